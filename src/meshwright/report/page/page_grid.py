"""Searches plans for all settings that the page of `plan --page` can show. A setting combines a number of devices, a
batch size, a sequence length and a memory size per device. Each of these takes a few values around the job's own value.
If the cluster has a budget, the page varies the budget instead of the memory size.

Neighbouring values of devices, batch and sequence differ by a factor of 2. The memory sizes are those of common
devices. A value is omitted if it is not an integer, or if the sequence is longer than the number of positions of the
model. The number of devices varies only if the cluster is written as `NODESxDEVICES:device`.

Each setting is a separate search, so that the page shows the plans that `plan` prints for this setting.
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
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.planner.search.best_plans import PlanFamily, RankedPlan, SearchObjective
from meshwright.planner.search.branch_and_bound import PlanSearch, search_top_plans
from meshwright.planner.search.ranking import rank_plans
from meshwright.spec.cluster import Cluster
from meshwright.spec.estimate import Estimate, FitStatus
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

GIB = 2.0**30
DEVICE_MEMORY_SIZES = tuple(GIB * size for size in (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 144, 192, 256))
"""The memory sizes of devices that the slider offers, in bytes."""

GRID_SHAPES = ((3, 3, 3, 5), (3, 3, 2, 5), (3, 3, 2, 3), (3, 2, 2, 3), (2, 2, 2, 3), (2, 2, 1, 3), (2, 2, 1, 1))
"""How many values the sliders of devices, batch, sequence and memory have. Shapes with more settings come first."""
GRID_BUDGET_SECONDS = 4.0
"""Seconds that the searches of a grid should take at most."""

GridShape = tuple[int, int, int, int]


class PageAxes(NamedTuple):
    """The values of each slider in ascending order, and in `here` the indices of the job's values. `clusters` differ in
    the number of devices. All have the job's memory limit, which a search replaces by a value of `memories`."""

    clusters: tuple[Cluster, ...]
    batches: tuple[int, ...]
    sequences: tuple[int, ...]
    memories: tuple[float, ...]
    here: tuple[int, int, int, int]

    @property
    def size(self) -> int:
        """Returns the number of settings: the product of the numbers of values of all sliders."""
        return math.prod(map(len, self[:4]))


def page_axes(question: Job, shape: GridShape) -> PageAxes:
    """Returns the slider values around the values of the job `question`. `shape` has the maximum number of values of
    each slider. No sequence is longer than the number of positions of the model."""
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
    """Returns the value that the memory slider changes: the budget if there is one, otherwise the memory of a
    device."""
    return cluster.budget or cluster.memory


def with_memory_limit(cluster: Cluster, limit: float) -> Cluster:
    """Returns the cluster with `limit` as its budget, or as its memory per device if it has no budget."""
    return (
        cluster
        if limit == cluster_memory_limit(cluster)
        else cluster.but(budget=limit)
        if cluster.budget
        else cluster.with_memory(limit)
    )


def memory_limits(cluster: Cluster, count: int) -> tuple[float, ...]:
    """Returns up to `count` memory limits around the limit of `cluster`. Budgets above the memory of a device are
    omitted. If devices have unequal memory, only the cluster's own limit is returned."""
    own = cluster_memory_limit(cluster)
    around = (
        neighbouring_memory_sizes(own, count) if len({group.device.memory for group in cluster.groups}) == 1 else (own,)
    )
    return tuple(size for size in around if not cluster.budget or size <= max(own, cluster.memory))


def grid_shape_for(seconds: float) -> GridShape:
    """Returns the shape of the finest grid that can be searched in GRID_BUDGET_SECONDS if one search takes `seconds`.
    If no grid can, returns the coarsest shape.

    >>> grid_shape_for(0.04), grid_shape_for(0.2), grid_shape_for(9.0)
    ((3, 3, 2, 5), (2, 2, 1, 3), (2, 2, 1, 1))
    """
    return next((shape for shape in GRID_SHAPES if math.prod(shape) * seconds <= GRID_BUDGET_SECONDS), GRID_SHAPES[-1])


