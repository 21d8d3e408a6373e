"""Gates: a block's `forward` replaced on the instance, so that one unmodified model can run any stage of itself.

[Note: stages without stage code] Every pipeline rank calls the forward of the whole model with the same batch, so that masks, positions and
rotary tables are made by the model's own code on every stage. Blocks that are not of the running stage hand their input on; the first block
of the stage takes the hidden state that arrived instead of its input; after the last block of the stage the call is left by `StageDone`,
which carries the hidden state out. What a rank does not hold is replaced by `Absent` (absent.py). Names never change.

A gate is also where weights are gathered (ZeRO 3), where a layer is recomputed, and where the sequence is cut and joined.

[Note: through] Autograd runs what was made last first, so that when the gradient of what entered a block is there (of a view of its own, made on
entry), all that the block does to its parameters is done. Parameters without a gradient by then, such as experts that were not chosen, get none.
That holds for the first call of a pass, and for parameters that no other module reads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from meshwright.anatomy.keeper import AGAIN, recording
from meshwright.base.errors import InputError
from meshwright.parallel.pipeline.absent import check_beside, hidden_of, passed_by
from meshwright.parallel.pipeline.carry import Carry
from meshwright.parallel.pipeline.keeping import Keeping
from meshwright.parallel.pipeline.moving import Moving
from meshwright.parallel.zero.flat import FlatUnit


class StageDone(Exception):
    """Leaves the model's forward with the hidden state after a stage's last block, or with all that goes on (carry.py). Not an error."""

    def __init__(self, hidden: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass
class Run:
    """Which stage is running: blocks [start, stop), the hidden state that arrived, whether the head follows."""

    start: int = 0
    stop: int = 0
    is_last: bool = True
    received: torch.Tensor | None = None
    keeping: Keeping = field(default_factory=Keeping)
    carry: Carry | None = None
    tried: bool = False
    """Nothing is trained yet: blocks of other stages give no numbers (rehearsal.py)."""
    recording: tuple[Any, bool] | None = None
    """Who keeps what backward needs, of a stage that is not the whole model."""
    passes: int = 0
    """Passes that have begun."""
    entered: set[int] = field(default_factory=set)
    """Blocks that ran in this one."""
    entered_first: dict[int, frozenset[int]] = field(default_factory=dict)
    """Those of the first pass, by where the stage begins."""

    def uneven(self) -> int | None:
        """A block that ran in this pass and not in the first one of its stage, or the other way round."""
        ran = frozenset(self.entered)
        return min(ran ^ self.entered_first.setdefault(self.start, ran), default=None)


def with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (hidden, *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: hidden}


class Gate:
    """The forward of one module. `index` is its place among the blocks, None outside of them."""

    def __init__(self, module: nn.Module, run: Run, index: int | None = None, returns: int = 0) -> None:
        """`returns`: values that the block returns, 0 for a bare tensor."""
        self.inner: Callable[..., Any] = module.forward
        self.moving = Moving(module)
        self.run, self.index, self.returns = run, index, returns
        self.checked = False
        self.units: list[FlatUnit] = []
        self.previous: list[FlatUnit] = []
        self.following: list[FlatUnit] = []
        self.needs_weights_backward = not isinstance(module, nn.Embedding)
        self.is_alone = False
        """Nothing else reads the weights that this gate gathers."""
        self.called = 0
        """The last pass that came by."""
        self.is_tied = False
        """Weights of another gate too: their gradient is whole, and they are closed for it, long after this one is through with them."""
        self.before: Callable[[torch.Tensor], torch.Tensor] | None = None
        self.after: Callable[[torch.Tensor], torch.Tensor] | None = None
        module.forward = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run, index = self.run, self.index
        if index is not None and run.recording is not None and recording() != run.recording:
            raise InputError(f"pipeline: block {index} {AGAIN}, and stages are left and entered between blocks: use pp1")
        if index is not None and run.carry is not None:
            return self._carried(run.carry, index, args, kwargs)
        if index is not None:
            if not run.start <= index < run.stop:
                hidden = passed_by(hidden_of(args, kwargs), run.tried)
                return (hidden, *[None] * (self.returns - 1)) if self.returns else hidden
            if index == run.start and run.received is not None and not self.checked:
                check_beside(args, kwargs)
                self.checked = True
            hidden = run.received if index == run.start and run.received is not None else hidden_of(args, kwargs)
            if self.before is not None:
                hidden = self.before(hidden)
            args, kwargs = with_hidden(args, kwargs, hidden)
        output = self._compute(args, kwargs)
        if index is None:
            return output
        if self.after is not None:
            output = map_first(self.after, output)
        if index == run.stop - 1 and not run.is_last:
            raise StageDone(output[0] if isinstance(output, tuple | list) else output)
        return output

    def _carried(self, carry: Carry, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A block of a model whose stages hand on more than a hidden state."""
        leaves, form = tree_flatten((args, kwargs))
        if self.run.start <= index < self.run.stop:
            args, kwargs = tree_unflatten(carry.filled(index, leaves), form)
            return self._compute(args, kwargs)
        message = carry.leave(index, leaves)
        if message is not None:
            raise StageDone(message)
        return carry.skipped(index, passed_by(hidden_of(args, kwargs), self.run.tried))

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.index is not None:
            self.run.entered.add(self.index)
        _open(self.units, self.following)
        entering = hidden_of(args, kwargs)
        if self.units and isinstance(entering, torch.Tensor) and entering.requires_grad:
            if self.is_alone and self.called != self.run.passes:
                entering = entering.view_as(entering)
                args, kwargs = with_hidden(args, kwargs, entering)
                entering.register_hook(self._end_of_backward)
            if any(
                unit.backlog or unit.frozen or self.is_tied for unit in self.units
            ):  # W and reductions, which end others, need no weights
                entering.register_hook(self._close_behind_backward)
        self.called = self.run.passes
        if self.index is not None and torch.is_grad_enabled():
            output = self.run.keeping(self.inner, self.index - self.run.start, args, kwargs, self.moving)
        else:
            output = self.inner(*args, **kwargs)
        for unit in self.units:
            unit.close()
        if self.units and self.needs_weights_backward:
            for tensor in tree_leaves(output):
                if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._open_for_backward)
        return output

    def _open_for_backward(self, gradient: torch.Tensor) -> None:
        _open(self.units, self.previous)

    def _end_of_backward(self, gradient: torch.Tensor) -> None:
        for unit in reversed(self.units):
            if unit.stage is not None and unit.backlog is None:
                unit.stage.through(unit)

    def _close_behind_backward(self, gradient: torch.Tensor) -> None:
        for unit in self.units:
            unit.close()


def _open(units: list[FlatUnit], ahead: list[FlatUnit]) -> None:
    """Whole weights for `units` now; those needed next start to gather while these compute."""
    for unit in units:
        unit.open()
    for unit in ahead:
        unit.prefetch()


def map_first(function: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    return type(output)([function(output[0]), *output[1:]]) if isinstance(output, tuple | list) else function(output)
