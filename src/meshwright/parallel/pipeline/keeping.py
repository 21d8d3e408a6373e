"""What a block keeps between its forward and its backward, by the plan: everything, only its input (recompute `layer`), everything but what
attention makes inside (`selective`), what the rest follows from by cheap operations (`operations`, anatomy/derived.py), and any of them on the
device or in host memory (offload `activations`).

Gradients are bit for bit the same: what is computed again is computed by the same kernels from the same numbers and random state.
Source of `selective`: Korthikanti et al., arXiv 2205.05198, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from meshwright.anatomy.derived import Cuts, Tape
from meshwright.base.errors import InputError
from meshwright.parallel.offload.activations import Activations, Block, taken
from meshwright.spec.plan import Offload, Plan, Recompute

Forward = Callable[..., Any]


def _nothing(place: int) -> Recompute:
    return Recompute.none


@dataclass(frozen=True)
class Keeping:
    """For all blocks of a rank. `how`: what the block of a place in its stage computes again. `away`: where what it keeps waits, if it `sends` it; None
    where all of it stays. `cuts`: what was decided of forms of blocks, by operation."""

    how: Callable[[int], Recompute] = _nothing
    away: Activations | None = None
    sends: Callable[[int], bool] = bool
    cuts: Cuts = field(default_factory=dict)

    @classmethod
    def of(cls, plan: Plan, device: torch.device, weights: Collection[int]) -> Keeping:
        """`weights`: storages that stay where they are. Context ranks, who compute attention by other means, see to its core themselves (context/setup.py),
        the compiler to what follows by operation (compiled.py)."""
        elsewhere = {Recompute.selective} if plan.cp > 1 else set()
        elsewhere |= {Recompute.operations} if plan.compile else set()

        def here(place: int) -> Recompute:
            return Recompute.none if (how := plan.recompute_at(place)) in elsewhere else how

        away = Activations(device, weights) if Offload.activations in plan.offload else None
        return cls(here, away, plan.sends)

    def __call__(self, forward: Forward, place: int, args: tuple[Any, ...], kwargs: dict[str, Any], once: Sequence[torch.Tensor]) -> Any:
        """The block's `forward`; it is the block number `place` of its stage. `once`: buffers that a pass moves on, and the same pass again must not."""
        if self.away is None or not self.sends(place):
            return self._run(forward, place, once, None, args, kwargs)
        with self.away.kept_by(place) as block:
            return self._run(forward, place, once, block, args, kwargs)

    def _run(
        self, forward: Forward, place: int, once: Sequence[torch.Tensor], block: Block | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        how = self.how(place)
        if how == Recompute.layer:
            return _again(forward, once)(*args, **kwargs)
        if how == Recompute.selective:
            return _core_again(forward)(*args, **kwargs)
        return self._by_operation(forward, block, args, kwargs) if how == Recompute.operations else forward(*args, **kwargs)

    def _by_operation(self, forward: Forward, block: Block | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tape = Tape(tree_leaves((args, kwargs)), block.keep if block else None, taken if block else None)
        with saved_tensors_hooks(tape.pack, tape.unpack), tape:
            output = forward(*args, **kwargs)
        tape.finish(self.cuts)
        return output


def _again(forward: Forward, once: Sequence[torch.Tensor]) -> Forward:
    contexts: Any = {"context_fn": lambda: (nullcontext(), as_it_was(once))} if once else {}
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **contexts, **kwargs)


def buffers_kept(module: nn.Module) -> list[torch.Tensor]:
    """Those of the saved state: running means among them."""
    kept = module.state_dict().keys()
    return [buffer for name, buffer in module.named_buffers() if name in kept]


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
                'build the model with attn_implementation="sdpa", or take rc-layer'
            )
        return output

    return run


class _Core(TorchFunctionMode):
    """Attention called inside keeps its inputs alone. The compiler reads this too, and makes attention again where it would have been kept."""

    def __init__(self) -> None:
        super().__init__()
        self.met = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.met = True
        return checkpoint(function, *args, use_reentrant=False, **(kwargs or {}))
