"""Replaces the `forward` of each block instance by a wrapper, so that one unmodified model can run any of its stages.
The build wraps the blocks (build/passes/wrap_modules.py), and the engine runs the stages.

[Note: stages without stage code] Every pipeline rank calls the forward of the whole model with the same batch. So the
model's own code computes masks, positions and rotary tables on every stage. Blocks of other stages return their input.
The first block of the stage takes the received tensors instead of its arguments. When the forward reaches the first
block of the next stage, the wrapper of that block raises `StageExit` with the block's arguments. So code between two
blocks runs on the stage of the earlier block. A `StagePlaceholder` replaces each module that a rank does not store
(runtime/stage_placeholder.py). Parameter names never change.

A wrapper also gathers weights (ZeRO 3), recomputes its block, and splits and joins the sequence (context parallelism).

[Note: end of backward] Backward runs the operations of the forward in reverse order. On entry a wrapper creates a
separate view of the block's input. When autograd has computed the gradient of this view, all gradients of the block's
parameters are complete. A parameter that has no gradient at this point, such as that of an expert without tokens, gets
none in this pass. Both statements hold only for the first call of a block in a pass, and for parameters that no other
module reads.

`BoundarySpec` lists the tensors that cross a stage boundary: the arguments of the next stage's first block that depend
on parameters.

In most models the only such argument is the hidden state. Other models also send further tensors: an encoder's output
for all blocks of a decoder, a position bias that the first block computes, or the embeddings of a second text.

[Note: boundary tensors] The analysis runs the model once and records which arguments of every block depend on
parameters (analysis/dataflow_recorder.py). A stage ends at the entry of the next stage's first block, and sends exactly
the arguments of this block that depend on parameters. In backward, their gradients return to the sending stage.

A model may have several stacks of blocks, such as an encoder and a decoder. The first block of a later stack may need
tensors that are computed before all blocks, such as the embeddings of the decoder. The first pipeline stage therefore
continues the forward up to that block, and also sends these tensors. In the forward of a later stage, the arguments of
that block are only placeholders: outputs of layers on other stages, or None. The stage replaces the placeholders by the
received tensors. If a stage passes a received tensor on to the next stage, the tensor is a leaf of the stage's graph.
So in backward the gradients from all stages that use the tensor add up.
"""

from __future__ import annotations

import weakref
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
from meshwright.runtime.zero.group_weights import GroupWeights
from meshwright.runtime.zero.param_group import FlatParamGroup


@dataclass(frozen=True)
class BoundarySpec:
    """Describes the tensors that cross stage boundaries.

    A block argument is a leaf of the flattened (args, kwargs) of a block's forward, given by its position. `needs`: for
    every block, the positions of the arguments that depend on parameters. `firsts`: the index of the first block of
    each stack. `early`: those arguments of these first blocks that do not depend on earlier stacks. `returns`: for
    every block, the number of values in the returned tuple, or 0 if the block returns a single tensor. `front`: names
    of the parameters outside of the blocks that are used before all blocks. `between[k]`: names of the parameters that
    are used after stack k and before the next stack.
    """

    needs: tuple[tuple[int, ...], ...]
    firsts: tuple[int, ...]
    early: frozenset[BlockArgument]
    returns: tuple[int, ...]
    front: frozenset[str]
    between: tuple[frozenset[str], ...]
    unsent: str = ""
    """The path of the first block that has an argument which depends on parameters but cannot be sent (a mask or
    integers). '' if there is none."""
    overwritten: frozenset[BlockArgument] = frozenset()
    """Block arguments that the forward overwrites in place."""

    def message(self, block: int) -> tuple[BlockArgument, ...]:
        """Returns the block arguments that a stage receives if its first block is `block`."""
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
        """Whether the model has more than one stack of blocks."""
        return len(self.firsts) > 1

    @property
    def is_more(self) -> bool:
        """Whether stages send more tensors than the hidden state."""
        return self.is_over_stacks or any(len(places) > 1 for places in self.needs)


