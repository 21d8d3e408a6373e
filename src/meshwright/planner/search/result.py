"""Defines the data types of a search result: plans with their estimates, rejected plans with reasons, and the best plan
of every family."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from meshwright.core.codec import StrictModel, TranslatableText
from meshwright.spec.estimate import Estimate
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
