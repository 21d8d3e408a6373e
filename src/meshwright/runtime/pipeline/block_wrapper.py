"""Wraps blocks: replaces the `forward` of each block instance, so that one unmodified model can run any of its stages.

[Note: stages without stage code] Every pipeline rank calls the forward of the whole model with the same batch. So the
model's own code makes masks, positions and rotary tables on every stage. Blocks of other stages return their input. The
first block of the stage takes the received tensors instead of its arguments. The first block of the next stage raises
`StageExit`, which leaves the forward with the arguments of this block (block_wrapper.py). So code between two blocks
runs on the stage of the earlier block. A `StagePlaceholder` replaces each module that a rank does not store
(runtime/stage_placeholder.py). Parameter names never change.

A wrapper also gathers weights (ZeRO 3), recomputes its block, and cuts and joins the sequence.

[Note: through] Autograd runs the latest operations first. On entry a wrapper creates a separate view of the block's
input. Once the gradient of this view exists, all gradients of the block's parameters are complete. Parameters without a
gradient at this point, such as those of experts that were not chosen, get no gradient in this pass. This is true for
the first call of a block in a pass, and for parameters that no other module reads.

`BoundarySpec` defines which tensors cross a stage boundary: the arguments of a block that depend on parameters.

For most models this is only the hidden state. Other models also send an encoder's output to every block of a decoder, a
position bias that the first block computes for all blocks, or the embeddings of another text.

[Note: carried] One run (analysis/dataflow_recorder.py) records which arguments of every block depend on parameters. A
stage ends at the entry of the first block of the next stage, and sends exactly these arguments. The model's own code
computes them. The code between two blocks runs once, on the stage of the earlier block. In backward, gradients return
to this stage.

With several stacks of blocks, the entry of a later stack may need tensors that are computed before all blocks (the
embeddings of a decoder). The first stage runs on to this entry, computes these tensors, and sends them too. In a later
stage's own run of the model, these arguments are only placeholders (outputs of layers on other stages, or None). The
stage replaces the placeholders by received tensors. A received tensor that a stage also sends on is a leaf of the
stage's graph. So in backward the gradients of all stages add up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from meshwright.analysis.block_lists import hidden_of, map_first, with_hidden
from meshwright.analysis.dataflow import BlockArgument, BlockEntry, BlockExit, DataflowRecord, TracedOp, names_from_bits
from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.recompute_tape import OWN_CHECKPOINT_REASON, saved_tensor_state
from meshwright.core.errors import InputError
from meshwright.core.messages import Message, mark_msgid
from meshwright.runtime.activation_recompute import MutatedBuffers, RecomputePolicy
from meshwright.runtime.stage_placeholder import skipped_block_output
from meshwright.runtime.zero.param_group import FlatParamGroup


@dataclass(frozen=True)
class BoundarySpec:
    """Describes the tensors that cross stage boundaries.

    `needs`: for every block, the paths of arguments that depend on parameters. `firsts`: the first block of each stack.
    `early`: the arguments of later stacks that do not depend on blocks. `returns`: the number of values that a block
    returns, 0 for a bare tensor. `front`, `between`: names of parameters outside of the blocks, used before all blocks,
    or after a stack (by stack).
    """

    needs: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...]
    early: frozenset[BlockArgument]
    returns: tuple[int, ...]
    front: frozenset[str]
    between: tuple[frozenset[str], ...]
    unsent: str = ""
    """The path of a block with an argument (a mask or integers) that depends on parameters but cannot be sent. '' if
    there is none."""
    overwritten: frozenset[BlockArgument] = frozenset()
    """Block arguments that the forward overwrites in place."""

    def message(self, block: int) -> tuple[BlockArgument, ...]:
        """Returns the block arguments that a stage receives if `block` is its first block."""
        later = [
            (first, place)
            for first in self.firsts
            if first > block
            for place in self.needs[first]
            if (first, place) in self.early
        ]
        return tuple([(block, place) for place in self.needs[block]] + later)

    def stack(self, block: int) -> int:
        """Returns the index of the stack that contains `block`."""
        return max(at for at, first in enumerate(self.firsts) if first <= block)

    @property
    def is_over_stacks(self) -> bool:
        """Whether stages are formed from more than one stack of blocks."""
        return len(self.firsts) > 1

    @property
    def is_more(self) -> bool:
        """Whether stages send tensors other than the hidden state."""
        return self.is_over_stacks or any(len(places) > 1 for places in self.needs)


@dataclass
class BoundaryState:
    """The state of one pass of a stage with blocks [start, stop): the received tensors, their placeholders in this
    stage's own run, and the tensors to send."""

    spec: BoundarySpec
    start: int = 0
    stop: int = 0
    arrived: dict[BlockArgument, torch.Tensor] = field(default_factory=dict)
    leaving: dict[BlockArgument, torch.Tensor] = field(default_factory=dict)
    stand_ins: dict[BlockArgument, tuple[Any, torch.Tensor]] = field(default_factory=dict)

    def begin(self, start: int, stop: int, received: Sequence[torch.Tensor]) -> None:
        """Starts a pass with the tensors `received` from the previous stage."""
        self.start, self.stop = start, stop
        self.arrived = dict(zip(self.spec.message(start), received, strict=True)) if received else {}
        # Tensors that blocks overwrite are cloned, because autograd forbids in-place writes to leaves.
        for key in self.spec.overwritten & self.arrived.keys():
            self.arrived[key] = self.arrived[key].clone()
        wanted = self.spec.message(stop) if stop < len(self.spec.needs) else ()
        self.leaving = {key: self.arrived[key] for key in wanted if key[0] != stop and key in self.arrived}
        self.stand_ins = {}

    def forget(self) -> None:
        """Drops all tensors of the pass."""
        self.arrived, self.leaving, self.stand_ins = {}, {}, {}

    def filled(self, block: int, leaves: list[Any]) -> list[Any]:
        """Returns the argument leaves of `block`, with received tensors in place of their placeholders."""
        stack = self.spec.stack(block)
        for place in self.spec.needs[block]:
            if (block, place) in self.arrived:
                self.stand_ins[stack, place] = (leaves[place], self.arrived[block, place])
            stand_in = self.stand_ins.get((stack, place))
            if stand_in is not None and leaves[place] is stand_in[0]:
                leaves[place] = stand_in[1]
        return leaves

    def leave(self, block: int, leaves: list[Any]) -> tuple[torch.Tensor, ...] | None:
        """Returns the message to the next stage at the entry of `block`, which is on another stage. Returns None while
        tensors of the message are missing."""
        if block < self.stop or self.stop >= len(self.spec.needs):
            return None
        wanted = self.spec.message(self.stop)
        leaves = self.filled(block, leaves)
        self.leaving.update({key: leaves[key[1]] for key in wanted if key[0] == block and key not in self.leaving})
        return tuple(self.leaving[key] for key in wanted) if len(self.leaving) == len(wanted) else None

    def skipped(self, block: int, hidden: torch.Tensor) -> Any:
        """Returns the output of `block`, which is on another stage: a placeholder."""
        return (hidden, *[None] * (self.spec.returns[block] - 1)) if self.spec.returns[block] else hidden


