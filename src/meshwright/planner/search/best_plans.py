"""Defines the result of a search, and collects the best plans during a search. All modules of planner/search use it.

`SearchResult` is the result for the user: the best plans with their estimates, rejected plans with reasons, and the
best plan of every family. A family contains the plans that combine the same kinds of parallelism, such as 'tensor +
ZeRO-1'.

The score of a plan is its step time, raised by RISK_MARGIN for each reason of uncertainty. A plan is uncertain if its
memory is tight, if it uses a host link that is not profiled, and for each of its features that no published run has
(planner/cost/uncertainty.py). Without the last reason, the search would prefer plans whose errors nobody has seen: the
best of many estimates is more often too low than too high. The host-link rate in the catalog is the rate while
only one device of the node transfers. When all devices transfer, the devices of one switch share the link, both
directions slow each other down, and all devices share the memory of the host. Each device then has only between a
quarter and a half of the catalog rate (ZeRO-Infinity, arXiv:2104.07857, section 3; NVIDIA/nvbandwidth#11, #53).
`meshwright probe` measures the link while all devices transfer, and the update on the host. On a measured cluster,
plans with offload have no risk margin for the link.

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
from meshwright.planner.cost.uncertainty import unmeasured_features
from meshwright.spec.cluster import Cluster
from meshwright.spec.enums import MESH_AXES, Offload
from meshwright.spec.estimate import Estimate, FitStatus
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan


class SearchObjective(StrEnum):
    """The objective by which a search ranks plans."""

    fastest = "fastest"
    """The shortest step on all devices."""
    fewest = "fewest"
    """The fewest devices on which a plan fits (whole nodes in a cluster of several nodes); then the shortest step."""
    cheapest = "cheapest"
    """The lowest price of a step, on any number of nodes."""
    energy = "energy"
    """The least energy of the devices in a step, on any number of nodes."""
    headroom = "headroom"
    """The lowest memory on the rank with the highest peak, without offload, and with one kind of recompute for all
    blocks of a stage."""


class RankedPlan(StrictModel):
    """A plan in the result of a search, with its estimate."""

    plan: Plan
    estimate: Estimate
    runs: bool = Field(default=True, description="whether this version can run the plan; otherwise it is plan-only")

    @property
    def name(self) -> str:
        """Returns the name of the plan."""
        return self.plan.name


class PlanRejection(StrictModel):
    """The number of plans that were rejected for one reason: a broken rule, missing memory, or a lower bound."""

    reason: str
    count: int
    example: TranslatableText = Field(description="description of one rejected plan")


class PlanFamily(StrictModel):
    """One plan of a family, such as 'tensor + ZeRO-1': the best plan that fits, or if none fits, the plan nearest to
    fitting."""

    name: str
    plan: Plan
    fits: bool
    seconds: float = Field(description="seconds per step of `plan`")
    reserved: float = Field(description="bytes of memory reserved on the peak rank of `plan`")


class SearchResult(StrictModel):
    """The result of a search. `plans` are the best plans that fit. The plans are sorted by score; if scores are equal,
    the simpler plan is first."""

    plans: tuple[RankedPlan, ...] = Field(min_length=1)
    families: tuple[PlanFamily, ...] = ()
    lowest_memory: PlanFamily | None = Field(
        default=None,
        description="the plan with the lowest memory of all families, if the search had no limit of the step time",
    )
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
"""Each reason of uncertainty raises the score of a plan by this fraction. A plan with one reason ranks before a plan
with none only if it is more than this fraction faster."""


def risk_factors(reasons: Array) -> Array:
    """Returns the factors by which `reasons`, numbers of reasons of uncertainty, raise the scores of plans."""
    counts = reasons.astype(int)
    return np.asarray(((1.0 + RISK_MARGIN) ** np.arange(counts.max() + 1))[counts])


def uses_unmeasured_link(cluster: Cluster, offload: tuple[Offload, ...]) -> bool:
    """Returns whether a plan with the offload choice `offload` uses a host link that was not profiled. Returns False
    without a host link, as for CPU ranks."""
    return bool(offload) and cluster.host_bandwidth > 0 and not all(group.host_update for group in cluster.groups)


def count_risks(job: Job, plan: Plan, priced: Estimate) -> int:
    """Returns the number of reasons why a plan with the estimate `priced` is uncertain."""
    return (
        (priced.verdict == FitStatus.tight)
        + uses_unmeasured_link(job.cluster, plan.offload)
        + len(unmeasured_features(job.cluster, plan))
    )


def risk_adjusted_seconds(job: Job, plan: Plan, priced: Estimate) -> float:
    """Returns the seconds of a step, raised by RISK_MARGIN for each reason why the plan is uncertain. The compile time
    divided by the number of steps is included."""
    return priced.over(job.workload.steps) * (1.0 + RISK_MARGIN) ** count_risks(job, plan, priced)


def required_gain(job: Job, chosen: tuple[Plan, Estimate], other: tuple[Plan, Estimate]) -> float:
    """Returns the fraction by which `other` must be faster than `chosen` to rank before `chosen`.

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
"""Relative tolerance of scores. Rounding errors, which depend on the order of summation, are below this fraction of a
score."""


