"""The settings that a page can show: a few values of devices, batch, sequence and memory a device around those of the job; where the cluster has
a budget, of the budget in place of the memory.

Stops double and halve. One is left out where it is no whole number, where the model has no such positions, or where the cluster is not written
as `NODESxDEVICES:device` and so has no other sizes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from meshwright.base.errors import InputError
from meshwright.intake.clusters import read_cluster
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job

GIB = 2.0**30
SOLD = tuple(GIB * size for size in (1, 2, 4, 8, 16, 24, 32, 40, 48, 64, 80, 96, 128, 144, 192, 256))
"""Memory of a device."""

SHAPES = ((3, 3, 3, 5), (3, 3, 2, 5), (3, 3, 2, 3), (3, 2, 2, 3), (2, 2, 2, 3), (2, 2, 1, 3), (2, 2, 1, 1))
"""Stops of devices, batch, sequence and memory, the finest grid first."""
BUDGET = 4.0
"""Seconds that a grid should take."""

Shape = tuple[int, int, int, int]


class Axes(NamedTuple):
    """Stops of each slider, ascending, and where the job stands on them. Clusters have their own memory and budget."""

    clusters: tuple[Cluster, ...]
    batches: tuple[int, ...]
    sequences: tuple[int, ...]
    memories: tuple[float, ...]
    here: tuple[int, int, int, int]

    @property
    def size(self) -> int:
        """Settings of all sliders."""
        return math.prod(map(len, self[:4]))


def axes_of(question: Job, shape: Shape) -> Axes:
    """Stops around `question`; no sequence is longer than the model has positions for."""
    work, memory, longest = question.workload, limit_of(question.cluster), question.model.context
    clusters = sizes_of(question.cluster, shape[0])
    batches = halves_and_doubles(work.batch, shape[1])
    sequences = tuple(size for size in halves_and_doubles(work.sequence, shape[2]) if not longest or size <= longest)
    memories = limits(question.cluster, shape[3])
    here = ([cluster.devices for cluster in clusters].index(question.cluster.devices), batches.index(work.batch))
    return Axes(clusters, batches, sequences, memories, (*here, sequences.index(work.sequence), memories.index(memory)))


def limit_of(cluster: Cluster) -> float:
    """What the slider of memory moves: the budget, where there is one, else the memory of a device."""
    return cluster.budget or cluster.memory


def limited(cluster: Cluster, limit: float) -> Cluster:
    """The same with another limit of that kind."""
    return cluster if limit == limit_of(cluster) else cluster.but(budget=limit) if cluster.budget else cluster.with_memory(limit)


def limits(cluster: Cluster, count: int) -> tuple[float, ...]:
    """Limits around that of `cluster`; no budget is more than the memory, and unlike devices keep theirs."""
    own = limit_of(cluster)
    around = beside(own, count) if len({group.device.memory for group in cluster.groups}) == 1 else (own,)
    return tuple(size for size in around if not cluster.budget or size <= max(own, cluster.memory))


def shape_for(seconds: float) -> Shape:
    """As many stops as there is time for when a search takes `seconds`.


    >>> shape_for(0.04), shape_for(0.2), shape_for(9.0)
    ((3, 3, 2, 5), (2, 2, 1, 3), (2, 2, 1, 1))
    """
    return next((shape for shape in SHAPES if math.prod(shape) * seconds <= BUDGET), SHAPES[-1])


def halves_and_doubles(value: int, count: int) -> tuple[int, ...]:
    """
    >>> halves_and_doubles(12, 5), halves_and_doubles(7, 3), halves_and_doubles(8, 2)
    ((3, 6, 12, 24, 48), (7, 14), (8, 16))
    """
    below, above = (count - 1) // 2, count // 2
    smaller = [value // 2**step for step in range(below, 0, -1) if value % 2**step == 0]
    return (*smaller, *(value * 2**step for step in range(above + 1)))


def beside(memory: float, count: int) -> tuple[float, ...]:
    """As many sold sizes as `count` says, with `memory` in their middle.

    >>> [round(size / GIB) for size in beside(80 * GIB, 5)]
    [48, 64, 80, 96, 128]
    """
    smaller, larger = [size for size in SOLD if size < memory], [size for size in SOLD if size > memory]
    return (*smaller[max(len(smaller) - (count - 1) // 2, 0) :], memory, *larger[: count // 2])


def sizes_of(cluster: Cluster, count: int) -> tuple[Cluster, ...]:
    """`cluster` and its halves and doubles, as far as its name says how to write them."""
    below, above = (count - 1) // 2, count // 2
    found = [other for step in range(-below, above + 1) if step for other in resized(cluster, step)]
    return tuple(sorted([cluster, *found], key=lambda each: each.devices))


def resized(cluster: Cluster, step: int) -> Iterator[Cluster]:
    """The cluster with 2**step times its nodes; where that is less than one, nodes with fewer devices. Nothing where it cannot be written."""

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
