"""Searches the plan space of a job (space.py) by branch and bound, for the best plans that fit and the best plan of
every family (best_plans.py). ranking.py presents the results.

Guarantees: the search is exact. It returns the plan that would be best if every plan were estimated separately; a test
compares both methods on random jobs. Plans are ordered by score. The score is the step time, raised by RISK_MARGIN for
each reason of uncertainty (best_plans.py). With the objective headroom, the score is the reserved bytes. If two scores
are equal in ten digits, the simpler plan is first: fewer axes, lower ZeRO stage, no recompute, no sequence parallelism,
the simpler schedule.

[Note: bounds] The cost of plans that cannot be among the results is not computed. All bounds rely on the fact that no
term of the step time is negative.

- Lower bound: no plan of a degree group is faster than the sum of compute, tensor-parallel communication and bubble.
  For each schedule, micro-batch and ZeRO choice, the bound also has the data-parallel communication and the update
  (planner/search/group_bounds.py). Groups are searched in the order of these bounds. Plans are pruned if their bound
  exceeds the score of the best plans and of the best plan of their family.
- Families: for a family in which no plan fits, the search needs only the plan that is nearest to fitting. This plan has
  the smallest micro-batch size, or only one micro-batch.
- Recompute: recompute and offload only slow a plan that already fits with the safety margin. The cost of recompute and
  offload is therefore computed only for plans that do not fit with the safety margin.
- Offload: a combination of offloads takes at least as long as each of its single offloads. The cost of a combination is
  computed only if each single offload is fast enough.
- Memory choices: the cost of recompute and offload is computed only if their bounds on bytes and seconds
  (planner/cost/bounds.py) allow the best plan.
- Other layouts: the families contain only plans with the default order of axes, uniform recompute and no offload. The
  cost of plans with other orders, partial recompute or offload is computed only if such a plan can be the best plan.
  For this reason, the ranking may omit such plans after the best plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from math import isfinite

import numpy as np

from meshwright.core.messages import Message
from meshwright.core.units import show_bytes
from meshwright.planner.cost.bounds import lower_bounds, step_floor
from meshwright.planner.cost.communicators import driver_bytes
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.memory import MemoryFootprint, memory_limit, physical_limit, reserved_bytes
from meshwright.planner.cost.overlap import choose_bucket
from meshwright.planner.cost.plan_grid import CHOICE_FIELDS, Array, PlanGrid
from meshwright.planner.cost.step import compile_seconds
from meshwright.planner.cost.uncertainty import unmeasured_counts
from meshwright.planner.search.best_plans import (
    SCORE_TOLERANCE,
    PlanCandidate,
    PricedGrid,
    SearchObjective,
    TopK,
    risk_factors,
    uses_unmeasured_link,
)
from meshwright.planner.search.choices import recompute_ladder
from meshwright.planner.search.group_bounds import (
    GroupBounds,
    candidate_grids,
    crop_size,
    legal_cells,
    lowest_memory_batches,
    score_floor,
)
from meshwright.planner.search.partial_recompute import SMALL_GRID_PLANS, PartialRecompute, crop_grid
from meshwright.planner.search.space import DegreeGroup, PlanSpace
from meshwright.spec.enums import Offload, Recompute, offloads_activations
from meshwright.spec.job import Job

DOES_NOT_FIT = "does not fit"
PRUNED_BY_BOUND = "pruned (lower bound)"

SPARSE_FRACTION = 0.5
"""Memory is computed either for a whole grid, or only for the smallest part that contains all plans that are fast
enough. The part is chosen if it has at most this fraction of the plans."""


ZERO_AXIS = CHOICE_FIELDS.index("shards")


@dataclass
class PlanSearch:
    """The search of one plan space, with the results collected so far.

    `ranking` collects the best plans. `legal`, `priced` and `unfit` are numbers of plans: legal plans, plans with
    computed memory, and plans that do not fit. `fastest` is the fastest plan that does not fit. `lowest_memory` is the
    plan with the lowest memory, as long as no plan fits.
    """

    pricer: CostModel
    space: PlanSpace
    ranking: TopK
    objective: SearchObjective = SearchObjective.fastest
    legal: int = 0
    priced: int = 0
    unfit: int = 0
    fastest: PlanCandidate | None = None
    lowest_memory: PlanCandidate | None = None

    def __post_init__(self) -> None:
        self._usable = memory_limit(self.pricer.setting)
        self._without_margin: list[tuple[DegreeGroup, PlanGrid, PricedGrid]] = []

    def explore(self) -> None:
        """Runs the search: computes the cost of every plan that may be among the results, and counts rejected plans."""
        groups = list(self.space.groups())
        self.legal = sum(group.legal for group in groups)
        bounds = [GroupBounds(self.pricer, group) for group in groups]
        self._price_in_order(bounds)
        for group, box, priced in self._without_margin:
            self._price_memory_choices(group, box, priced)
        # If no plan fits, other orders of axes do not help, because memory does not depend on the order. Below a
        # ceiling, a plan with another order may be the only one.
        for each in bounds if self.ranking.best or isfinite(self.ranking.ceiling) else ():
            self._price_other_layouts(each)
        limit = show_bytes(self._usable)
        if self.fastest is not None:
            needs = Message("needs more host memory for offload")
            if isfinite(self.fastest.reserved):
                needs = Message(
                    "needs {reserved} of {limit} usable memory",
                    reserved=show_bytes(self.fastest.reserved),
                    limit=limit,
                )
            rejection = Message("{plan}: {reason}", plan=self.fastest.plan.name, reason=needs)
            self.space.reject(DOES_NOT_FIT, self.unfit, rejection)
        if self.ranking.best:
            shown = Message(
                "slower than {plan} (estimated time or its lower bound)", plan=self.ranking.best[-1].plan.name
            )
            self.space.reject(PRUNED_BY_BOUND, self.legal - self.priced, shown)

    def _margin(self, box: PlanGrid) -> Array:
        """Returns the factors by which unmeasured features raise the scores of the plans of `box`, over the axes
        `obsczf` of GRID_AXES."""
        return risk_factors(unmeasured_counts(self.pricer.setting.job.cluster, box))

    def _is_needed(self, each: GroupBounds) -> bool:
        """Returns whether the results need the plans of a group: all families, or only groups of which some plan may
        fit by the lower bound of memory. After the first plan that fits, bounds of time exclude most plans, and the
        bound of memory takes longer than it saves."""
        return self.ranking.by_family or bool(self.ranking.best) or each.lowest_memory <= self._usable

    def _price_in_order(self, groups: Sequence[GroupBounds]) -> None:
        """Computes the cost of the plans in the boxes of `groups`, which form the plan families, in the order of the
        bounds of the groups."""
        waiting = [(each.low, at, False) for at, each in enumerate(groups)]
        heapify(waiting)
        while waiting:
            low, at, is_exact = heappop(waiting)
            each = groups[at]
            box = each.group.box
            if is_exact:
                self._price_default_layouts(each)
            elif (
                low <= self.ranking.bound(box).max() or self._searches_all or self.ranking.wanting(box).any()
            ) and self._is_needed(each):
                heappush(waiting, (float(each.bounds.min()), at, True))

    @property
    def _searches_all(self) -> bool:
        """Whether the seconds of a plan say nothing about its score."""
        return self.objective == SearchObjective.headroom

    def _price_default_layouts(self, each: GroupBounds) -> None:
        """Computes the cost of the plans in the box of a group."""
        box, legal = each.group.box, np.isfinite(each.bounds)
        few = self._searches_all or box.size <= SMALL_GRID_PLANS
        wanting = self.ranking.wanting(box)[:, None] & (few | lowest_memory_batches(box))
        done = legal & (self._searches_all | wanting)
        self._price_cells(each.group, done, bounded=False)
        self._price_cells(each.group, (each.bounds <= self.ranking.bound(box)[:, None]) & legal & ~done)

    def _price_cells(self, group: DegreeGroup, near: Array, bounded: bool = True) -> None:
        """Computes the cost of the plans in the cells `near`. `bounded`: whether plans that do not change the results
        are left out."""
        for box, cells in candidate_grids(group.box, near) if near.any() else ():
            priced = self.price(box, self.ranking.bound(box)[:, None, None, :, None] if bounded else np.inf, cells)
            self.ranking.take(box, priced)
            if (group.offloads or group.parts) and self._needs_memory_choices(box, priced).any():
                self._without_margin.append((group, box, priced))

    def _needs_memory_choices(self, box: PlanGrid, priced: PricedGrid) -> Array:
        """Returns which plans do not fit with the safety margin without recompute, but could be the best plan with
        recompute or offload. If offload of activations is pinned, the result is true for all legal plans, because
        recompute may make them faster."""
        if offloads_activations(box.offload[0]):
            return np.isfinite(priced.seconds[:, :, :, :1])
        least = priced.seconds[:, :, :, :1] * self._margin(box).min(axis=3, keepdims=True)
        return _with_single_rank_shards(box, ~priced.roomy[:, :, :, :1] & (least <= self.ranking.record))

    def _price_other_layouts(self, each: GroupBounds) -> None:
        """Computes the cost of the plans with other orders of axes, if such a plan can be the best plan."""
        record, limit = (np.inf, np.inf) if self._searches_all else (self.ranking.record, self.ranking.limit)
        near = legal_cells(each.group.box) & (each.floor.seconds[..., None] * (1 - SCORE_TOLERANCE) <= record)
        for axes in each.group.axes if near.any() and self._is_needed(each) else ():
            for box, cells in candidate_grids(each.group.other(axes), near):
                cells = cells & (score_floor(self.pricer, box, step_floor(self.pricer, box)) <= record)
                for part, near_part in candidate_grids(box, cells) if cells.any() else ():
                    self.ranking.take(part, self.price(part, limit, near_part), with_families=False)

    def price(self, box: PlanGrid, ceiling: float | Array = np.inf, cells: Array | None = None) -> PricedGrid:
        """Computes the seconds of every plan of a grid, and the memory of the plans whose score may be at most
        `ceiling`, a number or an array over the axes `obsczf` of GRID_AXES. `cells`, over axes (o, b, s, z), is the
        mask of the plans that are computed; None means all."""
        pricer = self.pricer
        ranks = pricer.ranks(box)
        states = pricer.states(box, ranks)
        wanted = box.legal[0] if cells is None else box.legal[0] & cells[:, :, :, None, :, None]
        step = np.broadcast_to(np.where(wanted, pricer.seconds(box, ranks, states).step[0], np.inf), box.shape)
        near = step * self._margin(box) <= ceiling
        count = int(np.count_nonzero(near & np.isfinite(step)))
        if not count:
            none = np.broadcast_to(np.inf, box.shape)
            return PricedGrid(none, step, none, np.broadcast_to(False, box.shape), np.broadcast_to(True, box.shape))
        part, at = crop_grid(box, near)
        if part.size > SPARSE_FRACTION * box.size:
            found = self._with_memory(box, pricer.memory(box, ranks, states), step)
            self._count_unfit(box, step, found)
            return found
        found = self._with_memory(part, pricer.memory(part, pricer.ranks(part)), step[at])
        self._count_unfit(part, step[at], found)
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

    def _with_memory(self, box: PlanGrid, parts: MemoryFootprint, step: Array) -> PricedGrid:
        """Returns the cost of the plans of `box` with score and memory. `step` is the seconds of a step, `parts` the
        bytes of each rank class."""
        setting = self.pricer.setting
        usual, safe = reserved_bytes(setting, parts.total.max(axis=0), driver_bytes(setting, box))
        room = np.broadcast_to(parts.host.max(axis=0) <= setting.host_memory if any(box.offload) else True, box.shape)
        taken = np.where(np.isfinite(step) & room, usual, np.inf)
        tight = np.broadcast_to(safe > physical_limit(setting), box.shape)
        each = step + compile_seconds(setting, box, self.pricer.ranks(box).layers)[0] / setting.job.workload.steps
        cluster = setting.job.cluster
        links = np.array([int(uses_unmeasured_link(cluster, choice)) for choice in box.offload])  # along axis f
        worth = (
            taken
            if self.objective == SearchObjective.headroom
            else each * self._margin(box) * risk_factors(tight + links)
        )
        return PricedGrid(np.where(taken <= self._usable, worth, np.inf), step, taken, tight, room)

    def _count_unfit(self, box: PlanGrid, step: Array, found: PricedGrid) -> None:
        """Counts the plans that do not fit, and stores the fastest of them in `fastest`."""
        legal = int(np.count_nonzero(np.isfinite(step)))
        self.priced += legal
        fitting = np.isfinite(found.score)
        missing = legal - int(np.count_nonzero(fitting))
        self.unfit += missing
        if missing:
            self._note_lowest_memory(box, step, found)
            lost = np.where(fitting, np.inf, step)
            at = np.unravel_index(int(lost.argmin()), lost.shape)
            if np.isfinite(lost[at]) and (self.fastest is None or lost[at] < self.fastest.seconds):
                self.fastest = PlanCandidate(box, tuple(map(int, at)), float(lost[at]), float(found.taken[at]))

    def _note_lowest_memory(self, box: PlanGrid, step: Array, found: PricedGrid) -> None:
        """Stores the plan with the lowest memory in `lowest_memory`, as long as no plan fits."""
        at = np.unravel_index(int(found.taken.argmin()), box.shape)
        if (
            not self.ranking.best
            and np.isfinite(found.taken[at])
            and (self.lowest_memory is None or found.taken[at] < self.lowest_memory.reserved)
        ):
            self.lowest_memory = PlanCandidate(box, tuple(map(int, at)), float(step[at]), float(found.taken[at]))

    # --- choices that reduce memory
    # --------------------------------------------------------------------------------------

    def _price_memory_choices(self, group: DegreeGroup, box: PlanGrid, priced: PricedGrid) -> None:
        """Computes the cost of partial recompute and offload for the plans of `box` that do not fit with the safety
        margin otherwise."""
        if not (mask := self._needs_memory_choices(box, priced)).any():
            return
        box, at = crop_grid(box, mask)
        every = np.arange(priced.seconds.shape[3]).reshape(1, 1, 1, -1, 1, 1)
        priced = priced.part((*at[:3], every, *at[4:]))
        candidates = self._may_be_best(box, mask[at], priced, group.ways)
        self._price_partial_recompute(group, box, candidates[group.ways[0]], priced)
        waiting = sorted(group.offloads, key=lambda choice: (offloads_activations(choice), len(choice)))
        while waiting := [choice for choice in waiting if candidates[choice].any()]:
            together = merge_offload_choices({choice: candidates[choice] for choice in waiting}, len(box.recompute))
            near = np.concatenate([candidates[choice] for choice in together], axis=-1)
            offloaded, where = crop_grid(replace(box, offload=together), near)
            fastest_seconds = np.full(near.shape, -np.inf)
            fastest_seconds[where] = self._price_offloaded(group, offloaded, near[where])
            waiting = [choice for choice in waiting if choice not in together]
            for which, single in enumerate(together):
                for choice in waiting:
                    if len(single) == 1 and single[0] in choice:
                        candidates[choice] = candidates[choice] & _with_single_rank_shards(
                            box, fastest_seconds[..., which : which + 1] <= self.ranking.record
                        )

    def _may_be_best(
        self, box: PlanGrid, mask: Array, priced: PricedGrid, ways: Sequence[tuple[Offload, ...]]
    ) -> dict[tuple[Offload, ...], Array]:
        """Returns, for each offload choice in `ways`, which plans of `mask` could be the best plan with this choice.
        The masks have the axes `obsczf` of GRID_AXES, with length 1 along c and f."""
        bound = lower_bounds(self.pricer, box, tuple(ways))
        stay = priced.seconds[:, :, :, :1]
        stay = np.where(_single_rank_shards(box), stay.min(axis=ZERO_AXIS, keepdims=True), stay)
        # If offload is pinned, recompute may save time, so the seconds without recompute are no lower bound.
        seconds = bound.link if ways[0] else np.maximum(stay + bound.more, bound.link)
        leaning = np.array([int(uses_unmeasured_link(self.pricer.setting.job.cluster, way)) for way in ways])
        seconds = seconds * risk_factors((bound.safe > physical_limit(self.pricer.setting)) + leaning)
        # As long as no plan fits, the search also looks for the plan with the lowest memory.
        room = (
            self._usable
            if self.ranking.best
            else max(self._usable, self.lowest_memory.reserved if self.lowest_memory else np.inf)
        )
        found = (
            mask
            & (bound.taken * (1 - SCORE_TOLERANCE) <= room)
            & (seconds * (1 - SCORE_TOLERANCE) <= self.ranking.record)
        )
        return {way: found[..., at : at + 1] for at, way in enumerate(ways)}

    def _price_offloaded(self, group: DegreeGroup, offloaded: PlanGrid, mask: Array) -> Array:
        """Computes the cost of the plans in `offloaded`. Either all offload choices of this grid offload activations,
        or none. Returns the minimum seconds of each plan over all recompute choices, along the axes `obsczf` of
        GRID_AXES with length 1 along c."""
        found = self.price(offloaded, self.ranking.limit)
        self.ranking.take(offloaded, found, with_families=False)
        return self._price_partial_recompute(
            group,
            offloaded,
            mask if offloads_activations(offloaded.offload[0]) else mask & self._needs_memory_choices(offloaded, found),
            found,
        )

    def _price_partial_recompute(self, group: DegreeGroup, box: PlanGrid, mask: Array, priced: PricedGrid) -> Array:
        """Computes the cost of every number of recomputed blocks that can be best, for each plan in `mask`. Returns the
        minimum seconds of each plan."""
        kinds = [choice.kind for choice in box.recompute]
        if not (group.parts and kinds[0] == Recompute.none and mask.any()):
            return np.minimum(priced.seconds[:, :, :, :1], priced.seconds[:, :, :, -1:])
        at = {kind: np.s_[:, :, :, kinds.index(kind) : kinds.index(kind) + 1] for kind in kinds}
        fastest_seconds = np.full(mask.shape, np.inf)
        valley = any(offloads_activations(choice) for choice in box.offload)
        for rung in recompute_ladder(kinds):
            less, more = at[rung.rest], at[rung.kind]
            enough = priced.roomy[less] & (rung.rest != Recompute.none)  # no block needs more recompute
            there = priced.may_fit[more] | (rung.kind == Recompute.full)  # otherwise no number of blocks can fit
            there = priced.room[less] | priced.room[more] if valley else there & priced.room[more] & ~enough
            partial = PartialRecompute(
                box, rung, lambda part: self.price(part, self.ranking.limit), self.ranking.record
            )
            for part, each in partial.explore(mask & there, priced.part(less), priced.part(more)):
                self.ranking.take(part, each, with_families=False)
            fastest_seconds = np.minimum(fastest_seconds, partial.fastest_seconds)
        return fastest_seconds


def _single_rank_shards(box: PlanGrid) -> Array:
    """Returns, over axes (z, f) of GRID_AXES, which ZeRO choices have a shard group of one rank (`ZeroChoice.lone`).
    They are as fast as ZeRO 0, and are legal only with an offload choice that requires ZeRO."""
    return np.array([each.lone for each in box.shards])[:, None]


def _with_single_rank_shards(box: PlanGrid, chosen: Array) -> Array:
    """Returns the mask `chosen` with additional plans. If `chosen` marks a plan with any ZeRO choice, the result also
    marks this plan with the ZeRO choices of `_single_rank_shards`."""
    return (
        chosen | (chosen.any(axis=ZERO_AXIS, keepdims=True) & lone)
        if (lone := _single_rank_shards(box)).any()
        else chosen
    )


def merge_offload_choices(
    candidates: Mapping[tuple[Offload, ...], Array], recompute: int
) -> tuple[tuple[Offload, ...], ...]:
    """Returns offload choices whose plans are computed in one grid: the first choice of `candidates`, and those other
    choices that add little computation. Either all choices of the result offload activations, or none does.
    `candidates` has the mask of plans of each choice. `recompute` is the number of recompute choices."""
    first, *others = candidates
    found, mask = [first], candidates[first]
    for way in others:
        both = mask | candidates[way]
        single = len(found) * crop_size(mask) + crop_size(candidates[way])
        if (
            offloads_activations(way) == offloads_activations(first)
            and recompute * ((len(found) + 1) * crop_size(both) - single) <= SMALL_GRID_PLANS
        ):
            found.append(way)
            mask = both
    return tuple(found)


def search_top_plans(
    job: Job,
    top: int,
    objective: SearchObjective = SearchObjective.fastest,
    runnable: bool = False,
    ceiling: float = np.inf,
) -> PlanSearch:
    """Searches the plan space of `job` for the `top` best plans and the best plan of each family. Plans with a score
    above `ceiling` are ignored. `runnable`: whether to search only plans that this version can run."""
    return run_search(job, TopK(top, ceiling), objective, runnable)


def find_best_plan(
    job: Job, runnable: bool = False, ceiling: float = np.inf, pricer: CostModel | None = None
) -> PlanCandidate | None:
    """Returns the best plan that fits and has a score of at most `ceiling`, or None. Plan families are not computed."""
    best = search_best_plan(job, runnable, ceiling, pricer).ranking.best
    return best[0] if best else None


def search_best_plan(
    job: Job, runnable: bool = False, ceiling: float = np.inf, pricer: CostModel | None = None
) -> PlanSearch:
    """Searches the plan space of `job` only for the best plan with a score of at most `ceiling`. `pricer` is a cost
    model of the job, which may have other pins; None means a new one."""
    return run_search(job, TopK(1, ceiling, by_family=False), SearchObjective.fastest, runnable, pricer)


def run_search(
    job: Job, ranking: TopK, objective: SearchObjective, runnable: bool, pricer: CostModel | None = None
) -> PlanSearch:
    """Searches the plan space of `job` for the results that `ranking` collects. Returns the completed search."""
    pricer = pricer or CostModel(job)
    space = PlanSpace(
        job, runnable, offloading=objective != SearchObjective.headroom, bucket=choose_bucket(pricer.setting)
    )
    found = PlanSearch(pricer, space, ranking, objective)
    found.explore()
    return found