@dataclass
class BoundaryState:
    """The state of one forward of a stage with blocks [start, stop). `arrived`: the received tensors. `leaving`: the
    tensors to send. `stand_ins` maps (stack, argument position) to the placeholder that this stage's forward computes,
    and to the received tensor that replaces the placeholder."""

    spec: BoundarySpec
    start: int = 0
    stop: int = 0
    arrived: dict[BlockArgument, torch.Tensor] = field(default_factory=dict)
    leaving: dict[BlockArgument, torch.Tensor] = field(default_factory=dict)
    stand_ins: dict[BlockArgument, tuple[Any, torch.Tensor]] = field(default_factory=dict)

    def begin(self, start: int, stop: int, received: Sequence[torch.Tensor]) -> None:
        """Starts a forward with the tensors `received` from the previous stage."""
        self.start, self.stop = start, stop
        self.arrived = dict(zip(self.spec.message(start), received, strict=True)) if received else {}
        # Tensors that blocks overwrite are cloned, because autograd forbids in-place writes to leaves.
        for key in self.spec.overwritten & self.arrived.keys():
            self.arrived[key] = self.arrived[key].clone()
        wanted = self.spec.message(stop) if stop < len(self.spec.needs) else ()
        self.leaving = {key: self.arrived[key] for key in wanted if key[0] != stop and key in self.arrived}
        self.stand_ins = {}

    def forget(self) -> None:
        """Drops all tensors of the forward."""
        self.arrived, self.leaving, self.stand_ins = {}, {}, {}

    def filled(self, block: int, leaves: list[Any]) -> list[Any]:
        """Returns the flattened arguments `leaves` of `block`, with placeholders replaced by received tensors."""
        stack = self.spec.stack(block)
        for place in self.spec.needs[block]:
            if (block, place) in self.arrived:
                self.stand_ins[stack, place] = (leaves[place], self.arrived[block, place])
            stand_in = self.stand_ins.get((stack, place))
            if stand_in is not None and leaves[place] is stand_in[0]:
                leaves[place] = stand_in[1]
        return leaves

    def leave(self, block: int, leaves: list[Any]) -> tuple[torch.Tensor, ...] | None:
        """Returns the tensors for the next stage when the forward reaches `block`, which is on another stage. Returns
        None if the forward must continue because some of these tensors are missing, and always on the last stage."""
        if block < self.stop or self.stop >= len(self.spec.needs):
            return None
        wanted = self.spec.message(self.stop)
        leaves = self.filled(block, leaves)
        self.leaving.update({key: leaves[key[1]] for key in wanted if key[0] == block and key not in self.leaving})
        return tuple(self.leaving[key] for key in wanted) if len(self.leaving) == len(wanted) else None

    def skipped(self, block: int, hidden: torch.Tensor) -> Any:
        """Returns a placeholder for the output of `block`, which is on another stage. The placeholder has the structure
        of the block's output, with `hidden` as the first value and None for all other values."""
        return (hidden, *[None] * (self.spec.returns[block] - 1)) if self.spec.returns[block] else hidden