@dataclass(eq=False)
class PlanCandidate:
    """The plan at `index` of the grid `box`, with its cost: seconds per step, reserved bytes on the peak rank, and
    score. Candidates are ordered by score; at equal score, the simpler plan is first."""

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
        """Returns the sort key. The second item of the key compares the plans, which are built only if scores are
        equal."""
        return round_score(self.score), self

    def __lt__(self, other: PlanCandidate) -> bool:
        return simplicity_key(self.plan) < simplicity_key(other.plan)

    @property
    def grid(self) -> PlanGrid:
        """Returns the grid with only this plan."""
        return self.box.only(self.index)


def round_score(score: float) -> float:
    """Rounds a score to ten significant digits for comparisons. Later digits depend on the order of summation."""
    return float(f"{score:.9e}")


def simplicity_key(plan: Plan) -> tuple[Any, ...]:
    """Returns a sort key by which simpler plans are first. Two plans of one grid never have equal keys."""
    return (
        sum(degree > 1 for degree in (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep)),
        len(plan.offload),
        plan.compile,
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
    """The cost of a grid over the axes `obsczf` of GRID_AXES: score, seconds, reserved bytes (`taken`), whether memory
    is tight, and whether the offloaded data fits in host memory (`room`). The score is infinite for plans that do not
    fit or are not legal. `taken` is infinite for plans that are not legal, were pruned, or offload more data than fits
    in host memory."""

    score: Array
    seconds: Array
    taken: Array
    tight: Array
    room: Array

    @property
    def roomy(self) -> Array:
        """Returns which plans fit with the safety margin."""
        return np.isfinite(self.score) & ~self.tight

    @property
    def may_fit(self) -> Array:
        """Returns which plans fit or may fit, because their memory was not computed."""
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
    """The best plans so far. `best` has at most `top` plans that fit. `families` has the best plan that fits of each
    family, `nearest` the plan with the lowest memory of each family. Plans with a score above `ceiling` are ignored.
    `by_family`: whether families are collected."""

    top: int
    ceiling: float = np.inf
    by_family: bool = True
    best: list[PlanCandidate] = field(default_factory=list)
    families: dict[str, PlanCandidate] = field(default_factory=dict)
    nearest: dict[str, PlanCandidate] = field(default_factory=dict)

    @property
    def limit(self) -> float:
        """Returns the score above which a plan cannot be among the `top` best plans."""
        return min(self.best[-1].score if len(self.best) == self.top else np.inf, self.ceiling) * (1 + SCORE_TOLERANCE)

    @property
    def record(self) -> float:
        """Returns the score above which a plan cannot be the best plan."""
        return min(self.best[0].score if self.best else np.inf, self.ceiling) * (1 + SCORE_TOLERANCE)

    def bound(self, box: PlanGrid) -> Array:
        """Returns, over axes (b, z) of GRID_AXES, the score above which no plan of `box` changes the results. Families
        without a plan that fits are ignored."""
        bound = np.full((len(box.micro_batches), len(box.shards)), self.limit)
        for name, rows, part in family_slices(box) if self.by_family else ():
            if name in self.families:
                at = np.ix_(rows, part)
                bound[at] = np.maximum(bound[at], self.families[name].score * (1 + SCORE_TOLERANCE))
        return bound

    def wanting(self, box: PlanGrid) -> Array:
        """Returns, over axes (b, z) of GRID_AXES, which plans of `box` are of a family in which no plan so far fits."""
        wanting = np.zeros((len(box.micro_batches), len(box.shards)), dtype=bool)
        for name, rows, part in family_slices(box) if self.by_family else ():
            wanting[np.ix_(rows, part)] = name not in self.families
        return wanting

    def take(self, box: PlanGrid, priced: PricedGrid, with_families: bool = True) -> None:
        """Adds the best plans of the grid `box` with the costs `priced`. `with_families`: whether to update the
        families too."""
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
    """Returns the families with plans in a grid, as triples: the name, and the indices of the family's plans along b
    and along z."""
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
    """Returns the name of the family of `plan`. Expert parallelism and context parallelism each form one family.

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