def trace_boundaries(record: DataflowRecord, anatomy: ModelGraph) -> BoundarySpec:
    """Returns which tensors cross stage boundaries: for each block, the arguments that depend on parameters.

    Raises:
        InputError: a block did not run.
    """
    paths = anatomy.block_paths
    entries: dict[int, BlockEntry] = {}
    returns: dict[int, int] = {}
    for event in record.events:
        if isinstance(event, BlockEntry):
            entries.setdefault(event.block, event)
        elif isinstance(event, BlockExit):
            returns.setdefault(event.block, event.values)
    missing = next((path for number, path in enumerate(paths) if number not in entries), None)
    if missing is not None:
        text = mark_msgid("block {path} did not run in the traced pass: give an example that runs it, or use pp1")
        raise InputError(Message(text, path=missing))
    ends = [0]
    for _, count in anatomy.stacks:
        ends.append(ends[-1] + count)
    stack_of = {
        name: at for at, (path, _) in enumerate(anatomy.stacks) for name in record.names if name.startswith(f"{path}.")
    }
    early: set[BlockArgument] = set()
    front: set[str] = set(record.params_without_grad)
    between: list[frozenset[str]] = []
    for at, first in enumerate(ends[:-1]):
        behind: set[str] = set()
        for place, leaf in entries[first].leaves.items():
            used = names_from_bits(record.names, leaf.made_from)
            if any(stack_of.get(name, at) < at for name in used):
                behind |= used
            else:
                early.add((first, place))
                front |= used
        if at:
            between.append(frozenset(behind - stack_of.keys() - front))
    changed = {storage for event in record.events if isinstance(event, TracedOp) for storage in event.changed}
    overwritten = (
        (block, place)
        for block, entry in entries.items()
        for place, leaf in entry.leaves.items()
        if leaf.copied in changed
    )
    unsent = (
        paths[block] for block, entry in entries.items() if not all(leaf.is_sent for leaf in entry.leaves.values())
    )
    return BoundarySpec(
        tuple(tuple(entries[block].leaves) for block in range(len(paths))),
        tuple(ends[:-1]),
        frozenset(early),
        tuple(returns[block] for block in range(len(paths))),
        frozenset(front),
        tuple(between),
        next(unsent, ""),
        frozenset(overwritten),
    )


