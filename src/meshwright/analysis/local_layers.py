"""Adapts a block to local shards: sets head counts that forwards read, slices arguments with one entry for each head,
and updates stored layer sizes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from meshwright.analysis.graph import PerHeadArg, TpRegion
from meshwright.analysis.layer_rules.rule import rule_of

AttributeUndo = list[tuple[nn.Module, str, Any]]


def set_local_heads(model: nn.Module, region: TpRegion, ranks: int) -> AttributeUndo:
    """Sets the counts of the region to those of each of `ranks` ranks. Returns the previous values. A shared
    configuration is copied before it is changed.
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
    """Sets the size attributes of a layer to the sizes of its weight (Linear, Embedding, convolutions, transformers'
    Conv1D).
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim < 2:
        return
    for name, size in zip(rule_of(module).size_attributes(module), weight.shape, strict=False):
        if hasattr(module, name):
            setattr(module, name, size)


class LocalHeadsHook:
    """A forward pre-hook that passes to a module only the rank's heads of one argument. `take(tensor, dim)` returns the
    rank's heads along `dim`.
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
        """Returns the rank's heads of (rows x heads). If an earlier block has already computed the tensor from local
        heads, it is returned unchanged.
        """
        dim = self.arg.dim
        if tensor.shape[dim] * self.ranks == self.arg.heads:
            return tensor
        return self.take(tensor.unflatten(dim, (-1, self.arg.heads)), dim + 1).flatten(dim, dim + 1)
