"""What a block keeps between its forward and its backward, by the plan: everything, only its input (recompute `full`), everything but what
attention makes inside (`attn`), what the rest follows from by cheap operations (`sac`, anatomy/derived.py), and any of them on the
device, in host memory or in files (offload `activations`).

Gradients are bit for bit the same: what is computed again is computed by the same kernels from the same numbers and random state.
Source of `attn`: Korthikanti et al., arXiv 2205.05198, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from meshwright.anatomy.cuts import Cuts
from meshwright.anatomy.derived import Tape
from meshwright.anatomy.keeper import keeper
from meshwright.base.errors import InputError
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.offload.activations import Activations, Block, storage_of, taken
from meshwright.parallel.pipeline.moving import AsBefore, Moving
from meshwright.spec.plan import Recompute, sends

Forward = Callable[..., Any]

UNKEPT = "don't yet support saved tensor hooks"
"""What torch.func says where others keep what backward needs."""


def _nothing(place: int) -> Recompute:
    return Recompute.none


@dataclass(frozen=True)
class Keeping:
    """For all blocks of a rank. `how`: what the block of a place in its stage computes again. `away`: where what it keeps waits, if it `sends` it; None
    where all of it stays. `cuts`: what was decided of forms of blocks, by operation. `weights`: storages that are gathered anew."""

    how: Callable[[int], Recompute] = _nothing
    away: Activations | None = None
    sends: Callable[[int], bool] = bool
    cuts: Cuts = field(default_factory=dict)
    weights: Collection[int] = ()

    @classmethod
    def of(cls, mesh: Mesh, weights: Collection[int]) -> Keeping:
        """`weights`: storages that stay where they are. Context ranks, who compute attention by other means, see to its core themselves (context/setup.py),
        the compiler to what follows by operation (compiled.py)."""
        plan = mesh.plan
        elsewhere = {Recompute.attn} if plan.cp > 1 else set()
        elsewhere |= {Recompute.sac} if plan.compile else set()

        def here(place: int) -> Recompute:
            return Recompute.none if (how := plan.recompute_at(place)) in elsewhere else how

        away = Activations(mesh.device, weights, mesh.depot) if sends(plan.offload) else None
        return cls(here, away, plan.sends, weights=weights)

    def __call__(self, forward: Forward, place: int, args: tuple[Any, ...], kwargs: dict[str, Any], moving: Moving) -> Any:
        """The block's `forward`; it is the block number `place` of its stage. `moving`: its buffers."""
        try:
            if self.away is None or not self.sends(place):
                return self._run(forward, place, moving, None, args, kwargs)
            with self.away.kept_by(place) as block:
                return self._run(forward, place, moving, block, args, kwargs)
        except RuntimeError as error:
            if UNKEPT not in str(error):
                raise
            raise InputError(
                "this block takes gradients by torch.func, which lets nobody else keep what it needs: leave recompute and off-activations out"
            ) from None

    def _run(self, forward: Forward, place: int, moving: Moving, block: Block | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        how = self.how(place)
        if how == Recompute.full:
            return _again(forward, moving, args, kwargs)
        if how == Recompute.attn:
            return _core_again(forward)(*args, **kwargs)
        return self._by_operation(forward, moving, block, args, kwargs) if how == Recompute.sac else forward(*args, **kwargs)

    def _by_operation(self, forward: Forward, moving: Moving, block: Block | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        before = moving.before()
        tape = Tape(tree_leaves((args, kwargs)), block.keep if block else None, taken if block else None, weights=self.weights)
        with saved_tensors_hooks(tape.pack, tape.unpack), tape:
            output = forward(*args, **kwargs)
        tape.finish(self.cuts, {storage_of(each.buffer) for each in moving.moved(before)})
        return output


def _again(forward: Forward, moving: Moving, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    before = moving.before()
    as_before, modes = AsBefore(before), function_modes()
    buffers = as_before if any(each.value is not None for each in before) else None
    contexts: Any = {"context_fn": lambda: (nullcontext(), under(modes, buffers))} if modes or buffers else {}
    output = checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)
    as_before.moved = moving.moved(before)
    return output


@contextmanager
def under(modes: Sequence[TorchFunctionMode], buffers: AbstractContextManager[Any] | None = None) -> Iterator[None]:
    """What is recomputed runs under the function modes of its forward, such as one without dropout: torch leaves them while a backward runs."""
    with buffers or nullcontext(), ExitStack() as stack:
        for mode in modes:
            if mode not in function_modes():
                stack.enter_context(mode)
        yield


@contextmanager
def as_it_was(buffers: Sequence[torch.Tensor]) -> Iterator[None]:
    """What happens inside leaves `buffers` as they are; past autograd, which keeps them for backward and does not read them."""
    before = [buffer.clone() for buffer in buffers]
    try:
        yield
    finally:
        for buffer, value in zip(buffers, before, strict=True):
            buffer.data.copy_(value)


def _core_again(forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _Core() as core:
            output = forward(*args, **kwargs)
        if not core.met:
            raise InputError(
                "recompute selective: this block calls no scaled_dot_product_attention whose inside could be computed again; "
                'build the model with attn_implementation="sdpa", or take rc-full'
            )
        return output

    return run


class _Core(TorchFunctionMode):
    """Attention called inside keeps its inputs alone; where the model's own code computes it again anyway, as a whole, it does. The compiler reads this
    too, and makes attention again where it would have been kept."""

    def __init__(self) -> None:
        super().__init__()
        self.met, self.keeper = False, keeper()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_core = function is F.scaled_dot_product_attention
        self.met |= is_core
        if not is_core or (not torch.compiler.is_compiling() and keeper() != self.keeper):
            return function(*args, **(kwargs or {}))
        return checkpoint(function, *args, use_reentrant=False, **(kwargs or {}))
