"""Pricing the space of a job: the best plans that fit, the best or nearest of every family, and how many did not fit.

Exact: the best plan is the one that pricing plan by plan would give. Plans stand in the order of their score: the step, and TIGHT_GAIN more where
it is not certain (caution.py); or, for the most headroom, the bytes taken. At equal score (to nine digits) the simpler plan stands first: fewer axes, lower
ZeRO, no recompute, no sequence parallelism, the plainer schedule.

[Note: bounds] What need not be priced, because it cannot be among what is shown:

    floor      no plan of a region takes less than its compute, its tensor ranks' traffic and its bubble: regions go in the order of their floors,
               and those above what is already found, of the best and of each family in them, are left out
    families   one of which nothing fits needs only its nearest plan, which has the smallest micro-batch or only one
    repeating  a plan that recompute of no block and no offload leaves with a margin is faster than the same plan with them: those choices
               are priced only where it is not
    offload    of several things at once takes no less time than of each alone: it is priced where each alone is fast enough
    relief     recompute and offload are priced where bounds on their bytes and seconds (cost/relief.py) leave room for the best of all
    others     what is listed, and the families, are of the usual order of axes, with all blocks alike and nothing offloaded; another order,
               recompute of part of the blocks and offload are priced only where they can be the best of all

Both follow from the step growing with every item of it; a test prices every plan of random jobs one by one and finds the same best.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, prod

import numpy as np

from meshwright.base.units import show_bytes
from meshwright.cost.box import CHOICES, Array, Box
from meshwright.cost.compiler import first_step
from meshwright.cost.hiding import bucket
from meshwright.cost.memory import Footprint, ample, reserved, usable
from meshwright.cost.price import Pricer
from meshwright.cost.relief import least
from meshwright.search.answer import Objective
from meshwright.search.caution import TIGHT_GAIN, leans
from meshwright.search.partly import FEW, Partly, crop
from meshwright.search.ranking import ROUNDING, Candidate, Priced, Ranking
from meshwright.search.space import Region, Space, rungs
from meshwright.spec.job import Job
from meshwright.spec.plan import Offload, Recompute, sends

DOES_NOT_FIT = "does not fit"
SLOWER = "slower for certain"

ROWS = 1 << 16
"""Plans of one box at most, so that its arrays stay in a core's cache."""

SPARSE = 0.5
"""Of a box; when fewer are fast enough, only their memory is priced."""


ALONG_Z = CHOICES.index("shards")


