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
from dataclasses import dataclass, replace
from functools import cached_property, partial
from heapq import heapify, heapreplace
from math import gcd
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost import heterogeneous
from meshwright.planner.cost.communicators import driver_bytes
from meshwright.planner.cost.cost_context import CostContext, build_cost_context
from meshwright.planner.cost.cost_model import CostModel, StepTime
from meshwright.planner.cost.memory import MemoryFootprint, memory_limit, reserved_bytes
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
from meshwright.planner.cost.step import estimate_heterogeneous
from meshwright.planner.search import uneven_micro_batch
from meshwright.planner.search.best_plans import risk_adjusted_seconds
from meshwright.planner.search.choices import divisors, even_split, offered_recompute
from meshwright.planner.search.partial_recompute import crop_grid
from meshwright.spec.constraints import plan_violations, tensor_parallel_violations
from meshwright.spec.enums import DEFAULT_SCHEDULE, MESH_AXES, MeshAxis
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

SHARD_WEIGHT_LEVELS = 16

MAX_BOUND_RATIO = 1.5
"""Until `top` plans are known, the memory of a grid is computed for plans whose lower bound is at most this ratio times
the lowest bound that is left."""


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
    on = heterogeneous.group_cost_models(job, range(len(groups)), job.cluster.devices)
    grids: list[GroupGridCosts] = []
    for tp in divisors(gcd(*(group.devices for group in job.cluster.groups))):
        if any(tensor_parallel_violations(Plan(tp=tp), job.model.divisible, job.model.tensor_parallel)):
            continue
        for pp in divisors(gcd(*groups) // tp):
            if pp <= max(job.model.blocks, 1) and job.cluster.devices // (tp * pp) > 1:
                grid = even_batch_grid(job, tp, pp)
                if grid.micro_batches:
                    grids.append(GroupGridCosts.of(job, grid, on, [size // (tp * pp) for size in groups]))
    score = partial(_plan_score, job, on)
    scored = [(said, plan) for plan in _best_shared_plans(job, on, grids, top) if (said := score(plan)) < np.inf]
    yield from scored
    best = min((said for said, _ in scored), default=np.inf)
    tables = [table for grid in grids for table in grid.tables(best)] if not job.model.experts else []
    yield from uneven_micro_batch.uneven_micro_batch_plans(tables, job.workload.batch, best, score)


def _best_shared_plans(job: Job, on: dict[int, CostModel], grids: Sequence[GroupGridCosts], top: int) -> list[Plan]:
    """Returns the `top` best plans of `grids` with one micro-batch size for all groups."""
    best: list[tuple[float, Plan]] = []
    bounds = [grid.bounds.reshape(-1) for grid in grids]
    starts = np.cumsum([0, *map(len, bounds)])
    flat = np.concatenate([*bounds, [np.inf]])
    for at in np.argsort(flat, kind="stable").tolist():
        least = float(flat[at])
        limit = best[top - 1][0] if len(best) >= top else np.inf
        if least > limit or least == np.inf:
            break
        number = int(np.searchsorted(starts, at, side="right")) - 1
        candidate = grids[number].bounded_plan(at - int(starts[number]), min(limit, MAX_BOUND_RATIO * least))
        if candidate is None:
            continue
        seconds, plan = candidate.shared(job.workload.batch)
        if (plan.shares or plan.shard_weights) and not any(plan_violations(job, plan)):
            if plan.shard_weights:
                priced = estimate_heterogeneous(job, plan, on)
                seconds = priced.time.step if priced.fits else np.inf
            best = sorted([*best, (seconds, plan)], key=lambda pair: pair[0])[:top]
    return [plan for _, plan in best]


def _plan_score(job: Job, on: dict[int, CostModel], plan: Plan) -> float:
    """Returns the score of a plan (`risk_adjusted_seconds`), or infinity if the plan does not fit or breaks a rule."""
    if any(plan_violations(job, plan)) or not (priced := estimate_heterogeneous(job, plan, on)).fits:
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


@dataclass(eq=False)
class GroupGridCosts:
    """The cost of the plans of a grid on each group, over the axes `obsczf` of GRID_AXES.

    `seconds` is the times on each group, `replicas` the number of replicas on each group. Memory is computed on demand:
    `_fits` is whether the plans in `_known` fit on each group, `_caps` the largest shards (`shard_weight_caps`) of the
    plans in `_known_caps`.
    """

    box: PlanGrid
    on: dict[int, CostModel]
    batch: int
    replicas: Sequence[int]
    seconds: uneven_micro_batch.GroupSeconds

    def __post_init__(self) -> None:
        self._known, self._known_caps = (np.zeros(self.box.shape, dtype=bool) for _ in range(2))
        self._fits = [np.zeros(self.box.shape, dtype=bool) for _ in self.on]
        self._caps = [np.full(self.box.shape, np.nan) for _ in self.on]

    @classmethod
    def of(cls, job: Job, box: PlanGrid, on: dict[int, CostModel], replicas: Sequence[int]) -> GroupGridCosts:
        """Computes the seconds of the plans of `box`."""
        first = next(iter(on.values()))
        ranks = first.ranks(box)
        states = first.states(box, ranks)
        said = [pricer.seconds(box, ranks, states) for pricer in on.values()]
        seconds = uneven_micro_batch.GroupSeconds(
            *(
                [_broadcast_to_grid(part(seconds), box) for seconds in said]
                for part in (_micro_batch_seconds, _fixed_seconds, _final_seconds)
            )
        )
        return cls(box, on, job.workload.batch, replicas, seconds)

    def fits(self, mask: Array) -> list[Array]:
        """Returns, for each group, which plans fit with equal shards. The result is valid where `mask` is true."""
        if (new := mask & ~self._known).any():
            part, at = crop_grid(self.box, new)
            first = next(iter(self.on.values()))
            ranks = first.ranks(part)
            states = first.states(part, ranks)
            for pricer, fits in zip(self.on.values(), self._fits, strict=True):
                fits[at] = _fits_on_group(pricer.setting, pricer.memory(part, ranks, states), part)
            self._known[at] = True
        return self._fits

    def levels(self, index: tuple[int, ...], limit: float) -> Array:
        """Returns the shard size of each group (`balance_shard_weights`) of the plan at `index`. The sizes are computed
        for all plans with a bound of at most `limit` that do not fit with equal shards."""
        if not self._known_caps[index]:
            uneven = self._known & ~np.logical_and.reduce(self._fits) & ~self._known_caps
            part, at = crop_grid(self.box, uneven & (self.bounds <= limit))
            for caps, found in zip(self._caps, shard_weight_caps(self.on, part), strict=True):
                caps[at] = found
            self._known_caps[at] = True
        return balance_shard_weights([caps[index] for caps in self._caps], self.replicas)

    def tables(self, best: float) -> Iterator[uneven_micro_batch.MicroBatchTable]:
        """Yields the input of the search for micro-batch sizes that differ by group, for plans that may be faster than
        `best` seconds."""
        return uneven_micro_batch.micro_batch_tables(self.box, self.seconds, self.fits, self.replicas, self.batch, best)

    @cached_property
    def bounds(self) -> Array:
        """Returns the lower bounds of the step times, without regard to memory. At ZeRO 2 and 3, all replicas have
        equal numbers of micro-batches, so only plans with uneven shards count, and only if the numbers are whole."""
        after = np.maximum.reduce(self.seconds.after)
        number = np.array([self.batch // micro_batch.size for micro_batch in self.box.micro_batches]).reshape(
            1, -1, 1, 1, 1, 1
        )
        groups = list(zip(self.replicas, self.seconds.each, self.seconds.once, strict=True))
        rate = sum(count / seconds for count, seconds, _ in groups)
        begun = sum(count * first / seconds for count, seconds, first in groups)
        even = np.maximum.reduce([number / sum(self.replicas) * seconds + first for _, seconds, first in groups])
        even = np.where(number % sum(self.replicas) > 0, np.inf, even)
        return np.asarray(np.where(self.box.zero[0] > 1, even, (number + begun) / rate) + after)

    def bounded_plan(self, flat: int, limit: float) -> BoundedPlan | None:
        """Returns the plan at the index `flat` of the flattened grid, with equal or uneven shards, or None if it does
        not fit. At ZeRO 2 and 3, the result is also None if it fits with equal shards. Memory is computed for all plans
        with a bound of at most `limit`."""
        index = tuple(map(int, np.unravel_index(flat, self.box.shape)))
        if not self._known[index]:
            self.fits(self.bounds <= limit)
        if all(fits[index] for fits in self._fits):
            if self.box.shards[index[4]].zero > 1:
                return None
            weights: tuple[int, ...] = ()
        else:
            levels = self.levels(index, limit)
            if not np.isfinite(levels[0]):
                return None
            weights = round_shard_weights([float(part) for part in levels], self.replicas)
        per, first = (
            tuple(float(part[index]) for part, count in zip(parts, self.replicas, strict=True) for _ in range(count))
            for parts in (self.seconds.each, self.seconds.once)
        )
        after = float(max(part[index] for part in self.seconds.after))
        return BoundedPlan(float(self.bounds[index]), after, self.box, index, per, first, weights)


def _micro_batch_seconds(seconds: StepTime) -> Array:
    """Returns the seconds of a micro-batch on the slowest rank."""
    return np.asarray(seconds.each.max(axis=0))


def _fixed_seconds(seconds: StepTime) -> Array:
    """Returns the seconds of a step that do not depend on the number of micro-batches. Messages are counted as if all
    replicas had equally many micro-batches."""
    return np.asarray((seconds.bubble + seconds.messages + seconds.terms.sum(axis=0))[0])


def _final_seconds(seconds: StepTime) -> Array:
    """Returns the seconds of the work that all replicas do together once per step: reductions and the update."""
    return seconds.once + seconds.update


def _broadcast_to_grid(part: Array, box: PlanGrid) -> Array:
    return np.broadcast_to(part[0] if part.ndim > len(box.shape) else part, box.shape)


def _fits_on_group(setting: CostContext, footprint: MemoryFootprint, box: PlanGrid) -> Array:
    taken, _ = reserved_bytes(setting, footprint.total.max(axis=0), driver_bytes(setting, box))
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
