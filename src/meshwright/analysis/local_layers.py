"""Which layers are bare products, y = x W + b, so that their forward may be replaced by one of ours; and convolutions,
which sum likewise.

What a rank changes of a block beside its weights: integers that forward methods read, and arguments with a number for
each head.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.analysis.graph import PerHeadArg, TpRegion


def is_linear_like(module: nn.Module) -> bool:
    """Linear, a Linear with a forward of its own that computes the same, or Conv1D of transformers."""
    kind = type(module)
    if kind.forward is nn.Linear.forward or kind.__name__ == "Conv1D":
        return True
    return isinstance(module, nn.Linear) and not module._modules and computes_linear(kind)  # type: ignore[arg-type]


def is_convolution(module: nn.Module) -> bool:
    """A convolution of torch's own."""
    return type(module).forward in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)


@functools.cache
def computes_linear(kind: type[nn.Linear]) -> bool:
    """Tried on a small one with numbers."""
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=()), torch.no_grad():
            small = kind(3, 5, bias=True).double()
            x = torch.randn(2, 4, 3, dtype=torch.float64)
            return bool(torch.allclose(small(x), F.linear(x, small.weight, small.bias), atol=1e-12, rtol=1e-12))
    except Exception:
        return False


AttributeUndo = list[tuple[nn.Module, str, Any]]


def set_local_heads(model: nn.Module, region: TpRegion, ranks: int) -> AttributeUndo:
    """The region's counts as each of `ranks` ranks has them; returns what was there. A configuration is copied for its
    module first."""
    undo: AttributeUndo = []
    for count in region.head_counts:
        owner: Any = model.get_submodule(count.path)
        name = count.name
        if name.startswith("config."):
            if not any(module is owner and what == "config" for module, what, _ in undo):
                undo.append((owner, "config", owner.config))
                owner.config = copy.copy(owner.config)
            owner, name = owner.config, name.removeprefix("config.")
        else:
            undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, region.local_count(count, getattr(owner, name), ranks))
    return undo


def restore_attributes(undo: AttributeUndo) -> None:
    for owner, name, value in reversed(undo):
        setattr(owner, name, value)


def update_layer_sizes(module: nn.Module) -> None:
    """Sizes that a module keeps beside its weight (Linear, Embedding, convolutions, and Conv1D of transformers, whose
    forward reads `nf`)."""
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim < 2:
        return
    names = ("num_embeddings", "embedding_dim") if isinstance(module, nn.Embedding) else ("out_features", "in_features")
    names = (
        ("nx", "nf") if hasattr(module, "nf") else ("out_channels", "in_channels") if is_convolution(module) else names
    )
    for name, size in zip(names, weight.shape, strict=False):
        if hasattr(module, name):
            setattr(module, name, size)


class LocalHeadsHook:
    """A forward pre-hook that hands a module only a rank's heads of one argument. `take(tensor, dim)` cuts a dimension
    of heads."""

    def __init__(self, one: PerHeadArg, ranks: int, take: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        self.arg, self.ranks, self.take = one, ranks, take

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        key = self.arg.argument
        if isinstance(key, int):
            if key >= len(args) or not isinstance(args[key], torch.Tensor):
                return args, kwargs
            return (*args[:key], self.cut(args[key]), *args[key + 1 :]), kwargs
        if not isinstance(kwargs.get(key), torch.Tensor):
            return args, kwargs
        return args, {**kwargs, key: self.cut(kwargs[key])}

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """(rows x heads) are cut by heads. What an earlier block made of its own heads is left as it is."""
        dim = self.arg.dim
        if tensor.shape[dim] * self.ranks == self.arg.heads:
            return tensor
        return self.take(tensor.unflatten(dim, (-1, self.arg.heads)), dim + 1).flatten(dim, dim + 1)
