"""Which layers each pipeline rank holds: the rule by which a plan's blocks, and what stands before, between and behind them, go to stages.

Most ranks of a pipeline hold the same layers: `kinds` keeps one of each kind, the earliest, which holds the most micro-batches of its kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.cost.box import Array, Order
from meshwright.cost.setting import Entry

Content = tuple[int, ...]
"""Layers of each entry on one virtual stage."""


class Kind(NamedTuple):
    """Pipeline ranks that hold equal layers: the first of them, how many; layers by virtual stage (rows) and entry; its unlike stages."""

    rank: int
    number: int
    layers: Array
    stages: tuple[tuple[Content, int], ...]


def held(entries: Sequence[Entry], order: Order) -> Array:
    """Layers of each entry (columns) on each virtual stage (rows). A layer between two blocks goes with the block before it."""
    ends = np.cumsum(order.stage_layers)
    starts = ends - order.stage_layers
    last = len(ends) - 1
    table = np.zeros((len(ends), len(entries)), dtype=np.int64)
    for column, entry in enumerate(entries):
        if entry.copy:
            table[last, column] = int(last > 0)
        elif entry.is_block:
            first, past = entry.first_block, entry.first_block + entry.layer.repeat
            table[:, column] = np.clip(np.minimum(ends, past) - np.maximum(starts, first), 0, None)
        else:
            table[min(int(np.searchsorted(ends, entry.first_block)), last), column] = entry.layer.repeat
    return table


def ranks(entries: Sequence[Entry], order: Order, pp: int) -> list[Kind]:
    """Every pipeline rank by itself."""
    table = held(entries, order).reshape(order.virtual_stages, pp, len(entries))
    return [_kind(rank, 1, table[:, rank]) for rank in range(pp)]


def kinds(entries: Sequence[Entry], order: Order, pp: int) -> tuple[Kind, ...]:
    """The kinds of pipeline ranks, in the order of their first rank."""
    table = held(entries, order).reshape(order.virtual_stages, pp, len(entries))
    found: dict[bytes, list[int]] = {}
    for rank in range(pp):
        found.setdefault(table[:, rank].tobytes(), []).append(rank)
    return tuple(_kind(same[0], len(same), table[:, same[0]]) for same in found.values())


def partly(kind: Kind, blocks: Sequence[bool], recomputing: int) -> Array:
    """Layers by virtual stage and entry of which the first `recomputing` blocks of a stage are."""
    content = kind.layers * np.array(blocks)
    before = np.cumsum(content, axis=1) - content
    return np.clip(recomputing - before, 0, content)


def apart(kind: Kind, blocks: Sequence[bool], recomputing: int) -> Kind:
    """The kind with two columns for each entry: its layers that recompute, then those that do not."""
    again = partly(kind, blocks, recomputing)
    return kind._replace(layers=np.stack([again, kind.layers - again], axis=2).reshape(len(again), -1))


def _kind(rank: int, count: int, layers: Array) -> Kind:
    return Kind(rank, count, layers, tuple(Counter(map(tuple, layers.tolist())).items()))
