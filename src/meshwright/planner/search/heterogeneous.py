"""Searches plans over heterogeneous groups of nodes, including plans that do not use all groups. ranking.py and
infeasible.py combine the results with the results of the search over identical ranks.

The searched plans are, for every set of groups:

- With one group: all 1f1b plans for the devices of the group.
- With several groups: 1f1b pipelines with each pipeline rank on one group. Groups are ordered by memory (the first
  ranks have the most micro-batches in flight), by speed, or as in the cluster. All pipeline ranks have equally many
  devices, so the devices per pipeline rank divide the number of devices of every group. Tensor ranks, micro-batch,
  sequence parallelism, recompute and ZeRO vary as usual. If there are at most MAX_EXHAUSTIVE_SPLITS ways to split the
  blocks into stages, all of them are searched. Otherwise blocks are split evenly, or by speed: each block goes to the
  rank that would finish it first.

In addition there are data-parallel plans with uneven batches over all groups (uneven_batches.py). A set of groups is
skipped if a step at its peak FLOP/s would already take longer than the best plan.

Lower bounds: the score of a placement is at least the time of perfectly balanced stages, and at least the compute and
the communication inside its stages. The full step time is computed only for plans whose bound allows a place among the
best plans, and memory only for those whose step time does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from math import comb, gcd
from typing import NamedTuple

import numpy as np

from meshwright.core.errors import InputError
from meshwright.planner.cost import heterogeneous
from meshwright.planner.cost.communicators import driver_bytes
from meshwright.planner.cost.cost_context import build_cost_context
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.memory import memory_limit, physical_limit, reserved_bytes
from meshwright.planner.cost.overlap import choose_bucket
from meshwright.planner.cost.plan_grid import (
    Array,
    BatchChoice,
    PlanGrid,
    RankLayout,
    RecomputeChoice,
    ScheduleChoice,
    ZeroChoice,
)
from meshwright.planner.cost.step import model_flops
from meshwright.planner.cost.uncertainty import unmeasured_counts
from meshwright.planner.search import uneven_batches
from meshwright.planner.search.best_plans import (
    RISK_MARGIN,
    SCORE_TOLERANCE,
    SearchObjective,
    TopK,
    risk_factors,
    round_score,
)
from meshwright.planner.search.branch_and_bound import run_search
from meshwright.planner.search.choices import divisors, offered_recompute
from meshwright.planner.search.partial_recompute import crop_grid
from meshwright.spec.constraints import is_supported, plan_violations, tensor_parallel_violations
from meshwright.spec.enums import DEFAULT_SCHEDULE, Recompute
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

MAX_EXHAUSTIVE_SPLITS = 100
"""If there are at most this many ways to split the blocks into stages, all of them are searched."""

ScoredPlan = tuple[float, Plan]


@dataclass
class PlacedPlans:
    """The plans found so far. `found` are pairs (score, plan), `valid` the best `top` of those that break no rule, and,
    with `runnable`, that this version can run. Plans with a score above `ceiling` may be omitted."""

    job: Job
    top: int
    runnable: bool
    ceiling: float
    best: float = np.inf
    valid: list[ScoredPlan] = field(default_factory=list)

    @property
    def limit(self) -> float:
        """Returns the score above which a plan cannot be among the results."""
        worst = self.valid[-1][0] if len(self.valid) == self.top else np.inf
        return min(worst, self.ceiling) * (1 + SCORE_TOLERANCE)

    def add(self, pairs: Iterable[ScoredPlan]) -> None:
        """Adds plans as pairs (score, plan)."""
        for score, plan in pairs:
            self.best = min(self.best, score)
            runs = not self.runnable or is_supported(plan, self.job.workload.recipe)
            if score <= self.limit and runs and not any(plan_violations(self.job, plan)):
                self.valid.append((score, plan))
                self.valid.sort(key=lambda pair: (round_score(pair[0]), pair[1].name))
                del self.valid[self.top :]


def heterogeneous_plans(job: Job, top: int, runnable: bool = False, ceiling: float = float("inf")) -> list[ScoredPlan]:
    """Returns the `top` best plans that place pipeline ranks on groups or distribute micro-batches unevenly, as pairs
    (score, plan). `runnable`: whether to return only plans that this version can run. Plans with a score above
    `ceiling` may be omitted. The result is empty if the job has pins or all devices are equal."""
    groups, precision = job.cluster.groups, job.workload.recipe.rate
    if job.pins or all(group.device == job.cluster.groups[0].device for group in job.cluster.groups):
        return []
    found = PlacedPlans(job, top, runnable, ceiling)
    found.add(
        pair
        for pair in uneven_batches.uneven_batch_plans(job, top)
        if is_supported(pair[1], job.workload.recipe) or not runnable
    )
    fewest = len(groups) if runnable else 1  # the runtime runs only plans that use all ranks
    choices = [chosen for count in range(fewest, len(groups) + 1) for chosen in combinations(range(len(groups)), count)]
    rates = {
        chosen: sum(groups[at].nodes * groups[at].devices * groups[at].device.peak[precision] for at in chosen)
        for chosen in choices
    }
    for chosen in sorted(choices, key=lambda chosen: -rates[chosen]):
        if model_flops(job) / rates[chosen] <= min(found.best, found.limit):
            if len(chosen) == 1:
                found.add(single_group_plans(job, chosen[0], top, min(found.best, found.limit)))
            else:
                add_cross_group_plans(found, chosen)
    return found.valid


def single_group_plans(job: Job, group: int, top: int, ceiling: float) -> Iterator[ScoredPlan]:
    """Yields the `top` best plans on one group, as pairs (score, plan). Plans with a score above `ceiling` are omitted.
    Yields nothing if no plan is legal."""
    only = job.but(cluster=job.cluster.but(groups=(job.cluster.groups[group],)), pins={"schedule": DEFAULT_SCHEDULE})
    try:
        best = run_search(only, TopK(top, ceiling, by_family=False), SearchObjective.fastest, False).ranking.best
    except InputError:
        return
    for candidate in best:
        yield candidate.score, candidate.plan.but(placement=(group,) * candidate.plan.pp)


class PlacementGrid(NamedTuple):
    """All searched plans of one placement and one set of degrees. `bound` is lower bounds of the scores, over the axes
    `obsczf` of GRID_AXES, and `least` is the minimum of `bound`."""

    least: float
    placement: tuple[int, ...]
    box: PlanGrid
    bound: Array


def add_cross_group_plans(found: PlacedPlans, groups: tuple[int, ...]) -> None:
    """Adds to `found` the best plan of each placement of a pipeline on `groups`, for each tensor-parallel degree.
    Placements are priced in ascending order of their lower bounds, until a bound exceeds the limit of `found`."""
    job = found.job
    kinds = [job.cluster.groups[group] for group in groups]
    sizes = {group: kind.nodes * kind.devices for group, kind in zip(groups, kinds, strict=True)}
    precision, world = job.workload.recipe.rate, sum(sizes.values())
    orders = {
        groups,
        tuple(sorted(groups, key=lambda at: -job.cluster.groups[at].device.memory)),
        tuple(sorted(groups, key=lambda at: -job.cluster.groups[at].device.peak.get(precision, 0.0))),
    }
    on = heterogeneous.group_cost_models(job, groups, world)
    grids: list[PlacementGrid] = []
    for devices in divisors(gcd(*sizes.values())):
        if 1 < world // devices <= job.model.blocks:
            placements = [
                tuple(group for group in order for _ in range(sizes[group] // devices)) for order in sorted(orders)
            ]
            for tp in divisors(gcd(devices, *(kind.devices for kind in kinds))):
                grids += placement_grids(job, on, placements, (tp, devices // tp), found.limit)
    for grid in sorted(grids, key=lambda grid: grid.least):
        if grid.least > found.limit:
            break
        found.add(best_of_placement(job, on, grid, found.limit))


def placement_grids(
    job: Job, on: dict[int, CostModel], placements: list[tuple[int, ...]], degrees: tuple[int, int], limit: float
) -> Iterator[PlacementGrid]:
    """Yields the plans of each placement in `placements` with the tensor-parallel and data-parallel `degrees`, if some
    of them may have a score of at most `limit`. The placements have equally many ranks on each group. `on` has the cost
    model of each group."""
    (tp, dp), batch, pp = degrees, job.workload.batch, len(placements[0])
    sizes = [size for size in divisors(batch) if batch % (dp * size) == 0]
    if not sizes or any(tensor_parallel_violations(Plan(tp=tp), job.model.divisible, job.model.tensor_parallel)):
        return
    counts = tuple(BatchChoice(size, batch // (dp * size)) for size in sizes)
    work = BlockSeconds.of(on, tp, sizes)
    if work.balanced_step(placements[0], job.model.blocks, [each.number for each in counts]).min() > limit:
        return
    shards = [ZeroChoice(0, dp, 1), *(ZeroChoice(zero, 1, dp) for zero in (1, 2, 3) if dp > 1)]
    again = tuple(RecomputeChoice(kind) for kind in offered_recompute(job))
    parallel = (False, True) if tp > 1 and job.workload.sequence % tp == 0 else (False,)
    layout = RankLayout(tp, pp, expert_tp=tp)
    splits = [sorted(set(stage_splits(job, work, placement))) for placement in placements]
    known = sorted(set().union(*splits))
    orders = tuple(ScheduleChoice(DEFAULT_SCHEDULE, 1, split, True) for split in known)
    box = PlanGrid(layout, choose_bucket(build_cost_context(job)), orders, counts, parallel, again, tuple(shards))
    rows = [[known.index(split) for split in each] for each in splits]
    bounds = heterogeneous.pipeline_compute_bounds(on, list(zip(placements, rows, strict=True)), box)
    for placement, row, bound in zip(placements, rows, bounds, strict=True):
        own = box.part(orders=row)
        scores = np.broadcast_to(bound * risk_factors(unmeasured_counts(job.cluster, own)), own.shape)
        if (least := float(scores.min())) <= limit:
            yield PlacementGrid(least, placement, own, scores)


def best_of_placement(job: Job, on: dict[int, CostModel], grid: PlacementGrid, limit: float) -> Iterator[ScoredPlan]:
    """Yields the best plan of `grid`. Yields nothing if no plan with a score of at most `limit` fits. The time is
    computed where the bound is at most `limit`, memory where the time is. `on` has the cost model of each group."""
    box, _ = crop_grid(grid.box, grid.bound <= limit)
    risk = risk_factors(unmeasured_counts(job.cluster, box))
    step = np.broadcast_to(heterogeneous.pipeline_step_time(on, grid.placement, box).step[0], box.shape)
    fast = step * risk <= limit
    if not fast.any():
        return
    box, at = crop_grid(box, fast)
    step, score = step[at], step[at]
    first = on[grid.placement[0]]
    ranks = first.ranks(box, each=True)
    states = first.states(box, ranks)
    totals = {group: on[group].memory(box, ranks, states).total for group in set(grid.placement)}
    for rank, group in enumerate(grid.placement):
        own = on[group].setting
        usual, safe = reserved_bytes(own, totals[group][rank], driver_bytes(own, box))
        score = np.where(
            usual > memory_limit(own),
            np.inf,
            np.where(safe > physical_limit(own), np.maximum(score, step * (1 + RISK_MARGIN)), score),
        )
    score = score * risk_factors(unmeasured_counts(job.cluster, box))
    best = np.unravel_index(int(score.argmin()), score.shape)
    if np.isfinite(score[best]):
        yield float(score[best]), box.plan(tuple(map(int, best))).but(placement=grid.placement)


class BlockSeconds(NamedTuple):
    """The seconds of layers without recompute, for each group, as arrays over the micro-batch sizes: the least and the
    mean of a block, and the sums of the layers before and after the blocks."""

    least: dict[int, Array]
    block: dict[int, Array]
    first: dict[int, Array]
    last: dict[int, Array]

    @classmethod
    def of(cls, on: dict[int, CostModel], tp: int, sizes: list[int]) -> BlockSeconds:
        """Computes the seconds for the tensor-parallel degree `tp` and the micro-batch sizes `sizes`. `on` has the cost
        model of each group."""
        counts = tuple(BatchChoice(size, 1) for size in sizes)
        parallel = (False, True) if tp > 1 else (False,)
        none = (RecomputeChoice(Recompute.none),)
        box = PlanGrid(RankLayout(tp, 1, expert_tp=tp), 1, (), counts, parallel, none, (ZeroChoice(0, 1, 1),))
        works = {group: np.add.reduce(pricer.work(box)[:4]) for group, pricer in on.items()}
        entries = next(iter(on.values())).setting.entries
        block = np.array([entry.is_block for entry in entries])
        first = np.array([not entry.is_block and not entry.copy and entry.first_block == 0 for entry in entries])
        others = (first, ~block & ~first)
        return cls(
            {group: work[block].min(axis=(0, 2)) for group, work in works.items()},
            {group: work[block, :, -1].mean(axis=0) for group, work in works.items()},
            *({group: work[which, :, -1].sum(axis=0) for group, work in works.items()} for which in others),
        )

    def balanced_step(self, placement: tuple[int, ...], blocks: int, counts: list[int]) -> Array:
        """Returns a lower bound of the step time with `counts` micro-batches: all ranks take equally long, and the
        bubble is that of a micro-batch whose blocks are all on the fastest group."""
        rate = sum(1.0 / self.least[group] for group in placement)
        fastest = np.minimum.reduce([self.least[group] for group in set(placement)])
        return np.asarray((np.array(counts) - 1) * blocks / rate + blocks * fastest)


def stage_splits(job: Job, work: BlockSeconds, placement: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yields the numbers of blocks of the stages. All splits are yielded if there are at most MAX_EXHAUSTIVE_SPLITS;
    otherwise an even split, and a split by speed for each micro-batch size in `work`."""
    blocks, pp = job.model.blocks, len(placement)
    if comb(blocks - 1, pp - 1) <= MAX_EXHAUSTIVE_SPLITS:
        for cuts in combinations(range(1, blocks), pp - 1):
            yield tuple(after - before for before, after in zip((0, *cuts), (*cuts, blocks), strict=True))
        return
    yield tuple(blocks // pp + (rank < blocks % pp) for rank in range(pp))
    each = np.stack([work.block[group] for group in placement], axis=1)
    load = np.zeros(each.shape)
    load[:, 0] += work.first[placement[0]]
    load[:, -1] += work.last[placement[-1]]
    count, rows = np.ones(each.shape, dtype=int), np.arange(len(each))
    for _ in range(blocks - pp):
        count[rows, (load + (count + 1) * each).argmin(axis=1)] += 1
    yield from map(tuple, count.tolist())