def layers_over_stacks(model: nn.Module, anatomy: ModelGraph, spec: BoundarySpec) -> list[tuple[str, list[str]]]:
    """Returns (layer, parameter names) in forward order, with blocks numbered over all stacks. The layer 'between.K'
    follows the blocks of stack K.

    Raises:
        InputError: a parameter has no layer.
    """
    found: dict[str, list[str]] = {"embedding": [], "front": []}
    for number in range(len(spec.needs)):
        if number in spec.firsts[1:]:
            found[f"between.{spec.firsts.index(number) - 1}"] = []
        found[f"block.{number}"] = []
    found |= {"back": [], "head": []}
    embedded = model.get_submodule(anatomy.embedding).weight if anatomy.embedding else None
    head = {id(parameter) for parameter in model.get_submodule(anatomy.head).parameters()} if anatomy.head else set()
    for name, parameter in model.named_parameters():
        block = next((at for at, path in enumerate(anatomy.block_paths) if name.startswith(f"{path}.")), None)
        behind = next((at for at, names in enumerate(spec.between) if name in names), None)
        if parameter is embedded:
            found["embedding"].append(name)
        elif block is not None:
            found[f"block.{block}"].append(name)
        elif name in spec.front:
            found["front"].append(name)
        elif behind is not None:
            found[f"between.{behind}"].append(name)
        elif id(parameter) in head:
            found["head"].append(name)
        elif name in anatomy.after_blocks:
            found["back"].append(name)
        else:
            raise InputError(
                Message(
                    "it is not known where {name} is used outside of the blocks, because the model has several "
                    "stacks of blocks: use pp1",
                    name=name,
                )
            )
    return [(layer, names) for layer, names in found.items() if names]


