"""Another number of ranks: the plan for what is there, and the number that someone asks for.

Rule: the search that chose the first plan chooses again, among plans that run, for the same job on so many devices; no pins, which were made
for another number. Where nothing fits or divides, the next smaller number is tried. For less memory it is the fastest of those plans that the
estimate gives at most LESS of what the one before takes. Batch, order of samples and learning rate are the
workload's and do not change. RUN/ranks holds the number that someone asks for: `echo 3 > RUN/ranks` while it trains.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.base.errors import InputError, NothingFits
from meshwright.cost.step import estimate
from meshwright.search.rank import search
from meshwright.spec.cluster import NodeGroup
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan
from meshwright.spec.rules import local_faults
from meshwright.spec.workload import Workload

RANKS = "ranks"
LESS = 0.8
"""Of the memory of a plan that was too large: what a leaner one may take by the estimate."""

AMONG = 1000
"""Plans, the fastest ones, that a leaner one is looked for among."""


def plan_for(job: Job | None, workload: Workload, devices: int) -> tuple[Job | None, Plan]:
    """The job on at most `devices` devices of its first kind of node, and the best plan for it. Without a `job`, which only a model that
    cannot be priced lacks, data parallelism for `workload`. Raises NothingFits when there is none."""
    for count in range(devices, 0, -1):
        if job is None:
            plan = Plan(dp_replicate=count, micro_batch=max(workload.exact, 1))
            if workload.batch % (count * plan.micro_batch) == 0 and not any(local_faults(plan, workload.local)):
                return None, plan
            continue
        fewer = job.cluster.but(name=f"{job.cluster.name.partition(':')[0]}:{count}", groups=(of(job.cluster.groups[0], count),))
        question = job.but(cluster=fewer, pins=job.workload.fixed)
        try:
            return question, search(question, 1, runnable=True).chosen.plan
        except (NothingFits, InputError):
            continue
    raise NothingFits(f"no plan runs on {devices} or fewer ranks: the run cannot go on with them")


def of(group: NodeGroup, count: int) -> NodeGroup:
    """`count` devices like those of `group`: in one node, in whole nodes, else each with its part of a node for itself, so that no link is taken for
    a faster one than it is.

    >>> from meshwright.intake.clusters import parse_cluster
    >>> pair = parse_cluster("2x2:cpu").groups[0]
    >>> [(found.nodes, found.devices) for found in (of(pair, 2), of(pair, 4), of(pair, 3))]
    [(1, 2), (2, 2), (3, 1)]
    """
    if count <= group.devices:
        return group.but(nodes=1, devices=count)
    if count % group.devices == 0:
        return group.but(nodes=count // group.devices)
    share = 1.0 / group.devices
    parts = {name: getattr(group, name) * share for name in ("host_memory", "storage_bandwidth", "host_update")}
    return group.but(nodes=count, devices=1, **parts)


def leaner(job: Job | None, plan: Plan) -> Plan:
    """The fastest plan for the same devices that takes at most LESS of the memory of `plan`. Raises NothingFits when there is none."""
    if job is not None:
        most = LESS * estimate(job, plan).memory.total
        question = job.but(pins=job.workload.fixed)
        for entry in search(question, AMONG, runnable=True).plans:
            if entry.plan.world == plan.world and entry.estimate.memory.total <= most:
                return entry.plan
    raise NothingFits(f"no plan for {plan.world} ranks takes less memory than {plan.name}")


def asked(folder: Path) -> int | None:
    """The number of ranks that RUN/ranks asks for, once: the file is gone then. None where nobody asks."""
    try:
        text = (folder / RANKS).read_text().strip()
        if text:
            (folder / RANKS).unlink()
    except OSError:
        return None
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 and int(text) > 0 else None
