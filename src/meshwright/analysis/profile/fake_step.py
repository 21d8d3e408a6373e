"""Runs one training step of a model on fake tensors and returns the statistics of every layer. model_spec.py runs two
steps and derives the costs per token. A stack is a list of blocks that pipeline stages cut (block_lists.py).

For a model that reads token ids, a token of the profile is a token id. For any other model, a sample counts as one
token, and `Workload.sequence` is 1. FLOPs and saved bytes per token are then those per sample. As in the runtime,
parameters have the compute dtype of the job and buffers have their own dtypes. These dtypes decide what norms and
attention cast to float32. Fake tensors replace the tensors of the model, so the model does not change.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from meshwright.analysis.dry_run import call_with_tensors
from meshwright.analysis.example_inputs import make_example
from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.profile.activations import ActivationProfiler, LayerStats

DEFAULT_IMAGE_PIXELS = 224
"""Default width and height of an image in pixels, if a model with convolutions does not specify a size."""


@dataclass(frozen=True)
class TraceInputs:
    """The shapes and dtypes of the inputs by name. The shapes are those of one sample. The input named '' is passed by
    position. `tokens` is the number of tokens per sample.
    """

    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    tokens: int

    def __str__(self) -> str:
        return ", ".join(f"{name or 'input'} {('rows', *shape)}" for name, (shape, _) in self.shapes.items()).replace(
            "'", ""
        )

    def make(self, rows: int, compute: torch.dtype) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Returns positional and keyword arguments with a batch size of `rows`. Floating-point arguments have the dtype
        `compute`, as in the runtime.
        """
        made = {
            name: torch.zeros(rows, *shape, dtype=compute if dtype.is_floating_point else dtype)
            for name, (shape, dtype) in self.shapes.items()
        }
        return ((made.pop(""),), made) if "" in made else ((), made)


def make_trace_inputs(model: nn.Module, sequence: int, batch: Mapping[str, Any] | None) -> TraceInputs:
    """Returns the inputs with which `model` is traced. `batch` is the user's example. Without it, a sample has
    `sequence` token ids.
    """
    example = make_example(model, batch, sequence, DEFAULT_IMAGE_PIXELS)
    shapes = {
        name: (tuple(value.shape[1:]), value.dtype)
        for name, value in example.items()
        if isinstance(value, torch.Tensor)
    }
    return TraceInputs(
        shapes, next((shape[0] for shape, dtype in shapes.values() if dtype == torch.long and len(shape) == 1), 1)
    )


FRONT, BETWEEN, BACK, EMBEDDING, HEAD = "front", "between", "back", "embedding", "head"


@dataclass(frozen=True)
class FakeStepResult:
    """The result of a step over a batch of `rows` samples.

    `itemsize` are the bytes per element of the compute dtype. `layers` has the statistics of each layer in forward
    order. `logits` is the number of elements of the logits, and `width` the size of their last dimension. `positions`
    is the longest sequence that learned positions allow, 0 without a limit. `outputs` is the number of elements of all
    differentiable outputs that have one row for each sample.
    """

    rows: int
    itemsize: int
    layers: dict[str, LayerStats]
    logits: int
    width: int
    positions: int
    outputs: int


def trace_step(
    model: nn.Module, graph: ModelGraph, inputs: TraceInputs, compute: torch.dtype, rows: int
) -> FakeStepResult:
    """Returns the result of one step over `rows` samples in the dtype `compute`. Exceptions of the model propagate.

    The step runs with a key-value cache first, because without one Hugging Face models read values to check whether a
    batch is packed. If it fails and the configuration of the model has `use_cache`, it is repeated without a cache,
    because the caches of some models do not work in training.
    """
    try:
        return _trace_step(model, graph, inputs, compute, rows, cache=True)
    except Exception:
        if getattr(getattr(model, "config", None), "use_cache", None) is None:
            raise
    return _trace_step(model, graph, inputs, compute, rows, cache=False)


def _trace_step(
    model: nn.Module, graph: ModelGraph, inputs: TraceInputs, compute: torch.dtype, rows: int, cache: bool
) -> FakeStepResult:
    with silence_fake_tensor_log(), FakeTensorMode(allow_non_fake_inputs=True), training_mode(model, cache):
        twins = {
            id(tensor): fake_like(tensor, compute) for tensor in itertools.chain(model.parameters(), model.buffers())
        }
        parameters = {name: twins[id(tensor)] for name, tensor in model.named_parameters(remove_duplicate=False)}
        state = parameters | {name: twins[id(tensor)] for name, tensor in model.named_buffers(remove_duplicate=False)}
        profiler = ActivationProfiler(compute, graph.splits, FRONT, rows)
        args, kwargs = inputs.make(rows, compute)
        profiler.register_inputs(parameters, (args, kwargs))
        with track_layers(model, graph, profiler), profiler.recording():
            outputs = differentiable_outputs(call_with_tensors(model, state, args, kwargs))
            logits, width = outputs[0].numel(), outputs[0].shape[-1]
            by_row = sum(output.numel() for output in outputs if output.ndim and len(output) == rows)
            order = [place for place, _ in sorted(profiler.layers.items(), key=lambda item: layer_order(item[0]))]
            profiler.backward(outputs, order)
    return FakeStepResult(
        rows,
        compute.itemsize,
        {place: profiler.layers[place] for place in order},
        logits,
        width,
        max_positions(model, graph, profiler),
        by_row,
    )