class StageExit(Exception):
    """Leaves the model's forward with the message to the next stage (block_wrapper.py). It is not an error."""

    def __init__(self, message: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.message = message


@dataclass
class MultiStageParameters:
    """Copies of the parameters that several stages of this rank compute with.

    A rank runs one stage at a time. Before each pass the copies of the running stage are set in the modules that read
    them.
    """

    copies: dict[int, dict[str, nn.Parameter]] = field(default_factory=dict)
    """For each stage: the copies by parameter name."""
    places: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    """For each parameter: the modules that read it, and its name in each module."""

    def add(self, stage: int, copies: Mapping[str, nn.Parameter]) -> None:
        """Adds copies that only `stage` reads. Records the modules that read them."""
        self.copies.setdefault(stage, {}).update(copies)

    def put(self, stage: int) -> None:
        """Sets the copies of `stage` in the model before a pass of this stage."""
        for name, copy in self.copies.get(stage, {}).items():
            for module, key in self.places.get(name, ()):
                module._parameters[key] = copy


@dataclass
class StageCursor:
    """Tracks the running stage: its blocks [start, stop) and, with several stages, its received and sent tensors."""

    start: int = 0
    stop: int = 0
    keeping: RecomputePolicy = field(default_factory=RecomputePolicy)
    carry: BoundaryState | None = None
    shared: MultiStageParameters = field(default_factory=MultiStageParameters)
    """The parameters that several stages of this rank compute with."""
    tried: bool = False
    """Whether a dry run is in progress. During a dry run, blocks of other stages return NaN
    (preflight/step_checks.py)."""
    recording: tuple[Any, bool] | None = None
    """The saved-tensor hooks and the gradient mode at the start of the pass; None if the stage is the whole model."""
    passes: int = 0
    """Number of passes that have begun."""
    entered: set[int] = field(default_factory=set)
    """Indices of the blocks that ran in the current pass."""
    entered_first: dict[int, frozenset[int]] = field(default_factory=dict)
    """For each stage, given by its first block: the blocks that ran in its first pass."""

    def uneven(self) -> int | None:
        """Returns a block that ran in only one of two passes: the current pass, and the first pass of its stage.
        Returns None if there is no such block."""
        ran = frozenset(self.entered)
        return min(ran ^ self.entered_first.setdefault(self.start, ran), default=None)


@dataclass(frozen=True)
class GatheredGroups:
    """The parameter groups that a wrapper gathers for its module (ZeRO 3)."""

    units: Sequence[FlatParamGroup] = ()
    previous: Sequence[FlatParamGroup] = ()
    """The groups of the previous block, which backward needs next."""
    following: Sequence[FlatParamGroup] = ()
    """The groups of the next block, which forward needs next."""
    is_sole_user: bool = False
    """Whether no other module reads these weights."""
    is_tied: bool = False
    """Whether another wrapper gathers these weights too. If so, their gradients are completed and they are resharded
    long after the backward of this module."""


HiddenFunction = Callable[[torch.Tensor], torch.Tensor]
"""A function that returns a replacement for a hidden state."""


class BlockWrapper:
    """Wraps the forward of one module. `index` is the index of a block, None for other modules."""

    def __init__(
        self,
        module: nn.Module,
        run: StageCursor,
        index: int | None = None,
        gathered: GatheredGroups = GatheredGroups(),
        inner: Callable[..., Any] | None = None,
        before: HiddenFunction | None = None,
        after: HiddenFunction | None = None,
    ) -> None:
        """`inner` computes the module, by default with its forward. `before` and `after` map the hidden state on entry
        and on exit."""
        self.inner = inner or module.forward
        self.moving = MutatedBuffers(module)
        self.run, self.index, self.gathered = run, index, gathered
        self.before, self.after = before, after
        self.needs_weights_backward = not isinstance(module, nn.Embedding)
        self.called = 0
        """Number of the last pass that called the module."""
        module.forward = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run, index = self.run, self.index
        if index is not None and run.recording is not None and saved_tensor_state() != run.recording:
            raise InputError(
                Message(
                    "pipeline: block {index} {own_checkpoint_reason}, but pipeline stages must begin and end between "
                    "blocks: use pp1",
                    index=index,
                    own_checkpoint_reason=OWN_CHECKPOINT_REASON,
                )
            )
        if index is None:
            return self._compute(args, kwargs)
        if run.carry is not None:
            leaves, form = tree_flatten((args, kwargs))
            if not run.start <= index < run.stop:
                message = run.carry.leave(index, leaves)
                if message is not None:
                    raise StageExit(message)
                return run.carry.skipped(index, skipped_block_output(hidden_of(args, kwargs), run.tried))
            args, kwargs = tree_unflatten(run.carry.filled(index, leaves), form)
        if self.before is not None:
            args, kwargs = with_hidden(args, kwargs, self.before(hidden_of(args, kwargs)))
        output = self._compute(args, kwargs)
        return output if self.after is None else map_first(self.after, output)

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.index is not None:
            self.run.entered.add(self.index)
        gathered, units = self.gathered, self.gathered.units
        _unshard(units, gathered.following)
        entering = hidden_of(args, kwargs)
        if units and isinstance(entering, torch.Tensor) and entering.requires_grad:
            if gathered.is_sole_user and self.called != self.run.passes:
                entering = entering.view_as(entering)
                args, kwargs = with_hidden(args, kwargs, entering)
                entering.register_hook(self._end_of_backward)
            # Later actions (W and the reductions) need no weights. So the weights are resharded after the module's
            # backward.
            if any(unit.wgrad_queue or unit.frozen or gathered.is_tied for unit in units):
                entering.register_hook(self._close_behind_backward)
        self.called = self.run.passes
        if self.index is not None and torch.is_grad_enabled():
            output = self.run.keeping(self.inner, self.index - self.run.start, args, kwargs, self.moving)
        else:
            output = self.inner(*args, **kwargs)
        for unit in units:
            unit.weights.reshard()
        if units and self.needs_weights_backward:
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._open_for_backward)
        return output

    def _open_for_backward(self, gradient: torch.Tensor) -> None:
        _unshard(self.gathered.units, self.gathered.previous)

    def _end_of_backward(self, gradient: torch.Tensor) -> None:
        for unit in reversed(self.gathered.units):
            if unit.reducer is not None and unit.wgrad_queue is None:
                unit.reducer.mark_unused(unit)

    def _close_behind_backward(self, gradient: torch.Tensor) -> None:
        for unit in self.gathered.units:
            unit.weights.reshard()


def _unshard(units: Sequence[FlatParamGroup], ahead: Sequence[FlatParamGroup]) -> None:
    """Unshards the weights of `units`, and starts to gather those of `ahead` in the background."""
    for unit in units:
        unit.weights.unshard()
    for unit in ahead:
        unit.weights.prefetch()
