"""Collects the best plans of a search, overall and of each family. branch_and_bound.py decides for which plans the cost
is computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from meshwright.planner.cost.plan_grid import Array, PlanGrid
from meshwright.spec.enums import MESH_AXES
from meshwright.spec.plan import Plan

SCORE_TOLERANCE = 1e-9
"""Relative tolerance of scores. Different orders of summation change a score by less than this."""


@dataclass(eq=False)
class PlanCandidate:
    """A plan of a grid with its cost. Candidates are ordered by score; at equal score, the simpler plan comes first."""

    box: PlanGrid
    index: tuple[int, ...]
    seconds: float
    reserved: float
    tight: bool = False
    score: float = 0.0

    @cached_property
    def plan(self) -> Plan:
        """Returns the plan."""
        return self.box.plan(self.index)

    @property
    def key(self) -> tuple[float, PlanCandidate]:
        """Returns the sort key. Plans are built only if scores are equal."""
        return round_score(self.score), self

    def __lt__(self, other: PlanCandidate) -> bool:
        return simplicity_key(self.plan) < simplicity_key(other.plan)

    @property
    def grid(self) -> PlanGrid:
        """Returns the grid with only this plan."""
        return self.box.only(self.index)


def round_score(score: float) -> float:
    """Rounds a score to the digits in which scores are compared. The order of summation may change further digits."""
    return float(f"{score:.9e}")


def simplicity_key(plan: Plan) -> tuple[Any, ...]:
    """Returns a sort key by which simpler plans come first. No two plans have equal keys."""
    return (
        sum(degree > 1 for degree in (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep)),
        len(plan.offload),
        plan.zero,
        plan.recompute != "none",
        plan.recompute_layers,
        plan.sequence_parallel,
        plan.layers_per_stage != (),
        plan.axes != MESH_AXES,
        plan.schedule_rules.preference,
        plan.virtual_stages,
        plan.pp,
        plan.tp,
        plan.cp,
        plan.ep,
        plan.dp_shard,
        plan.micro_batch,
        plan.recompute,
        plan.offload,
        plan.context,
        plan.axes,
        plan.layers_per_stage,
    )


class PricedGrid(NamedTuple):
    """The cost of a grid over the axes `obsczf` of GRID_AXES: score, seconds, reserved bytes, and whether memory is
    tight. The score is infinite for plans that do not fit or are not legal. The bytes (`room`) are infinite for plans
    that are not legal, were pruned, or lack host memory for their offload."""

    score: Array
    seconds: Array
    taken: Array
    tight: Array
    room: Array

    @property
    def roomy(self) -> Array:
        """Returns which plans fit with a margin."""
        return np.isfinite(self.score) & ~self.tight

    @property
    def may_fit(self) -> Array:
        """Returns which plans fit or were not checked."""
        return np.isfinite(self.score) | ~np.isfinite(self.taken)

    def part(self, at: Any) -> PricedGrid:
        """Returns the cost of the plans at the indices `at`."""
        return PricedGrid(*(table[at] for table in self))

    def candidate(self, box: PlanGrid, at: int) -> PlanCandidate:
        """Returns the plan at flat index `at` with its cost."""
        index = tuple(map(int, np.unravel_index(at, self.score.shape)))
        return PlanCandidate(
            box,
            index,
            float(self.seconds[index]),
            float(self.taken[index]),
            bool(self.tight[index]),
            float(self.score[index]),
        )


@dataclass
class TopK:
    """The best plans so far, and the best plan of each family. If no plan of a family fits, its nearest plan is
    stored."""

    top: int
    ceiling: float = np.inf
    by_family: bool = True
    best: list[PlanCandidate] = field(default_factory=list)
    families: dict[str, PlanCandidate] = field(default_factory=dict)
    nearest: dict[str, PlanCandidate] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        """Returns the score above which a plan is not among the best plans."""
        return min(self.best[-1].score if len(self.best) == self.top else np.inf, self.ceiling) * (1 + SCORE_TOLERANCE)

    @property
    def record(self) -> float:
        """Returns the score above which a plan is not the best plan."""
        return min(self.best[0].score if self.best else np.inf, self.ceiling) * (1 + SCORE_TOLERANCE)

    def bound(self, box: PlanGrid) -> Array:
        """Returns, over axes (b) of GRID_AXES, the score above which no plan of `box` changes the results. Families in
        which no plan fits are ignored."""
        bound = np.full(len(box.micro_batches), self.limit)
        for name, rows, _ in family_slices(box) if self.by_family else ():
            if name in self.families:
                bound[rows] = np.maximum(bound[rows], self.families[name].score * (1 + SCORE_TOLERANCE))
        return bound

    def wanting(self, box: PlanGrid) -> Array:
        """Returns, over axes (b) of GRID_AXES, whether a family with plans in `box` has no plan that fits so far."""
        wanting = np.zeros(len(box.micro_batches), dtype=bool)
        for name, rows, _ in family_slices(box) if self.by_family else ():
            wanting[rows] |= name not in self.families
        return wanting

    def take(self, box: PlanGrid, priced: PricedGrid, with_families: bool = True) -> None:
        """Adds the best plans of a grid to the results."""
        flat = priced.score.reshape(-1)
        limit = self.limit
        if flat.size > self.top:
            limit = min(limit, np.partition(flat, self.top - 1)[self.top - 1] * (1 + SCORE_TOLERANCE))
        chosen = np.flatnonzero((flat <= limit) & np.isfinite(flat))
        if chosen.size:
            self.best += [priced.candidate(box, int(at)) for at in chosen]
            self.best = sorted(self.best, key=lambda candidate: candidate.key)[: self.top]
        for name, rows, part in family_slices(box) if with_families and self.by_family else ():
            self._family(name, box, rows, part, priced)

    def _family(self, name: str, box: PlanGrid, rows: Array, part: Array, priced: PricedGrid) -> None:
        for table, found in ((priced.score, self.families), (priced.taken, self.nearest)):
            values = table[:, rows][:, :, :, :, part]
            at = np.unravel_index(int(values.argmin()), values.shape)
            if np.isfinite(values[at]) and not (
                name in found and _candidate_value(found[name], found is self.families) <= values[at]
            ):
                index = (int(at[0]), int(rows[at[1]]), int(at[2]), int(at[3]), int(part[at[4]]), int(at[5]))
                found[name] = priced.candidate(box, int(np.ravel_multi_index(index, table.shape)))


def _candidate_value(candidate: PlanCandidate, by_score: bool) -> float:
    return candidate.score if by_score else candidate.reserved


def family_slices(box: PlanGrid) -> list[tuple[str, Array, Array]]:
    """Returns the families in a grid. Each item: the name, and the indices along b and z of the family's choices."""
    shards, no_context = np.arange(len(box.shards)), box.contexts == 1
    if box.layout.ep > 1:
        return [("expert", np.arange(len(no_context)), shards)]
    found = [] if no_context.all() else [("context", np.flatnonzero(~no_context), shards)]
    axes = [name for name, degree in (("tensor", box.tp), ("pipeline", box.pp)) if degree > 1]
    zero = box.zero.reshape(-1)
    for stage in sorted(set(zero.tolist())) if no_context.any() else ():
        found.append((_family_label(axes, stage, box.data), np.flatnonzero(no_context), np.flatnonzero(zero == stage)))
    return found


def plan_family(plan: Plan) -> str:
    """Returns the family of one plan.

    >>> from meshwright.spec.plan import parse_plan
    >>> plan_family(parse_plan("dp4.tp2.z1")), plan_family(parse_plan("dp2.cp2"))
    ('tensor + ZeRO-1', 'context')
    """
    if plan.ep > 1 or plan.cp > 1:
        return "expert" if plan.ep > 1 else "context"
    return _family_label(
        [name for name, degree in (("tensor", plan.tp), ("pipeline", plan.pp)) if degree > 1], plan.zero, plan.dp
    )


def _family_label(axes: list[str], zero: int, data: int) -> str:
    parts = [f"ZeRO-{zero}" if zero else "data"] if data > 1 or zero else []
    return " + ".join([*axes, *parts]) or "one device"
