"""Assigns layers to pipeline ranks: the blocks of a plan, and the layers before, between and after them.

Most ranks of a pipeline have equal layers. `group_equal_ranks` returns the first rank of each class, which has the most
micro-batches in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost.cost_context import LayerRun
from meshwright.planner.cost.plan_grid import Array, ScheduleChoice
from meshwright.spec.schedules.schedule import stage_to_rank

StageContent = tuple[int, ...]
"""The number of layers of each layer run on one virtual stage."""


class RankClass(NamedTuple):
    """Pipeline ranks with equal layers. `rank` is the first of these ranks and `number` the number of ranks. `layers`
    is the number of layers by virtual stage (rows) and layer run (columns). `stages` is the distinct stages, each with
    its number of occurrences."""

    rank: int
    number: int
    layers: Array
    stages: tuple[tuple[StageContent, int], ...]


def stage_contents(entries: Sequence[LayerRun], order: ScheduleChoice) -> Array:
    """Returns the number of layers by virtual stage (rows) and layer run (columns). A layer between two blocks is on
    the stage of the block before it."""
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


def stages_by_rank(table: Array, order: ScheduleChoice, pp: int) -> Array:
    """Rearranges rows of virtual stages to an array (index of the stage on its rank, rank, ...)."""
    owner = stage_to_rank(np.arange(len(table)), pp, order.rules.v_shape)  # type: ignore[arg-type]
    return table[np.argsort(owner, kind="stable").reshape(pp, order.virtual_stages).T]


def list_ranks(entries: Sequence[LayerRun], order: ScheduleChoice, pp: int) -> list[RankClass]:
    """Returns every pipeline rank as a separate class."""
    table = stages_by_rank(stage_contents(entries, order), order, pp)
    return [_rank_class(rank, 1, table[:, rank]) for rank in range(pp)]


def group_equal_ranks(entries: Sequence[LayerRun], order: ScheduleChoice, pp: int) -> tuple[RankClass, ...]:
    """Returns the classes of pipeline ranks, in the order of their first rank."""
    table = stages_by_rank(stage_contents(entries, order), order, pp)
    found: dict[tuple[bytes, int], list[int]] = {}
    for rank in range(pp):
        # In V-shaped schedules, later ranks have more micro-batches of their second stage in flight, and this stage may
        # be the larger one.
        distinct = order.rules.v_shape and order.given
        found.setdefault((table[:, rank].tobytes(), rank * distinct), []).append(rank)
    return tuple(_rank_class(same[0], len(same), table[:, same[0]]) for same in found.values())


def recomputing_layers(kind: RankClass, blocks: Sequence[bool], recomputing: int) -> Array:
    """Returns the number of layers among the first `recomputing` blocks of a stage, by virtual stage and layer run."""
    content = kind.layers * np.array(blocks)
    before = np.cumsum(content, axis=1) - content
    return np.clip(recomputing - before, 0, content)


def split_recomputing(kind: RankClass, blocks: Sequence[bool], recomputing: int) -> RankClass:
    """Returns the class with two columns for each layer run: recomputed layers, and other layers."""
    again = recomputing_layers(kind, blocks, recomputing)
    return kind._replace(layers=np.stack([again, kind.layers - again], axis=2).reshape(len(again), -1))


def _rank_class(rank: int, count: int, layers: Array) -> RankClass:
    return RankClass(rank, count, layers, tuple(Counter(map(tuple, layers.tolist())).items()))
