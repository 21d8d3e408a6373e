"""Makes a `ModelSpec` of a module for the planner. The analysis determines the structure of the model, and two steps on
fake tensors determine costs and saved bytes.

The second step has twice the batch size of the first. The cost of a layer per token is the difference between the two
steps, divided by the number of added tokens. So tables that do not grow with the batch do not count, and neither do
gradients of weights. Saved bytes and attention are valid for the traced sequence length. They include terms that grow
with the square of this length (probabilities of unfused attention, masks). The tensors that the loss saves are added to
the layer that makes the logits. Adjacent blocks with equal costs become one layer with a repeat count.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.batch_coupling import find_batch_norm
from meshwright.analysis.block_lists import params_by_layer
from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.profile.activations import LayerStats
from meshwright.analysis.profile.fake_step import (
    EMBEDDING,
    HEAD,
    FakeStepResult,
    TraceInputs,
    layer_order,
    make_trace_inputs,
    trace_step,
)
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.core.printable_text import reason_of
from meshwright.spec.model import LayerSpec, ModelSpec, ParameterSpec
from meshwright.spec.precision import recipe

MIN_TOKENS, MAX_ROWS = 4096, 64
"""The smaller batch has MIN_TOKENS tokens, rounded down to whole samples, but at least 2 and at most MAX_ROWS samples.
With this many tokens, the peak of the transient bytes of a layer comes from activations and not from gradients of
weights.
"""
LOSS_BYTES_PER_LOGIT, LOSS_BYTES_PER_LABEL = 4, 10
LOSS_LOGIT_PASSES = 4
"""Number of times that the loss reads or writes all logits. The loss saves the softmax of each logit in float32. For
each label it saves the index of the label and whether the label is valid.
"""


def describe(
    model: nn.Module | Callable[[], nn.Module],
    sequence: int = 256,
    batch: Mapping[str, Any] | None = None,
    name: str = "",
    precision: str = "bf16",
    gather: bool = False,
) -> ModelSpec:
    """Returns the `ModelSpec` of `model`, or of the model that `model` builds if it is a function. The profiled steps
    run on fake tensors.

    `sequence` is the number of token ids per sample. `batch` is an example batch, if the model does not describe its
    inputs. `precision` is the precision recipe of the job. Its compute dtype determines which tensors are cast to
    float32. `name` is the name of the model, by default that of its class. `gather`: whether the loss
    compares the outputs of all rows of the global batch (runtime/batch_loss.py).

    Raises:
        InputError: the model cannot be built or traced.
    """
    module = model if isinstance(model, nn.Module) else build_on_meta(model, name)
    name = name or type(module).__name__
    if next(module.parameters(), None) is None:
        raise InputError(Message("model {name!r} has no parameters: nothing to plan", name=name))
    compute, tried = getattr(torch, recipe(precision).compute), ""
    try:
        graph = analyze_model(module, example=batch)
        if graph.embedding and len(graph.stacks) > 1:  # the runtime numbers blocks over all stacks too
            graph = graph.across_stacks()
        inputs = make_trace_inputs(module, sequence, batch)
        tried = f" with {inputs}"
        rows = min(max(MIN_TOKENS // inputs.tokens, 2), MAX_ROWS)
        runs = [_trace_rows(module, graph, inputs, compute, each) for each in (rows, 2 * rows)]
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            Message(
                "model {name!r} cannot be traced{tried} ({error_line}); give it an attribute dummy_inputs with its "
                "inputs, or plan from an architecture file with its sizes",
                name=name,
                tried=tried,
                error_line=_error_line(error),
            )
        ) from error
    spec = spec_from_runs(name, module, graph, inputs.tokens, runs)
    return spec.but(gathered=runs[0].outputs // runs[0].rows) if gather else spec


def _trace_rows(
    model: nn.Module, graph: ModelGraph, inputs: TraceInputs, compute: torch.dtype, rows: int
) -> FakeStepResult:
    """Returns the result of a traced step in the dtype `compute`. If this fails because an operation supports only
    bfloat16, the step runs in bfloat16.

    On fake tensors, torch supports grouped expert products only in bfloat16. Tensors that the bfloat16 step casts to
    float32 have the same size as in a step in `compute`.
    """
    try:
        return trace_step(model, graph, inputs, compute, rows)
    except RuntimeError as error:
        if compute == torch.bfloat16 or "BF16" not in str(error):
            raise
        return trace_step(model, graph, inputs, torch.bfloat16, rows)


def build_on_meta(make: Callable[[], nn.Module], name: str) -> nn.Module:
    """Returns the model that `make` builds on the meta device. If `make` fails on the meta device, except with an
    InputError, it is called again without a default device.

    Raises:
        InputError: the model cannot be built.
    """
    try:
        try:
            with torch.device("meta"):
                return make()
        except InputError:
            raise
        except Exception:
            return make()
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            Message(
                "model {name!r} cannot be built ({error_line}): run its function by itself to see where",
                name=name,
                error_line=_error_line(error),
            )
        ) from error


def _error_line(error: Exception) -> str:
    if "DataDependent" in type(error).__name__:
        return f"its forward asks for the values of a tensor, {error}"[:160]
    return reason_of(error)


def spec_from_runs(
    name: str, model: nn.Module, graph: ModelGraph, tokens: int, runs: list[FakeStepResult]
) -> ModelSpec:
    """Returns the `ModelSpec` from the results `runs` of the two steps. `tokens` is the number of tokens per sample.
    The layers of the spec are in forward order.
    """
    few, many = runs
    accounts = {place: _per_token(few.layers[place], many.layers[place], few, tokens) for place in few.layers}
    _add_loss(accounts, few, tokens)
    hidden = next(
        (account["output"] for place, account in accounts.items() if place.startswith("block.")), float(few.width)
    )
    layer_parameters = _layer_parameters(model, graph)
    for place in layer_parameters:
        accounts.setdefault(place, {"output": 0.0})
    for account in accounts.values():
        account["output"] = account["output"] or hidden
    heads = graph.divisible.get("heads")
    found: list[LayerSpec] = []
    for place in sorted(accounts, key=layer_order):
        layer = LayerSpec(
            name=place.partition(".")[0] if graph.blocks else place,
            parameters=layer_parameters.get(place, ()),
            tied=EMBEDDING if place == HEAD and graph.tied else None,
            **accounts[place],  # type: ignore[arg-type]
        )
        if found and _are_identical(found[-1], layer):
            found[-1] = found[-1].but(repeat=found[-1].repeat + 1, transient=max(found[-1].transient, layer.transient))
        elif layer.parameters or layer.flops or layer.saved_whole or layer.fixed_whole:
            found.append(layer)
    return ModelSpec(
        name=name,
        layers=tuple(found),
        hidden=max(round(hidden), 1),
        context=few.positions if tokens > 1 else 1,
        divisible={what: size for what, size in graph.divisible.items() if what != "kv_heads" or size != heads},
        tensor_parallel=bool(graph.regions or graph.experts),
        against_sequence=graph.against_sequence,
        against_division=(together := _no_batch_split_reason(model, few, many)),
        against_stages=graph.unsupported.get("stages", ""),
        vocabulary=graph.vocabulary,
        notes=(*graph.findings, *_notes(graph, tokens, together)),
    )


def _per_token(few: LayerStats, many: LayerStats, run: FakeStepResult, tokens: int) -> dict[str, float]:
    """Returns the fields of `LayerSpec` per token, from the difference between the two steps `few` and `many`."""
    before = few.values()
    added = {name: (value - before[name]) / (run.rows * tokens) for name, value in many.values().items()}
    added = {name: value if name.startswith(("derived", "fused")) else max(value, 0.0) for name, value in added.items()}
    return {
        "flops": added["flops"],
        "attention_flops": added["attention"] / tokens,
        "moved": added["moved"] / run.itemsize,
        "transient": added["transient"] / run.itemsize,
        "derived_moved": max(added["derived_moved"], 0.0) / run.itemsize,
        **{
            name: value
            for name, value in added.items()
            if name not in ("flops", "attention", "moved", "transient", "derived_moved")
        },
    }


def _add_loss(accounts: dict[str, dict[str, float]], run: FakeStepResult, tokens: int) -> None:
    """Adds the costs of the loss to the layer that makes the logits. The saved softmax is sharded over tensor ranks if
    the model has a vocabulary head. The logits are live until the loss has read them.
    """
    each = run.logits / (run.rows * tokens)
    account = accounts[HEAD if HEAD in accounts else next(reversed(accounts))]
    account["fixed_split" if HEAD in accounts else "fixed_whole"] += LOSS_BYTES_PER_LOGIT * each
    account["fixed_whole"] += LOSS_BYTES_PER_LABEL * each / run.width
    account["moved"] += LOSS_LOGIT_PASSES * each
    account["transient"] = max(each, 0.0 if HEAD in accounts else account["transient"])


def _layer_parameters(model: nn.Module, graph: ModelGraph) -> dict[str, tuple[ParameterSpec, ...]]:
    """Returns the parameters of each layer as the runtime assigns them. A tied vocabulary weight belongs to the
    embedding and is also the first parameter of the head.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    stacked = {f"{experts.path}.{name}": experts.count for experts in graph.experts for name in experts.names}
    layer_parameters = {}
    for place, names in params_by_layer(model, graph):
        start = (
            graph.block(int(place[6:])).rpartition(".")[0] + "." if graph.blocks and place.startswith("block.") else ""
        )
        found = []
        for name in names:
            split = graph.splits.get(name)
            short = name[len(start) :].partition(".")[2] if start else name
            dim, parts, ways = (split.dim, tuple(split.parts), tuple(split.ways)) if split else (None, (), ())
            ways = ways if any(ways) else ()
            found.append(
                ParameterSpec(
                    name=short, shape=shapes[name], split=dim, parts=parts, ways=ways, experts=stacked.get(name, 0)
                )
            )
        layer_parameters[place if graph.blocks else names[0].partition(".")[0]] = tuple(found)
    if graph.tied:
        layer_parameters[HEAD] = (layer_parameters[EMBEDDING][0], *layer_parameters.get(HEAD, ()))
    return layer_parameters


