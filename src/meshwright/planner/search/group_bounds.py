"""Bounds the scores of the plans of a degree group, and divides the plans that a search needs into grids.

A cell is the plans of a group with one schedule, micro-batch choice, sequence parallelism and ZeRO choice: the axes (o,
b, s, z) of GRID_AXES. `GroupBounds` has the lower bound of the score of each cell. branch_and_bound.py visits cells in
the order of these bounds, and a search needs few of them: cells with a low bound are near each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from math import prod

import numpy as np

from meshwright.planner.cost.bounds import StepFloor, data_floor, lower_bounds, step_floor
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.plan_grid import Array, PlanGrid
from meshwright.planner.cost.step import compile_seconds
from meshwright.planner.cost.uncertainty import unmeasured_counts
from meshwright.planner.search.best_plans import SCORE_TOLERANCE, risk_factors
from meshwright.planner.search.space import DegreeGroup

MAX_GRID_PLANS = 1 << 16
"""Maximum number of plans of a grid whose cost is computed at once. With this limit, the arrays of a grid fit in the
cache of a core."""

SMALL_GROUP_PLANS = 1 << 14
"""For groups with at most this number of plans, the bound of data-parallel communication takes longer than it saves."""


class GroupBounds:
    """The lower bounds of the scores and of the memory of the plans of `group`. They are computed only when they are
    needed."""

    def __init__(self, pricer: CostModel, group: DegreeGroup) -> None:
        self.pricer, self.group = pricer, group

    @cached_property
    def floor(self) -> StepFloor:
        """Returns the lower bound of the step without data-parallel communication."""
        return step_floor(self.pricer, self.group.box)

    @property
    def low(self) -> float:
        """Returns a lower bound of all scores, which takes little time."""
        return float(self.floor.seconds.min()) * (1 - SCORE_TOLERANCE)

    @cached_property
    def lowest_memory(self) -> float:
        """Returns a lower bound of the reserved bytes of all plans of the group."""
        box = self.group.box
        least = box.part(micro_batches=np.flatnonzero(lowest_memory_batches(box)))
        taken = lower_bounds(self.pricer, least, self.group.ways).taken
        return float(np.fmin.reduce(taken, axis=None)) * (1 - SCORE_TOLERANCE)

    @cached_property
    def bounds(self) -> Array:
        """Returns the lower bounds of the scores of the cells."""
        return score_floor(self.pricer, self.group.box, self.floor, self.group.box.size > SMALL_GROUP_PLANS)


def score_floor(pricer: CostModel, box: PlanGrid, floor: StepFloor, with_data: bool = True) -> Array:
    """Returns lower bounds of the scores of the cells of `box`, infinite where no plan is legal. `floor` is the result
    of `step_floor`. `with_data`: whether data-parallel communication is included."""
    counts = unmeasured_counts(pricer.setting.job.cluster, box)
    compiling = compile_seconds(pricer.setting, box, pricer.ranks(box).layers)[0, ..., 0, 0, 0]
    least = (floor.seconds + compiling / pricer.setting.job.workload.steps)[..., None]
    if with_data:
        least = least + data_floor(pricer, box, floor)[:, :, None, :]
    factors = risk_factors(counts.min(axis=(3, 5))) * (1 - SCORE_TOLERANCE)
    return np.where(legal_cells(box), least * factors, np.inf)


def legal_cells(box: PlanGrid) -> Array:
    """Returns which cells of `box` have a legal plan."""
    found = box.legal[0].any(axis=(3, 5))
    return np.broadcast_to(found, (*(box.shape[axis] for axis in (0, 1, 2, 4)),))


def lowest_memory_batches(box: PlanGrid) -> Array:
    """Returns, over axes (b, s, z) of GRID_AXES, which micro-batch choices can have the lowest memory: those with the
    smallest size, and those with one micro-batch per step."""
    lowest_memory = min(each.size for each in box.micro_batches)
    return np.array([each.size == lowest_memory or each.number == 1 for each in box.micro_batches])[:, None, None]


def candidate_grids(box: PlanGrid, near: Array) -> Iterator[tuple[PlanGrid, Array]]:
    """Yields parts of `box` that together contain all plans of the cells in `near`, each with the mask of those of its
    cells that are in `near` and in no other part. The schedules are divided among the parts so that a part has at most
    about MAX_GRID_PLANS plans."""
    cells = np.stack(np.nonzero(near))
    each = prod(len(_distinct(choices)) for choices in cells[1:]) * len(box.recompute) * len(box.offload)
    orders, count = _distinct(cells[0]), max(MAX_GRID_PLANS // max(each, 1), 1)
    for first in range(0, len(orders), count):
        last = orders[min(first + count, len(orders)) - 1]
        yield _grid_of_cells(box, cells[:, (cells[0] >= orders[first]) & (cells[0] <= last)])


def _grid_of_cells(box: PlanGrid, cells: Array) -> tuple[PlanGrid, Array]:
    """Returns the smallest part of `box` that contains `cells`, indices over axes (o, b, s, z), and the mask of `cells`
    in it."""
    # Shard groups of one rank are legal only with offload, and are then searched where any other choice is.
    lone = [z for z, choice in enumerate(box.shards) if choice.lone]
    orders, micro_batches, parallel, shards = map(_distinct, (*cells[:3], np.append(cells[3], lone).astype(int)))
    part = box.part(orders=orders, micro_batches=micro_batches, sequence_parallel=parallel, shards=shards)
    mask = np.zeros((len(orders), len(micro_batches), len(parallel), len(shards)), dtype=bool)
    pairs = zip((orders, micro_batches, parallel, shards), cells, strict=True)
    mask[tuple(np.searchsorted(choices, which) for choices, which in pairs)] = True
    return part, mask


def _distinct(indices: Array) -> Array:
    """Returns the distinct elements of `indices` in ascending order, without an import of numpy.ma as in np.unique."""
    return np.flatnonzero(np.bincount(indices))


def crop_size(mask: Array) -> int:
    """Returns the number of plans of the smallest grid that contains all plans of `mask`."""
    counts = (mask.any(axis=tuple(other for other in range(mask.ndim) if other != axis)) for axis in range(mask.ndim))
    return prod(int(np.count_nonzero(each)) for each in counts)
