"""Defines the result of a search, and collects its best plans.

`SearchResult` defines the data types of a search result: plans with their estimates, rejected plans with reasons, and
the best plan of every family.

`required_gain` defines the risk margin: the fraction by which an uncertain plan must be faster to rank before a certain
plan.

A plan is uncertain if its memory is tight, or if it depends on a host link that is not profiled. The rate in the
catalog is that of a single active device. In real nodes the devices of one switch share the link, both directions slow
each other, and all devices share the memory of the host. From a quarter to a half of the rate remains (ZeRO-Infinity,
arXiv:2104.07857, section 3; NVIDIA/nvbandwidth#11, #53). `meshwright probe` measures the link with all devices at the
same time, and the update on the host. On a measured cluster, plans with offload have no risk margin for the link.

`TopK` collects the best plans of a search, overall and of each family. branch_and_bound.py decides for which plans the
cost is computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field

from meshwright.core.codec import StrictModel, TranslatableText
from meshwright.planner.cost.plan_grid import Array, PlanGrid
from meshwright.spec.cluster import Cluster
from meshwright.spec.enums import MESH_AXES, Offload
from meshwright.spec.estimate import Estimate, FitStatus
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan


class SearchObjective(StrEnum):
    """The objective by which plans are ranked."""

    fastest = "fastest"
    """The shortest step on all devices."""
    fewest = "fewest"
    """The fewest devices on which a plan fits (whole nodes in a cluster of several nodes); then the shortest step."""
    cheapest = "cheapest"
    """The lowest price of a step, on any number of nodes."""
    headroom = "headroom"
    """The lowest memory on the rank with the highest peak, without offload."""


class RankedPlan(StrictModel):
    """A plan and its estimate."""

    plan: Plan
    estimate: Estimate
    runs: bool = Field(default=True, description="whether this version can run the plan; otherwise it is plan-only")

    @property
    def name(self) -> str:
        """Returns the name of the plan."""
        return self.plan.name


class PlanRejection(StrictModel):
    """The plans that break one rule, or do not fit."""

    reason: str
    count: int
    example: TranslatableText = Field(description="description of one rejected plan")


class PlanFamily(StrictModel):
    """The plans of one kind, such as 'tensor' or 'ZeRO-3'. `plan` is the best plan that fits, or else the plan that is
    nearest to fitting."""

    name: str
    plan: Plan
    fits: bool
    seconds: float = Field(description="seconds per step of `plan`")
    reserved: float = Field(description="bytes of memory reserved on the peak rank of `plan`")


class SearchResult(StrictModel):
    """The result of a search. `plans` are the best plans that fit, sorted by time; at equal time the simpler plan comes
    first."""

    plans: tuple[RankedPlan, ...] = Field(min_length=1)
    families: tuple[PlanFamily, ...] = ()
    considered: int = Field(description="number of plans in the search space, including invalid plans")
    rejected: tuple[PlanRejection, ...] = ()
    seconds: float = Field(description="seconds of the search")
    devices: int = Field(
        default=0,
        description=(
            "number of devices that the plans use; objectives fewest and cheapest may use fewer than the job has"
        ),
    )

    @property
    def chosen(self) -> RankedPlan:
        """Returns the best plan."""
        return self.plans[0]


RISK_MARGIN = 0.05
"""An uncertain plan ranks before a certain plan only if it is faster by more than this fraction, for each of the two
reasons."""


def uses_unmeasured_link(cluster: Cluster, offload: tuple[Offload, ...]) -> bool:
    """Returns whether a plan with the offload choice `offload` uses a host link that was not measured. CPU ranks have
    no host link."""
    return bool(offload) and cluster.host_bandwidth > 0 and not all(group.host_update for group in cluster.groups)


def count_risks(job: Job, plan: Plan, priced: Estimate) -> int:
    """Returns the number of reasons why a plan is uncertain."""
    return (priced.verdict == FitStatus.tight) + uses_unmeasured_link(job.cluster, plan.offload)


def risk_adjusted_seconds(job: Job, plan: Plan, priced: Estimate) -> float:
    """Returns the seconds of a step, raised by RISK_MARGIN for each reason why the plan is uncertain."""
    return priced.over(job.workload.steps) * (1.0 + RISK_MARGIN) ** count_risks(job, plan, priced)


def required_gain(job: Job, chosen: tuple[Plan, Estimate], other: tuple[Plan, Estimate]) -> float:
    """Returns the fraction by which `other` must be faster than `chosen` to come first.

    The result is 0 unless `other` is faster but ranks lower because of the risk margin.
    """
    more = count_risks(job, *other) - count_risks(job, *chosen)
    faster = other[1].over(job.workload.steps) < chosen[1].over(job.workload.steps)
    return (
        (1.0 + RISK_MARGIN) ** more - 1.0
        if faster and more > 0 and risk_adjusted_seconds(job, *chosen) <= risk_adjusted_seconds(job, *other)
        else 0.0
    )


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
