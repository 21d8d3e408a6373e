"""What one change of the cluster or the workload would bring: twice the memory, links twice as fast, twice the batch, devices twice as fast.

Each is a search of the changed job, so that the plan may change with it. What is compared is tokens per second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.search.near import fastest
from meshwright.spec.cluster import Cluster, NodeGroup
from meshwright.spec.job import Job

TIMES = 2.0


class Improvement(NamedTuple):
    """A change by its name, how many times as many tokens per second the best plan then does, and that plan."""

    name: str
    speed: float
    plan: str


def with_groups(cluster: Cluster, groups: Iterator[NodeGroup]) -> Cluster:
    return cluster.but(groups=tuple(groups))


def improved(job: Job) -> Iterator[tuple[str, Job]]:
    """The changed jobs by name. Changes that a cluster cannot feel are left out."""
    cluster, groups = job.cluster, job.cluster.groups
    more = (group.but(device=group.device.but(memory=group.device.memory * TIMES)) for group in groups)
    yield "memory", job.but(cluster=with_groups(cluster, more))
    rates = (
        group.but(device=group.device.but(peak={precision: rate * TIMES for precision, rate in group.device.peak.items()}))
        for group in groups
    )
    yield "compute", job.but(cluster=with_groups(cluster, rates))
    if any(group.devices > 1 for group in groups):
        near = (group.but(link=group.link.but(bandwidth=group.link.bandwidth * TIMES)) for group in groups)
        yield "links", job.but(cluster=with_groups(cluster, near))
    if sum(group.nodes for group in groups) > 1:
        yield "network", job.but(cluster=cluster.but(network=cluster.network.but(bandwidth=cluster.network.bandwidth * TIMES)))
    yield "batch", job.but(workload=job.workload.but(batch=int(job.workload.batch * TIMES)))


def improvements(job: Job, step: float, runnable: bool = False) -> tuple[Improvement, ...]:
    """Every single change of a job whose best plan takes `step` seconds, the best first."""
    found = []
    for name, changed in improved(job):
        best = fastest(changed, runnable)
        if best is not None:
            found.append(Improvement(name, step / best.seconds * (changed.workload.batch / job.workload.batch), best.plan.name))
    return tuple(sorted(found, key=lambda it: -it.speed))