@dataclass
class Survey:
    """A space as far as it had to be priced."""

    pricer: Pricer
    space: Space
    ranking: Ranking
    objective: Objective = Objective.fastest
    legal: int = 0
    priced: int = 0
    unfit: int = 0
    fastest: Candidate | None = None
    least: Candidate | None = None

    def __post_init__(self) -> None:
        self._usable = usable(self.pricer.setting)
        self._cramped: list[tuple[Region, Box, Priced]] = []

    def explore(self) -> None:
        """Prices what can be among what is shown."""
        regions = list(self.space.regions())
        self.legal = sum(region.legal for region in regions)
        regions = regions if self.ranking.by_family else [region for region in regions if self._may_fit(region)]
        floors = [self._floor(region.box) for region in regions]
        for at in sorted(range(len(regions)), key=lambda at: float(floors[at].min())):
            self._usual(regions[at], floors[at])
        for region, box, priced in self._cramped:
            self._beside(region, box, priced)
        for region, floor in zip(regions, floors, strict=True) if self.ranking.best else ():  # memory knows no order of axes
            self._others(region, floor)
        limit = show_bytes(self._usable)
        if self.fastest is not None:
            needs = f"needs {show_bytes(self.fastest.reserved)} of the {limit} that a rank can take"
            needs = needs if isfinite(self.fastest.reserved) else "its host has no room for what waits there"
            self.space.refuse(DOES_NOT_FIT, self.unfit, f"{self.fastest.plan.name}: {needs}")
        if self.ranking.best:
            shown = f"than {self.ranking.best[-1].plan.name}, by their time or a bound below it"
            self.space.refuse(SLOWER, self.legal - self.priced, shown)

    def _floor(self, box: Box) -> Array:
        """Seconds that no legal plan of a region goes below, over (o, b, s); see [Note: bounds]."""
        floor = self.pricer.floor(box)
        legal = box.legal[0].any(axis=(3, 4, 5))
        return np.where(np.broadcast_to(legal, floor.shape), floor, np.inf) * (1 - ROUNDING)

    def _may_fit(self, region: Region) -> bool:
        """Whether the least bytes of any plan of a region leave room; asked where its nearest plan is not."""
        return bool((least(self.pricer, region.box, region.ways).taken * (1 - ROUNDING) <= self._usable).any())

    def _usual(self, region: Region, floor: Array) -> None:
        """The usual layout, of which the families are."""
        everything = self.objective == Objective.headroom
        few = everything or region.box.size <= FEW
        done = np.isfinite(floor) & (everything | (self.ranking.wanting(region.box)[:, None] & (few | _least(region.box))))
        self._usually(region, done, np.inf)
        bound = self.ranking.bound(region.box)
        self._usually(region, (floor <= bound[:, None]) & ~done, np.inf if everything else float(bound.max()))

    def _usually(self, region: Region, near: Array, ceiling: float) -> None:
        for box in _near(region.box, near):
            priced = self.price(box, ceiling)
            self.ranking.take(box, priced)
            if (region.offloads or region.parts) and self._asked(box, priced).any():
                self._cramped.append((region, box, priced))

    def _asked(self, box: Box, priced: Priced) -> Array:
        """Plans that leave no margin without recompute, and are fast enough to be the best with it or with offload; all where activations must
        wait elsewhere, which recompute may make faster."""
        if sends(box.offload[0]):
            return np.isfinite(priced.seconds[:, :, :, :1])
        return _lone_too(box, ~priced.roomy[:, :, :, :1] & (priced.seconds[:, :, :, :1] <= self.ranking.record))

    def _others(self, region: Region, floor: Array) -> None:
        """The other layouts, of which only the best can be."""
        everything = self.objective == Objective.headroom
        near = np.isfinite(floor) & (everything or floor <= self.ranking.record)
        for axes in region.axes:
            for box in _near(region.other(axes), near):
                self.ranking.take(box, self.price(box, np.inf if everything else self.ranking.limit), with_families=False)

    def price(self, box: Box, ceiling: float = np.inf) -> Priced:
        """The seconds of every plan of a box, and the memory of those that take at most `ceiling`."""
        pricer = self.pricer
        ranks = pricer.ranks(box)
        states = pricer.states(box, ranks)
        step = np.broadcast_to(np.where(box.legal[0], pricer.seconds(box, ranks, states).step[0], np.inf), box.shape)
        near = step <= ceiling
        count = int(np.count_nonzero(near & np.isfinite(step)))
        if not count:
            none = np.broadcast_to(np.inf, box.shape)
            return Priced(none, step, none, np.broadcast_to(False, box.shape), np.broadcast_to(True, box.shape))
        part, at = crop(box, near)
        if part.size > SPARSE * box.size:
            found = self._fitting(box, pricer.memory(box, ranks, states), step)
            self._count(box, step, found)
            return found
        found = self._fitting(part, pricer.memory(part, pricer.ranks(part)), step[at])
        self._count(part, step[at], found)
        whole = Priced(np.full(box.shape, np.inf), step, np.full(box.shape, np.inf), np.zeros(box.shape, bool), np.ones(box.shape, bool))
        for table, values in zip(whole, found, strict=True):
            if table is not step:
                table[at] = values
        return whole

    def _fitting(self, box: Box, parts: Footprint, step: Array) -> Priced:
        """Plans that take `step` seconds, with their memory."""
        setting = self.pricer.setting
        usual, safe = reserved(setting, parts.total.max(axis=0))
        room = np.broadcast_to(parts.host.max(axis=0) <= setting.host_memory if any(box.offload) else True, box.shape)
        taken = np.where(np.isfinite(step) & room, usual, np.inf)
        tight = np.broadcast_to(safe > ample(setting), box.shape)
        each = step if not box.compile else step + first_step(setting, box, self.pricer.ranks(box).layers)[0] / setting.job.workload.steps
        doubts = tight + np.array([int(leans(setting.job.cluster, choice)) for choice in box.offload])  # the last axis
        worth = taken if self.objective == Objective.headroom else each * (1.0 + TIGHT_GAIN) ** doubts
        return Priced(np.where(taken <= self._usable, worth, np.inf), step, taken, tight, room)

    def _count(self, box: Box, step: Array, found: Priced) -> None:
        """What was priced and did not fit; the fastest of that."""
        legal = box.legal_size
        self.priced += legal
        fitting = np.isfinite(found.score)
        missing = legal - int(np.count_nonzero(fitting))
        self.unfit += missing
        if missing:
            self._least_of(box, step, found)
            lost = np.where(fitting, np.inf, step)
            at = np.unravel_index(int(lost.argmin()), lost.shape)
            if np.isfinite(lost[at]) and (self.fastest is None or lost[at] < self.fastest.seconds):
                self.fastest = Candidate(box, tuple(map(int, at)), float(lost[at]), float(found.taken[at]))

    def _least_of(self, box: Box, step: Array, found: Priced) -> None:
        """The plan that takes least, while nothing fits."""
        at = np.unravel_index(int(found.taken.argmin()), box.shape)
        if not self.ranking.best and np.isfinite(found.taken[at]) and (self.least is None or found.taken[at] < self.least.reserved):
            self.least = Candidate(box, tuple(map(int, at)), float(step[at]), float(found.taken[at]))

    # --- choices that only memory asks for --------------------------------------------------------------------------------------

    def _beside(self, region: Region, box: Box, priced: Priced) -> None:
        """Recompute of some of the blocks, and offload, where `box` leaves no margin without them."""
        if not (asked := self._asked(box, priced)).any():
            return
        box, at = crop(box, asked)
        every = np.arange(priced.seconds.shape[3]).reshape(1, 1, 1, -1, 1, 1)
        priced = priced.part((*at[:3], every, *at[4:]))
        open_ = self._open(box, asked[at], priced, region.ways)
        self._partly(region, box, open_[region.ways[0]], priced)
        waiting = sorted(region.offloads, key=lambda choice: (sends(choice), len(choice)))
        while waiting := [choice for choice in waiting if open_[choice].any()]:
            together = gathered({choice: open_[choice] for choice in waiting}, len(box.recompute))
            near = np.concatenate([open_[choice] for choice in together], axis=-1)
            sent, where = crop(replace(box, offload=together), near)
            quickest = np.full(near.shape, -np.inf)
            quickest[where] = self._sent(region, sent, near[where])
            waiting = [choice for choice in waiting if choice not in together]
            for which, alone in enumerate(together):
                for choice in waiting:
                    if len(alone) == 1 and alone[0] in choice:
                        open_[choice] = open_[choice] & _lone_too(box, quickest[..., which : which + 1] <= self.ranking.record)

    def _open(self, box: Box, asked: Array, priced: Priced, ways: Sequence[tuple[Offload, ...]]) -> dict[tuple[Offload, ...], Array]:
        """Of the plans that are asked for, those that each way to offload could make the best of all, over obs1z1."""
        bound = least(self.pricer, box, tuple(ways))
        stay = priced.seconds[:, :, :, :1]
        stay = np.where(_lone(box), stay.min(axis=ALONG_Z, keepdims=True), stay)
        seconds = bound.link if ways[0] else np.maximum(stay + bound.more, bound.link)  # what must wait elsewhere may gain by recompute
        leaning = np.array([int(leans(self.pricer.setting.job.cluster, way)) for way in ways])
        seconds = seconds * (1.0 + TIGHT_GAIN) ** ((bound.safe > ample(self.pricer.setting)) + leaning)
        room = (
            self._usable if self.ranking.best else max(self._usable, self.least.reserved if self.least else np.inf)
        )  # else what comes nearest
        found = asked & (bound.taken * (1 - ROUNDING) <= room) & (seconds * (1 - ROUNDING) <= self.ranking.record)
        return {way: found[..., at : at + 1] for at, way in enumerate(ways)}

    def _sent(self, region: Region, sent: Box, asked: Array) -> Array:
        """Prices plans that offload, all activations or none of them; the least seconds of each, whatever recomputes, over obs1zf."""
        found = self.price(sent, self.ranking.limit)
        self.ranking.take(sent, found, with_families=False)
        return self._partly(region, sent, asked if sends(sent.offload[0]) else asked & self._asked(sent, found), found)

    def _partly(self, region: Region, box: Box, asked: Array, priced: Priced) -> Array:
        """Of the numbers of blocks that recompute, the best of each plan that is asked for; the least seconds of each."""
        kinds = [choice.kind for choice in box.recompute]
        if not (region.parts and kinds[0] == Recompute.none and asked.any()):
            return np.minimum(priced.seconds[:, :, :, :1], priced.seconds[:, :, :, -1:])
        at = {kind: np.s_[:, :, :, kinds.index(kind) : kinds.index(kind) + 1] for kind in kinds}
        quickest = np.full(asked.shape, np.inf)
        valley = any(sends(choice) for choice in box.offload)
        for rung in rungs(kinds):
            less, more = at[rung.rest], at[rung.kind]
            enough = priced.roomy[less] & (rung.rest != Recompute.none)  # then none of these blocks needs to do more
            there = priced.may_fit[more] | (rung.kind == Recompute.full)  # else no number of them fits
            there = priced.room[less] | priced.room[more] if valley else there & priced.room[more] & ~enough
            partly = Partly(box, rung, lambda part: self.price(part, self.ranking.limit), self.ranking.record)
            for part, each in partly.explore(asked & there, priced.part(less), priced.part(more)):
                self.ranking.take(part, each, with_families=False)
            quickest = np.minimum(quickest, partly.quickest)
        return quickest


