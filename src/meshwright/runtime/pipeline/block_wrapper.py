"""Wraps blocks: replaces the `forward` of each block instance, so that one unmodified model can run any of its stages.

[Note: stages without stage code] Every pipeline rank calls the forward of the whole model with the same batch. So the
model's own code makes masks, positions and rotary tables on every stage. Blocks of other stages return their input. The
first block of the stage takes the received tensors instead of its arguments. The first block of the next stage raises
`StageExit`, which leaves the forward with the arguments of this block (boundary_tensors.py). So code between two blocks
runs on the stage of the earlier block. A `StagePlaceholder` replaces each module that a rank does not store
(layout/placeholder.py). Parameter names never change.

A wrapper also gathers weights (ZeRO 3), recomputes its block, and cuts and joins the sequence.

[Note: through] Autograd runs the latest operations first. On entry a wrapper creates a separate view of the block's
input. Once the gradient of this view exists, all gradients of the block's parameters are complete. Parameters without a
gradient at this point, such as those of experts that were not chosen, get no gradient in this pass. This is true for
the first call of a block in a pass, and for parameters that no other module reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from meshwright.analysis.block_calls import hidden_of, map_first, with_hidden
from meshwright.analysis.remat.tape import OWN_CHECKPOINT_REASON, saved_tensor_state
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.layout.placeholder import skipped_block_output
from meshwright.runtime.pipeline.boundary_tensors import BoundaryState
from meshwright.runtime.recompute.policy import MutatedBuffers, RecomputePolicy
from meshwright.runtime.zero.param_group import FlatParamGroup


class StageExit(Exception):
    """Leaves the model's forward with the message to the next stage (boundary_tensors.py). It is not an error."""

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
                    "pipeline: block {index} {own_checkpoint_reason}, and stages are left and entered between blocks: "
                    "use pp1",
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
