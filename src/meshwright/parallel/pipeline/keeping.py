"""What a block keeps between its forward and its backward, by the plan: everything, only its input (recompute `layer`), everything but what
attention makes inside (`selective`), and any of them on the device or in host memory (offload `activations`).

Gradients are bit for bit the same: what is computed again is computed by the same kernels from the same numbers and random state.
Source of `selective`: Korthikanti et al., arXiv 2205.05198, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from meshwright.base.errors import InputError
from meshwright.parallel.offload.activations import Activations
from meshwright.spec.plan import Offload, Plan, Recompute

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Keeping:
    """For all blocks of a rank. `layers`: the first blocks of each stage that recompute, 0 for all. `away`: where what they keep waits; None where
    it stays."""

    recompute: Recompute = Recompute.none
    layers: int = 0
    away: Activations | None = None

    @classmethod
    def of(cls, plan: Plan, device: torch.device, weights: Collection[int]) -> Keeping:
        """`weights`: storages that stay where they are. Context ranks, who compute attention by other means, see to its core themselves (context/setup.py)."""
        elsewhere = plan.recompute == Recompute.selective and plan.cp > 1
        recompute = Recompute.none if elsewhere else plan.recompute
        return cls(recompute, plan.recompute_layers, Activations(device, weights) if Offload.activations in plan.offload else None)

    def __call__(self, forward: Forward, place: int, args: tuple[Any, ...], kwargs: dict[str, Any], once: Sequence[torch.Tensor]) -> Any:
        """The block's `forward`; it is the block number `place` of its stage. `once`: buffers that a pass moves on, and the same pass again must not."""
        again = not self.layers or place < self.layers
        if self.recompute == Recompute.layer and again:
            run: Forward = _again(forward, once)
        elif self.recompute == Recompute.selective:
            run = _core_again(forward)
        else:
            run = forward
        if self.away is None:
            return run(*args, **kwargs)
        with self.away.kept_by(place):
            return run(*args, **kwargs)


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
    """Attention called inside keeps its inputs alone."""

    def __init__(self) -> None:
        super().__init__()
        self.met = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.met = True
        return checkpoint(function, *args, use_reentrant=False, **(kwargs or {}))