def _lone(box: Box) -> Array:
    """Shards of one rank are as quick as no shards, but are plans only where weights wait elsewhere (z, f)."""
    return np.array([each.lone for each in box.shards])[:, None]


def _lone_too(box: Box, chosen: Array) -> Array:
    """`chosen` (over obscz_), shards of one rank as no shards are."""
    return chosen | (chosen.any(axis=ALONG_Z, keepdims=True) & lone) if (lone := _lone(box)).any() else chosen


def gathered(open_: Mapping[tuple[Offload, ...], Array], recompute: int) -> tuple[tuple[Offload, ...], ...]:
    """Of the ways to offload the first, and those like it that are priced in one box with it no slower than by themselves."""
    first, *others = open_
    found, mask = [first], open_[first]
    for way in others:
        both = mask | open_[way]
        alone = len(found) * extent(mask) + extent(open_[way])
        if sends(way) == sends(first) and recompute * ((len(found) + 1) * extent(both) - alone) <= FEW:
            found.append(way)
            mask = both
    return tuple(found)


def extent(mask: Array) -> int:
    """Plans of the least box that holds what `mask` asks for."""
    kept = (mask.any(axis=tuple(other for other in range(mask.ndim) if other != axis)) for axis in range(mask.ndim))
    return prod(int(np.count_nonzero(each)) for each in kept)


