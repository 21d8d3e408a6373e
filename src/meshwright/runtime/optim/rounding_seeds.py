"""Where the tensors of a flat unit lie in their whole ones: what rounding and whole updates go by."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from meshwright.analysis.graph import shard_intervals
from meshwright.runtime.engine import Engine
from meshwright.runtime.shard.low_bit import GlobalIndex, LowBitShard
from meshwright.runtime.state_dict import shard_of
from meshwright.runtime.zero.param_group import FlatParamGroup


def global_indices(engine: Engine, unit: FlatParamGroup) -> Iterator[GlobalIndex]:
    """Of the run of `unit` that this rank updates."""
    for name, offset in unit.layout.offsets.items():
        start = max(offset, unit.shard_range.start)
        stop = min(offset + unit.parameters[name].numel(), unit.shard_range.stop)
        if start >= stop:
            continue
        split, index, ranks, before = shard_of(engine, unit, name)
        at = start - unit.shard_range.start
        if split is None:
            yield GlobalIndex(name, at, start - offset, stop - start, before)
            continue
        shape = engine.shapes[name]
        held = shard_intervals(split.parts or shape[split.dim], index, ranks)
        rows = torch.cat([torch.arange(first, last) for first, last in held])
        inner = shape[split.dim + 1 :].numel()
        if engine.experts is not None and name in engine.experts.dealt:
            before *= ranks  # of this rank's share of the experts that lie before; whole they are so many times as long
        yield GlobalIndex(name, at, start - offset, stop - start, before, rows, shape[split.dim], inner)


def set_rounding_seeds(engine: Engine, seed: int) -> None:
    """Units that round know where their elements belong, and by what seed."""
    for unit in engine.zero.trainable:
        if isinstance(unit.optim_shard, LowBitShard) and unit.optim_shard.stochastic:
            unit.optim_shard.global_indices, unit.optim_shard.seed = tuple(global_indices(engine, unit)), seed
