"""Why this plan: what was chosen, where its time and memory go, what each other family of plans lost by. A handful of sentences."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.cost.step import estimate
from meshwright.search.answer import Answer, Family
from meshwright.search.caution import ahead_by, leans
from meshwright.search.why_not import Term, terms
from meshwright.spec.estimate import Fits
from meshwright.spec.job import Job
from meshwright.words.say import Sentence, name, tell
from meshwright.words.verdict import largest_kind, verdict

SHOWN = 3
"""Families that a sentence names."""

WORTH = 0.005
"""Share of the step below which an item of time is not named."""


def explain(job: Job, answer: Answer) -> list[Sentence]:
    """What a screen says under the ranked plans."""
    said = [_chosen(answer), *_passed(job, answer), _where(answer)]
    others = [family for family in answer.families if family.plan != answer.chosen.plan]
    slower = [family for family in others if family.fits and family.seconds >= answer.chosen.estimate.time.step]
    unfit = [family for family in others if not family.fits]
    if slower:
        parts = tuple(_slower(job, answer, family) for family in slower[:SHOWN])
        said.append(tell("why.slower", families=parts + _more(slower)))
    if unfit:
        parts = tuple(tell("why.needs", family=family_name(family.name), reserved=family.reserved) for family in unfit[:SHOWN])
        said.append(tell("why.unfit", limit=answer.chosen.estimate.limit, families=parts + _more(unfit)))
    return said


def family_name(words: str) -> Sentence:
    """A family such as 'tensor + ZeRO-1': its parts one by one."""
    first, _, rest = words.partition(" + ")
    return tell("family.and", first=name("family", first), rest=family_name(rest)) if rest else name("family", first)


def _chosen(answer: Answer) -> Sentence:
    chosen = answer.chosen
    return tell(
        "why.chosen",
        plan=chosen.name,
        step=chosen.estimate.time.step,
        rate=chosen.estimate.tokens_per_second,
        considered=answer.considered,
    )


def _passed(job: Job, answer: Answer) -> list[Sentence]:
    """The fastest plan that the chosen one was put before, for it is not certain."""
    chosen = (answer.chosen.plan, answer.chosen.estimate)
    known = [(entry.estimate.time.step, entry.plan) for entry in answer.plans]
    known += [(family.seconds, family.plan) for family in answer.families if family.fits]
    _, plan = min(known, key=lambda it: it[0])
    priced = estimate(job, plan)
    gain = ahead_by(job, chosen, (plan, priced))
    if not gain:
        return []
    leaning = leans(job.cluster, plan.offload) and not leans(job.cluster, chosen[0].offload)
    tight = priced.verdict == Fits.tight and chosen[1].verdict != Fits.tight
    key = "why.both" if leaning and tight else "why.leans" if leaning else "why.passed"
    values = {"plan": plan.name, "share": chosen[1].time.step / priced.time.step - 1.0, "gain": gain}
    return [tell(key, **values, **({"verdict": verdict(priced)} if tight else {}))]


def _where(answer: Answer) -> Sentence:
    """Shares of the step and of the fullest rank."""
    priced = answer.chosen.estimate
    items = {item: seconds for item, seconds in priced.time if item != "step" and seconds > WORTH * priced.time.step}
    shares = tuple(
        tell("why.share", item=name("time", item), share=seconds / priced.time.step)
        for item, seconds in sorted(items.items(), key=lambda it: -it[1])
    )
    kind, size = largest_kind(priced.memory)
    return tell(
        "why.where", shares=shares, reserved=priced.memory.reserved, limit=priced.limit, verdict=verdict(priced), kind=kind, size=size
    )


def _slower(job: Job, answer: Answer, family: Family) -> Sentence:
    best = answer.chosen.estimate
    lost = [term for term in terms(best, estimate(job, family.plan)) if term.seconds > WORTH * best.time.step][:2]
    share = family.seconds / best.time.step - 1.0
    return tell(
        "why.family" if lost else "why.family.even", family=family_name(family.name), share=share, plan=family.plan.name, terms=more(lost)
    )


def more(lost: Sequence[Term]) -> tuple[Sentence, ...]:
    """Items of time that take longer."""
    return tuple(tell("why.term", item=name("time", term.name), seconds=term.seconds) for term in lost)


def _more(found: Sequence[object]) -> tuple[Sentence, ...]:
    return (tell("why.more", count=len(found) - SHOWN),) if len(found) > SHOWN else ()