def _least(box: Box) -> Array:
    """Where memory can be least: the smallest micro-batch, or a single one (b, s)."""
    least = min(each.size for each in box.micro_batches)
    return np.array([each.size == least or each.number == 1 for each in box.micro_batches])[:, None]


def _near(box: Box, near: Array) -> Iterator[Box]:
    """The least parts of `box`, some orders each, that hold what is near over (o, b, s)."""
    orders = np.flatnonzero(near.any(axis=(1, 2)))
    each = int(np.count_nonzero(near.any(axis=(0, 2)))) * box.size // (len(box.orders) * len(box.micro_batches))
    for begin in range(0, len(orders), step := max(ROWS // max(each, 1), 1)):
        some = orders[begin : begin + step]
        micro_batches, parallel = (np.flatnonzero(near[some].any(axis=axes)) for axes in ((0, 2), (0, 1)))
        yield box.part(orders=some, micro_batches=micro_batches, sequence_parallel=parallel)


def survey(job: Job, top: int, objective: Objective = Objective.fastest, runnable: bool = False, ceiling: float = np.inf) -> Survey:
    """The space of `job`, priced as far as its `top` best plans, and the best of each family, need; nothing above `ceiling` counts."""
    return surveyed(job, Ranking(top, ceiling), objective, runnable)


def first(job: Job, runnable: bool = False, ceiling: float = np.inf) -> Candidate | None:
    """The best plan that fits, if any below `ceiling`, and nothing else: no families."""
    best = quick(job, runnable, ceiling).ranking.best
    return best[0] if best else None


def quick(job: Job, runnable: bool = False, ceiling: float = np.inf) -> Survey:
    """The space of `job`, priced as far as its best plan needs."""
    return surveyed(job, Ranking(1, ceiling, by_family=False), Objective.fastest, runnable)


def surveyed(job: Job, ranking: Ranking, objective: Objective, runnable: bool) -> Survey:
    """The space of `job`, priced as far as `ranking` needs."""
    pricer = Pricer(job)
    space = Space(job, runnable, offloading=objective != Objective.headroom, bucket=bucket(pricer.setting))
    found = Survey(pricer, space, ranking, objective)
    found.explore()
    return found
