"""Search of the number of recomputed blocks of a stage, where plans without recompute have no margin.

The result is the fewest blocks with which each plan fits, and fits with a margin. There are two rungs: some blocks
recompute by operation and the others not at all; then some recompute fully and the others by operation.

More recompute takes longer. So of the block counts of one plan the first that fits with a margin, or the first that is
too slow, ends the search. This does not hold where activations are offloaded: recomputed activations need no transfer,
the fastest count can be in the middle, and all counts are tried. The blocks of a stage are first taken in
RECOMPUTE_PARTS_PER_STAGE parts, then one by one between two parts where that can still give the best plan. So a plan
comes within one block of its memory limit.

[Note: valley] Where activations are offloaded, the seconds over the number of blocks are assumed to be convex: work
grows evenly, and the time that is not overlapped is the larger of two lines. So lines through two parts are lower
bounds between and outside of them. Parts with bounds above the best plan are not priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from meshwright.planner.cost.plan_grid import CHOICE_FIELDS, RECOMPUTE_PARTS_PER_STAGE, Array, PlanGrid, RecomputeChoice
from meshwright.planner.search.top_k import PricedGrid
from meshwright.spec.enums import offloads_activations

SMALL_GRID_PLANS = 4096
"""Plans of a box that are priced as quickly as a part of them."""

VALLEY_PROBE_ORDER = (
    (RECOMPUTE_PARTS_PER_STAGE // 2,),
    (RECOMPUTE_PARTS_PER_STAGE // 4, 3 * RECOMPUTE_PARTS_PER_STAGE // 4),
    tuple(range(1, RECOMPUTE_PARTS_PER_STAGE, 2)),
)
"""Parts of a valley in the order in which they are tried."""

PRUNED_VALUES = (np.inf, np.inf, 0.0, False, False)
"""The values of a plan that cannot be the best."""


class RecomputeInterval(NamedTuple):
    """Between part `until` of the blocks and the one before it: which plans may do with less than `until` (over
    obs1zf), and seconds below
    which they do not go there."""

    until: int
    open: Array
    least: Array


class PartialRecompute:
    """Plans of `box` of which some blocks do as `rung` says, and others as its rest; `price` prices a box, and above
    `record` a score is not the best.
    `quickest`: the least seconds of each plan (obs1zf), whether it fits or not."""

    def __init__(
        self, box: PlanGrid, rung: RecomputeChoice, price: Callable[[PlanGrid], PricedGrid], record: float
    ) -> None:
        self.box, self.rung, self.price, self.record = box, rung, price, record
        self.coarse = tuple(rung._replace(part=part) for part in range(1, RECOMPUTE_PARTS_PER_STAGE))
        self.valley = any(offloads_activations(choice) for choice in box.offload)
        self.found: list[tuple[PlanGrid, Any, PricedGrid]] = []
        self.fastest_seconds = np.empty(0)

    def explore(self, mask: Array, none: PricedGrid, whole: PricedGrid) -> Iterator[tuple[PlanGrid, PricedGrid]]:
        """The best number of blocks of each plan `asked` for, over obs1zf, from `none` of them, where all do as the
        rest, to the `whole` of them."""
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
        """Prices part after part until one is enough, several together where they are few plans; then what follows
        the last."""
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
        """Prices the middle first, then the parts that [Note: valley] does not exclude."""
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
            if before + 1 < part:  # parts between the two are pruned, except for their neighbours
                yield RecomputeInterval(before + 1, mask, least)
            yield RecomputeInterval(part, mask & _may_fit(found[before], found[part]), least)

    def _between(self, span: RecomputeInterval) -> None:
        """The numbers of blocks between two parts, where they can still be the best."""
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
    """Where plans between two numbers of blocks may fit: what recomputes may hold more than what goes to the host,
    which then has less to hold."""
    return (one.may_fit | other.may_fit) & (one.room | other.room)


def _interval_lower_bound(one: Array, other: Array) -> Array:
    """Below which seconds nothing between two parts of a valley goes."""
    low, high = np.minimum(one, other), np.maximum(one, other)
    return low - np.subtract(high, low, out=np.zeros_like(low), where=np.isfinite(high))


def _convex_lower_bound(known: dict[int, Array], part: int) -> Array:
    """Seconds below which `part` does not go: what the lines through the two nearest parts before it, and behind it,
    say there."""
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
    """Returns `values` at their positions and `otherwise` at all others."""
    found = np.full(shape, otherwise, dtype=values.dtype)
    found[at] = values
    return found


def crop_grid(box: PlanGrid, mask: Array) -> tuple[PlanGrid, Any]:
    """Returns the smallest grid that contains all plans of `mask`, and its position in `mask`. One recompute choice
    represents all."""
    one = mask.shape[3] == 1
    chosen = {
        name: np.flatnonzero(mask.any(axis=_other_axes(axis, mask.ndim))) for axis, name in enumerate(CHOICE_FIELDS)
    }
    part = box.part(**{name: at for name, at in chosen.items() if not (one and name == "recompute")})
    return part, np.ix_(*chosen.values())


def _other_axes(axis: int, axes: int) -> tuple[int, ...]:
    return tuple(other for other in range(axes) if other != axis)
