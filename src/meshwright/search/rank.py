"""The answer to a job: the fastest plans that fit, with what was refused and the best of every family."""

from __future__ import annotations

import time

from meshwright.cost.step import estimate_of
from meshwright.search.answer import Answer, Entry, Family, Rejection
from meshwright.search.near import nothing_fits
from meshwright.search.survey import Ranking, survey
from meshwright.spec.job import Job


def search(job: Job, top: int = 10) -> Answer:
    """The `top` fastest plans that fit. Raises NothingFits with the nearest plan and the smallest change that would fit."""
    began = time.perf_counter()
    found = survey(job, top)
    if not found.ranking.best:
        raise nothing_fits(found)
    return Answer(
        plans=tuple(Entry(plan=candidate.plan, estimate=estimate_of(found.pricer, candidate.alone)) for candidate in found.ranking.best),
        families=families(found.ranking),
        considered=found.space.considered,
        rejected=tuple(Rejection(reason=reason, count=it.count, example=it.example) for reason, it in found.space.refused.items()),
        seconds=time.perf_counter() - began,
    )


def families(ranking: Ranking) -> tuple[Family, ...]:
    """The best of each family, those that fit first and fastest first, then the nearest of the others."""
    found = [
        Family(name=name, plan=it.plan, fits=name in ranking.families, seconds=it.seconds, reserved=it.reserved)
        for name, it in {**ranking.nearest, **ranking.families}.items()
    ]
    return tuple(sorted(found, key=lambda family: (not family.fits, family.seconds if family.fits else family.reserved)))
