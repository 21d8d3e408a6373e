"""Pricing the space of a job: the best plans that fit, the best or nearest of every family, and how many did not fit.

Exact: the best plan is the one that pricing plan by plan would give. Plans stand in the order of their score: the step,
and TIGHT_GAIN more where
it is not certain (caution.py); or, for the most headroom, the bytes taken. At equal score (to nine digits) the simpler
plan stands first: fewer axes, lower
ZeRO, no recompute, no sequence parallelism, the plainer schedule.

[Note: bounds] What need not be priced, because it cannot be among what is shown:

    floor      no plan of a region takes less than its compute, its tensor ranks' traffic and its bubble: regions go in
    the order of their floors,
               and those above what is already found, of the best and of each family in them, are left out
    families   one of which nothing fits needs only its nearest plan, which has the smallest micro-batch or only one
    repeating  a plan that recompute of no block and no offload leaves with a margin is faster than the same plan with
    them: those choices
               are priced only where it is not
    offload    of several things at once takes no less time than of each alone: it is priced where each alone is fast
    enough
    relief     recompute and offload are priced where bounds on their bytes and seconds (planner/cost/bounds.py) leave
    room for the best of all
    others     what is listed, and the families, are of the usual order of axes, with all blocks alike and nothing
    offloaded; another order,
               recompute of part of the blocks and offload are priced only where they can be the best of all

Both follow from the step growing with every item of it; a test prices every plan of random jobs one by one and finds
the same best.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite, prod

import numpy as np

from meshwright.core.units import show_bytes
from meshwright.planner.cost.bounds import lower_bounds
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.memory import MemoryFootprint, memory_limit, physical_limit, reserved_bytes
from meshwright.planner.cost.overlap import choose_bucket
from meshwright.planner.cost.plan_grid import CHOICE_FIELDS, Array, PlanGrid
from meshwright.planner.cost.step import compile_seconds
from meshwright.planner.search.partial_recompute import SMALL_GRID_PLANS, PartialRecompute, crop_grid
from meshwright.planner.search.result import SearchObjective
from meshwright.planner.search.risk_margin import RISK_MARGIN, uses_unmeasured_link
from meshwright.planner.search.space import DegreeGroup, PlanSpace, recompute_ladder
from meshwright.planner.search.top_k import SCORE_TOLERANCE, PlanCandidate, PricedGrid, TopK
from meshwright.spec.enums import Offload, Recompute, offloads_activations
from meshwright.spec.job import Job

DOES_NOT_FIT = "does not fit"
PRUNED_BY_BOUND = "slower for certain"

MAX_GRID_PLANS = 1 << 16
"""Plans of one box at most, so that its arrays stay in a core's cache."""

SPARSE_FRACTION = 0.5
"""Of a box; when fewer are fast enough, only their memory is priced."""


ZERO_AXIS = CHOICE_FIELDS.index("shards")


