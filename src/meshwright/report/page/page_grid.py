"""Searches the plans that the page of `plan --page` can show.

The number of devices takes a few values around the job's own value; neighbouring values differ by a factor of 2. It
varies only if the cluster is written as `NODESxDEVICES:device`. Each number of devices is a point.

Batch size, sequence length, device memory (or the budget, if the cluster has one) and the rates of the cluster are
continuous: the page ranks all plans of a point by formulas of the cost model, with every micro-batch size that divides
the batch. At each point, plans are searched at several anchors: the job's own values, and the ends of the ranges of
memory, of all links together, of the batch and of the sequence. So the page shows the plans that are best among those
that any anchor has found, with any micro-batch size. At the job's own values, the best plans for each value of tp, pp
and ZeRO are also searched.

If no formulas exist (`is_continuous`), batch and sequence take a few values like the devices, and each combination is a
point.

The number of points depends on the size of the plan space, so it is equal on all machines.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import islice, product
from math import inf
from multiprocessing import active_children, get_context
from typing import Any, NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.signals import blocked_stop_signals
from meshwright.planner.cost.constants import USABLE_MEMORY_FRACTION
from meshwright.planner.cost.cost_context import build_cost_context
from meshwright.planner.cost.overlap import choose_bucket
from meshwright.planner.cost.step import estimate
from meshwright.planner.cost.uncertainty import unmeasured_features
from meshwright.planner.inputs.cluster_parser import read_cluster
from meshwright.planner.search.best_plans import (
    RISK_MARGIN,
    RankedPlan,
    SearchObjective,
    risk_adjusted_seconds,
    simplicity_key,
    uses_unmeasured_link,
)
from meshwright.planner.search.branch_and_bound import search_top_plans
from meshwright.planner.search.ranking import rank_plans
from meshwright.spec.cluster import Cluster, ClusterRates
from meshwright.spec.estimate import Estimate
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

GIB = 2.0**30
DEVICE_MEMORY_SIZES = tuple(GIB * size for size in (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 144, 192, 256))
"""The memory sizes of devices that the slider offers, in bytes."""

GRID_SHAPES = ((3, 3, 2), (3, 2, 2), (2, 2, 2), (2, 2, 1), (2, 1, 1), (1, 1, 1))
"""How many values the sliders of devices, batch and sequence have. Shapes with more points come first."""
MAX_PLANS_OF_GRID = 200_000_000
"""The maximum number of plans in the plan spaces of all points together, unless there is only one point. With this
number, the searches of a page take about a minute of one CPU core."""
MAX_BATCH_FACTOR = 4
"""The largest batch and sequence, divided by those of the job. The smallest ones are smaller by the same factor."""
STEPS_PER_OCTAVE, SEQUENCE_UNIT = 8, 64
"""The steps of the slider of the sequence for each factor of 2, and the number of tokens to which it rounds."""
RATE_RANGES = {"network": (0.25, 4.0), "link": (0.25, 4.0), "efficiency": (0.5, 1.5)}
"""The ends of the range of each rate (`ClusterRates`), divided by the job's own value."""

GridShape = tuple[int, int, int]


class InputRange(NamedTuple):
    """The range of a continuous input, and the value of the job."""

    low: float
    own: float
    high: float


