"""Adapts the modules of a tensor-parallel region to the local shards of a rank, for the tensor-parallel runtime and for
simulated_ranks.py. Sets head counts, slices arguments with one entry for each head, and updates the sizes that layers
store. A region consists of column layers and the row layers that read their outputs.
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
    """Sets the `head_counts` of the region to the counts of one of `ranks` tensor ranks. Returns the previous values
    for `restore_attributes`. A configuration that other modules may share is copied before it is changed.
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
    """Sets the size attributes of a layer (such as `out_features`) to the sizes of its weight. Other modules do not
    change.
    """
    weight = module._parameters.get("weight")
    if weight is None or weight.ndim < 2:
        return
    for name, size in zip(rule_of(module).size_attributes(module), weight.shape, strict=False):
        if hasattr(module, name):
            setattr(module, name, size)


class LocalHeadsHook:
    """A forward pre-hook that replaces the argument `one` of a module by its entries for the heads of this rank.
    `take(tensor, dim)` returns the heads of this rank along `dim`.
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
        """Returns the heads of this rank from `tensor`, whose dimension `dim` has heads or batch size x heads elements.
        Returns `tensor` unchanged if an earlier block has computed it from local heads.
        """
        dim = self.arg.dim
        if tensor.shape[dim] * self.ranks == self.arg.heads:
            return tensor
        return self.take(tensor.unflatten(dim, (-1, self.arg.heads)), dim + 1).flatten(dim, dim + 1)
