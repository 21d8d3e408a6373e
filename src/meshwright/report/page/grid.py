"""Answers for every setting of a page, exact: for each the plans that `search` would rank first.

A search is asked for the job's own memory and for the largest. Where all plans found under one memory fit with a margin in less, a search for less
would find the same (what it tries besides are other forms of faster plans that do not fit, and there is none): then none is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import product, repeat
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from meshwright.base.errors import InputError
from meshwright.cost.memory import reserved, usable
from meshwright.cost.setting import setting
from meshwright.cost.step import estimate_of
from meshwright.report.page.axes import Axes
from meshwright.search.survey import Candidate, Survey, survey
from meshwright.spec.estimate import Estimate, Fits
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

SHOWN = 8
"""Plans of a setting."""


class Priced(NamedTuple):
    """A plan with what does not depend on the memory of a device: its estimate, and the bytes with which it fits with a margin."""

    plan: Plan
    estimate: Estimate
    safe: float

    def verdict(self, limit: float) -> Fits:
        return Fits.fits if self.safe <= limit else Fits.tight if self.estimate.memory.reserved <= limit else Fits.no


class Standing(NamedTuple):
    """What is true under one memory: bytes that a rank can take, the plans that fit, best first, and the best or nearest of each family."""

    limit: float
    ranked: tuple[Priced, ...]
    families: tuple[tuple[str, Priced], ...]


class Point(NamedTuple):
    """One cluster, batch and sequence: a standing for each memory. `error` says why there is none."""

    job: Job
    standings: tuple[Standing, ...]
    rejected: tuple[tuple[str, int, str], ...]
    considered: int
    error: str = ""


class Grid(NamedTuple):
    """`points` by cluster, batch and sequence, the last fastest."""

    job: Job
    axes: Axes
    points: tuple[Point, ...]

    @property
    def base(self) -> Point:
        """The question itself."""
        cluster, batch, sequence, _ = self.axes.here
        return self.points[(cluster * len(self.axes.batches) + batch) * len(self.axes.sequences) + sequence]


def grid(question: Job, axes: Axes, workers: int = 1, tell: Callable[[int, int], None] = lambda done, all: None) -> Grid:
    """Every point, priced by so many processes; `tell` hears how many are done of how many."""
    jobs = [
        question.but(cluster=cluster, workload=question.workload.but(batch=batch, sequence=sequence))
        for cluster, batch, sequence in product(axes.clusters, axes.batches, axes.sequences)
    ]
    points: list[Point] = []
    with ExitStack() as stack:
        pool = stack.enter_context(ProcessPoolExecutor(workers, get_context("spawn"))) if workers > 1 else None
        for found in (pool.map if pool else map)(point, jobs, repeat(axes.memories), [job == question for job in jobs]):
            points.append(found)
            tell(len(points), len(jobs))
    return Grid(question, axes, tuple(points))


def point(job: Job, memories: tuple[float, ...], every: bool = False) -> Point:
    """The standings of one job. Every memory is searched for the families' sake where `every` is set."""
    found = Found(job)
    own = job.cluster.memory
    try:
        for memory in memories if every else {own, max(memories)}:
            found.search(memory)
    except InputError as error:
        return Point(job, (), (), 0, str(error))
    standings = [found.standing(memory) for memory in sorted(memories, reverse=True)]
    space = found.surveys[own].space
    rejected = tuple((reason, it.count, it.example) for reason, it in space.refused.items())
    return Point(job, tuple(reversed(standings)), rejected, space.considered)


@dataclass
class Found:
    """What searches of one job under several memories found."""

    job: Job
    surveys: dict[float, Survey] = field(default_factory=dict)
    prices: dict[Plan, Priced] = field(default_factory=dict)

    def under(self, memory: float) -> Job:
        """The job with so many bytes on every device."""
        cluster = self.job.cluster
        return self.job if memory == cluster.memory else self.job.but(cluster=cluster.with_memory(memory))

    def search(self, memory: float) -> Survey:
        if memory not in self.surveys:
            self.surveys[memory] = survey(self.under(memory), SHOWN)
        return self.surveys[memory]

    def price(self, found: Survey, candidate: Candidate) -> Priced:
        plan = candidate.plan
        if plan not in self.prices:
            priced = estimate_of(found.pricer, candidate.alone)
            _, safe = reserved(found.pricer.setting, np.array(priced.memory.total))
            self.prices[plan] = Priced(plan, priced, float(safe))
        return self.prices[plan]

    def ranked(self, memory: float) -> tuple[Priced, ...]:
        found = self.search(memory)
        return tuple(self.price(found, candidate) for candidate in found.ranking.best)

    def standing(self, memory: float) -> Standing:
        """What is true under `memory`; larger memories come first."""
        limit = usable(setting(self.under(memory)))
        known = min(size for size in self.surveys if size >= memory)
        ranked = self.ranked(known)
        if any(priced.verdict(limit) != Fits.fits for priced in ranked):
            ranked = self.ranked(memory)
        return Standing(limit, ranked, tuple(self.families(memory, limit)))

    def families(self, memory: float, limit: float) -> Iterator[tuple[str, Priced]]:
        """The best of each family that fits, fastest first, then the nearest of the others: exact where this memory was searched for."""
        found: dict[str, list[tuple[Survey, Candidate]]] = {}
        for each in [self.surveys[memory]] if memory in self.surveys else self.surveys.values():
            for table in (each.ranking.families, each.ranking.nearest):
                for name, candidate in table.items():
                    found.setdefault(name, []).append((each, candidate))
        chosen: list[tuple[str, Survey, Candidate]] = []
        for name, pairs in found.items():
            fitting = [pair for pair in pairs if pair[1].reserved <= limit]
            best = min(fitting, key=lambda pair: pair[1].score) if fitting else min(pairs, key=lambda pair: pair[1].reserved)
            chosen.append((name, *best))
        chosen.sort(key=lambda kin: (kin[2].reserved > limit, kin[2].seconds if kin[2].reserved <= limit else kin[2].reserved))
        yield from ((name, self.price(each, candidate)) for name, each, candidate in chosen)
