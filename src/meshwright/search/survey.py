"""Pricing the whole space of a job: the fastest plans that fit, the best or nearest of every family, and how many did not fit.

Exact: the answer is the one that pricing plan by plan would give. At equal time (to nine digits) the simpler plan stands first: fewer
axes, lower ZeRO, no recompute, no sequence parallelism, the plainer schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from meshwright.base.units import show_bytes
from meshwright.cost.box import Array, Box
from meshwright.cost.memory import reserved, usable
from meshwright.cost.price import Pricer
from meshwright.search.space import Space
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan, Schedule

SCHEDULES = (Schedule.one_f_one_b, Schedule.gpipe, Schedule.interleaved)
DOES_NOT_FIT = "does not fit"


@dataclass
class Candidate:
    """A plan of a box with its price."""

    box: Box
    index: tuple[int, ...]
    seconds: float
    reserved: float

    @property
    def plan(self) -> Plan:
        return self.box.plan(self.index)

    @property
    def key(self) -> tuple[Any, ...]:
        return (float(f"{self.seconds:.9e}"), *simplicity(self.plan))

    @property
    def alone(self) -> Box:
        """The box that holds only this plan."""
        box = self.box
        order, size, parallel, recompute, shards = self.index
        return Box(
            box.tp,
            box.pp,
            box.bucket,
            box.orders[order : order + 1],
            box.micro_batches[size : size + 1],
            box.sequence_parallel[parallel : parallel + 1],
            box.recompute[recompute : recompute + 1],
            box.shards[shards : shards + 1],
        )


def simplicity(plan: Plan) -> tuple[Any, ...]:
    """Smaller is simpler; no two plans are equal."""
    axes = sum(degree > 1 for degree in (plan.dp, plan.tp, plan.pp))
    return (
        axes,
        plan.zero,
        plan.recompute != "none",
        plan.sequence_parallel,
        SCHEDULES.index(plan.schedule),
        plan.virtual_stages,
        plan.pp,
        plan.tp,
        plan.dp_shard,
        plan.micro_batch,
    )


@dataclass
class Ranking:
    """The best plans so far, and the best of each family, or its nearest where none fits."""

    top: int
    best: list[Candidate] = field(default_factory=list)
    families: dict[str, Candidate] = field(default_factory=dict)
    nearest: dict[str, Candidate] = field(default_factory=dict)

    def take(self, box: Box, seconds: Array, taken: Array) -> None:
        """`seconds` are infinite where a plan does not fit or is not legal; `taken` bytes are infinite where it is not legal."""
        flat = seconds.reshape(-1)
        limit = self.best[-1].seconds if len(self.best) == self.top else np.inf
        if flat.size > self.top:
            limit = min(limit, np.partition(flat, self.top - 1)[self.top - 1])
        if np.isfinite(limit) or np.isfinite(flat).any():
            chosen = np.flatnonzero((flat <= limit * (1 + 1e-9)) & np.isfinite(flat))
            self.best += [self._candidate(box, seconds, taken, int(at)) for at in chosen]
            self.best = sorted(self.best, key=lambda candidate: candidate.key)[: self.top]
        for name, part in family_parts(box):
            self._family(name, box, np.flatnonzero(part), seconds, taken)

    def _family(self, name: str, box: Box, part: Array, seconds: Array, taken: Array) -> None:
        for table, found in ((seconds, self.families), (taken, self.nearest)):
            values = table[..., part]
            at = np.unravel_index(int(values.argmin()), values.shape)
            if np.isfinite(values[at]) and not (name in found and _value(found[name], found is self.families) <= values[at]):
                index = (*map(int, at[:-1]), int(part[at[-1]]))
                found[name] = self._candidate(box, seconds, taken, int(np.ravel_multi_index(index, seconds.shape)))

    def _candidate(self, box: Box, seconds: Array, taken: Array, at: int) -> Candidate:
        index = tuple(map(int, np.unravel_index(at, seconds.shape)))
        return Candidate(box, index, float(seconds[index]), float(taken[index]))


def _value(candidate: Candidate, by_time: bool) -> float:
    return candidate.seconds if by_time else candidate.reserved


def family_parts(box: Box) -> list[tuple[str, Array]]:
    """The families in a box: name, and which choices of z are of it."""
    axes = [name for name, present in (("tensor", box.tp > 1), ("pipeline", box.pp > 1)) if present]
    zero = np.array([shards.zero for shards in box.shards])
    many = any(shards.dp_replicate * shards.dp_shard > 1 for shards in box.shards)
    found = []
    for stage in sorted(set(zero.tolist())):
        data = [f"ZeRO-{stage}" if stage else "data"] if many or stage else []
        found.append((" + ".join([*axes, *data]) or "one device", zero == stage))
    return found


@dataclass
class Survey:
    """A priced space."""

    pricer: Pricer
    space: Space
    ranking: Ranking


def survey(job: Job, top: int) -> Survey:
    """Every legal plan of `job`, priced."""
    found = Survey(Pricer(job), Space(job), Ranking(top))
    limit = usable(found.pricer.setting)
    unfit, fastest = 0, None
    for box in found.space.boxes():
        prices = found.pricer.price(box)
        legal = np.broadcast_to(box.legal[0], (*box.shape[:2], 1, 1, 1))
        taken = np.where(legal, reserved(found.pricer.setting, prices.allocated)[0], np.inf)
        step = np.where(legal, prices.step, np.inf)
        fitting = taken <= limit
        found.ranking.take(box, np.where(fitting, step, np.inf), taken)
        missing = int(legal.sum()) * (box.size // legal.size) - int(np.count_nonzero(fitting))
        if missing:
            unfit += missing
            lost = np.where(fitting, np.inf, step)
            at = np.unravel_index(int(lost.argmin()), lost.shape)
            if fastest is None or lost[at] < fastest.seconds:
                fastest = Candidate(box, tuple(map(int, at)), float(lost[at]), float(taken[at]))
    if fastest is not None:
        needs = f"{fastest.plan.name}: needs {show_bytes(fastest.reserved)} of the {show_bytes(limit)} that a rank can take"
        found.space.refuse(DOES_NOT_FIT, unfit, needs)
    return found
