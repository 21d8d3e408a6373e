"""Answers for every setting of a page: each is a search of its own, so that the page shows what `plan` prints for the same setting."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from itertools import product, repeat
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np

from meshwright.base.errors import InputError
from meshwright.cost.memory import reserved, usable
from meshwright.cost.step import estimate_of
from meshwright.report.page.axes import Axes
from meshwright.search.answer import Objective
from meshwright.search.ranking import Candidate
from meshwright.search.survey import Survey, survey
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
    """What is true under one memory: bytes that a rank can take, the plans that fit, best first, the best or nearest of each family, and the
    others by reason, with their number and an example."""

    limit: float
    ranked: tuple[Priced, ...]
    families: tuple[tuple[str, Priced], ...]
    rejected: tuple[tuple[str, int, str], ...]


class Point(NamedTuple):
    """One cluster, batch and sequence: a standing for each memory. `error` says why there is none."""

    job: Job
    standings: tuple[Standing, ...]
    considered: int
    error: str = ""


class Grid(NamedTuple):
    """`points` by cluster, batch and sequence, the last fastest."""

    job: Job
    axes: Axes
    objective: Objective
    points: tuple[Point, ...]

    @property
    def base(self) -> Point:
        """The question itself."""
        cluster, batch, sequence, _ = self.axes.here
        return self.points[(cluster * len(self.axes.batches) + batch) * len(self.axes.sequences) + sequence]


def grid(question: Job, axes: Axes, objective: Objective = Objective.fastest, runnable: bool = False, workers: int = 1) -> Grid:
    """Every point, searched by so many processes; objectives are those for all devices."""
    jobs = [
        question.but(cluster=cluster, workload=question.workload.but(batch=batch, sequence=sequence))
        for cluster, batch, sequence in product(axes.clusters, axes.batches, axes.sequences)
    ]
    if workers == 1:
        return Grid(question, axes, objective, tuple(point(job, axes.memories, objective, runnable) for job in jobs))
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn")) as pool:
        return Grid(question, axes, objective, tuple(pool.map(point, jobs, repeat(axes.memories), repeat(objective), repeat(runnable))))


def point(job: Job, memories: tuple[float, ...], objective: Objective = Objective.fastest, runnable: bool = False) -> Point:
    """The standings of one job."""
    own = job.cluster.memory
    prices: dict[Plan, Priced] = {}
    standings, considered = [], 0
    for memory in memories:
        asked = job if memory == own else job.but(cluster=job.cluster.with_memory(memory))
        try:
            found = survey(asked, SHOWN, objective, runnable)
        except InputError as error:
            return Point(job, (), 0, str(error))
        standings.append(standing(found, prices))
        considered = found.space.considered
    return Point(job, tuple(standings), considered)


def standing(found: Survey, prices: dict[Plan, Priced]) -> Standing:
    """What one search found; `prices` are remembered from search to search."""

    def price(candidate: Candidate) -> Priced:
        plan = candidate.plan
        if plan not in prices:
            priced = estimate_of(found.pricer, candidate.alone)
            _, safe = reserved(found.pricer.setting, np.array(priced.memory.total))
            prices[plan] = Priced(plan, priced, float(safe))
        return prices[plan]

    ranking, limit = found.ranking, usable(found.pricer.setting)
    ranked = tuple(price(candidate) for candidate in ranking.best)
    kin = [(name, price(candidate)) for name, candidate in {**ranking.nearest, **ranking.families}.items()]
    families = tuple(sorted(kin, key=lambda pair: order(pair[1].estimate, limit)))
    return Standing(limit, ranked, families, tuple((reason, it.count, it.example) for reason, it in found.space.refused.items()))


def order(priced: Estimate, limit: float) -> tuple[bool, float]:
    """Those that fit first, fastest first, then those that need least."""
    fits = priced.memory.reserved <= limit
    return not fits, priced.time.step if fits else priced.memory.reserved