@dataclass
class PlanSearch:
    """A space as far as it had to be priced."""

    pricer: CostModel
    space: PlanSpace
    ranking: TopK
    objective: SearchObjective = SearchObjective.fastest
    legal: int = 0
    priced: int = 0
    unfit: int = 0
    fastest: PlanCandidate | None = None
    least: PlanCandidate | None = None

    def __post_init__(self) -> None:
        self._usable = memory_limit(self.pricer.setting)
        self._cramped: list[tuple[DegreeGroup, PlanGrid, PricedGrid]] = []

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
        for region, floor in (
            zip(regions, floors, strict=True) if self.ranking.best else ()
        ):  # memory knows no order of axes
            self._others(region, floor)
        limit = show_bytes(self._usable)
        if self.fastest is not None:
            needs = f"needs {show_bytes(self.fastest.reserved)} of {limit} usable memory"
            needs = needs if isfinite(self.fastest.reserved) else "needs more host memory for offload"
            self.space.refuse(DOES_NOT_FIT, self.unfit, f"{self.fastest.plan.name}: {needs}")
        if self.ranking.best:
            shown = f"slower than {self.ranking.best[-1].plan.name}, by time or by a lower bound of it"
            self.space.refuse(PRUNED_BY_BOUND, self.legal - self.priced, shown)

    def _floor(self, box: PlanGrid) -> Array:
        """Seconds that no legal plan of a region goes below, over (o, b, s); see [Note: bounds]."""
        floor = self.pricer.floor(box)
        legal = box.legal[0].any(axis=(3, 4, 5))
        return np.where(np.broadcast_to(legal, floor.shape), floor, np.inf) * (1 - SCORE_TOLERANCE)

    def _may_fit(self, region: DegreeGroup) -> bool:
        """Whether the least bytes of any plan of a region leave room; asked where its nearest plan is not."""
        return bool(
            (lower_bounds(self.pricer, region.box, region.ways).taken * (1 - SCORE_TOLERANCE) <= self._usable).any()
        )

    def _usual(self, region: DegreeGroup, floor: Array) -> None:
        """The usual layout, of which the families are."""
        everything = self.objective == SearchObjective.headroom
        few = everything or region.box.size <= SMALL_GRID_PLANS
        done = np.isfinite(floor) & (
            everything | (self.ranking.wanting(region.box)[:, None] & (few | _lowest_memory_batches(region.box)))
        )
        self._usually(region, done, np.inf)
        bound = self.ranking.bound(region.box)
        self._usually(region, (floor <= bound[:, None]) & ~done, np.inf if everything else float(bound.max()))

    def _usually(self, region: DegreeGroup, near: Array, ceiling: float) -> None:
        for box in _candidate_grids(region.box, near):
            priced = self.price(box, ceiling)
            self.ranking.take(box, priced)
            if (region.offloads or region.parts) and self._asked(box, priced).any():
                self._cramped.append((region, box, priced))

    def _asked(self, box: PlanGrid, priced: PricedGrid) -> Array:
        """Plans that leave no margin without recompute, and are fast enough to be the best with it or with offload; all
        where activations must
        wait elsewhere, which recompute may make faster."""
        if offloads_activations(box.offload[0]):
            return np.isfinite(priced.seconds[:, :, :, :1])
        return _with_single_rank_shards(
            box, ~priced.roomy[:, :, :, :1] & (priced.seconds[:, :, :, :1] <= self.ranking.record)
        )

    def _others(self, region: DegreeGroup, floor: Array) -> None:
        """The other layouts, of which only the best can be."""
        everything = self.objective == SearchObjective.headroom
        near = np.isfinite(floor) & (everything or floor <= self.ranking.record)
        for axes in region.axes:
            for box in _candidate_grids(region.other(axes), near):
                self.ranking.take(
                    box, self.price(box, np.inf if everything else self.ranking.limit), with_families=False
                )

    def price(self, box: PlanGrid, ceiling: float = np.inf) -> PricedGrid:
        """The seconds of every plan of a box, and the memory of those that take at most `ceiling`."""
        pricer = self.pricer
        ranks = pricer.ranks(box)
        states = pricer.states(box, ranks)
        step = np.broadcast_to(np.where(box.legal[0], pricer.seconds(box, ranks, states).step[0], np.inf), box.shape)
        near = step <= ceiling
        count = int(np.count_nonzero(near & np.isfinite(step)))
        if not count:
            none = np.broadcast_to(np.inf, box.shape)
            return PricedGrid(none, step, none, np.broadcast_to(False, box.shape), np.broadcast_to(True, box.shape))
        part, at = crop_grid(box, near)
        if part.size > SPARSE_FRACTION * box.size:
            found = self._fitting(box, pricer.memory(box, ranks, states), step)
            self._count(box, step, found)
            return found
        found = self._fitting(part, pricer.memory(part, pricer.ranks(part)), step[at])
        self._count(part, step[at], found)
        whole = PricedGrid(
            np.full(box.shape, np.inf),
            step,
            np.full(box.shape, np.inf),
            np.zeros(box.shape, bool),
            np.ones(box.shape, bool),
        )
        for table, values in zip(whole, found, strict=True):
            if table is not step:
                table[at] = values
        return whole

    def _fitting(self, box: PlanGrid, parts: MemoryFootprint, step: Array) -> PricedGrid:
        """Plans that take `step` seconds, with their memory."""
        setting = self.pricer.setting
        usual, safe = reserved_bytes(setting, parts.total.max(axis=0))
        room = np.broadcast_to(parts.host.max(axis=0) <= setting.host_memory if any(box.offload) else True, box.shape)
        taken = np.where(np.isfinite(step) & room, usual, np.inf)
        tight = np.broadcast_to(safe > physical_limit(setting), box.shape)
        each = (
            step
            if not box.compile
            else step + compile_seconds(setting, box, self.pricer.ranks(box).layers)[0] / setting.job.workload.steps
        )
        doubts = tight + np.array(
            [int(uses_unmeasured_link(setting.job.cluster, choice)) for choice in box.offload]
        )  # the last axis
        worth = taken if self.objective == SearchObjective.headroom else each * (1.0 + RISK_MARGIN) ** doubts
        return PricedGrid(np.where(taken <= self._usable, worth, np.inf), step, taken, tight, room)

    def _count(self, box: PlanGrid, step: Array, found: PricedGrid) -> None:
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
                self.fastest = PlanCandidate(box, tuple(map(int, at)), float(lost[at]), float(found.taken[at]))

    def _least_of(self, box: PlanGrid, step: Array, found: PricedGrid) -> None:
        """The plan that takes least, while nothing fits."""
        at = np.unravel_index(int(found.taken.argmin()), box.shape)
        if (
            not self.ranking.best
            and np.isfinite(found.taken[at])
            and (self.least is None or found.taken[at] < self.least.reserved)
        ):
            self.least = PlanCandidate(box, tuple(map(int, at)), float(step[at]), float(found.taken[at]))

    # --- choices that only memory asks for
    # --------------------------------------------------------------------------------------

    def _beside(self, region: DegreeGroup, box: PlanGrid, priced: PricedGrid) -> None:
        """Recompute of some of the blocks, and offload, where `box` leaves no margin without them."""
        if not (asked := self._asked(box, priced)).any():
            return
        box, at = crop_grid(box, asked)
        every = np.arange(priced.seconds.shape[3]).reshape(1, 1, 1, -1, 1, 1)
        priced = priced.part((*at[:3], every, *at[4:]))
        open_ = self._open(box, asked[at], priced, region.ways)
        self._partly(region, box, open_[region.ways[0]], priced)
        waiting = sorted(region.offloads, key=lambda choice: (offloads_activations(choice), len(choice)))
        while waiting := [choice for choice in waiting if open_[choice].any()]:
            together = merge_offload_choices({choice: open_[choice] for choice in waiting}, len(box.recompute))
            near = np.concatenate([open_[choice] for choice in together], axis=-1)
            sent, where = crop_grid(replace(box, offload=together), near)
            quickest = np.full(near.shape, -np.inf)
            quickest[where] = self._sent(region, sent, near[where])
            waiting = [choice for choice in waiting if choice not in together]
            for which, alone in enumerate(together):
                for choice in waiting:
                    if len(alone) == 1 and alone[0] in choice:
                        open_[choice] = open_[choice] & _with_single_rank_shards(
                            box, quickest[..., which : which + 1] <= self.ranking.record
                        )

    def _open(
        self, box: PlanGrid, asked: Array, priced: PricedGrid, ways: Sequence[tuple[Offload, ...]]
    ) -> dict[tuple[Offload, ...], Array]:
        """Of the plans that are asked for, those that each way to offload could make the best of all, over obs1z1."""
        bound = lower_bounds(self.pricer, box, tuple(ways))
        stay = priced.seconds[:, :, :, :1]
        stay = np.where(_single_rank_shards(box), stay.min(axis=ZERO_AXIS, keepdims=True), stay)
        seconds = (
            bound.link if ways[0] else np.maximum(stay + bound.more, bound.link)
        )  # what must wait elsewhere may gain by recompute
        leaning = np.array([int(uses_unmeasured_link(self.pricer.setting.job.cluster, way)) for way in ways])
        seconds = seconds * (1.0 + RISK_MARGIN) ** ((bound.safe > physical_limit(self.pricer.setting)) + leaning)
        room = (
            self._usable if self.ranking.best else max(self._usable, self.least.reserved if self.least else np.inf)
        )  # else what comes nearest
        found = (
            asked
            & (bound.taken * (1 - SCORE_TOLERANCE) <= room)
            & (seconds * (1 - SCORE_TOLERANCE) <= self.ranking.record)
        )
        return {way: found[..., at : at + 1] for at, way in enumerate(ways)}

    def _sent(self, region: DegreeGroup, sent: PlanGrid, asked: Array) -> Array:
        """Prices plans that offload, all activations or none of them; the least seconds of each, whatever recomputes,
        over obs1zf."""
        found = self.price(sent, self.ranking.limit)
        self.ranking.take(sent, found, with_families=False)
        return self._partly(
            region, sent, asked if offloads_activations(sent.offload[0]) else asked & self._asked(sent, found), found
        )

    def _partly(self, region: DegreeGroup, box: PlanGrid, asked: Array, priced: PricedGrid) -> Array:
        """Of the numbers of blocks that recompute, the best of each plan that is asked for; the least seconds of
        each."""
        kinds = [choice.kind for choice in box.recompute]
        if not (region.parts and kinds[0] == Recompute.none and asked.any()):
            return np.minimum(priced.seconds[:, :, :, :1], priced.seconds[:, :, :, -1:])
        at = {kind: np.s_[:, :, :, kinds.index(kind) : kinds.index(kind) + 1] for kind in kinds}
        quickest = np.full(asked.shape, np.inf)
        valley = any(offloads_activations(choice) for choice in box.offload)
        for rung in recompute_ladder(kinds):
            less, more = at[rung.rest], at[rung.kind]
            enough = priced.roomy[less] & (rung.rest != Recompute.none)  # then none of these blocks needs to do more
            there = priced.may_fit[more] | (rung.kind == Recompute.full)  # else no number of them fits
            there = priced.room[less] | priced.room[more] if valley else there & priced.room[more] & ~enough
            partly = PartialRecompute(box, rung, lambda part: self.price(part, self.ranking.limit), self.ranking.record)
            for part, each in partly.explore(asked & there, priced.part(less), priced.part(more)):
                self.ranking.take(part, each, with_families=False)
            quickest = np.minimum(quickest, partly.quickest)
        return quickest


