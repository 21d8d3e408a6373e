"""Another number of ranks: the plan for what is there, and the number that someone asks for.

Rule: the search that chose the first plan chooses again, among plans that run, for the same job on so many devices; no
pins, which were made
for another number. Where nothing fits or divides, the next smaller number is tried. For less memory it is the fastest
of those plans that the
estimate gives at most LESS of what the one before takes. Batch, order of samples and learning rate are the
workload's and do not change. RUN/ranks holds the number that someone asks for: `echo 3 > RUN/ranks` while it trains.
Planning has a
deadline: the run stands meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.core import storage
from meshwright.core.errors import InputError, NothingFits
from meshwright.planner.cost.step import estimate
from meshwright.planner.search.rank import search_plans
from meshwright.spec.cluster import NodeGroup
from meshwright.spec.constraints import diloco_violations
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan
from meshwright.spec.workload import Workload

RANKS_FILE = "ranks"
MAX_MEMORY_FRACTION = 0.8
"""Of the memory of a plan that was too large: what a leaner one may take by the estimate."""

MAX_RANKS_FILE_BYTES = 12
"""Bytes of RUN/ranks that are read."""

PLANNING_SECONDS = 60.0
"""Seconds after which no further number of ranks is tried."""

MAX_CANDIDATE_PLANS = 1000
"""Plans, the fastest ones, that a leaner one is looked for among."""


def plan_for_devices(
    job: Job | None, workload: Workload, devices: int, clock: Callable[[], float] = time.monotonic
) -> tuple[Job | None, Plan]:
    """The job on at most `devices` devices of its first kind of node, and the best plan for it. Without a `job`, which
    only a model that
    cannot be priced lacks, data parallelism for `workload`. Raises NothingFits when there is none."""
    began = clock()
    for count in range(devices, 0, -1):
        if clock() > began + PLANNING_SECONDS:
            raise NothingFits(
                f"no plan for {count + 1} to {devices} ranks was found in {PLANNING_SECONDS:.0f} s: ask for fewer"
            )
        if job is None:
            plan = Plan(dp_replicate=count, micro_batch=max(workload.exact, 1))
            if workload.batch % (count * plan.micro_batch) == 0 and not any(diloco_violations(plan, workload.local)):
                return None, plan
            continue
        fewer = job.cluster.but(
            name=f"{job.cluster.name.partition(':')[0]}:{count}", groups=(resize_group(job.cluster.groups[0], count),)
        )
        question = job.but(cluster=fewer, pins=job.workload.fixed)
        try:
            return question, search_plans(question, 1, runnable=True).chosen.plan
        except (NothingFits, InputError):
            continue
    raise NothingFits(f"no plan runs on {devices} or fewer ranks: the run cannot go on with them")


def resize_group(group: NodeGroup, count: int) -> NodeGroup:
    """`count` devices like those of `group`: in one node, in whole nodes, else each with its part of a node for itself,
    so that no link is taken for
    a faster one than it is.

    >>> from meshwright.planner.inputs.clusters import parse_cluster
    >>> pair = parse_cluster("2x2:cpu").groups[0]
    >>> [(found.nodes, found.devices) for found in (resize_group(pair, 2), resize_group(pair, 4), resize_group(pair, 3))]
    [(1, 2), (2, 2), (3, 1)]
    """
    if count <= group.devices:
        return group.but(nodes=1, devices=count)
    if count % group.devices == 0:
        return group.but(nodes=count // group.devices)
    share = 1.0 / group.devices
    parts = {name: getattr(group, name) * share for name in ("host_memory", "storage_bandwidth", "host_update")}
    return group.but(nodes=count, devices=1, **parts)


def lower_memory_plan(job: Job | None, plan: Plan) -> Plan:
    """The fastest plan for the same devices that takes at most LESS of the memory of `plan`. Raises NothingFits when
    there is none."""
    if job is not None:
        most = MAX_MEMORY_FRACTION * estimate(job, plan).memory.total
        question = job.but(pins=job.workload.fixed)
        for entry in search_plans(question, MAX_CANDIDATE_PLANS, runnable=True).plans:
            if entry.plan.world == plan.world and entry.estimate.memory.total <= most:
                return entry.plan
    raise NothingFits(f"no plan for {plan.world} ranks takes less memory than {plan.name}")


@dataclass
class RankCountRequest:
    """What RUN/ranks asks for. Whatever else stands there is one line and changes nothing."""

    folder: Path
    note: Callable[[str], None]
    full: int
    """The ranks that the run was planned for."""
    _said: str = ""

    def __call__(self, places: int | None) -> int | None:
        """The number of ranks that is asked for, once: the file is gone then. None where nobody asks, or for more than
        there may be: `places` on
        several machines, one on each core of this machine, or what the run was planned for."""
        most = max(self.full, len(os.sched_getaffinity(0)) if places is None else places)
        path = self.folder / RANKS_FILE
        try:
            content = storage.read_file(path, most=MAX_RANKS_FILE_BYTES).strip()
            if not content:
                return None  # it is being written
            storage.remove(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._say(f"the number of ranks that is asked for cannot be read: {storage.describe_failure(error)}")
            return None
        text = content.decode("ascii", errors="backslashreplace")
        wanted = int(text) if text.isdigit() and len(text) < MAX_RANKS_FILE_BYTES else 0
        if not 1 <= wanted <= most:
            self._say(f"{path} asks for {text!r} ranks: a number from 1 to {most} is wanted here; goes on as before")
            return None
        self._said = ""
        return wanted

    def _say(self, line: str) -> None:
        """Says the line once, however often the file is looked at."""
        if line != self._said:
            self.note(line)
        self._said = line
