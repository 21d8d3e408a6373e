"""Analyses the structure of a model: repeated blocks, vocabulary embedding and head, and tensor-parallel regions. The
engine builder, `meshwright verify` and the profile for the planner call `analyze_model`.

A region consists of column-parallel layers and the row-parallel layers that read their outputs (regions.py). Blocks are
the modules in lists of modules of equal classes (block_lists.py). Everything else comes from forwards on the meta
device, with each module in its training mode (op_trace.py). Regions are then verified numerically (verify_sharding.py).
If a trace finds column layers that must stay unsharded, the next trace treats them as unsharded. For a model that
cannot run on the meta device, the analysis uses the tensor-parallel plan of Hugging Face models (`base_model_tp_plan`).
Without such a plan the blocks are replicated. `ModelGraph.findings` describes the result, including what was not found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from meshwright.analysis.block_lists import (
    block_stacks,
    check_distinct_blocks,
    find_block_lists,
    is_list_used,
    main_block_list,
    params_between_stacks,
)
from meshwright.analysis.dataflow_recorder import fixed_seeds
from meshwright.analysis.declared_regions import check_user_rules, hf_plan_regions, propose_user_regions
from meshwright.analysis.dry_run import dry_run, external_failure, in_eval_mode, limit_analysis_time
from meshwright.analysis.example_inputs import ExampleInputs, describe_inputs, make_example
from meshwright.analysis.experts import add_experts
from meshwright.analysis.graph import ModelGraph, TpSplit
from meshwright.analysis.lora import add_lora_to_graph, lora_layers, without_lora
from meshwright.analysis.nf4 import add_nf4_to_graph, as_linear, nf4_layers
from meshwright.analysis.op_trace import find_written_parameter, trace_ops
from meshwright.analysis.regions import AnalysisState, OuterLayers, RegionCandidate, find_block_regions
from meshwright.analysis.run_conditions import run_modes, set_training_modes
from meshwright.analysis.trace_log import TraceLog
from meshwright.analysis.verified_regions import accept_verified_regions
from meshwright.core.messages import Message
from meshwright.core.printable_text import reason_of

SHAPE_CHANGED_REASON = "its blocks, or those of a connected list, change the shape of the hidden state"
SEQUENCE_UNVERIFIED_REASON = "the model was analysed for a plan without sequence parallelism"
GATHERING_UNVERIFIED_REASON = "the model was analysed for a plan without ZeRO 3"
MAX_TRACE_PASSES = 24
"""Maximum number of traces. In each block, a trace finds only the earliest column layers that must stay unsharded."""


@limit_analysis_time()
def analyze_model(
    model: nn.Module,
    use_random_weights: bool = False,
    example: ExampleInputs | None = None,
    splits: bool = True,
    sequence: bool = True,
    evaluates: bool = False,
    gathers: bool = True,
) -> ModelGraph:
    """Returns the structure of `model`. The model does not change.

    `use_random_weights`: whether meta parameters that the numeric checks need get random values. These are all
    parameters outside of the blocks, and those of the first block of each group of identical blocks. `example`: a batch
    to call the model with, if the model does not describe its own inputs (example_inputs.py). `splits`: whether regions
    are verified for tensor parallelism. If False, the result has no regions. `sequence`: whether sequence parallelism
    is checked. `evaluates`: whether to run the model in eval mode. `gathers`: whether writes to parameters in eval mode
    are found, which ZeRO 3 must know. What is not checked is marked as unsupported in the result.

    Raises:
        InputError: a block occurs twice in a list, a user's rule is wrong, or the time limit is exceeded.
    """
    adapted, packed = lora_layers(model), nf4_layers(model)
    if adapted or packed:
        with as_linear(model, packed), without_lora(model, adapted):
            found = analyze_model(model, use_random_weights, example, splits, sequence, evaluates, gathers)
        return add_nf4_to_graph(add_lora_to_graph(model, found, adapted) if adapted else found, packed)
    names = tuple(name for name, _ in model.named_parameters())
    lists = [path for path in find_block_lists(model) if any(True for _ in model.get_submodule(path).parameters())]
    if not lists:
        return ModelGraph(findings=("no list of repeated modules: nothing to cut or to shard",), replicated=names)
    check_distinct_blocks(model, lists)
    counts = _count_blocks(model, lists)
    state = AnalysisState(model, lists, counts, make_example(model, example), run_modes(model, evaluates))
    state.sequence_error = "" if sequence else SEQUENCE_UNVERIFIED_REASON
    state.gathering_error = "" if gathers else GATHERING_UNVERIFIED_REASON
    modules = {path: id(module) for path, module in model.named_modules()}
    with dry_run(model, {}), fixed_seeds(0):
        set_training_modes(model, state.modes)
        _trace_with_fallback(state)
        _refuse_replaced_modules(state, modules)
        state.stacks = block_stacks(lists, state.trace)
        blocks = main_block_list(model, state.stacks, state.trace)
        outer = (
            _traced_outer_layers(model, blocks, state.trace) if state.trace else _declared_outer_layers(model, blocks)
        )
        if state.trace is None:
            _apply_hf_plan(state)
        made = propose_user_regions(
            model, [f"{path}.{name}" for path in lists for name in model.get_submodule(path)._modules], state.candidates
        )
        for weight in made:
            state.unsharded.pop(weight, None)
        if splits:
            accept_verified_regions(state, outer, use_random_weights)
        else:
            state.candidates = {block: [] for block in state.candidates}
        check_user_rules(made, state.unsharded)
        return add_experts(
            model, _build_graph(state, blocks, outer), state.trace.inputs if state.trace else {}, state.modes
        )


def _refuse_replaced_modules(state: AnalysisState, modules: Mapping[str, int]) -> None:
    """Shards no layer if the model has replaced one of its modules while it ran. `modules`: their identities before."""
    new = next((path for path, module in state.model.named_modules() if modules.get(path) != id(module)), None)
    if new is not None:
        state.candidates = {block: [] for block in state.candidates}
        state.whole.append(f"no layer is sharded: the model replaces parts of itself when it runs ({new})")
        state.findings += state.whole


def _count_blocks(model: nn.Module, lists: list[str]) -> list[str]:
    """Returns a finding for each of `lists`, with the path of the list and its number of blocks."""
    return [
        Message("{count} blocks in {path}", count=len(list(model.get_submodule(path).children())), path=path)
        for path in lists
    ]


# --- traces
def _trace_with_fallback(state: AnalysisState) -> None:
    """Repeats the trace until it finds no more column layers that must stay unsharded. The model runs in its own
    dtypes. If this fails, it runs in bfloat16, which some kernels require. If that fails too, `state.trace` is None and
    `state.failed_run` has the reason.
    """
    try:
        _trace_until_stable(state, None)
    except Exception as error:
        reason = reason_of(error)
        state.unsharded.clear()
        try:
            _trace_until_stable(state, torch.bfloat16)
        except Exception:
            state.trace = None
            state.candidates.clear()
            state.external_failure = external_failure(error)
            where = state.external_failure.where if state.external_failure else ""
            state.failed_run = f"it does not run with {describe_inputs(state.example)} ({reason}{where})"
            state.findings.append(state.failed_run)


def _trace_until_stable(state: AnalysisState, dtype: torch.dtype | None) -> None:
    for _ in range(MAX_TRACE_PASSES):
        seen = trace_ops(state.model, state.lists, frozenset(state.unsharded), state.example, dtype)
        # Obstacles of earlier traces are kept, because some forwards write to their weights only in their first call.
        seen.obstacles |= state.trace.obstacles if state.trace else {}
        both = {block: find_block_regions(state.model, block, seen) for block in seen.blocks}
        left = {weight: why for _, more in both.values() for weight, why in more.items()}
        state.trace, state.candidates = seen, {block: regions for block, (regions, _) in both.items()}
        if not left:
            break
        state.unsharded |= left
    else:
        state.candidates = {block: [] for block in state.candidates}  # if traces do not converge, nothing is sharded
    _record_eval_writes(state, dtype)


def _record_eval_writes(state: AnalysisState, dtype: torch.dtype | None) -> None:
    """Records a parameter to which the forward writes in eval mode, if the training forward writes to none."""
    assert state.trace is not None
    if "writes" in state.trace.obstacles or state.gathering_error:
        return
    # Errors in eval mode are ignored here. The user sees them when the model is evaluated.
    with suppress(Exception), in_eval_mode(state.model):
        written = find_written_parameter(state.model, state.example, dtype)
        state.trace.obstacles |= {"writes": written} if written else {}


def _traced_outer_layers(model: nn.Module, blocks: str, seen: TraceLog) -> OuterLayers:
    sizes = {name: parameter.shape[0] for name, parameter in model.named_parameters() if parameter.ndim}
    heads = [weight for weight, size in seen.vocabulary.outside_products if size == sizes[weight]]
    pairs = sorted(
        ((e, h) for e in seen.vocabulary.embeddings for h in reversed(heads) if sizes[h] == sizes[e]),
        key=lambda pair: pair[0] != pair[1],
    )
    embedding, head = pairs[0] if pairs else (next(iter(seen.vocabulary.embeddings), None), None)
    last = max((place for name, place in seen.order.items() if name.startswith(blocks + ".")), default=-1)
    back = tuple(name for name, place in seen.order.items() if place > last and not name.startswith(blocks + "."))
    found = OuterLayers(
        _lookup_layer(model, embedding) if embedding else None,
        _weight_owner(model, head, nn.Linear) if head else None,
        back,
    )
    for path, weight in ((found.embedding, embedding), (found.head, head)):
        if path is None or weight is None:
            continue
        if weight in seen.vocabulary.problems:
            found.unsharded[path] = seen.vocabulary.problems[weight]
            continue
        found.splits[f"{path}.weight"] = TpSplit(0)
        if path == found.head:
            per_word = seen.vocabulary.per_word_params.get(weight, {})
            found.splits.update({name: TpSplit(dim) for name, dim in per_word.items()})
            if model.get_submodule(path)._parameters.get("bias") is not None:
                found.splits[f"{path}.bias"] = TpSplit(0)
    return found


def _declared_outer_layers(model: nn.Module, blocks: str) -> OuterLayers:
    """Finds the layers around the blocks without running the model: embedding and head by the getters of Hugging Face
    models, and the parameters after the blocks by their order of registration.
    """
    names = [name for name, _ in model.named_parameters()]
    last = max(index for index, name in enumerate(names) if name.startswith(blocks + "."))
    embedding, head = (
        _module_from_getter(model, method) for method in ("get_input_embeddings", "get_output_embeddings")
    )
    paths = {id(module): path for path, module in model.named_modules()}
    table = paths.get(id(embedding)) if isinstance(embedding, nn.Embedding) else None
    end = paths.get(id(head)) if isinstance(head, nn.Linear) else None
    return OuterLayers(
        table,
        end,
        tuple(names[last + 1 :]),
        unsharded=dict.fromkeys(filter(None, (table, end)), "it was not seen to run"),
    )


def _module_from_getter(model: nn.Module, method: str) -> Any:
    """Returns the result of the model's getter `method`. Returns None if the model has no such getter, or if the getter
    raises NotImplementedError, which it does in some audio models.
    """
    try:
        return getattr(model, method, lambda: None)()
    except NotImplementedError:
        return None


def _weight_owner(model: nn.Module, weight: str, kind: type[nn.Module]) -> str | None:
    """Returns the path of the first module of type `kind` whose `weight` attribute is the parameter named `weight`. For
    a tied parameter, this path may differ from the one in `weight`. Returns None if there is no such module.
    """
    wanted = model.get_parameter(weight)
    return next(
        (
            path
            for path, module in model.named_modules()
            if isinstance(module, kind) and module._parameters.get("weight") is wanted
        ),
        None,
    )


def _lookup_layer(model: nn.Module, weight: str) -> str | None:
    """Returns the path of the module that uses the parameter `weight` as an embedding table. An `nn.Embedding` that
    owns the parameter is preferred to other owners. An `nn.Linear` does not count. Returns None if there is no such
    module.
    """
    wanted = model.get_parameter(weight)
    own = (
        path
        for path, module in model.named_modules()
        if module._parameters.get("weight") is wanted and not isinstance(module, nn.Linear)
    )
    return _weight_owner(model, weight, nn.Embedding) or next(own, None)


def _apply_hf_plan(state: AnalysisState) -> None:
    for path in state.lists:
        state.candidates |= hf_plan_regions(state.model, path)
    any_found = any(state.candidates.values())
    state.findings.append(
        "regions from the plan that the model carries"
        if any_found
        else "no tensor-parallel plan: the blocks are replicated"
    )


# --- the result


def _build_graph(state: AnalysisState, blocks: str, outer: OuterLayers) -> ModelGraph:
    model, findings, embedding, head = state.model, state.findings, outer.embedding, outer.head
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    found = [one for regions in state.candidates.values() for one in regions]
    splits = dict(outer.splits)
    for one in found:
        splits.update(one.splits)
    splits = _with_aliases(model, splits)
    tied = bool(head and embedding) and model.get_parameter(f"{head}.weight") is model.get_parameter(
        f"{embedding}.weight"
    )
    regions, whole = _region_summary(state)
    findings += [*regions, *whole]
    findings += [
        f"{path} cannot be cut into pipeline stages: "
        + (
            SHAPE_CHANGED_REASON
            if is_list_used(path, state.trace)
            else f"none of its blocks ran with {describe_inputs(state.example)}"
        )
        for path in state.lists
        if path not in state.stacks
    ]
    findings += [
        Message("vocabulary embedding {embedding}", embedding=embedding)
        if embedding
        else Message("no vocabulary embedding reads the token ids")
    ]
    findings += (
        [Message("vocabulary head {head}, tied to the embedding" if tied else "vocabulary head {head}", head=head)]
        if head
        else [Message("no vocabulary head")]
    )
    outer_whole = [Message("{path} is not sharded: {why}", path=path, why=why) for path, why in outer.unsharded.items()]
    findings += outer_whole
    if state.trace and state.trace.batch_coupling.found:
        findings.append(
            f"{state.trace.batch_coupling.found} orders tokens across all rows of the batch: exact only if it "
            "drops no token, or if the batch is not divided"
        )
    return ModelGraph(
        blocks,
        len(list(model.get_submodule(blocks).children())),
        embedding,
        head,
        tied,
        vocabulary=model.get_parameter(f"{embedding}.weight").shape[0] if embedding else 0,
        regions=tuple(one.region for one in found),
        splits=splits,
        divisible=_common_divisors(found),
        partial=tuple(dict.fromkeys(name for one in found for name in one.partial if name not in splits)),
        sequence_sliced=state.sequence_sliced,
        after_blocks=outer.after_blocks,
        unsupported=_unsupported_reasons(state, _whole_matrix(blocks, shapes, splits), [*whole, *outer_whole]),
        findings=tuple(findings),
        replicated=tuple(name for name in shapes if name not in splits),
        extra_block_args=_extra_block_inputs(state),
        stacks=tuple((path, len(list(model.get_submodule(path).children()))) for path in state.stacks),
        between_stacks=params_between_stacks(state.stacks, state.trace.order) if state.trace else (),
    )


def _extra_block_inputs(state: AnalysisState) -> tuple[str, ...]:
    """Returns the names of the block arguments, other than the hidden state, that depend on parameters.

    For a model with several stacks the result is empty, because block_wrapper.py finds the inputs of each stage.
    """
    seen = state.trace
    if seen is None or len(state.stacks) > 1:
        return ()
    return tuple(name for name, block in seen.extra_args.items() if block.startswith(f"{state.stacks[0]}."))


def _common_divisors(found: list[RegionCandidate]) -> dict[str, int]:
    """Returns the greatest common divisor of each size in `RegionCandidate.sizes` over all regions, by name (such as
    'heads'). tp must divide the result.
    """
    result: dict[str, int] = {}
    for one in found:
        for name, size in one.sizes.items():
            result[name] = math.gcd(result.get(name, 0), size)
    return result


def _region_summary(state: AnalysisState) -> tuple[list[str], list[str]]:
    """Returns two lists of findings: one finding for each distinct region, and one for each reason why layers stay
    unsharded.
    """
    findings = dict.fromkeys(one.summary(block) for block, regions in state.candidates.items() for one in regions)
    left: dict[str, dict[str, None]] = {}
    for weight, why in state.unsharded.items():
        block = next((block for block in state.candidates if weight.startswith(block + ".")), "")
        left.setdefault(why, {})[weight.removeprefix(block + ".").rpartition(".")[0]] = None
    whole: list[str] = [
        Message("{names} are not sharded: {why}", names=", ".join(names), why=why) for why, names in left.items()
    ]
    return list(findings), whole


def _unsupported_reasons(state: AnalysisState, matrix: str, whole: list[str]) -> dict[str, str]:
    """Returns the value of `ModelGraph.unsupported`. `matrix` is the name of a matrix inside the blocks that stays
    unsharded, '' if all are sharded. `whole` are the findings about unsharded layers.
    """
    against_sequence = _no_sequence_parallel_reason(state)
    found = {
        "sequence": against_sequence or (f"{matrix} is not sharded" if matrix else state.sequence_error),
        "matrix": "" if against_sequence else matrix,
        "run": state.failed_run,
        "tensors": "; ".join((*state.whole, *whole)),
        "slices": state.sequence_error,
        "proof": state.unverified_reason,
        "remedy": state.external_failure.advice if state.external_failure else "",
    }
    if state.trace:
        findings = state.trace.obstacles
        found |= {
            "rows": state.trace.batch_coupling.found,
            "gathering": findings.get("writes", state.gathering_error),
            "stages": state.trace.stage_obstacle(state.stacks),
        }
    return {what: why for what, why in found.items() if why}


def _no_sequence_parallel_reason(state: AnalysisState) -> str:
    """Returns why sequence parallelism is impossible: there are several lists of blocks, a block runs more than once,
    or a region merges the batch and sequence dimensions. Returns '' if none of these holds.
    """
    if len(state.lists) > 1:
        return f"the blocks are in several lists ({', '.join(state.lists)})"
    if state.trace and state.trace.repeated:
        return f"{state.trace.repeated[0]} runs more than once"
    found = [one for regions in state.candidates.values() for one in regions]
    flat = next((one.region.columns[0] for one in found if not one.has_sequence_dim), None)
    if flat:
        return f"{flat} reads batch and sequence as one"
    return ""


def _whole_matrix(blocks: str, shapes: Mapping[str, torch.Size], splits: Mapping[str, TpSplit]) -> str:
    """Returns the name of a matrix inside the blocks that stays unsharded, '' if there is none. Such a matrix rules out
    sequence parallelism: it may mix positions of the sequence, but would read only a slice of it.
    """
    names = (name for name, shape in shapes.items() if len(shape) > 1 and name not in splits)
    return next((name for name in names if name.startswith(f"{blocks}.")), "")


def _with_aliases(model: nn.Module, splits: dict[str, TpSplit]) -> dict[str, TpSplit]:
    """Returns `splits` with an entry for every name of a tied parameter. Entries of buffers do not change."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    known = {id(parameters[name]): split for name, split in splits.items() if name in parameters}
    buffers = {name: split for name, split in splits.items() if name not in parameters}
    return {name: known[id(tensor)] for name, tensor in parameters.items() if id(tensor) in known} | buffers
