"""Defines the risk margin: the fraction by which an uncertain plan must be faster to rank before a certain plan.

A plan is uncertain if its memory is tight, or if it depends on a host link that is not profiled. The rate in the
catalog is that of a single active device. In real nodes the devices of one switch share the link, both directions slow
each other, and all devices share the memory of the host. From a quarter to a half of the rate remains (ZeRO-Infinity,
arXiv:2104.07857, section 3; NVIDIA/nvbandwidth#11, #53). `meshwright probe` measures the link with all devices at the
same time, and the update on the host. On a measured cluster, plans with offload have no risk margin for the link.
"""

from __future__ import annotations

from meshwright.spec.cluster import Cluster
from meshwright.spec.enums import Offload
from meshwright.spec.estimate import Estimate, FitStatus
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

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
