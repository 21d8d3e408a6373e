"""By how much a plan must be faster than one that is certain to run as priced.

Not certain is a plan whose memory is tight, and one that leans on a link to the host that nobody has measured: what a
catalog says of such links is
of a device alone, and in nodes as they are the devices of one switch share them, both directions slow each other, and
the host's memory is shared
by all (a quarter to a half of the rate alone: ZeRO-Infinity, arXiv:2104.07857, section 3; NVIDIA/nvbandwidth#11, #53).
`probe` measures the link
with all devices at once, and the host's own update with it; a plan on a cluster that was probed stands by its time
alone.
"""

from __future__ import annotations

from meshwright.spec.cluster import Cluster
from meshwright.spec.enums import Offload
from meshwright.spec.estimate import Estimate, FitStatus
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

RISK_MARGIN = 0.05
"""A plan that is not certain stands before one that is only when it is faster by more than this share, for each of both
reasons."""


def uses_unmeasured_link(cluster: Cluster, offload: tuple[Offload, ...]) -> bool:
    """Whether a plan that offloads so is priced by a link to the host that was not measured. Of cores it is none."""
    return bool(offload) and cluster.host_bandwidth > 0 and not all(group.host_update for group in cluster.groups)


def count_risks(job: Job, plan: Plan, priced: Estimate) -> int:
    """For how many reasons it is not certain."""
    return (priced.verdict == FitStatus.tight) + uses_unmeasured_link(job.cluster, plan.offload)


def risk_adjusted_seconds(job: Job, plan: Plan, priced: Estimate) -> float:
    """Seconds of a step of the run, and TIGHT_GAIN more for each reason why the plan is not certain."""
    return priced.over(job.workload.steps) * (1.0 + RISK_MARGIN) ** count_risks(job, plan, priced)


def required_gain(job: Job, chosen: tuple[Plan, Estimate], other: tuple[Plan, Estimate]) -> float:
    """The share by which `other` would have to be faster than `chosen` to come first, where it is faster and that alone
    keeps it behind; else 0."""
    more = count_risks(job, *other) - count_risks(job, *chosen)
    faster = other[1].over(job.workload.steps) < chosen[1].over(job.workload.steps)
    return (
        (1.0 + RISK_MARGIN) ** more - 1.0
        if faster and more > 0 and risk_adjusted_seconds(job, *chosen) <= risk_adjusted_seconds(job, *other)
        else 0.0
    )
