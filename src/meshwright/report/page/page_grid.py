"""The settings that a page can show: a few values of devices, batch, sequence and memory a device around those of the
job; where the cluster has
a budget, of the budget in place of the memory.

Stops double and halve. One is left out where it is no whole number, where the model has no such positions, or where the
cluster is not written
as `NODESxDEVICES:device` and so has no other sizes.

Answers for every setting of a page: each is a search of its own, so that the page shows what `plan` prints for the same
setting.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from math import inf
from multiprocessing import active_children, get_context
from typing import NamedTuple

import numpy as np

from meshwright.core.errors import InputError
from meshwright.core.signals import blocked_stop_signals
from meshwright.planner.cost.constants import USABLE_MEMORY_FRACTION
from meshwright.planner.cost.memory import memory_limit, physical_limit, reserved_bytes
from meshwright.planner.cost.step import estimate
from meshwright.planner.inputs.clusters import read_cluster
from meshwright.planner.search.branch_and_bound import PlanSearch, search_top_plans
from meshwright.planner.search.rank import rank_plans
from meshwright.planner.search.result import PlanFamily, RankedPlan, SearchObjective
from meshwright.spec.cluster import Cluster
from meshwright.spec.estimate import Estimate, FitStatus
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

GIB = 2.0**30
DEVICE_MEMORY_SIZES = tuple(GIB * size for size in (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 144, 192, 256))
"""Memory of a device."""

GRID_SHAPES = ((3, 3, 3, 5), (3, 3, 2, 5), (3, 3, 2, 3), (3, 2, 2, 3), (2, 2, 2, 3), (2, 2, 1, 3), (2, 2, 1, 1))
"""Stops of devices, batch, sequence and memory, the finest grid first."""
GRID_BUDGET_SECONDS = 4.0
"""Seconds that a grid should take."""

GridShape = tuple[int, int, int, int]


class PageAxes(NamedTuple):
    """Stops of each slider in ascending order, and the stop of the job. Each cluster has its own memory and budget."""

    clusters: tuple[Cluster, ...]
    batches: tuple[int, ...]
    sequences: tuple[int, ...]
    memories: tuple[float, ...]
    here: tuple[int, int, int, int]

    @property
    def size(self) -> int:
        """Settings of all sliders."""
        return math.prod(map(len, self[:4]))


def page_axes(question: Job, shape: GridShape) -> PageAxes:
    """Stops around `question`; no sequence is longer than the model has positions for."""
    work, memory, longest = question.workload, cluster_memory_limit(question.cluster), question.model.context
    clusters = cluster_sizes(question.cluster, shape[0])
    batches = halves_and_doubles(work.batch, shape[1])
    sequences = tuple(size for size in halves_and_doubles(work.sequence, shape[2]) if not longest or size <= longest)
    memories = memory_limits(question.cluster, shape[3])
    here = ([cluster.devices for cluster in clusters].index(question.cluster.devices), batches.index(work.batch))
    return PageAxes(
        clusters, batches, sequences, memories, (*here, sequences.index(work.sequence), memories.index(memory))
    )


def cluster_memory_limit(cluster: Cluster) -> float:
    """What the slider of memory moves: the budget, where there is one, else the memory of a device."""
    return cluster.budget or cluster.memory


def with_memory_limit(cluster: Cluster, limit: float) -> Cluster:
    """The same with another limit of that kind."""
    return (
        cluster
        if limit == cluster_memory_limit(cluster)
        else cluster.but(budget=limit)
        if cluster.budget
        else cluster.with_memory(limit)
    )


def memory_limits(cluster: Cluster, count: int) -> tuple[float, ...]:
    """Returns memory limits around that of `cluster`. No budget exceeds the memory; heterogeneous devices keep
    theirs."""
    own = cluster_memory_limit(cluster)
    around = (
        neighbouring_memory_sizes(own, count) if len({group.device.memory for group in cluster.groups}) == 1 else (own,)
    )
    return tuple(size for size in around if not cluster.budget or size <= max(own, cluster.memory))


def grid_shape_for(seconds: float) -> GridShape:
    """As many stops as there is time for when a search takes `seconds`.


    >>> grid_shape_for(0.04), grid_shape_for(0.2), grid_shape_for(9.0)
    ((3, 3, 2, 5), (2, 2, 1, 3), (2, 2, 1, 1))
    """
    return next((shape for shape in GRID_SHAPES if math.prod(shape) * seconds <= GRID_BUDGET_SECONDS), GRID_SHAPES[-1])


def halves_and_doubles(value: int, count: int) -> tuple[int, ...]:
    """
    >>> halves_and_doubles(12, 5), halves_and_doubles(7, 3), halves_and_doubles(8, 2)
    ((3, 6, 12, 24, 48), (7, 14), (8, 16))
    """
    below, above = (count - 1) // 2, count // 2
    smaller = [value // 2**step for step in range(below, 0, -1) if value % 2**step == 0]
    return (*smaller, *(value * 2**step for step in range(above + 1)))


def neighbouring_memory_sizes(memory: float, count: int) -> tuple[float, ...]:
    """As many sold sizes as `count` says, with `memory` in their middle.

    >>> [round(size / GIB) for size in neighbouring_memory_sizes(80 * GIB, 5)]
    [48, 64, 80, 96, 128]
    """
    smaller, larger = (
        [size for size in DEVICE_MEMORY_SIZES if size < memory],
        [size for size in DEVICE_MEMORY_SIZES if size > memory],
    )
    return (*smaller[max(len(smaller) - (count - 1) // 2, 0) :], memory, *larger[: count // 2])


def cluster_sizes(cluster: Cluster, count: int) -> tuple[Cluster, ...]:
    """`cluster` and its halves and doubles, as far as its name says how to write them."""
    below, above = (count - 1) // 2, count // 2
    found = [other for step in range(-below, above + 1) if step for other in resize_cluster(cluster, step)]
    return tuple(sorted([cluster, *found], key=lambda each: each.devices))


def resize_cluster(cluster: Cluster, step: int) -> Iterator[Cluster]:
    """The cluster with 2**step times its nodes; where that is less than one, nodes with fewer devices. Nothing where it
    cannot be written."""

    def other(match: re.Match[str]) -> str:
        nodes, devices = int(match[1]), int(match[2])
        for _ in range(-step):
            nodes, devices = (nodes // 2, devices) if nodes % 2 == 0 else (nodes, devices / 2 if nodes == 1 else 0)  # type: ignore[assignment]
        if step > 0:
            nodes *= 2**step
        return f"{nodes}x{devices:g}:"

    text = re.sub(r"(?<![\w.])(\d+)x(\d+):", other, cluster.name)
    try:
        if text != cluster.name and read_cluster(cluster.name) == cluster.but(budget=0.0):
            yield read_cluster(text).but(budget=cluster.budget)
    except InputError:
        return


MAX_PLANS_PER_POINT = 8
"""Plans of a setting."""


class PricedPlan(NamedTuple):
    """A plan with what does not depend on the memory of a device: its estimate, and the bytes that are safe for it.

    Over heterogeneous groups it also has the usable memory of each pipeline rank.
    """

    plan: Plan
    estimate: Estimate
    safe: float
    limits: tuple[float, ...] = ()


class GridResult(NamedTuple):
    """What is true under one memory or budget: bytes that a rank can take, those that its device has, the plans that
    fit, best first, the best or
    nearest of each family, and the others by reason, with their number and an example."""

    limit: float
    ample: float
    ranked: tuple[PricedPlan, ...]
    families: tuple[tuple[str, PricedPlan], ...]
    rejected: tuple[tuple[str, int, str], ...]

    def verdict(self, priced: PricedPlan) -> FitStatus:
        """Returns whether the plan fits: the budget limits expected bytes, the device limits safe bytes.

        Over heterogeneous groups each rank has its own limit, so such a page has one memory.
        """
        if priced.limits:
            return priced.estimate.verdict
        if priced.estimate.memory.reserved > self.limit or priced.estimate.crowded:
            return FitStatus.no
        return FitStatus.fits if priced.safe <= self.ample else FitStatus.tight


class GridPoint(NamedTuple):
    """One cluster, batch and sequence: a standing for each memory. `error` says why there is none."""

    job: Job
    standings: tuple[GridResult, ...]
    considered: int
    error: str = ""


class PageGrid(NamedTuple):
    """`points` by cluster, batch and sequence, the last fastest."""

    job: Job
    axes: PageAxes
    objective: SearchObjective
    points: tuple[GridPoint, ...]

    @property
    def base(self) -> GridPoint:
        """The question itself."""
        cluster, batch, sequence, _ = self.axes.here
        return self.points[(cluster * len(self.axes.batches) + batch) * len(self.axes.sequences) + sequence]


def search_page_grid(
    question: Job,
    axes: PageAxes,
    objective: SearchObjective = SearchObjective.fastest,
    runnable: bool = False,
    workers: int = 1,
) -> PageGrid:
    """Every point, searched by so many processes; objectives are those for all devices."""
    jobs = [
        question.but(cluster=cluster, workload=question.workload.but(batch=batch, sequence=sequence))
        for cluster, batch, sequence in product(axes.clusters, axes.batches, axes.sequences)
    ]
    if workers == 1:
        return PageGrid(
            question, axes, objective, tuple(search_point(job, axes.memories, objective, runnable) for job in jobs)
        )
    others = active_children()
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn")) as pool:
        try:
            with (
                blocked_stop_signals()
            ):  # not `map`, which cancels pending futures at exit: a pool whose processes have died fails on that
                found = [pool.submit(search_point, job, axes.memories, objective, runnable) for job in jobs]
            return PageGrid(question, axes, objective, tuple(each.result() for each in found))
        except BaseException:
            for process in set(active_children()).difference(others):  # else each would end what it has begun
                process.kill()
            raise


def search_point(
    job: Job, memories: tuple[float, ...], objective: SearchObjective = SearchObjective.fastest, runnable: bool = False
) -> GridPoint:
    """The standings of one job."""
    prices: dict[Plan, PricedPlan] = {}
    standings, considered = [], 0
    for memory in memories:
        limited = job.but(cluster=with_memory_limit(job.cluster, memory))
        try:
            found = search_top_plans(limited, MAX_PLANS_PER_POINT, objective, runnable)
            entries, families = rank_plans(limited, found, MAX_PLANS_PER_POINT, objective, runnable)
        except InputError as error:
            return GridPoint(job, (), 0, str(error))
        standings.append(grid_result(limited, found, entries, families, prices))
        considered = found.space.considered
    return GridPoint(job, tuple(standings), considered)


def grid_result(
    job: Job,
    found: PlanSearch,
    entries: Sequence[RankedPlan],
    families: Sequence[PlanFamily],
    prices: dict[Plan, PricedPlan],
) -> GridResult:
    """What one search found; `prices` are remembered from search to search."""

    def price(plan: Plan, known: Estimate | None = None) -> PricedPlan:
        if plan not in prices:
            priced = known or estimate(job, plan)
            _, safe = reserved_bytes(found.pricer.setting, np.array(priced.memory.total))
            prices[plan] = PricedPlan(plan, priced, float(safe), rank_memory_limits(job, plan, priced))
        return prices[plan]

    ranked = tuple(price(entry.plan, entry.estimate) for entry in entries)
    kin = tuple((family.name, price(family.plan)) for family in families)
    rejected = tuple((reason, it.count, it.example) for reason, it in found.space.rejected.items())
    return GridResult(memory_limit(found.pricer.setting), physical_limit(found.pricer.setting), ranked, kin, rejected)


def rank_memory_limits(job: Job, plan: Plan, priced: Estimate) -> tuple[float, ...]:
    """Returns the usable memory of each pipeline rank over heterogeneous groups. For a stage with different replicas
    it is that of the peak rank."""
    if plan.placement:
        return tuple(
            min(job.cluster.groups[group].device.memory * USABLE_MEMORY_FRACTION, job.cluster.budget or inf)
            for group in plan.placement
        )
    return (priced.limit,) * plan.pp if plan.shares or plan.micro_batch_sizes or plan.shard_weights else ()