def _single_rank_shards(box: PlanGrid) -> Array:
    """Shards of one rank are as quick as no shards, but are plans only where weights wait elsewhere (z, f)."""
    return np.array([each.lone for each in box.shards])[:, None]


def _with_single_rank_shards(box: PlanGrid, chosen: Array) -> Array:
    """`chosen` (over obscz_), shards of one rank as no shards are."""
    return (
        chosen | (chosen.any(axis=ZERO_AXIS, keepdims=True) & lone)
        if (lone := _single_rank_shards(box)).any()
        else chosen
    )


def merge_offload_choices(
    open_: Mapping[tuple[Offload, ...], Array], recompute: int
) -> tuple[tuple[Offload, ...], ...]:
    """Of the ways to offload the first, and those like it that are priced in one box with it no slower than by
    themselves."""
    first, *others = open_
    found, mask = [first], open_[first]
    for way in others:
        both = mask | open_[way]
        alone = len(found) * crop_size(mask) + crop_size(open_[way])
        if (
            offloads_activations(way) == offloads_activations(first)
            and recompute * ((len(found) + 1) * crop_size(both) - alone) <= SMALL_GRID_PLANS
        ):
            found.append(way)
            mask = both
    return tuple(found)


def crop_size(mask: Array) -> int:
    """Plans of the least box that holds what `mask` asks for."""
    kept = (mask.any(axis=tuple(other for other in range(mask.ndim) if other != axis)) for axis in range(mask.ndim))
    return prod(int(np.count_nonzero(each)) for each in kept)


