"""Data types of a search result: plans with their estimates, rejected plans with reasons, the best plan of every
family."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from meshwright.core.codec import StrictModel, TranslatableText
from meshwright.spec.estimate import Estimate
from meshwright.spec.plan import Plan


class SearchObjective(StrEnum):
    """What is wanted most."""

    fastest = "fastest"
    """The least time of a step on all devices."""
    fewest = "fewest"
    """The fewest devices on which a plan fits, whole nodes where there are several; then the fastest."""
    cheapest = "cheapest"
    """The least money a step, on any number of nodes."""
    headroom = "headroom"
    """The lowest memory of the peak rank, nothing offloaded."""


class RankedPlan(StrictModel):
    """A plan and its price."""

    plan: Plan
    estimate: Estimate
    runs: bool = Field(default=True, description="whether this version runs the plan; else it only plans it")

    @property
    def name(self) -> str:
        """Returns the name of the plan."""
        return self.plan.name


class PlanRejection(StrictModel):
    """Plans that broke one rule, or did not fit."""

    reason: str
    count: int
    example: TranslatableText = Field(description="the line for one of them")


class PlanFamily(StrictModel):
    """Plans of one kind, such as 'tensor' or 'ZeRO-3': the best of those that fit, else the nearest."""

    name: str
    plan: Plan
    fits: bool
    seconds: float = Field(description="of a step of `plan`")
    reserved: float = Field(description="bytes on its peak rank")


class SearchResult(StrictModel):
    """What a search found. `plans` fit and are ranked fastest first; at equal time the simpler plan comes first."""

    plans: tuple[RankedPlan, ...] = Field(min_length=1)
    families: tuple[PlanFamily, ...] = ()
    considered: int = Field(description="all plans of the space, legal or not")
    rejected: tuple[PlanRejection, ...] = ()
    seconds: float = Field(description="that the search took")
    devices: int = Field(default=0, description="that the plans use; fewer than the job has where fewer are wanted")

    @property
    def chosen(self) -> RankedPlan:
        """Returns the first plan."""
        return self.plans[0]