class PageAxes(NamedTuple):
    """The values of devices (`clusters`), batch and sequence in ascending order, and in `here` the indices of the job's
    values. `memory` is the range of the memory limit, `rates` the ranges of those rates that vary. With formulas,
    `batches` and `sequences` have only the job's values, `batch` is the range of the batch and `lengths` has all
    sequence lengths of the page. `searches` is the maximum number of anchors of a point."""

    clusters: tuple[Cluster, ...]
    batches: tuple[int, ...]
    sequences: tuple[int, ...]
    memory: InputRange
    rates: dict[str, InputRange]
    here: tuple[int, int, int]
    batch: tuple[int, int, int]
    lengths: tuple[int, ...]
    searches: int

    @property
    def size(self) -> int:
        """Returns the number of points."""
        return math.prod(map(len, self[:3]))

    def anchors(self, job: Job) -> Iterator[Job]:
        """Yields `job` with the continuous inputs of each anchor, the job's own values first."""
        yield from islice(self._anchors(job), self.searches)

    def _anchors(self, job: Job) -> Iterator[Job]:
        cluster, (low, own, high), lengths = job.cluster, self.batch, self.lengths
        least, most = with_memory_limit(cluster, self.memory.low), with_memory_limit(cluster, self.memory.high)
        links = {name: ends for name, ends in self.rates.items() if name != "efficiency"}
        ends = [
            cluster.with_rates(ClusterRates(**{name: getattr(each, end) for name, each in links.items()}))
            for end in (("low", "high") if links else ())
        ]
        found = [job, *(job.but(cluster=on) for on in (least, most, *ends))]
        size = job.workload.sequence
        # The rows below combine the ends of the ranges of batch, sequence and memory. A large plan space has only the
        # first rows (`searches`). Batches with few factors of 2 divide among fewer replicas.
        odd, twice, four, eight = (min(number * (own // number | 1), high) for number in (1, 2, 4, 8))
        for on, batch, sequence in (
            *((cluster, own, lengths[-1]), (cluster, odd, size), (cluster, low, size), (cluster, own, lengths[0])),
            *((cluster, high, size), (most, own, lengths[-1]), (cluster, twice, size), (least, own, lengths[-1])),
            *((cluster, odd, lengths[-1]), (cluster, low, lengths[-1]), (cluster, high, lengths[0])),
            *((cluster, four, size), (cluster, odd, lengths[0]), (most, odd, size), (least, low, lengths[0])),
            *((cluster, eight, size), (least, odd, size), (most, low, lengths[-1]), (cluster, twice, lengths[-1])),
            *((cluster, min(3 * own // 2, high), size), (least, high, lengths[0]), (most, twice, lengths[0])),
            *((cluster, four, lengths[-1]), (most, high, size), (least, four, size)),
        ):
            if (batch, sequence) != (own, size):
                found.append(job.but(cluster=on, workload=job.workload.but(batch=batch, sequence=sequence)))
        yield from {each.to_json(): each for each in found}.values()


def page_axes(question: Job, shape: GridShape) -> PageAxes:
    """Returns the values and ranges around the values of the job `question`. `shape` has the maximum number of values
    of devices, batch and sequence. No sequence is longer than the number of positions of the model."""
    work, longest = question.workload, question.model.context
    clusters = cluster_sizes(question.cluster, shape[0])
    is_smooth = is_continuous(question)
    batches = (work.batch,) if is_smooth else halves_and_doubles(work.batch, shape[1])
    sequences = (work.sequence,) if is_smooth else halves_and_doubles(work.sequence, shape[2])
    sequences = tuple(size for size in sequences if not longest or size <= longest)
    lengths = sequence_lengths(work.sequence, longest) if is_smooth else (work.sequence,)
    factor = MAX_BATCH_FACTOR if is_smooth else 1
    here = ([cluster.devices for cluster in clusters].index(question.cluster.devices), batches.index(work.batch))
    return PageAxes(
        clusters,
        batches,
        sequences,
        memory_range(question.cluster),
        rate_ranges(question, clusters),
        (*here, sequences.index(work.sequence)),
        (-(-work.batch // factor), work.batch, work.batch * factor),
        lengths,
        SEARCHES_OF_POINT + max(5 * (shape[1] * shape[2] - 1), 6),
    )


SEARCHES_OF_POINT = 5
"""The number of anchors with the job's own batch and sequence."""


def is_continuous(job: Job) -> bool:
    """Returns whether the page has formulas for batch and sequence. Nodes of several kinds have none, nor has a batch
    that a plan must not divide."""
    return job.cluster.rates is not None and not job.model.gathered and not job.model.against_division


def sequence_lengths(own: int, longest: int) -> tuple[int, ...]:
    """Returns the sequence lengths of the page in ascending order: from a quarter of `own` to four times `own`, at most
    `longest` unless this is 0.

    >>> sequence_lengths(1024, 2048)[-4:], len(sequence_lengths(4096, 0)), sequence_lengths(24, 0)[:3]
    ((1584, 1728, 1872, 2048), 33, (6, 7, 8))
    """
    unit = min(SEQUENCE_UNIT, max(own // SEQUENCE_UNIT, 1))
    steps = STEPS_PER_OCTAVE * (MAX_BATCH_FACTOR.bit_length() - 1)
    sizes = {
        max(round(own * 2 ** (step / STEPS_PER_OCTAVE) / unit), 1) * unit for step in range(-steps, steps + 1) if step
    }
    return tuple(sorted(size for size in {own, *sizes} if not longest or size <= longest))


def rate_ranges(question: Job, clusters: Sequence[Cluster]) -> dict[str, InputRange]:
    """Returns the range of each rate that the page varies. The network varies if one of `clusters` has several nodes,
    the link if nodes have several devices. The search chooses the bucket size by these bandwidths, so a range ends
    before this choice changes."""
    own = question.cluster.rates
    if own is None:
        return {}
    found = {}
    for name, (low, high) in RATE_RANGES.items():
        value = getattr(own, name)
        ends = [value * factor for factor in (low, high)]
        if name == "efficiency":
            found[name] = InputRange(ends[0], value, min(ends[1], 1.0))
            continue
        used = [each for each in clusters if (each.blocks if name == "network" else each.devices_per_node) > 1]
        ends = [end for end in ends if all(_has_bucket_of(question, each, {name: end}) for each in used)]
        if used and ends:
            found[name] = InputRange(min(*ends, value), value, max(*ends, value))
    return found


def _has_bucket_of(question: Job, cluster: Cluster, rates: dict[str, float]) -> bool:
    """Returns whether the search chooses the same bucket size if the rates of `cluster` change to `rates`."""
    first, second = (
        choose_bucket(build_cost_context(question.but(cluster=each)))
        for each in (cluster, cluster.with_rates(ClusterRates(**rates)))
    )
    return first == second


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


def memory_range(cluster: Cluster) -> InputRange:
    """Returns the range of the memory limit of `cluster`: common sizes of devices, two below and two above its own. A
    budget is at most the memory of a device. If devices differ, only the cluster's own limit is in the range."""
    own = cluster_memory_limit(cluster)
    if len(cluster.groups) > 1:
        return InputRange(own, own, own)
    sizes = neighbouring_memory_sizes(own, 5)
    return InputRange(sizes[0], own, min(sizes[-1], max(own, cluster.memory)) if cluster.budget else sizes[-1])


def grid_shape_for(considered: int) -> GridShape:
    """Returns the shape of the finest grid whose plan spaces have MAX_PLANS_OF_GRID plans together, if the plan space
    of one point has `considered` plans. If no grid has so few, returns the coarsest shape.

    >>> grid_shape_for(4_000_000), grid_shape_for(60_000_000), grid_shape_for(10**9)
    ((3, 3, 2), (2, 1, 1), (1, 1, 1))
    """
    return next((shape for shape in GRID_SHAPES if math.prod(shape) * considered <= MAX_PLANS_OF_GRID), GRID_SHAPES[-1])


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


PLANS_PER_ANCHOR = 8
"""The maximum number of ranked plans that an anchor adds to its point."""
PLANS_PER_PIN = 3
PINS = ("tp", "pp", "zero")
"""The fields of a plan that the page can pin."""


class PricedPlan(NamedTuple):
    """A plan with its estimate for the job of its point, or for an anchor: then its seconds are those of the anchor.

    `risk`: the factor by which uncertainty raises the score, without the factor of tight memory, or 0 if the host
    memory does not suffice. `limits`: the usable memory of each pipeline rank if ranks may differ, otherwise empty; the
    fit status is then that of the estimate.
    """

    plan: Plan
    estimate: Estimate
    risk: float
    limits: tuple[float, ...] = ()


class Anchor(NamedTuple):
    """The result of the search at an anchor of a point: the best plan and its score, infinite if no plan fits.
    `rejected`: for each reason, the number of rejected plans and an example."""

    job: Job
    best: RankedPlan | None
    score: float
    rejected: tuple[tuple[str, int, str], ...]


class GridPoint(NamedTuple):
    """The search results for one cluster, batch size and sequence length. Simpler plans are first in `plans`. `others`
    are plans that were found at other batch sizes and sequence lengths. `pins` are the pins whose best plans were
    searched. If there are no results, `error` is the reason."""

    job: Job
    plans: tuple[PricedPlan, ...]
    others: tuple[Plan, ...]
    anchors: tuple[Anchor, ...]
    considered: int
    pins: tuple[str, ...] = ()
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
        cluster, batch, sequence = self.axes.here
        return self.points[(cluster * len(self.axes.batches) + batch) * len(self.axes.sequences) + sequence]


class PageSearch(NamedTuple):
    """The options of the searches of a page."""

    objective: SearchObjective = SearchObjective.fastest
    runnable: bool = False

    def ranked(self, job: Job, top: int) -> Iterator[RankedPlan]:
        """Yields the `top` best plans of `job`. Yields nothing if no plan is legal."""
        try:
            found = search_top_plans(job, top, self.objective, self.runnable)
            yield from rank_plans(job, found, top, self.objective, self.runnable)[0]
        except InputError:
            return


def search_page_grid(
    question: Job,
    axes: PageAxes,
    objective: SearchObjective = SearchObjective.fastest,
    runnable: bool = False,
    workers: int = 1,
) -> PageGrid:
    """Searches plans at every point of `axes`, with `workers` processes."""
    jobs = [
        question.but(cluster=cluster, workload=question.workload.but(batch=batch, sequence=sequence))
        for cluster, batch, sequence in product(axes.clusters, axes.batches, axes.sequences)
    ]
    options = PageSearch(objective, runnable)
    tasks = [(job, axes, options, job == question) for job in jobs]
    if workers == 1:
        return PageGrid(question, axes, objective, tuple(search_point(*task) for task in tasks))
    others = active_children()
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn")) as pool:
        try:
            # `map` would cancel pending futures when it exits, which fails if processes of the pool have died
            with blocked_stop_signals():
                found = [pool.submit(search_point, *task) for task in tasks]
            return PageGrid(question, axes, objective, tuple(each.result() for each in found))
        except BaseException:
            # without this, each process would complete its searches before it ends
            for process in set(active_children()).difference(others):
                process.kill()
            raise


def search_point(job: Job, axes: PageAxes, options: PageSearch, with_pins: bool = False) -> GridPoint:
    """Searches plans for `job` at each anchor. `with_pins`: whether to search the best plans of each pin too."""
    plans: dict[Plan, PricedPlan] = {}
    others: dict[Plan, None] = {}
    anchors, considered, degrees = [], 0, {}
    for limited in axes.anchors(job):
        is_own = limited.workload == job.workload
        try:
            found = search_top_plans(limited, PLANS_PER_ANCHOR, options.objective, options.runnable)
            entries, families = rank_plans(limited, found, PLANS_PER_ANCHOR, options.objective, options.runnable)
        except InputError as error:
            if is_own:
                return GridPoint(job, (), (), (), 0, error=str(error))
            continue
        score = risk_adjusted_seconds(limited, entries[0].plan, entries[0].estimate) if entries else inf
        anchors.append(Anchor(limited, entries[0] if entries else None, score, _rejections(found.space.rejected)))
        if not is_own:
            others |= dict.fromkeys(entry.plan for entry in entries)
            others |= dict.fromkeys(family.plan for family in families if not entries)
            continue
        for entry in entries:
            plans.setdefault(entry.plan, priced_plan(job, entry.plan, entry.estimate))
        if limited == job or not entries:
            for family in families:
                plans.setdefault(family.plan, priced_plan(job, family.plan, estimate(job, family.plan)))
        if not considered:
            considered = found.space.considered
            degrees = {name: sorted({getattr(group.box, name) for group in found.space.groups()}) for name in PINS[:2]}
    pins = []
    for name in PINS if with_pins else ():
        for value in degrees.get(name, range(4)) if name not in job.pins else ():
            pins.append(f"{name}={value}")
            for entry in options.ranked(job.but(pins={**job.pins, name: value}), PLANS_PER_PIN):
                # ZeRO over one rank is ZeRO 0 by another name, which a search without pins does not have
                if entry.plan.dp_shard > 1 or not entry.plan.zero or entry.plan.offload:
                    plans.setdefault(entry.plan, priced_plan(job, entry.plan, entry.estimate))
    ordered = sorted(plans.values(), key=lambda each: simplicity_key(each.plan))
    return GridPoint(job, tuple(ordered), tuple(others), tuple(anchors), considered, tuple(pins))


def _rejections(found: dict[str, Any]) -> tuple[tuple[str, int, str], ...]:
    return tuple((reason, it.count, it.example) for reason, it in found.items())


def priced_plan(job: Job, plan: Plan, known: Estimate) -> PricedPlan:
    """Returns a plan of `job` with the estimate `known`."""
    return PricedPlan(plan, known, 0.0 if known.crowded else plan_risk(job, plan), rank_memory_limits(job, plan, known))


def plan_risk(job: Job, plan: Plan) -> float:
    """Returns the factor by which the features of a plan raise its score."""
    risks = uses_unmeasured_link(job.cluster, plan.offload) + len(unmeasured_features(job.cluster, plan))
    return (1.0 + RISK_MARGIN) ** risks


def rank_memory_limits(job: Job, plan: Plan, priced: Estimate) -> tuple[float, ...]:
    """Returns the usable memory of each pipeline rank if the cluster has several groups of nodes, otherwise nothing. If
    the replicas of a stage differ, this is the usable memory of the rank with the highest peak."""
    if plan.placement:
        return tuple(
            min(job.cluster.groups[group].device.memory * USABLE_MEMORY_FRACTION, job.cluster.budget or inf)
            for group in plan.placement
        )
    return (priced.limit,) * plan.pp if len(job.cluster.groups) > 1 else ()
