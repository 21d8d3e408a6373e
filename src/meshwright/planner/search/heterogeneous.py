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
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from math import comb, gcd

import numpy as np

from meshwright.core.errors import InputError
from meshwright.planner.cost import heterogeneous
from meshwright.planner.cost.communicators import driver_bytes
from meshwright.planner.cost.cost_context import build_cost_context
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.memory import memory_limit, physical_limit, reserved_bytes
from meshwright.planner.cost.overlap import choose_bucket
from meshwright.planner.cost.plan_grid import (
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
from meshwright.planner.search.best_plans import RISK_MARGIN, round_score
from meshwright.planner.search.branch_and_bound import search_top_plans
from meshwright.planner.search.choices import divisors, offered_recompute
from meshwright.spec.constraints import is_supported, plan_violations, tensor_parallel_violations
from meshwright.spec.enums import DEFAULT_SCHEDULE, Recompute
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

MAX_EXHAUSTIVE_SPLITS = 100
"""If there are at most this many ways to split the blocks into stages, all of them are searched."""

ScoredPlan = tuple[float, Plan]


def heterogeneous_plans(job: Job, top: int, runnable: bool = False) -> list[ScoredPlan]:
    """Returns the `top` best plans that place pipeline ranks on groups or distribute micro-batches unevenly, as pairs
    (score, plan). `runnable`: whether to return only plans that this version can run. The result is empty if the job
    has pins or all devices are equal."""
    groups, precision = job.cluster.groups, job.workload.recipe.rate
    if job.pins or all(group.device == job.cluster.groups[0].device for group in job.cluster.groups):
        return []
    found: list[ScoredPlan] = [
        pair
        for pair in uneven_batches.uneven_batch_plans(job, top)
        if is_supported(pair[1], job.workload.recipe) or not runnable
    ]
    fewest = len(groups) if runnable else 1  # the runtime runs only plans that use all ranks
    choices = [chosen for count in range(fewest, len(groups) + 1) for chosen in combinations(range(len(groups)), count)]
    rates = {
        chosen: sum(groups[at].nodes * groups[at].devices * groups[at].device.peak[precision] for at in chosen)
        for chosen in choices
    }
    for chosen in sorted(choices, key=lambda chosen: -rates[chosen]):
        best = min((score for score, _ in found), default=np.inf)
        if model_flops(job) / rates[chosen] <= best:
            found += (
                single_group_plans(job, chosen[0], top, best) if len(chosen) == 1 else cross_group_plans(job, chosen)
            )
    return sorted(
        (
            pair
            for pair in found
            if not any(plan_violations(job, pair[1])) and (not runnable or is_supported(pair[1], job.workload.recipe))
        ),
        key=lambda pair: (round_score(pair[0]), pair[1].name),
    )[:top]


def single_group_plans(job: Job, group: int, top: int, ceiling: float) -> Iterator[ScoredPlan]:
    """Yields the `top` best plans on one group, as pairs (score, plan). Plans with a score above `ceiling` are omitted.
    Yields nothing if no plan is legal."""
    only = job.but(cluster=job.cluster.but(groups=(job.cluster.groups[group],)), pins={"schedule": DEFAULT_SCHEDULE})
    try:
        best = search_top_plans(only, top, ceiling=ceiling).ranking.best
    except InputError:
        return
    for candidate in best:
        yield candidate.score, candidate.plan.but(placement=(group,) * candidate.plan.pp)


def cross_group_plans(job: Job, groups: tuple[int, ...]) -> list[ScoredPlan]:
    """Returns the best plan of each placement of a pipeline on `groups`, for each tensor-parallel degree."""
    kinds = [job.cluster.groups[group] for group in groups]
    sizes = {group: kind.nodes * kind.devices for group, kind in zip(groups, kinds, strict=True)}
    precision, world = job.workload.recipe.rate, sum(sizes.values())
    orders = {
        groups,
        tuple(sorted(groups, key=lambda at: -job.cluster.groups[at].device.memory)),
        tuple(sorted(groups, key=lambda at: -job.cluster.groups[at].device.peak.get(precision, 0.0))),
    }
    on = heterogeneous.group_cost_models(job, groups, world)
    found: list[ScoredPlan] = []
    for devices in divisors(gcd(*sizes.values())):
        pp = world // devices
        if 1 < pp <= job.model.blocks:
            for tp in divisors(gcd(devices, *(kind.devices for kind in kinds))):
                for order in sorted(orders):
                    placement = tuple(group for group in order for _ in range(sizes[group] // devices))
                    found += best_of_placement(job, on, placement, tp, devices // tp)
    return found


def best_of_placement(
    job: Job, on: dict[int, CostModel], placement: tuple[int, ...], tp: int, dp: int
) -> Iterator[ScoredPlan]:
    """Yields the best plan of one placement and the degrees `tp` and `dp`. Yields nothing if no plan fits, or if the
    degrees do not divide the batch or the model. `on` has the cost model of each group."""
    batch, pp = job.workload.batch, len(placement)
    sizes = [size for size in divisors(batch) if batch % (dp * size) == 0]
    if not sizes or any(tensor_parallel_violations(Plan(tp=tp), job.model.divisible, job.model.tensor_parallel)):
        return
    shards = [ZeroChoice(0, dp, 1), *(ZeroChoice(zero, 1, dp) for zero in (1, 2, 3) if dp > 1)]
    again = tuple(RecomputeChoice(kind) for kind in offered_recompute(job))
    parallel = (False, True) if tp > 1 and job.workload.sequence % tp == 0 else (False,)
    counts = tuple(BatchChoice(size, batch // (dp * size)) for size in sizes)
    layout = RankLayout(tp, pp, expert_tp=tp)
    splits = sorted(set(stage_splits(job, on, placement, tp, sizes)))
    orders = tuple(ScheduleChoice(DEFAULT_SCHEDULE, 1, split, True) for split in splits)
    box = PlanGrid(layout, choose_bucket(build_cost_context(job)), orders, counts, parallel, again, tuple(shards))
    said = heterogeneous.group_costs(on, box)
    step = heterogeneous.pipeline_step_time(on, placement, box, said).step[0]
    score = np.broadcast_to(step, box.shape)
    for rank, group in enumerate(placement):
        own, total = on[group].setting, said[group].footprint.total[rank]
        usual, safe = reserved_bytes(own, total, driver_bytes(own, box))
        score = np.where(
            usual > memory_limit(own),
            np.inf,
            np.where(safe > physical_limit(own), np.maximum(score, step * (1 + RISK_MARGIN)), score),
        )
    score = score * (1 + RISK_MARGIN) ** unmeasured_counts(job.cluster, box)
    at = np.unravel_index(int(score.argmin()), score.shape)
    if np.isfinite(score[at]):
        yield float(score[at]), box.plan(tuple(map(int, at))).but(placement=placement)


def stage_splits(
    job: Job, on: dict[int, CostModel], placement: tuple[int, ...], tp: int, sizes: list[int]
) -> Iterator[tuple[int, ...]]:
    """Yields the numbers of blocks of the stages. All splits are yielded if there are at most MAX_EXHAUSTIVE_SPLITS;
    otherwise an even split, and a split by speed for each micro-batch size in `sizes`. `on` has the cost model of each
    group."""
    blocks, pp = job.model.blocks, len(placement)
    if comb(blocks - 1, pp - 1) <= MAX_EXHAUSTIVE_SPLITS:
        for cuts in combinations(range(1, blocks), pp - 1):
            yield tuple(after - before for before, after in zip((0, *cuts), (*cuts, blocks), strict=True))
        return
    yield tuple(blocks // pp + (rank < blocks % pp) for rank in range(pp))
    counts = tuple(BatchChoice(size, 1) for size in sizes)
    box = PlanGrid(
        RankLayout(tp, pp, expert_tp=tp),
        1,
        (),
        counts,
        (tp > 1,),
        (RecomputeChoice(Recompute.none),),
        (ZeroChoice(0, 1, 1),),
    )
    works = {group: np.add.reduce(pricer.work(box)[:4])[:, :, 0] for group, pricer in on.items()}
    entries = next(iter(on.values())).setting.entries
    block = np.array([entry.is_block for entry in entries])
    first = np.array([not entry.is_block and not entry.copy and entry.first_block == 0 for entry in entries])
    last = ~block & ~first
    for at in range(len(sizes)):
        each = np.array([works[group][block, at].mean() for group in placement])
        load = np.zeros(pp)
        load[0] += works[placement[0]][first, at].sum()
        load[-1] += works[placement[-1]][last, at].sum()
        count = np.ones(pp, dtype=int)
        for _ in range(blocks - pp):
            count[int((load + (count + 1) * each).argmin())] += 1
        yield tuple(count.tolist())