def halves_and_doubles(value: int, count: int) -> tuple[int, ...]:
    """Returns up to `count` values around `value`, each twice the previous value. Values that are not integers are
    omitted.

    >>> halves_and_doubles(12, 5), halves_and_doubles(7, 3), halves_and_doubles(8, 2)
    ((3, 6, 12, 24, 48), (7, 14), (8, 16))
    """
    below, above = (count - 1) // 2, count // 2
    smaller = [value // 2**step for step in range(below, 0, -1) if value % 2**step == 0]
    return (*smaller, *(value * 2**step for step in range(above + 1)))


def neighbouring_memory_sizes(memory: float, count: int) -> tuple[float, ...]:
    """Returns `memory` and up to `count` - 1 sizes of DEVICE_MEMORY_SIZES next to it, in ascending order: half of them
    smaller, half of them larger. There are fewer if no smaller or larger sizes are left.

    >>> [round(size / GIB) for size in neighbouring_memory_sizes(80 * GIB, 5)]
    [48, 64, 80, 96, 128]
    """
    smaller, larger = (
        [size for size in DEVICE_MEMORY_SIZES if size < memory],
        [size for size in DEVICE_MEMORY_SIZES if size > memory],
    )
    return (*smaller[max(len(smaller) - (count - 1) // 2, 0) :], memory, *larger[: count // 2])


def cluster_sizes(cluster: Cluster, count: int) -> tuple[Cluster, ...]:
    """Returns up to `count` clusters: `cluster`, and clusters whose number of devices is smaller or larger by powers of
    2. Sizes that the notation of `cluster` cannot express are omitted."""
    below, above = (count - 1) // 2, count // 2
    found = [other for step in range(-below, above + 1) if step for other in resize_cluster(cluster, step)]
    return tuple(sorted([cluster, *found], key=lambda each: each.devices))


def resize_cluster(cluster: Cluster, step: int) -> Iterator[Cluster]:
    """Yields the cluster with 2**step times its nodes, or one node with fewer devices if that is less than one node.
    Yields nothing if the cluster's notation cannot express the result."""

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
"""The maximum number of plans for one setting."""


class PricedPlan(NamedTuple):
    """A plan with its estimate. `safe`: the bytes that the peak rank needs, with a safety margin. `limits`: the usable
    memory of each pipeline rank if ranks differ, otherwise empty. Only the estimates of plans with `limits` depend on
    the memory limit."""

    plan: Plan
    estimate: Estimate
    safe: float
    limits: tuple[float, ...] = ()


class GridResult(NamedTuple):
    """The result for one memory limit. `limit` is the bytes that a rank may use, `ample` the usable bytes of its
    device. `ranked` has the plans that fit, best first. `families` has the best plan of each family, or the nearest if
    none fits. `rejected`: for each reason, the number of rejected plans and an example."""

    limit: float
    ample: float
    ranked: tuple[PricedPlan, ...]
    families: tuple[tuple[str, PricedPlan], ...]
    rejected: tuple[tuple[str, int, str], ...]

    def verdict(self, priced: PricedPlan) -> FitStatus:
        """Returns the fit status of a plan. `limit` applies to the expected bytes, `ample` to the bytes with a safety
        margin.

        If the ranks of the plan differ, each rank has its own limit, and the status is taken from the estimate.
        """
        if priced.limits:
            return priced.estimate.verdict
        if priced.estimate.memory.reserved > self.limit or priced.estimate.crowded:
            return FitStatus.no
        return FitStatus.fits if priced.safe <= self.ample else FitStatus.tight


class GridPoint(NamedTuple):
    """The search results for one cluster, batch size and sequence length. `standings`: one result per memory limit. If
    there are no results, `error` is the reason."""

    job: Job
    standings: tuple[GridResult, ...]
    considered: int
    error: str = ""


class PageGrid(NamedTuple):
    """All results of a page. `points` is ordered by cluster, then batch, then sequence."""

    job: Job
    axes: PageAxes
    objective: SearchObjective
    points: tuple[GridPoint, ...]

    @property
    def base(self) -> GridPoint:
        """Returns the results for the job itself."""
        cluster, batch, sequence, _ = self.axes.here
        return self.points[(cluster * len(self.axes.batches) + batch) * len(self.axes.sequences) + sequence]


def search_page_grid(
    question: Job,
    axes: PageAxes,
    objective: SearchObjective = SearchObjective.fastest,
    runnable: bool = False,
    workers: int = 1,
) -> PageGrid:
    """Searches plans for every setting of `axes`, with `workers` processes."""
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
            # `map` would cancel pending futures when it exits, which fails if processes of the pool have died
            with blocked_stop_signals():
                found = [pool.submit(search_point, job, axes.memories, objective, runnable) for job in jobs]
            return PageGrid(question, axes, objective, tuple(each.result() for each in found))
        except BaseException:
            # without this, each process would complete its searches before it ends
            for process in set(active_children()).difference(others):
                process.kill()
            raise


def search_point(
    job: Job, memories: tuple[float, ...], objective: SearchObjective = SearchObjective.fastest, runnable: bool = False
) -> GridPoint:
    """Searches plans for `job` with each memory limit in `memories`."""
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
    """Converts the result of one search to a `GridResult`. `prices` caches the estimates of plans between searches."""

    def price(plan: Plan, known: Estimate | None = None) -> PricedPlan:
        # the limits of unequal ranks, and so the fit status of the estimate, depend on the memory limit
        if plan not in prices or prices[plan].limits:
            priced = known or estimate(job, plan)
            _, safe = reserved_bytes(found.pricer.setting, np.array(priced.memory.total))
            prices[plan] = PricedPlan(plan, priced, float(safe), rank_memory_limits(job, plan, priced))
        return prices[plan]

    ranked = tuple(price(entry.plan, entry.estimate) for entry in entries)
    kin = tuple((family.name, price(family.plan)) for family in families)
    rejected = tuple((reason, it.count, it.example) for reason, it in found.space.rejected.items())
    return GridResult(memory_limit(found.pricer.setting), physical_limit(found.pricer.setting), ranked, kin, rejected)


def rank_memory_limits(job: Job, plan: Plan, priced: Estimate) -> tuple[float, ...]:
    """Returns the usable memory of each pipeline rank. If the replicas of a stage differ, this is the usable memory of
    the rank with the highest peak. If all ranks are equal, the result is empty."""
    if plan.placement:
        return tuple(
            min(job.cluster.groups[group].device.memory * USABLE_MEMORY_FRACTION, job.cluster.budget or inf)
            for group in plan.placement
        )
    return (priced.limit,) * plan.pp if plan.shares or plan.micro_batch_sizes or plan.shard_weights else ()
