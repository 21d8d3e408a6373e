"""Data parallelism over unlike groups: every replica lies on one group and takes as many micro-batches as its speed allows.

The space: replicas of tp x pp ranks inside a group (a pipeline's ranks side by side), 1f1b, ZeRO, micro-batch, sequence parallelism,
recompute of all blocks alike. A step ends with its last replica, t_r seconds a micro-batch and f_r once: with n micro-batches in all, and
parts of micro-batches, all would end at

    T = (n + sum of f_r / t_r) / (sum of 1 / t_r),

below which no shares go. Plans in the order of T get whole shares, as long as T is below what is found: each replica what it does by T, the rest one
by one to whoever then ends first, which is the best that whole numbers can do; the best of these are priced by themselves.

Where one size of micro-batches does not fit on every group, or is too coarse, each group may have its own (`sizes.py`). Where equal shards do not
fit on every group, shards by memory may (`portions.py`): ZeRO 1 with any shares, ZeRO 2 and 3, whose replicas meet in every micro-batch, with
equal ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heapreplace
from math import gcd
from typing import NamedTuple

import numpy as np

from meshwright.cost import unlike
from meshwright.cost.box import Again, Array, Box, Layout, MicroBatch, Order, Shards
from meshwright.cost.hiding import bucket
from meshwright.cost.memory import reserved, usable
from meshwright.cost.price import Pricer, Prices
from meshwright.cost.setting import Setting, setting
from meshwright.cost.step import estimate
from meshwright.search import portions, sizes
from meshwright.search.caution import cautious
from meshwright.search.division import divisors, even
from meshwright.search.worth import offered
from meshwright.spec.estimate import Fits
from meshwright.spec.job import Job
from meshwright.spec.plan import AXES, Axis, Plan, Schedule
from meshwright.spec.rules import faults, tensor_faults

SIDE_BY_SIDE: tuple[Axis, ...] = ("dp", "pp", "tp")
"""The order of axes in which a pipeline's ranks are neighbours."""


