"""Pricing the whole space of a job: the fastest plans that fit, the best or nearest of every family, and how many did not fit.

Exact: the answer is the one that pricing plan by plan would give. Plans stand in the order of their score: the step, and TIGHT_GAIN more where
memory is tight. At equal score (to nine digits) the simpler plan stands first: fewer axes, lower ZeRO, no recompute, no sequence parallelism,
the plainer schedule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

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

TIGHT_GAIN = 0.05
"""A plan whose memory is tight stands before one that fits with a margin only when it is faster by more than this share."""


@dataclass
class Candidate:
    """A plan of a box with its price."""

    box: Box
    index: tuple[int, ...]
    seconds: float
    reserved: float
    tight: bool = False

    @property
    def plan(self) -> Plan:
        return self.box.plan(self.index)

    @property
    def score(self) -> float:
        """What plans are ranked by: smaller is better."""
        return self.seconds * (1.0 + TIGHT_GAIN) if self.tight else self.seconds

    @property
    def key(self) -> tuple[Any, ...]:
        return (float(f"{self.score:.9e}"), *simplicity(self.plan))

    @property
    def alone(self) -> Box:
        """The box that holds only this plan."""
        return self.box.only(self.index)


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


class Priced(NamedTuple):
    """A box over `obsczf`: the score, infinite where a plan does not fit or is not legal; seconds; reserved bytes, infinite where it is not legal."""

    score: Array
    seconds: Array
    taken: Array
    tight: Array

    def candidate(self, box: Box, at: int) -> Candidate:
        index = tuple(map(int, np.unravel_index(at, self.score.shape)))
        return Candidate(box, index, float(self.seconds[index]), float(self.taken[index]), bool(self.tight[index]))


@dataclass
class Ranking:
    """The best plans so far, and the best of each family, or its nearest where none fits."""

    top: int
    best: list[Candidate] = field(default_factory=list)
    families: dict[str, Candidate] = field(default_factory=dict)
    nearest: dict[str, Candidate] = field(default_factory=dict)

    def take(self, box: Box, priced: Priced) -> None:
        """The best of a box into the tables."""
        flat = priced.score.reshape(-1)
        limit = self.best[-1].score if len(self.best) == self.top else np.inf
        if flat.size > self.top:
            limit = min(limit, np.partition(flat, self.top - 1)[self.top - 1])
        if np.isfinite(limit) or np.isfinite(flat).any():
            chosen = np.flatnonzero((flat <= limit * (1 + 1e-9)) & np.isfinite(flat))
            self.best += [priced.candidate(box, int(at)) for at in chosen]
            self.best = sorted(self.best, key=lambda candidate: candidate.key)[: self.top]
        for name, part in family_parts(box):
            self._family(name, box, np.flatnonzero(part), priced)

    def _family(self, name: str, box: Box, part: Array, priced: Priced) -> None:
        for table, found in ((priced.score, self.families), (priced.taken, self.nearest)):
            values = table[..., part, :]
            at = np.unravel_index(int(values.argmin()), values.shape)
            if np.isfinite(values[at]) and not (name in found and _value(found[name], found is self.families) <= values[at]):
                index = (*map(int, at[:-2]), int(part[at[-2]]), int(at[-1]))
                found[name] = priced.candidate(box, int(np.ravel_multi_index(index, table.shape)))


def _value(candidate: Candidate, by_score: bool) -> float:
    return candidate.score if by_score else candidate.reserved


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
        legal = np.broadcast_to(box.legal[0], (*box.shape[:2], 1, 1, 1, 1))
        usual, safe = reserved(found.pricer.setting, prices.allocated)
        taken = np.where(legal, usual, np.inf)
        step = np.where(legal, prices.step, np.inf)
        fitting, tight = taken <= limit, safe > limit
        score = np.where(fitting, np.where(tight, step * (1.0 + TIGHT_GAIN), step), np.inf)
        found.ranking.take(box, Priced(score, step, taken, np.broadcast_to(tight, taken.shape)))
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
