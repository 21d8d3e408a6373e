"""Searches data-parallel plans over heterogeneous groups with uneven batches and uneven ZeRO shards. The search over
heterogeneous groups (heterogeneous.py) uses it.

Every replica is on one group, and runs as many micro-batches as the speed of this group allows. The searched plans have
replicas of tp x pp ranks inside a group (the ranks of a pipeline are adjacent). These plans use 1f1b, and all ZeRO
stages, micro-batch sizes, choices of sequence parallelism and uniform recompute kinds. A step ends when the last
replica ends. Replica r takes t_r seconds per micro-batch, and f_r further seconds per step. If n micro-batches could be
divided into fractions, all replicas could end at the time

    T = (n + sum of f_r / t_r) / (sum of 1 / t_r)

No division into whole micro-batches ends earlier. T is therefore a lower bound, and plans are computed in ascending
order of T until T exceeds the best step time. For each plan, every replica first gets the whole micro-batches that it
finishes by T. Each remaining micro-batch goes to the replica that would finish it first, which is the optimal division.
Then the exact cost of the best of these plans is computed.

A common micro-batch size may not fit on every group, or may divide the work too coarsely. Then each group may have a
separate size (uneven_micro_batch.py).

Uneven shards: if equal shards do not fit on every group, shard sizes are chosen by memory. With ZeRO 1, replicas may
have unequal numbers of micro-batches. With ZeRO 2 and 3, replicas synchronize in every micro-batch and need equal
numbers. A rank needs a + b w bytes, where w is the size of its shard relative to an equal shard, and a and b are
constants. The free memory of a group limits w. Groups below their limit divide the remaining states evenly, which makes
the largest shard, for which all ranks wait, as small as possible. The shard weights are rounded down to multiples of
(largest weight) / SHARD_WEIGHT_LEVELS.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import heapify, heapreplace
from math import gcd
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost import heterogeneous
from meshwright.planner.cost.communicators import driver_bytes
from meshwright.planner.cost.cost_context import CostContext, build_cost_context
from meshwright.planner.cost.cost_model import CostModel, GridCost
from meshwright.planner.cost.memory import memory_limit, reserved_bytes
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
from meshwright.planner.cost.step import estimate
from meshwright.planner.search import uneven_micro_batch
from meshwright.planner.search.best_plans import risk_adjusted_seconds
from meshwright.planner.search.choices import divisors, even_split, offered_recompute
from meshwright.spec.constraints import plan_violations, tensor_parallel_violations
from meshwright.spec.enums import DEFAULT_SCHEDULE, MESH_AXES, MeshAxis
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

SHARD_WEIGHT_LEVELS = 16


def shard_weight_caps(on: Mapping[int, CostModel], box: PlanGrid) -> list[Array]:
    """Returns, for each group, the size of the largest shard that fits on the group's devices, relative to an equal
    shard. The arrays are over the axes `obsczf` of GRID_AXES. A negative size means that a plan does not fit even
    without a shard."""
    return [_shard_weight_cap(pricer, box) for pricer in on.values()]


def _shard_weight_cap(pricer: CostModel, box: PlanGrid) -> Array:
    ranks = pricer.ranks(box)
    none, one = (pricer.memory(replace(box, weight=weight), ranks).total for weight in (0.0, 1.0))
    _, taken = reserved_bytes(pricer.setting, none, driver_bytes(pricer.setting, box))
    _, more = reserved_bytes(pricer.setting, one, driver_bytes(pricer.setting, box))
    with np.errstate(divide="ignore", invalid="ignore"):
        cap = np.where(
            more > taken,
            (memory_limit(pricer.setting) - taken) / (more - taken),
            np.where(taken <= memory_limit(pricer.setting), np.inf, -1.0),
        )
    return np.broadcast_to(cap.min(axis=0), box.shape)


def balance_shard_weights(cap: Sequence[Array], replicas: Sequence[int]) -> Array:
    """Returns the shard size of each group (first axis), relative to an equal shard, or NaN where the states do not
    fit. `cap` is the largest size that fits on each group. `replicas` is the number of replicas on each group.

    >>> balance_shard_weights([np.array([0.5, 1.5, 0.5]), np.array([9.0, 1.5, 1.2])], [2, 2]).round(2).tolist()
    [[0.5, 1.0, nan], [1.5, 1.0, nan]]
    """
    limits = np.stack([np.maximum(each, 0.0) for each in cap])
    counts = np.array(replicas, dtype=float).reshape(-1, *[1] * (limits.ndim - 1))
    capped = np.zeros(limits.shape, dtype=bool)
    for _ in replicas:
        free = np.where(capped, 0.0, counts).sum(axis=0)
        rest = counts.sum() - (np.where(capped, limits, 0.0) * counts).sum(axis=0)
        level = rest / np.maximum(free, 1.0)
        capped |= limits < level
    levels = np.where(capped, limits, level)
    fits = (np.abs((levels * counts).sum(axis=0) - counts.sum()) < 1e-6) & (levels > 0).all(axis=0)
    return np.where(fits, levels, np.nan)


def round_shard_weights(levels: Sequence[float], replicas: Sequence[int]) -> tuple[int, ...]:
    """Returns integer weights of the shards of all replicas, ordered by group, or () if all weights are equal. `levels`
    is the shard size of each group relative to an equal shard, `replicas` the number of replicas on each group.

    >>> round_shard_weights([0.5, 1.5], [2, 2]), round_shard_weights([1.0, 1.0], [2, 2])
    ((5, 5, 16, 16), ())
    """
    each = [max(int(SHARD_WEIGHT_LEVELS * part / max(levels)), 1) for part in levels]
    if len(set(each)) == 1:
        return ()
    common = gcd(*each)
    return tuple(part // common for part, count in zip(each, replicas, strict=True) for _ in range(count))


ADJACENT_PIPELINE_AXES: tuple[MeshAxis, ...] = ("dp", "pp", "tp")
"""The order of axes in which the ranks of one pipeline have consecutive indices."""


class BoundedPlan(NamedTuple):
    """A plan whose numbers of micro-batches are not yet determined: the plan at index `at` of the grid `box`.

    `after` is the seconds of the common work of all replicas after the last micro-batch. `least` is a lower bound of
    the step time: T plus `after`. For each replica, `each` is the seconds per micro-batch and `once` the other seconds
    per step, `after` not included. `weights` are the weights of uneven shards, or () for equal shards.
    """

    least: float
    after: float
    box: PlanGrid
    at: tuple[int, ...]
    each: tuple[float, ...]
    once: tuple[float, ...]
    weights: tuple[int, ...] = ()

    def shared(self, batch: int) -> tuple[float, Plan]:
        """Returns the approximate seconds of a step with whole micro-batches, and the plan. `batch` is the global batch
        in sequences."""
        plan = self.box.plan(self.at).but(shard_weights=self.weights)
        number = batch // plan.micro_batch
        counts = split_micro_batches(number, self.each, self.once) if plan.zero < 2 else (number // plan.dp,) * plan.dp
        end = max(count * each + once for count, each, once in zip(counts, self.each, self.once, strict=True))
        return end + self.after, plan.but(shares=counts) if len(set(counts)) > 1 else plan


def uneven_batch_plans(job: Job, top: int) -> Iterator[tuple[float, Plan]]:
    """Yields the best plans with uneven numbers of micro-batches, uneven micro-batch sizes or uneven shards, as pairs
    (score, plan). At most `top` of these plans have one micro-batch size for all groups."""
    groups = [group.nodes * group.devices for group in job.cluster.groups]
    found: list[BoundedPlan] = []
    tables: list[uneven_micro_batch.MicroBatchTable] = []
    on = heterogeneous.group_cost_models(job, range(len(groups)), job.cluster.devices)
    for tp in divisors(gcd(*(group.devices for group in job.cluster.groups))):
        if any(tensor_parallel_violations(Plan(tp=tp), job.model.divisible, job.model.tensor_parallel)):
            continue
        for pp in divisors(gcd(*groups) // tp):
            if pp <= max(job.model.blocks, 1) and job.cluster.devices // (tp * pp) > 1:
                said = GroupGridCosts.of(job, even_batch_grid(job, tp, pp), on, [size // (tp * pp) for size in groups])
                found += said.bounded() if said else ()
                tables += said.tables() if said and not job.model.experts else ()
    best: list[tuple[float, Plan]] = []
    for candidate in sorted(found, key=lambda it: it.least):
        if len(best) >= top and candidate.least > best[top - 1][0]:
            break
        seconds, plan = candidate.shared(job.workload.batch)
        if (plan.shares or plan.shard_weights) and not any(plan_violations(job, plan)):
            if plan.shard_weights:
                priced = estimate(job, plan)
                seconds = priced.time.step if priced.fits else np.inf
            best = sorted([*best, (seconds, plan)], key=lambda pair: pair[0])[:top]
    scored = [(score, plan) for _, plan in best if (score := _plan_score(job, plan)) < np.inf]
    yield from scored
    yield from uneven_micro_batch.uneven_micro_batch_plans(
        tables,
        job.workload.batch,
        min((score for score, _ in scored), default=np.inf),
        lambda plan: _plan_score(job, plan),
    )


def _plan_score(job: Job, plan: Plan) -> float:
    """Returns the score of a plan (`risk_adjusted_seconds`), or infinity if the plan does not fit or breaks a rule."""
    if any(plan_violations(job, plan)) or not (priced := estimate(job, plan)).fits:
        return np.inf
    return risk_adjusted_seconds(job, plan, priced)


def even_batch_grid(job: Job, tp: int, pp: int) -> PlanGrid:
    """Returns the grid of all searched plans with the degrees `tp` and `pp`, before uneven batches or shards are
    chosen: all replicas have equally many micro-batches."""
    batch, dp = job.workload.batch, job.cluster.devices // (tp * pp)
    parallel = (
        (False, True) if tp > 1 and job.workload.sequence % tp == 0 and not job.model.against_sequence else (False,)
    )
    return PlanGrid(
        RankLayout(tp, pp, expert_tp=tp, axes=MESH_AXES if pp == 1 else ADJACENT_PIPELINE_AXES),
        choose_bucket(build_cost_context(job)),
        (ScheduleChoice(DEFAULT_SCHEDULE, 1, even_split(max(job.model.blocks, 1), pp)),),
        tuple(BatchChoice(size, max(batch // (size * dp), 1)) for size in divisors(batch) if batch // size >= dp),
        parallel,
        tuple(RecomputeChoice(kind) for kind in offered_recompute(job)),
        (ZeroChoice(0, dp, 1), *(ZeroChoice(zero, 1, dp) for zero in (1, 2, 3))),
    )


class GroupGridCosts(NamedTuple):
    """The cost of the plans of a grid on each group, over the axes `obsczf` of GRID_AXES.

    There is one array for each group. `each` is the seconds per micro-batch, `once` the other seconds per step. `after`
    is the seconds of the common work of all replicas after the last micro-batch. `fits` is whether a plan fits.
    `replicas` is the number of replicas on each group.
    """

    box: PlanGrid
    on: dict[int, CostModel]
    batch: int
    replicas: Sequence[int]
    each: list[Array]
    once: list[Array]
    after: list[Array]
    fits: list[Array]

    @classmethod
    def of(cls, job: Job, box: PlanGrid, on: dict[int, CostModel], replicas: Sequence[int]) -> GroupGridCosts | None:
        """Computes the costs of the plans of `box`. Returns None if no micro-batch size is possible."""
        if not box.micro_batches:
            return None
        said = {group: pricer.price(box) for group, pricer in on.items()}
        each, once, after = (
            [_broadcast_to_grid(part(prices), box) for prices in said.values()]
            for part in (_micro_batch_seconds, _fixed_seconds, _final_seconds)
        )
        fits = [_fits_on_group(on[group].setting, prices, box) for group, prices in said.items()]
        return cls(box, on, job.workload.batch, replicas, each, once, after, fits)

    def tables(self) -> Iterator[uneven_micro_batch.MicroBatchTable]:
        """Yields the input of the search for micro-batch sizes that differ by group."""
        return uneven_micro_batch.micro_batch_tables(
            self.box, self.each, self.once, self.after, self.fits, self.replicas
        )

    def bounded(self) -> Iterator[BoundedPlan]:
        """Yields the plans that fit on every group, with equal or uneven shards, and the lower bounds of their step
        times. At ZeRO 2 and 3, plans that fit with equal shards are omitted, because their numbers of micro-batches
        must be equal too."""
        box, replicas, fits = self.box, self.replicas, np.logical_and.reduce(self.fits)
        after = np.maximum.reduce(self.after)
        number = np.array([self.batch // micro_batch.size for micro_batch in box.micro_batches]).reshape(
            1, -1, 1, 1, 1, 1
        )
        rate = sum(count / seconds for count, seconds in zip(replicas, self.each, strict=True))
        begun = sum(
            count * first / seconds for count, first, seconds in zip(replicas, self.once, self.each, strict=True)
        )
        levels = balance_shard_weights(shard_weight_caps(self.on, box), replicas)
        even = np.maximum.reduce(
            [number / sum(replicas) * seconds + first for seconds, first in zip(self.each, self.once, strict=True)]
        )
        even = np.where(fits | (number % sum(replicas) > 0), np.inf, even)
        bound = np.where(
            fits | np.isfinite(levels[0]), np.where(box.zero[0] > 1, even, (number + begun) / rate) + after, np.inf
        )
        for index in map(tuple, np.argwhere(np.isfinite(bound)).tolist()):
            parts = [
                (float(part[index]), float(first[index]), count)
                for part, first, count in zip(self.each, self.once, replicas, strict=True)
            ]
            per = tuple(seconds for seconds, _, count in parts for _ in range(count))
            first = tuple(seconds for _, seconds, count in parts for _ in range(count))
            weights = () if fits[index] else round_shard_weights([float(part[index]) for part in levels], replicas)
            yield BoundedPlan(float(bound[index]), float(after[index]), box, index, per, first, weights)


def _micro_batch_seconds(prices: GridCost) -> Array:
    """Returns the seconds of a micro-batch on the slowest rank."""
    return prices.seconds.each.max(axis=0)


def _fixed_seconds(prices: GridCost) -> Array:
    """Returns the seconds of a step that do not depend on the number of micro-batches. Messages are counted as if all
    replicas had equally many micro-batches."""
    return (prices.seconds.bubble + prices.seconds.messages + prices.seconds.terms.sum(axis=0))[0]


def _final_seconds(prices: GridCost) -> Array:
    """Returns the seconds of the work that all replicas do together once per step: reductions and the update."""
    return prices.seconds.once + prices.seconds.update


def _broadcast_to_grid(part: Array, box: PlanGrid) -> Array:
    return np.broadcast_to(part[0] if part.ndim > len(box.shape) else part, box.shape)


def _fits_on_group(setting: CostContext, prices: GridCost, box: PlanGrid) -> Array:
    taken, _ = reserved_bytes(setting, prices.allocated, driver_bytes(setting, box))
    return np.broadcast_to(taken <= memory_limit(setting), box.shape)


def split_micro_batches(number: int, each: Sequence[float], once: Sequence[float]) -> tuple[int, ...]:
    """Returns the number of micro-batches of each replica. The sum is `number`, each replica has at least one, and the
    last replica ends as early as possible. `each` is the seconds of each replica per micro-batch, `once` the further
    seconds per step.

    >>> (split_micro_batches(16, (1.0, 1.0, 3.0, 3.0), (0.0,) * 4),
    ...     split_micro_batches(4, (1.0, 9.0, 9.0, 9.0), (0.0,) * 4))
    ((6, 6, 2, 2), (1, 1, 1, 1))
    """
    rate = sum(1.0 / seconds for seconds in each)
    end = (number + sum(first / seconds for first, seconds in zip(once, each, strict=True))) / rate
    counts = [max(int((end - first) / seconds), 1) for first, seconds in zip(once, each, strict=True)]
    ends = [((counts[at] + 1) * each[at] + once[at], at) for at in range(len(counts))]
    heapify(ends)
    for _ in range(number - sum(counts)):
        after, at = ends[0]
        counts[at] += 1
        heapreplace(ends, (after + each[at], at))
    for _ in range(sum(counts) - number):
        last = max((at for at in range(len(counts)) if counts[at] > 1), key=lambda at: counts[at] * each[at] + once[at])
        counts[last] -= 1
    return tuple(counts)