class Bounded(NamedTuple):
    """A plan before its shares are known: T with what all do after it, those seconds, and each replica's seconds a micro-batch and once."""

    least: float
    after: float
    box: Box
    at: tuple[int, ...]
    each: tuple[float, ...]
    once: tuple[float, ...]
    weights: tuple[int, ...] = ()

    def shared(self, batch: int) -> tuple[float, Plan]:
        """With whole shares: the seconds of its step, nearly, and the plan."""
        plan = self.box.plan(self.at).but(shard_weights=self.weights)
        number = batch // plan.micro_batch
        counts = whole(number, self.each, self.once) if plan.zero < 2 else (number // plan.dp,) * plan.dp
        end = max(count * each + once for count, each, once in zip(counts, self.each, self.once, strict=True))
        return end + self.after, plan.but(shares=counts) if len(set(counts)) > 1 else plan


def plans(job: Job, top: int) -> Iterator[tuple[float, Plan]]:
    """The best plans with shares, sizes of their own, or shards by memory, with their scores."""
    groups = [group.nodes * group.devices for group in job.cluster.groups]
    found: list[Bounded] = []
    tables: list[sizes.Table] = []
    on = unlike.pricers(job, range(len(groups)), job.cluster.devices)
    for tp in divisors(gcd(*(group.devices for group in job.cluster.groups))):
        if any(tensor_faults(Plan(tp=tp), job.model.divisible, job.model.tensor_parallel)):
            continue
        for pp in divisors(gcd(*groups) // tp):
            if pp <= max(job.model.blocks, 1) and job.cluster.devices // (tp * pp) > 1:
                said = Said.of(job, box_of_all(job, tp, pp), on, [size // (tp * pp) for size in groups])
                found += said.bounded() if said else ()
                tables += said.tables() if said and not job.model.experts else ()
    best: list[tuple[float, Plan]] = []
    for candidate in sorted(found, key=lambda it: it.least):
        if len(best) >= top and candidate.least > best[top - 1][0]:
            break
        seconds, plan = candidate.shared(job.workload.batch)
        if (plan.shares or plan.shard_weights) and not any(faults(job, plan)):
            if plan.shard_weights:
                priced = estimate(job, plan)
                seconds = priced.time.step if priced.verdict != Fits.no else np.inf
            best = sorted([*best, (seconds, plan)], key=lambda pair: pair[0])[:top]
    scored = [(score, plan) for _, plan in best if (score := _score(job, plan)) < np.inf]
    yield from scored
    yield from sizes.plans(tables, job.workload.batch, min((score for score, _ in scored), default=np.inf), lambda plan: _score(job, plan))


def _score(job: Job, plan: Plan) -> float:
    """Of a plan that is priced by itself; infinite where it does not fit or breaks a rule."""
    if any(faults(job, plan)) or (priced := estimate(job, plan)).verdict == Fits.no:
        return np.inf
    return cautious(job, plan, priced)


def box_of_all(job: Job, tp: int, pp: int) -> Box:
    """All plans of these degrees, with as many micro-batches as equal shares would have."""
    batch, dp = job.workload.batch, job.cluster.devices // (tp * pp)
    parallel = (False, True) if tp > 1 and job.workload.sequence % tp == 0 and not job.model.against_sequence else (False,)
    return Box(
        Layout(tp, pp, expert_tensor=tp, axes=AXES if pp == 1 else SIDE_BY_SIDE),
        bucket(setting(job)),
        (Order(Schedule.one_f_one_b, 1, even(max(job.model.blocks, 1), pp)),),
        tuple(MicroBatch(size, max(batch // (size * dp), 1)) for size in divisors(batch) if batch // size >= dp),
        parallel,
        tuple(Again(kind) for kind in offered(job)),
        (Shards(0, dp, 1), *(Shards(zero, 1, dp) for zero in (1, 2, 3))),
    )


class Said(NamedTuple):
    """What the groups say of the plans of a box over `obsczf`, `replicas` on each: seconds of a micro-batch, once and of what all do afterwards, and what fits."""

    box: Box
    on: dict[int, Pricer]
    batch: int
    replicas: Sequence[int]
    each: list[Array]
    once: list[Array]
    after: list[Array]
    fits: list[Array]

    @classmethod
    def of(cls, job: Job, box: Box, on: dict[int, Pricer], replicas: Sequence[int]) -> Said | None:
        """None where no size of micro-batches divides."""
        if not box.micro_batches:
            return None
        said = {group: pricer.price(box) for group, pricer in on.items()}
        each, once, after = ([_whole(part(prices), box) for prices in said.values()] for part in (_each, _once, _after))
        fits = [_fits(on[group].setting, prices, box) for group, prices in said.items()]
        return cls(box, on, job.workload.batch, replicas, each, once, after, fits)

    def tables(self) -> Iterator[sizes.Table]:
        """For sizes of micro-batches that differ by group."""
        return sizes.tables(self.box, self.each, self.once, self.after, self.fits, self.replicas)

    def bounded(self) -> Iterator[Bounded]:
        """The plans that fit on every group with their bound; of those that need neither shares nor weights none."""
        box, replicas, fits = self.box, self.replicas, np.logical_and.reduce(self.fits)
        after = np.maximum.reduce(self.after)
        number = np.array([self.batch // micro_batch.size for micro_batch in box.micro_batches]).reshape(1, -1, 1, 1, 1, 1)
        rate = sum(count / seconds for count, seconds in zip(replicas, self.each, strict=True))
        begun = sum(count * first / seconds for count, first, seconds in zip(replicas, self.once, self.each, strict=True))
        held = portions.shared(portions.caps(self.on, box), replicas)
        even = np.maximum.reduce([number / sum(replicas) * seconds + first for seconds, first in zip(self.each, self.once, strict=True)])
        even = np.where(fits | (number % sum(replicas) > 0), np.inf, even)
        bound = np.where(fits | np.isfinite(held[0]), np.where(box.zero[0] > 1, even, (number + begun) / rate) + after, np.inf)
        for index in map(tuple, np.argwhere(np.isfinite(bound)).tolist()):
            parts = [
                (float(part[index]), float(first[index]), count) for part, first, count in zip(self.each, self.once, replicas, strict=True)
            ]
            per = tuple(seconds for seconds, _, count in parts for _ in range(count))
            first = tuple(seconds for _, seconds, count in parts for _ in range(count))
            weights = () if fits[index] else portions.weights([float(part[index]) for part in held], replicas)
            yield Bounded(float(bound[index]), float(after[index]), box, index, per, first, weights)


def _each(prices: Prices) -> Array:
    """Seconds of a micro-batch on the slowest rank."""
    return prices.seconds.each.max(axis=0)


def _once(prices: Prices) -> Array:
    """Seconds that do not grow with micro-batches, messages taken as those of equal shares."""
    return (prices.seconds.bubble + prices.seconds.messages)[0]


def _after(prices: Prices) -> Array:
    """Seconds of what all do together, once."""
    return prices.seconds.once + prices.seconds.update


def _whole(part: Array, box: Box) -> Array:
    return np.broadcast_to(part[0] if part.ndim > len(box.shape) else part, box.shape)


def _fits(setting: Setting, prices: Prices, box: Box) -> Array:
    return np.broadcast_to(reserved(setting, prices.allocated)[0] <= usable(setting), box.shape)


def whole(number: int, each: Sequence[float], once: Sequence[float]) -> tuple[int, ...]:
    """`number` micro-batches shared out so that the last replica ends first, each at least one.

    >>> whole(16, (1.0, 1.0, 3.0, 3.0), (0.0,) * 4), whole(4, (1.0, 9.0, 9.0, 9.0), (0.0,) * 4)
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
        late = max((at for at in range(len(counts)) if counts[at] > 1), key=lambda at: counts[at] * each[at] + once[at])
        counts[late] -= 1
    return tuple(counts)
