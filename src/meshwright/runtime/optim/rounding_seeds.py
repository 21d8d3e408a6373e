"""Stochastic rounding by the global index of each element, so that it is the same on any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from meshwright.runtime.shard.low_bit import GlobalIndex, LowBitShard
from meshwright.runtime.shard.shard_table import ShardTable
from meshwright.runtime.zero.param_group import FlatParamGroup


def global_indices(shards: ShardTable, unit: FlatParamGroup) -> Iterator[GlobalIndex]:
    """Yields where the elements that this rank updates of `unit` are in their global tensors."""
    for name, offset in unit.layout.offsets.items():
        start = max(offset, unit.shard_range.start)
        stop = min(offset + unit.parameters[name].numel(), unit.shard_range.stop)
        if start >= stop:
            continue
        spec = shards.params[name]
        before = spec.expert_offset(unit.parameters[name].numel())
        at = start - unit.shard_range.start
        if spec.tp_split is None:
            yield GlobalIndex(name, at, start - offset, stop - start, before)
            continue
        shape, dim = spec.global_shape, spec.tp_split.dim
        rows = torch.cat([torch.arange(first, last) for first, last in spec.intervals()])
        if spec.is_expert:
            before *= spec.tp_ranks  # the offset counts this rank's part of each expert, the global tensor all parts
        yield GlobalIndex(name, at, start - offset, stop - start, before, rows, shape[dim], shape[dim + 1 :].numel())


def set_rounding_seeds(trained: Sequence[FlatParamGroup], shards: ShardTable, seed: int) -> None:
    """Gives the groups that round stochastically the indices of their elements, and the seed."""
    for unit in trained:
        if isinstance(unit.optim_shard, LowBitShard) and unit.optim_shard.stochastic:
            unit.optim_shard.global_indices, unit.optim_shard.seed = tuple(global_indices(shards, unit)), seed