def trace_boundaries(record: DataflowRecord, anatomy: ModelGraph) -> BoundarySpec:
    """Returns which tensors cross stage boundaries: for each block, the arguments that depend on parameters.

    Raises:
        InputError: a block did not run in the recorded pass.
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
    """Returns (layer name, parameter names) for each layer in forward order. Blocks are numbered over all stacks. The
    layer 'between.K' follows the blocks of stack K.

    Raises:
        InputError: it is unknown where a parameter outside of the blocks is used.
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
    """Leaves the model's forward with the tensors for the next stage. This exception is not an error."""

    def __init__(self, message: tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.message = message


@dataclass
class MultiStageParameters:
    """Stores a separate parameter object for each stage of this rank that computes with the same parameter, such as a
    tied weight.

    A rank runs one stage at a time. Before a stage runs, `put` sets the parameter objects of this stage in the modules
    that read the parameters.
    """

    copies: dict[int, dict[str, nn.Parameter]] = field(default_factory=dict)
    """Maps each stage to its parameter objects by parameter name."""
    places: dict[str, list[tuple[nn.Module, str]]] = field(default_factory=dict)
    """Maps each parameter name to the modules that read the parameter, with the parameter's name in each module."""

    def add(self, stage: int, copies: Mapping[str, nn.Parameter]) -> None:
        """Adds parameter objects for `stage`, by parameter name. `places` must already list the modules that read these
        parameters."""
        self.copies.setdefault(stage, {}).update(copies)

    def put(self, stage: int) -> None:
        """Sets the parameter objects of `stage` in the model, before this stage runs."""
        for name, copy in self.copies.get(stage, {}).items():
            for module, key in self.places.get(name, ()):
                module._parameters[key] = copy


@dataclass
class StageCursor:
    """Tracks the stage that this rank is running: its blocks [start, stop) and its recompute policy (`keeping`).
    `carry`: the tensors that the stage receives and sends; None if the model has one stage."""

    start: int = 0
    stop: int = 0
    keeping: RecomputePolicy = field(default_factory=RecomputePolicy)
    carry: BoundaryState | None = None
    shared: MultiStageParameters = field(default_factory=MultiStageParameters)
    """The parameter objects of parameters that several stages of this rank compute with."""
    tried: bool = False
    """Whether a dry run of the stages is in progress (preflight/step_checks.py). In a dry run, blocks of other stages
    return NaN."""
    recording: tuple[Any, bool] | None = None
    """The saved-tensor hooks and the gradient mode (`saved_tensor_state`) at the start of the pass; None if the stage
    is the whole model."""
    passes: int = 0
    """Number of stage forwards that have begun."""
    entered: set[int] = field(default_factory=set)
    """Indices of the blocks that ran in the current pass."""
    entered_first: dict[int, frozenset[int]] = field(default_factory=dict)
    """Maps the first block of each stage to the blocks that ran in the first pass of the stage."""

    def uneven(self) -> int | None:
        """Compares the blocks that ran in the current pass with those in the first pass of the same stage. Returns the
        first block that ran in only one of the two passes, or None."""
        ran = frozenset(self.entered)
        return min(ran ^ self.entered_first.setdefault(self.start, ran), default=None)


@dataclass(frozen=True)
class GatheredGroups:
    """The parameter groups that a wrapper gathers for its module (ZeRO 3), or waits for (`pending`, ZeRO 1 and 2)."""

    units: Sequence[FlatParamGroup] = ()
    previous: Sequence[FlatParamGroup] = ()
    """The groups of the previous block, which backward needs next."""
    following: Sequence[FlatParamGroup] = ()
    """The groups of the next block, which forward needs next."""
    is_sole_user: bool = False
    """Whether no other module reads these weights."""
    is_tied: bool = False
    """Whether another wrapper gathers these weights too. If so, their gradients are complete only long after the
    backward of this module. So this module's wrapper reshards the weights without waiting for the gradients."""
    pending: Sequence[weakref.ref[GroupWeights]] = ()
    """The weights whose all-gather may still run when the module is called ([Note: overlapped all-gather] in
    zero/group_weights.py). The references are weak, so that a copy of the model does not copy process groups."""


HiddenFunction = Callable[[torch.Tensor], torch.Tensor]
"""A function that returns a replacement for a hidden state."""


class BlockWrapper:
    """Wraps the forward of one module. `index` is the index of the block, or None if the module is not a block."""

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
        """`run` is the cursor that all wrappers of the rank use. `inner` computes the module; the default is the
        module's forward. `before` and `after` replace the hidden state on entry and on exit."""
        self.inner = inner or module.forward
        self.moving = MutatedBuffers(module)
        self.run, self.index, self.gathered = run, index, gathered
        self.before, self.after = before, after
        self.needs_weights_backward = not isinstance(module, nn.Embedding)
        self.called = 0
        """Value of `run.passes` when the module was last called."""
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
            filled = run.carry.filled(index, list(leaves))
            if any(one is not other for one, other in zip(filled, leaves, strict=True)):
                args, kwargs = tree_unflatten(filled, form)  # otherwise the block gets the model's own dicts and lists
        if self.before is not None:
            args, kwargs = with_hidden(args, kwargs, self.before(hidden_of(args, kwargs)))
        output = self._compute(args, kwargs)
        return output if self.after is None else map_first(self.after, output)

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.index is not None:
            self.run.entered.add(self.index)
        gathered, units = self.gathered, self.gathered.units
        for reference in gathered.pending:
            weights = reference()
            if weights is not None:
                weights.finish_gather()
        _unshard(units, gathered.following)
        entering = hidden_of(args, kwargs)
        # A reentrant checkpoint of the user's runs the forward without gradients first, and hooks need the second one.
        has_gradient = torch.is_grad_enabled()
        if units and has_gradient and isinstance(entering, torch.Tensor) and entering.requires_grad:
            if gathered.is_sole_user and self.called != self.run.passes:
                entering = entering.view_as(entering)
                args, kwargs = with_hidden(args, kwargs, entering)
                entering.register_hook(self._end_of_backward)
            # Usually the start of the reduction reshards the weights. Here it starts late or never. W actions and
            # reductions need no weights, so the weights are resharded when the module's backward ends.
            if any(unit.wgrad_queue or unit.frozen or gathered.is_tied for unit in units):
                entering.register_hook(self._close_behind_backward)
        self.called = self.run.passes if has_gradient else self.called
        if self.index is not None and has_gradient:
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
    """Unshards the weights of `units`, and starts to gather the weights of `ahead` in the background."""
    for unit in units:
        unit.weights.unshard()
    for unit in ahead:
        unit.weights.prefetch()
