"""What one change of the cluster or the workload would bring: twice the memory, links twice as fast, twice the batch, devices twice as fast, fewer
bytes between nodes.

Each is a search of the changed job, so that the plan may change with it. What is compared is tokens per second.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from meshwright.search.near import fastest
from meshwright.spec.cluster import Cluster, NodeGroup
from meshwright.spec.compression import Compression
from meshwright.spec.job import Job
from meshwright.spec.local import Local
from meshwright.spec.plan import Plan

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
        yield from _fewer_bytes(job)
    yield "batch", job.but(workload=job.workload.but(batch=int(job.workload.batch * TIMES)))


def _fewer_bytes(job: Job) -> Iterator[tuple[str, Job]]:
    """What changes the result, so that nobody gets it who did not ask: the same batch with less on the wires between nodes."""
    work, nodes = job.workload, sum(group.nodes for group in job.cluster.groups)
    if work.compression is None and not work.exact and work.precision != "fp16":
        for kind in ("bf16",) * (work.recipe.gradient_size > 2) + ("int8", "low-rank"):
            yield kind, job.but(workload=work.but(compression=Compression(kind=kind)))  # type: ignore[arg-type]
    if work.local is None and not work.exact and work.batch % nodes == 0 and not {"dp", "dp_replicate", "ep"} & job.pins.keys():
        apart = work.but(local=Local(replicas=nodes))
        yield "local", job.but(workload=apart, pins={**job.pins, **apart.fixed})


def improvements(job: Job, step: float, runnable: bool = False, chosen: Plan | None = None) -> tuple[Improvement, ...]:
    """Every single change of a job whose best plan, `chosen` where it is known, takes `step` seconds, the best first."""
    found = []
    for name, changed in improved(job):
        best = fastest(changed, runnable, chosen if changed.pins == job.pins else None)
        if best is not None:
            found.append(Improvement(name, step / best.seconds * (changed.workload.batch / job.workload.batch), best.plan.name))
    return tuple(sorted(found, key=lambda it: -it.speed))