def _lowest_memory_batches(box: PlanGrid) -> Array:
    """Where memory can be least: the smallest micro-batch, or a single one (b, s)."""
    least = min(each.size for each in box.micro_batches)
    return np.array([each.size == least or each.number == 1 for each in box.micro_batches])[:, None]


def _candidate_grids(box: PlanGrid, near: Array) -> Iterator[PlanGrid]:
    """The least parts of `box`, some orders each, that hold what is near over (o, b, s)."""
    orders = np.flatnonzero(near.any(axis=(1, 2)))
    each = int(np.count_nonzero(near.any(axis=(0, 2)))) * box.size // (len(box.orders) * len(box.micro_batches))
    for begin in range(0, len(orders), step := max(MAX_GRID_PLANS // max(each, 1), 1)):
        some = orders[begin : begin + step]
        micro_batches, parallel = (np.flatnonzero(near[some].any(axis=axes)) for axes in ((0, 2), (0, 1)))
        yield box.part(orders=some, micro_batches=micro_batches, sequence_parallel=parallel)


def search_top_plans(
    job: Job,
    top: int,
    objective: SearchObjective = SearchObjective.fastest,
    runnable: bool = False,
    ceiling: float = np.inf,
) -> PlanSearch:
    """The space of `job`, priced as far as its `top` best plans, and the best of each family, need; nothing above
    `ceiling` counts."""
    return run_search(job, TopK(top, ceiling), objective, runnable)


def find_best_plan(job: Job, runnable: bool = False, ceiling: float = np.inf) -> PlanCandidate | None:
    """The best plan that fits, if any below `ceiling`, and nothing else: no families."""
    best = search_best_plan(job, runnable, ceiling).ranking.best
    return best[0] if best else None


def search_best_plan(job: Job, runnable: bool = False, ceiling: float = np.inf) -> PlanSearch:
    """The space of `job`, priced as far as its best plan needs."""
    return run_search(job, TopK(1, ceiling, by_family=False), SearchObjective.fastest, runnable)


def run_search(job: Job, ranking: TopK, objective: SearchObjective, runnable: bool) -> PlanSearch:
    """The space of `job`, priced as far as `ranking` needs."""
    pricer = CostModel(job)
    space = PlanSpace(
        job, runnable, offloading=objective != SearchObjective.headroom, bucket=choose_bucket(pricer.setting)
    )
    found = PlanSearch(pricer, space, ranking, objective)
    found.explore()
    return found
