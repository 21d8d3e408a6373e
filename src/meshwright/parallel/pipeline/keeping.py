"""What a block keeps between its forward and its backward, by the plan: everything, only its input (recompute `layer`), everything but what
attention makes inside (`selective`), and any of them on the device or in host memory (offload `activations`).

Gradients are bit for bit the same: what is computed again is computed by the same kernels from the same numbers and random state.
Source of `selective`: Korthikanti et al., arXiv 2205.05198, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from meshwright.base.errors import InputError
from meshwright.spec.plan import Offload, Plan, Recompute

Forward = Callable[..., Any]


@dataclass(frozen=True)
class Keeping:
    """For all blocks of a rank. `layers`: the first blocks of each stage that recompute, 0 for all. `weights`: storages that stay where they are."""

    recompute: Recompute = Recompute.none
    layers: int = 0
    offload: bool = False
    weights: Collection[int] = ()

    @classmethod
    def of(cls, plan: Plan, weights: Collection[int]) -> Keeping:
        """Context ranks, who compute attention by other means, see to its core themselves (context/setup.py)."""
        elsewhere = plan.recompute == Recompute.selective and plan.cp > 1
        recompute = Recompute.none if elsewhere else plan.recompute
        return cls(recompute, plan.recompute_layers, Offload.activations in plan.offload, weights)

    def __call__(self, forward: Forward, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's `forward`; it is the block number `place` of its stage."""
        again = not self.layers or place < self.layers
        if self.recompute == Recompute.layer and again:
            run: Forward = _again(forward)
        elif self.recompute == Recompute.selective:
            run = _core_again(forward)
        else:
            run = forward
        if not self.offload:
            return run(*args, **kwargs)
        with saved_tensors_hooks(self._to_host, _from_host):
            return run(*args, **kwargs)

    def _to_host(self, tensor: torch.Tensor) -> tuple[torch.device | None, torch.Tensor]:
        """Where `tensor` was and its copy in host memory, which on an accelerator is pinned and filled while the device goes on."""
        if storage_of(tensor) in self.weights:
            return None, tensor
        pinned = tensor.device.type == "cuda"
        host = torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        host.copy_(tensor, non_blocking=pinned)
        return tensor.device, host


def storage_of(tensor: torch.Tensor) -> int:
    """The same number as long as the storage lives, also when it is emptied and filled again (ZeRO 3)."""
    return tensor.untyped_storage()._cdata


def _from_host(kept: tuple[torch.device | None, torch.Tensor]) -> torch.Tensor:
    device, tensor = kept
    return tensor if device is None else tensor.to(device, non_blocking=True)


def _again(forward: Forward) -> Forward:
    return lambda *args, **kwargs: checkpoint(forward, *args, use_reentrant=False, **kwargs)


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
