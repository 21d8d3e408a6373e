"""Layers on one tensor rank: recognises linear layers and convolutions, and sets a rank's head counts, layer sizes and
per-head arguments.

A layer that computes y = x W + b alone may get another forward. In addition to its weights, a rank changes integers
that forward methods read, and arguments with one entry for each head.
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
    """Returns whether it is a Linear, a subclass of Linear that computes the same, or transformers' Conv1D."""
    kind = type(module)
    if kind.forward is nn.Linear.forward or kind.__name__ == "Conv1D":
        return True
    return isinstance(module, nn.Linear) and not module._modules and computes_linear(kind)  # type: ignore[arg-type]


def is_convolution(module: nn.Module) -> bool:
    """Returns whether it has the forward of a convolution of torch."""
    return type(module).forward in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)


@functools.cache
def computes_linear(kind: type[nn.Linear]) -> bool:
    """Returns whether a subclass of Linear computes y = x W + b, tried on a small instance."""
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=()), torch.no_grad():
            small = kind(3, 5, bias=True).double()
            x = torch.randn(2, 4, 3, dtype=torch.float64)
            return bool(torch.allclose(small(x), F.linear(x, small.weight, small.bias), atol=1e-12, rtol=1e-12))
    except Exception:
        return False


AttributeUndo = list[tuple[nn.Module, str, Any]]


def set_local_heads(model: nn.Module, region: TpRegion, ranks: int) -> AttributeUndo:
    """Sets the region's counts to those of each of `ranks` ranks and returns the earlier values. A configuration is
    copied first.
    """
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
    """Restores the attributes that `set_local_heads` changed."""
    for owner, name, value in reversed(undo):
        setattr(owner, name, value)


def update_layer_sizes(module: nn.Module) -> None:
    """Sets the size attributes of a layer to those of its weight (Linear, Embedding, convolutions, transformers'
    Conv1D).
    """
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
    """A forward pre-hook that passes a module only the rank's heads of one argument. `take(tensor, dim)` slices a
    dimension of heads.
    """

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
        """Returns the rank's heads of (rows x heads). What an earlier block computed from its own heads is
        unchanged.
        """
        dim = self.arg.dim
        if tensor.shape[dim] * self.ranks == self.arg.heads:
            return tensor
        return self.take(tensor.unflatten(dim, (-1, self.arg.heads)), dim + 1).flatten(dim, dim + 1)
