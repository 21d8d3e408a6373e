"""Answers for every setting of a page: each is a search of its own, so that the page shows what `plan` prints for the same setting."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from math import inf
from multiprocessing import active_children, get_context
from typing import NamedTuple

import numpy as np

from meshwright.base.errors import InputError
from meshwright.base.signals import deaf
from meshwright.cost.constants import USABLE
from meshwright.cost.memory import ample, reserved, usable
from meshwright.cost.step import estimate
from meshwright.report.page.axes import Axes, limited
from meshwright.search.answer import Entry, Family, Objective
from meshwright.search.rank import standing
from meshwright.search.survey import Survey, survey
from meshwright.spec.estimate import Estimate, Fits
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

SHOWN = 8
"""Plans of a setting."""


class Priced(NamedTuple):
    """A plan with what does not depend on the memory of a device: its estimate, and the bytes that are safe for it. Over unlike groups also what
    each pipeline rank can take."""

    plan: Plan
    estimate: Estimate
    safe: float
    limits: tuple[float, ...] = ()


class Standing(NamedTuple):
    """What is true under one memory or budget: bytes that a rank can take, those that its device has, the plans that fit, best first, the best or
    nearest of each family, and the others by reason, with their number and an example."""

    limit: float
    ample: float
    ranked: tuple[Priced, ...]
    families: tuple[tuple[str, Priced], ...]
    rejected: tuple[tuple[str, int, str], ...]

    def verdict(self, priced: Priced) -> Fits:
        """A budget binds what is expected, the device what can happen. Of a plan over unlike groups each rank has a limit of its own: such a page
        has one memory."""
        if priced.limits:
            return priced.estimate.verdict
        if priced.estimate.memory.reserved > self.limit or priced.estimate.crowded:
            return Fits.no
        return Fits.fits if priced.safe <= self.ample else Fits.tight


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
    others = active_children()
    with ProcessPoolExecutor(min(workers, len(jobs)), get_context("spawn")) as pool:
        try:
            with deaf():  # no map, which cancels what waits when it is left: a pool whose processes are gone stumbles over that
                found = [pool.submit(point, job, axes.memories, objective, runnable) for job in jobs]
            return Grid(question, axes, objective, tuple(each.result() for each in found))
        except BaseException:
            for process in set(active_children()).difference(others):  # else each would end what it has begun
                process.kill()
            raise


def point(job: Job, memories: tuple[float, ...], objective: Objective = Objective.fastest, runnable: bool = False) -> Point:
    """The standings of one job."""
    prices: dict[Plan, Priced] = {}
    standings, considered = [], 0
    for memory in memories:
        asked = job.but(cluster=limited(job.cluster, memory))
        try:
            found = survey(asked, SHOWN, objective, runnable)
            entries, families = standing(asked, found, SHOWN, objective, runnable)
        except InputError as error:
            return Point(job, (), 0, str(error))
        standings.append(shown(asked, found, entries, families, prices))
        considered = found.space.considered
    return Point(job, tuple(standings), considered)


def shown(job: Job, found: Survey, entries: Sequence[Entry], families: Sequence[Family], prices: dict[Plan, Priced]) -> Standing:
    """What one search found; `prices` are remembered from search to search."""

    def price(plan: Plan, known: Estimate | None = None) -> Priced:
        if plan not in prices:
            priced = known or estimate(job, plan)
            _, safe = reserved(found.pricer.setting, np.array(priced.memory.total))
            prices[plan] = Priced(plan, priced, float(safe), limits(job, plan, priced))
        return prices[plan]

    ranked = tuple(price(entry.plan, entry.estimate) for entry in entries)
    kin = tuple((family.name, price(family.plan)) for family in families)
    refused = tuple((reason, it.count, it.example) for reason, it in found.space.refused.items())
    return Standing(usable(found.pricer.setting), ample(found.pricer.setting), ranked, kin, refused)


def limits(job: Job, plan: Plan, priced: Estimate) -> tuple[float, ...]:
    """Bytes that each pipeline rank of a plan over unlike groups can take of its device; of a stage whose replicas are unlike that of the fullest."""
    if plan.placement:
        return tuple(min(job.cluster.groups[group].device.memory * USABLE, job.cluster.budget or inf) for group in plan.placement)
    return (priced.limit,) * plan.pp if plan.shares or plan.micro_batch_sizes or plan.shard_weights else ()