def fake_like(tensor: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """Returns a fake tensor that replaces the parameter or buffer `tensor`. Floating-point parameters get the dtype
    `compute`.
    """
    is_weight = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    made = torch.empty(tensor.shape, dtype=compute if is_weight else tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)


@contextmanager
def training_mode(model: nn.Module, cache: bool) -> Iterator[None]:
    """Sets training mode, and sets `use_cache` of the model's configuration (if it exists) to `cache`. Restores both on
    exit.
    """
    modes = [(module, module.training) for module in model.modules()]
    config: Any = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    model.train()
    if before is not None:
        config.use_cache = cache
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
        if before is not None:
            config.use_cache = before


@contextmanager
def silence_fake_tensor_log() -> Iterator[None]:
    """Suppresses the tracebacks that torch logs for failures on fake tensors, because `describe` reports such a failure
    in one line.
    """
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def layer_order(place: str) -> tuple[int, int]:
    """Returns a sort key that puts layers in forward order."""
    known = {EMBEDDING: 0, FRONT: 1, BACK: 3, HEAD: 4}
    name, _, index = place.partition(".")
    return known.get(name, 2), 2 * int(index) + (name == BETWEEN) if index.isdigit() else 0


def layer_modules(model: nn.Module, graph: ModelGraph) -> list[tuple[str, nn.Module]]:
    """Returns (layer, module) for each block, the embedding and the head. The operations of the module's forward count
    for the layer. For a model without blocks, the modules are its children with parameters.
    """
    if graph.blocks is None:
        return [(name, child) for name, child in model.named_children() if any(True for _ in child.parameters())]
    stacks = [path for path, _ in graph.stacks] if graph.spans_stacks else [graph.blocks]
    blocks = [block for path in stacks for block in model.get_submodule(path).children()]
    found = [(f"block.{index}", block) for index, block in enumerate(blocks)]
    if graph.embedding:  # encoder and decoder may each have a module that shares the table
        table = model.get_submodule(graph.embedding).weight
        tables = [
            module
            for path, module in model.named_modules()
            if path == graph.embedding or (isinstance(module, nn.Embedding) and module.weight is table)
        ]
        found += [(EMBEDDING, module) for module in tables]
    return [*found, (HEAD, model.get_submodule(graph.head))] if graph.head else found


@contextmanager
def track_layers(model: nn.Module, graph: ModelGraph, profiler: ActivationProfiler) -> Iterator[None]:
    """Reports the running layer to the profiler. Code outside of blocks, embedding and head counts for the layer FRONT
    (before the blocks), BETWEEN (between two stacks), or BACK (after the last block).
    """
    stack: list[str] = []
    handles = []
    behind = {place: BACK for place, _ in layer_modules(model, graph) if place.startswith("block.")}
    ends = list(itertools.accumulate(count for _, count in graph.stacks))[:-1] if graph.spans_stacks else []
    for start, end in itertools.pairwise([0, *ends]):
        behind |= {f"block.{index}": f"{BETWEEN}.{end - 1}" for index in range(start, end)}

    def follow(module: nn.Module, place: str) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
            stack.append(profiler.layer)
            if place != EMBEDDING or profiler.layer == FRONT:  # lookups of later stacks count for the code around them
                profiler.layer = place
            if place in behind:
                profiler.begin_block((args, kwargs))

        def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if place in behind:
                profiler.end_block()
            outside = stack.pop()
            made = next((leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)), None)
            profiler.layers[place].output = float(made.numel()) if made is not None else 0.0
            if graph.blocks is None:
                return  # code after a child module belongs to the child
            profiler.layer = behind[place] if place in behind and outside not in behind else outside

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))

    for place, module in layer_modules(model, graph):
        follow(module, place)
    try:
        yield
    finally:
        profiler.end_tape()
        for handle in handles:
            handle.remove()


def differentiable_outputs(result: Any) -> list[torch.Tensor]:
    """Returns the logits in the model output `result` if it has any, otherwise every tensor that requires a gradient.

    Raises:
        ValueError: no such tensor requires a gradient.
    """
    if isinstance(result, dict) and "logits" in result:
        result = result["logits"]
    result = getattr(result, "logits", result)
    found = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not found:
        raise ValueError("its result has no gradient")
    return found


def max_positions(model: nn.Module, graph: ModelGraph, profiler: ActivationProfiler) -> int:
    """Returns the longest sequence that learned positions allow, 0 if there are none. Some tables begin with one or two
    padding rows, which do not count.
    """
    declared = getattr(getattr(model, "config", None), "max_position_embeddings", None) or 0
    inside = tuple(f"{path}." for path, _ in graph.stacks) or ("\n",)
    sizes = {name: model.get_parameter(name).shape[0] for name in profiler.looked_up if not name.startswith(inside)}
    near = [declared for size in sizes.values() if declared and 0 <= size - declared <= 2]
    return min(near or [size for name, size in sizes.items() if size >= profiler.looked_up[name]], default=0)