def _are_identical(first: LayerSpec, second: LayerSpec) -> bool:
    """Returns whether two layers are blocks that are equal, except for repeat count and transient bytes."""
    if first.name != second.name or first.name != "block":
        return False
    return first.but(repeat=1, transient=0.0) == second.but(transient=0.0)


def _no_batch_split_reason(model: nn.Module, few: FakeStepResult, many: FakeStepResult) -> str:
    """Returns why a batch must not be divided, '' if the shapes show no reason.

    The first step of a training run checks this with values (runtime/preflight/batch_separability.py).
    """
    if path := find_batch_norm(model):
        return Message("{path} is a norm with batch statistics", path=path)
    # A contrastive model returns one logit for each pair of samples.
    pairs = many.logits * few.rows**2 == few.logits * many.rows**2
    return (
        Message(
            "its output grows with the square of the number of rows, unless forward returns the embeddings and "
            "parallelize is given loss and gather='batch'"
        )
        if pairs
        else ""
    )


def _notes(graph: ModelGraph, tokens: int, together: str) -> list[str]:
    """Returns notes for the user who reads the spec."""
    notes: list[str] = []
    if tokens == 1:
        notes.append(Message("each sample is one token: the sequence length is 1"))
    if graph.blocks and not (graph.regions or graph.experts):
        notes.append(Message("tensor parallelism shards no layer of this model"))
    if graph.against_sequence:
        notes.append(
            Message(
                "sequence parallelism would compute wrong results: {against_sequence}",
                against_sequence=graph.against_sequence,
            )
        )
    if together:
        notes.append(Message("a batch must not be divided: {together}", together=together))
    if stages := graph.unsupported.get("stages"):
        notes.append(Message("the model cannot be divided into pipeline stages: {stages}", stages=stages))
    return notes
