"""Searches the number of recomputed blocks per stage. branch_and_bound.py uses this search for plans that need
recompute to fit with the safety margin.

Each plan has two results: the smallest number of recomputed blocks with which the plan fits, and the smallest number
with which the plan fits with the safety margin. The first blocks of a stage have one recompute kind, and the other
blocks have a kind with less recompute. Such a pair of kinds is called a rung: selective recompute and none, or full and
selective recompute.

More recomputed blocks take longer. The search for a plan therefore ends at the first number of blocks with which the
plan fits with the safety margin, or is too slow. Offload of activations changes this: recomputed activations need no
transfer, so a medium number of blocks can be fastest, and the whole range is searched. In both cases, the search first
computes multiples of one part (1 / RECOMPUTE_PARTS_PER_STAGE of a stage). Then it computes the numbers of blocks
between two parts, if they can still give the best plan. The result is exact to one block.

[Note: valley] If activations are offloaded, the step time is assumed to be a convex function of the number of blocks.
The compute time grows linearly with this number, and the exposed transfer time is the maximum of two linear functions.
A line through the values of a convex function at two parts is a lower bound outside the interval between these parts.
Parts whose bound exceeds the best plan are skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from meshwright.planner.cost.plan_grid import CHOICE_FIELDS, RECOMPUTE_PARTS_PER_STAGE, Array, PlanGrid, RecomputeChoice
from meshwright.planner.search.best_plans import PricedGrid
from meshwright.spec.enums import offloads_activations

SMALL_GRID_PLANS = 4096
"""For grids with at most this number of plans, computing the cost of the whole grid takes as long as computing the cost
of a part of the grid."""

VALLEY_PROBE_ORDER = (
    (RECOMPUTE_PARTS_PER_STAGE // 2,),
    (RECOMPUTE_PARTS_PER_STAGE // 4, 3 * RECOMPUTE_PARTS_PER_STAGE // 4),
    tuple(range(1, RECOMPUTE_PARTS_PER_STAGE, 2)),
)
"""The parts in the order in which they are computed with offload of activations ([Note: valley])."""

PRUNED_VALUES = (np.inf, np.inf, 0.0, False, False)
"""The cost of a plan that was not computed, because it cannot be the best, in the order of the fields of
`PricedGrid`."""


class RecomputeInterval(NamedTuple):
    """The numbers of blocks between `until` - 1 parts and `until` parts. `open` marks the plans for which these numbers
    may be best, along the axes `obsczf` of GRID_AXES with length 1 along c. `least` is a lower bound of the seconds of
    these plans."""

    until: int
    open: Array
    least: Array


class PartialRecompute:
    """Searches the plans of `box` in which the first blocks of a stage have recompute `rung.kind` and the other blocks
    `rung.rest`. `price` computes the cost of a grid. A plan with a score above `record` cannot be the best.

    `fastest_seconds` is the minimum seconds of each plan over the computed numbers of blocks, along the axes `obsczf`
    of GRID_AXES with length 1 along c. Plans that do not fit are included.
    """

    def __init__(
        self, box: PlanGrid, rung: RecomputeChoice, price: Callable[[PlanGrid], PricedGrid], record: float
    ) -> None:
        self.box, self.rung, self.price, self.record = box, rung, price, record
        self.coarse = tuple(rung._replace(part=part) for part in range(1, RECOMPUTE_PARTS_PER_STAGE))
        self.valley = any(offloads_activations(choice) for choice in box.offload)
        self.found: list[tuple[PlanGrid, Any, PricedGrid]] = []
        self.fastest_seconds = np.empty(0)

    def explore(self, mask: Array, none: PricedGrid, whole: PricedGrid) -> Iterator[tuple[PlanGrid, PricedGrid]]:
        """Yields grids with their costs. For each plan that `mask` marks, the grids contain the best number of blocks;
        the scores of all other numbers of blocks are infinite. `mask` is along the axes `obsczf` of GRID_AXES with
        length 1 along c. `none` is the cost if all blocks have recompute `rung.rest`, `whole` the cost if all blocks
        have `rung.kind`."""
        mask, self.fastest_seconds = mask.copy(), np.minimum(none.seconds, whole.seconds)
        for span in [
            *(
                self._valley(mask, none, whole)
                if self.valley
                else self._parts(mask, np.where(mask, none.seconds, np.inf))
            )
        ]:
            self._between(span)
        best = np.full(mask.shape, np.inf)
        for _, at, each in self.found:
            best[at] = np.minimum(best[at], each.score.min(axis=3, keepdims=True))
        for part, at, each in self.found:
            yield part, each._replace(score=np.where(each.score <= best[at], each.score, np.inf))

    def _parts(self, mask: Array, before: Array) -> Iterator[RecomputeInterval]:
        """Computes the cost of one part after another, until each plan fits with the safety margin or is too slow. If
        the parts have few plans, several parts are computed together. Yields the intervals between parts."""
        parts = self.coarse
        while parts and mask.any():
            part, at = crop_grid(self.box, mask)
            count = max(SMALL_GRID_PLANS // (part.size // len(part.recompute)), 1)
            part, parts = replace(part, recompute=parts[:count]), parts[count:]
            each = self._priced(part, at)
            for c, choice in enumerate(part.recompute):
                seconds, fits, roomy = (table[:, :, :, c : c + 1] for table in (each.seconds, each.may_fit, each.roomy))
                yield RecomputeInterval(
                    choice.part,
                    _scatter(mask.shape, at, mask[at] & fits, False),
                    _scatter(mask.shape, at, before[at], np.inf),
                )
                mask[at] &= ~(np.isfinite(seconds) & (roomy | (seconds > self.record)))
                before[at] = np.where(np.isfinite(seconds), seconds, before[at])
                self.fastest_seconds[at] = np.minimum(self.fastest_seconds[at], seconds)
        yield RecomputeInterval(RECOMPUTE_PARTS_PER_STAGE, mask, before)

    def _valley(self, mask: Array, none: PricedGrid, whole: PricedGrid) -> Iterator[RecomputeInterval]:
        """Computes the cost of the middle part, then of all parts that [Note: valley] does not exclude. Yields the
        intervals between parts."""
        found = {
            part: each._replace(taken=np.full_like(each.taken, np.inf))
            for part, each in {0: none, RECOMPUTE_PARTS_PER_STAGE: whole}.items()
        }
        known = {part: each.seconds for part, each in found.items()}
        for stage in VALLEY_PROBE_ORDER:
            open_at = {part: mask & (_convex_lower_bound(known, part) <= self.record) for part in stage}
            near = np.logical_or.reduce(list(open_at.values()))
            stage = tuple(part for part in stage if open_at[part].any())
            if stage:
                box, at = crop_grid(self.box, near)
                each = self._priced(replace(box, recompute=tuple(self.coarse[part - 1] for part in stage)), at)
                for c, part in enumerate(stage):
                    one = each.part(np.s_[:, :, :, c : c + 1])
                    found[part] = PricedGrid(
                        *(_scatter(mask.shape, at, *each) for each in zip(one, PRUNED_VALUES, strict=True))
                    )
                    known[part] = found[part].seconds
        self.fastest_seconds = np.minimum.reduce(list(known.values()))
        parts = sorted(known)
        for before, part in pairwise(parts):
            least = _interval_lower_bound(known[before], known[part])
            if before + 1 < part:  # pruned parts are in between; numbers just above a computed part may be best
                yield RecomputeInterval(before + 1, mask, least)
            yield RecomputeInterval(part, mask & _may_fit(found[before], found[part]), least)

    def _between(self, span: RecomputeInterval) -> None:
        """Computes the cost of the numbers of blocks in the interval `span` for the plans that can still be the
        best."""
        near = span.open & (span.least <= self.record)
        if not near.any():
            return
        together: dict[range, list[int]] = {}
        for o in np.flatnonzero(near.any(axis=(1, 2, 3, 4, 5))).tolist():
            ends = [self.rung._replace(part=part).blocks(self.box.orders[o]) for part in (span.until - 1, span.until)]
            together.setdefault(range(ends[0] + 1, ends[1]), []).append(o)
        for counts, orders in together.items():
            mask = np.zeros_like(near)
            mask[orders] = near[orders]
            if counts and mask.any():
                part, at = crop_grid(self.box, mask)
                self._priced(
                    replace(part, recompute=tuple(self.rung._replace(layers=count, fewer=True) for count in counts)), at
                )

    def _priced(self, part: PlanGrid, at: Any) -> PricedGrid:
        each = self.price(part)
        self.found.append((part, at, each))
        self.record = min(self.record, float(each.score.min()))
        return each


def _may_fit(one: PricedGrid, other: PricedGrid) -> Array:
    """Returns which plans may fit with a number of blocks between `one` and `other`. Device memory must suffice at one
    end of the interval, and host memory at one end, possibly the other: more recompute may need more device memory but
    less host memory than offload."""
    return (one.may_fit | other.may_fit) & (one.room | other.room)


def _interval_lower_bound(one: Array, other: Array) -> Array:
    """Returns a lower bound of the seconds between two neighbouring parts ([Note: valley])."""
    low, high = np.minimum(one, other), np.maximum(one, other)
    return low - np.subtract(high, low, out=np.zeros_like(low), where=np.isfinite(high))


def _convex_lower_bound(known: dict[int, Array], part: int) -> Array:
    """Returns a lower bound of the seconds of `part`: the maximum of two lines at `part`. One line goes through the two
    nearest known parts before `part`, the other through the two nearest after `part`."""
    found = np.full_like(known[0], -np.inf)
    for parts in (sorted((at for at in known if at < part), reverse=True), sorted(at for at in known if at > part)):
        if len(parts) > 1:
            near, far = parts[:2]
            steps = abs(part - near) / abs(far - near)
            both = np.isfinite(known[near]) & np.isfinite(known[far])
            line = np.full_like(found, -np.inf)
            np.subtract((1.0 + steps) * known[near], steps * known[far], out=line, where=both)
            found = np.maximum(found, line)
    return found


def _scatter(shape: tuple[int, ...], at: Any, values: Array, otherwise: Any) -> Array:
    """Returns an array of shape `shape` with `values` at the positions `at` and `otherwise` at all other positions."""
    found = np.full(shape, otherwise, dtype=values.dtype)
    found[at] = values
    return found


def crop_grid(box: PlanGrid, mask: Array) -> tuple[PlanGrid, Any]:
    """Returns the smallest grid that contains all plans of `mask`, and the indices of this grid in `mask`. If `mask`
    has length 1 along c, the result contains all recompute choices of `box`."""
    one = mask.shape[3] == 1
    chosen = {
        name: np.flatnonzero(mask.any(axis=_other_axes(axis, mask.ndim))) for axis, name in enumerate(CHOICE_FIELDS)
    }
    part = box.part(**{name: at for name, at in chosen.items() if not (one and name == "recompute")})
    return part, np.ix_(*chosen.values())


def _other_axes(axis: int, axes: int) -> tuple[int, ...]:
    return tuple(other for other in range(axes) if other != axis)
