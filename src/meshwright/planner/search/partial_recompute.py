"""How many blocks of a stage recompute, where plans that keep everything leave no margin: the fewest with which each
fits, and with a margin.
Rung by rung: some by operation and others not at all, then some as a whole and others by operation.

More recompute takes longer, so that of the numbers of blocks of one plan the first that fits with a margin ends the
search, or the first that is
too slow. Not so where activations are offloaded: what recomputes need not go to the host, and the quickest is somewhere
between; there all are
tried. The blocks of a stage are first taken in PARTS parts, then one by one between two parts where that can still be
the best of all: so a plan
comes as near to what it may take of its device as one block is large.

[Note: valley] Seconds over the number of blocks are taken to be convex where activations are offloaded: work grows
evenly, and what is not hidden
is the larger of two lines. So lines through two parts are bounds for what lies beside them, and parts that these leave
above the best are not priced.
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
"""What stands in Priced of a plan that cannot be the best."""


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
        self.quickest = np.empty(0)

    def explore(self, asked: Array, none: PricedGrid, whole: PricedGrid) -> Iterator[tuple[PlanGrid, PricedGrid]]:
        """The best number of blocks of each plan `asked` for, over obs1zf, from `none` of them, where all do as the
        rest, to the `whole` of them."""
        asked, self.quickest = asked.copy(), np.minimum(none.seconds, whole.seconds)
        for span in [
            *(
                self._valley(asked, none, whole)
                if self.valley
                else self._parts(asked, np.where(asked, none.seconds, np.inf))
            )
        ]:
            self._between(span)
        best = np.full(asked.shape, np.inf)
        for _, at, each in self.found:
            best[at] = np.minimum(best[at], each.score.min(axis=3, keepdims=True))
        for part, at, each in self.found:
            yield part, each._replace(score=np.where(each.score <= best[at], each.score, np.inf))

    def _parts(self, asked: Array, before: Array) -> Iterator[RecomputeInterval]:
        """Part after part until one is enough, several in one go where that are few plans; then what lies behind the
        last."""
        parts = self.coarse
        while parts and asked.any():
            part, at = crop_grid(self.box, asked)
            count = max(SMALL_GRID_PLANS // (part.size // len(part.recompute)), 1)
            part, parts = replace(part, recompute=parts[:count]), parts[count:]
            each = self._priced(part, at)
            for c, choice in enumerate(part.recompute):
                seconds, fits, roomy = (table[:, :, :, c : c + 1] for table in (each.seconds, each.may_fit, each.roomy))
                yield RecomputeInterval(
                    choice.part,
                    _scatter(asked.shape, at, asked[at] & fits, False),
                    _scatter(asked.shape, at, before[at], np.inf),
                )
                asked[at] &= ~(np.isfinite(seconds) & (roomy | (seconds > self.record)))
                before[at] = np.where(np.isfinite(seconds), seconds, before[at])
                self.quickest[at] = np.minimum(self.quickest[at], seconds)
        yield RecomputeInterval(RECOMPUTE_PARTS_PER_STAGE, asked, before)

    def _valley(self, asked: Array, none: PricedGrid, whole: PricedGrid) -> Iterator[RecomputeInterval]:
        """The middle first, then what lies between, where [Note: valley] leaves room."""
        found = {
            part: each._replace(taken=np.full_like(each.taken, np.inf))
            for part, each in {0: none, RECOMPUTE_PARTS_PER_STAGE: whole}.items()
        }
        known = {part: each.seconds for part, each in found.items()}
        for stage in VALLEY_PROBE_ORDER:
            open_at = {part: asked & (_convex_lower_bound(known, part) <= self.record) for part in stage}
            near = np.logical_or.reduce(list(open_at.values()))
            stage = tuple(part for part in stage if open_at[part].any())
            if stage:
                box, at = crop_grid(self.box, near)
                each = self._priced(replace(box, recompute=tuple(self.coarse[part - 1] for part in stage)), at)
                for c, part in enumerate(stage):
                    one = each.part(np.s_[:, :, :, c : c + 1])
                    found[part] = PricedGrid(
                        *(_scatter(asked.shape, at, *each) for each in zip(one, PRUNED_VALUES, strict=True))
                    )
                    known[part] = found[part].seconds
        self.quickest = np.minimum.reduce(list(known.values()))
        parts = sorted(known)
        for before, part in pairwise(parts):
            least = _interval_lower_bound(known[before], known[part])
            if before + 1 < part:  # what lies between is bounded away, but for what is next to the two
                yield RecomputeInterval(before + 1, asked, least)
            yield RecomputeInterval(part, asked & _may_fit(found[before], found[part]), least)

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
    """`values` at their places, `otherwise` elsewhere."""
    found = np.full(shape, otherwise, dtype=values.dtype)
    found[at] = values
    return found


def crop_grid(box: PlanGrid, mask: Array) -> tuple[PlanGrid, Any]:
    """The least box that holds what `mask` asks for, and where it lies in `mask`; one choice of recompute stands for
    all."""
    one = mask.shape[3] == 1
    kept = {
        name: np.flatnonzero(mask.any(axis=_other_axes(axis, mask.ndim))) for axis, name in enumerate(CHOICE_FIELDS)
    }
    part = box.part(**{name: at for name, at in kept.items() if not (one and name == "recompute")})
    return part, np.ix_(*kept.values())


def _other_axes(axis: int, axes: int) -> tuple[int, ...]:
    return tuple(other for other in range(axes) if other != axis)
