"""Why a plan is not the chosen one: the rules that it breaks, the memory that it lacks, or the time that it loses, term by term.

The terms are the items of `Time`, each the other plan's less the chosen one's, so that they sum to the whole gap between the two steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from pydantic import Field

from meshwright.base.codec import Noun
from meshwright.base.errors import InputError
from meshwright.cost.step import estimate, estimate_of
from meshwright.search.answer import Answer, Entry
from meshwright.search.caution import ahead_by
from meshwright.search.pins import conflict
from meshwright.search.ranking import rounded
from meshwright.search.survey import Survey, survey
from meshwright.spec.estimate import Estimate, Fits, Time
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan
from meshwright.spec.rules import faults

ITEMS = tuple(name for name in Time.model_fields if name != "step")


class Outcome(StrEnum):
    """How a plan stands beside the chosen one. `faster`: the search does not try it, or another objective was asked for."""

    chosen = "chosen"
    slower = "slower"
    tight = "tight"
    unmeasured = "unmeasured"
    faster = "faster"
    unfit = "unfit"
    illegal = "illegal"


class Term(Noun):
    """Seconds that a plan takes more than the chosen one for one item of time; below 0 where it takes less."""

    name: str
    seconds: float


class Against(Noun):
    """A plan beside the chosen one. `faults` are the rules that it breaks, or all plans that were asked for; then there is no estimate."""

    asked: str
    outcome: Outcome
    plan: Plan | None = None
    estimate: Estimate | None = None
    terms: tuple[Term, ...] = Field(default=(), description="largest first")
    faults: tuple[str, ...] = ()

    @property
    def gap(self) -> float:
        """Seconds a step more than the chosen plan."""
        return math.fsum(term.seconds for term in self.terms)


def terms(chosen: Estimate, other: Estimate) -> tuple[Term, ...]:
    """What `other` takes more, item by item, the largest difference first; items in which both are equal are left out."""
    found = [Term(name=name, seconds=getattr(other.time, name) - getattr(chosen.time, name)) for name in ITEMS]
    return tuple(sorted((term for term in found if term.seconds), key=lambda term: -abs(term.seconds)))


def against(job: Job, asked: str, chosen: Entry, plan: Plan, priced: Estimate) -> Against:
    """A priced plan beside the chosen one."""
    outcome = (
        Outcome.chosen
        if plan == chosen.plan
        else Outcome.unfit
        if priced.verdict == Fits.no
        else Outcome.slower
        if rounded(priced.time.step) >= rounded(chosen.estimate.time.step)
        else Outcome.faster
        if not ahead_by(job, (chosen.plan, chosen.estimate), (plan, priced))
        else Outcome.tight
        if priced.verdict == Fits.tight and chosen.estimate.verdict != Fits.tight
        else Outcome.unmeasured
    )
    return Against(asked=asked, outcome=outcome, plan=plan, estimate=priced, terms=terms(chosen.estimate, priced))


def families_against(job: Job, answer: Answer) -> tuple[Against, ...]:
    """The best plan of every family that lost, or its nearest, beside the chosen one."""
    return tuple(
        against(job, family.name, answer.chosen, family.plan, estimate(job, family.plan))
        for family in answer.families
        if family.plan != answer.chosen.plan
    )


def why_not(job: Job, chosen: Entry, asked: str, wanted: Plan | Mapping[str, Any], runnable: bool = False) -> Against:
    """`wanted`, a plan or pins that leave many, beside the chosen plan of `job`. Of many the best is taken, or the nearest where none fits."""
    if isinstance(wanted, Plan):
        broken = tuple(fault.message for fault in faults(job, wanted))
        if broken:
            return Against(asked=asked, outcome=Outcome.illegal, plan=wanted, faults=broken)
        return against(job, asked, chosen, wanted, estimate(job, wanted))
    narrowed = job.but(pins={**job.pins, **wanted})
    try:
        found = survey(narrowed, 1, runnable=runnable)
    except InputError as error:
        return Against(asked=asked, outcome=Outcome.illegal, faults=(str(error),))
    best = found.ranking.best[0] if found.ranking.best else min(found.ranking.nearest.values(), key=lambda it: it.reserved, default=None)
    if best is None:
        return Against(asked=asked, outcome=Outcome.illegal, faults=illegal(found))
    return against(job, asked, chosen, best.plan, estimate_of(found.pricer, best.alone))


def illegal(found: Survey) -> tuple[str, ...]:
    """Why a space holds no legal plan: its pins contradict each other, or every plan breaks a rule."""
    said = conflict(found.space.job)
    return (
        (said,) if said else tuple(f"{it.example} ({it.count:,} plan{'' if it.count == 1 else 's'})" for it in found.space.refused.values())
    )
