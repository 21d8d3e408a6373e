"""Explains the chosen plan in a few sentences: its time, its memory, and how much slower the best plans of other
families are."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.core.messages import Message, term
from meshwright.planner.cost.step import estimate
from meshwright.planner.search.result import PlanFamily, SearchResult
from meshwright.planner.search.risk_margin import required_gain, uses_unmeasured_link
from meshwright.planner.search.why_not import TimeDelta, time_deltas
from meshwright.spec.estimate import FitStatus, fit_message, largest_memory_kind
from meshwright.spec.job import Job

MAX_FAMILIES_NAMED = 3
"""The maximum number of families in one sentence."""

MIN_TIME_FRACTION_NAMED = 0.005
"""Kinds of time below this fraction of the step are not mentioned."""


def explain(job: Job, answer: SearchResult) -> list[Message]:
    """Returns the sentences that follow the ranked plans."""
    said = [_chosen_message(answer), *_passed_over_messages(job, answer), _breakdown_message(answer)]
    others = [family for family in answer.families if family.plan != answer.chosen.plan]
    slower = [family for family in others if family.fits and family.seconds >= answer.chosen.estimate.time.step]
    unfit = [family for family in others if not family.fits]
    if slower:
        parts = tuple(_slower_family_message(job, answer, family) for family in slower[:MAX_FAMILIES_NAMED])
        said.append(Message("slower: {families}", families=parts + _remaining_families(slower)))
    if unfit:
        parts = tuple(
            Message("{family} needs {reserved:bytes}", family=family_name(family.name), reserved=family.reserved)
            for family in unfit[:MAX_FAMILIES_NAMED]
        )
        said.append(
            Message(
                "do not fit in {limit:bytes}: {families}",
                limit=answer.chosen.estimate.limit,
                families=parts + _remaining_families(unfit),
            )
        )
    return said


def family_name(words: str) -> Message:
    """Returns the name of a family such as 'tensor + ZeRO-1', with each part translated."""
    first, _, rest = words.partition(" + ")
    return (
        Message("{first} + {rest}", first=term("family", first), rest=family_name(rest))
        if rest
        else term("family", first)
    )


def _chosen_message(answer: SearchResult) -> Message:
    chosen = answer.chosen
    return Message(
        "{plan}: {step:seconds} a step, {rate:count} tokens/s, the first of {considered:count plan}",
        plan=chosen.name,
        step=chosen.estimate.time.step,
        rate=chosen.estimate.tokens_per_second,
        considered=answer.considered,
    )


def _passed_over_messages(job: Job, answer: SearchResult) -> list[Message]:
    """If the chosen plan was preferred over a faster plan because of risk, returns a sentence about the faster plan."""
    chosen = (answer.chosen.plan, answer.chosen.estimate)
    known = [(entry.estimate.time.step, entry.plan) for entry in answer.plans]
    known += [(family.seconds, family.plan) for family in answer.families if family.fits]
    _, plan = min(known, key=lambda it: it[0])
    priced = estimate(job, plan)
    gain = required_gain(job, chosen, (plan, priced))
    if not gain:
        return []
    leaning = uses_unmeasured_link(job.cluster, plan.offload) and not uses_unmeasured_link(
        job.cluster, chosen[0].offload
    )
    tight = priced.verdict == FitStatus.tight and chosen[1].verdict != FitStatus.tight
    values = {"plan": plan.name, "share": chosen[1].time.step / priced.time.step - 1.0, "gain": gain}
    if not leaning:
        return [
            Message(
                (
                    "{plan} is {share:percent} faster but {verdict}: a tight plan comes first only when it is more "
                    "than {gain:percent} faster"
                ),
                verdict=fit_message(priced),
                **values,
            )
        ]
    if not tight:
        return [
            Message(
                (
                    "{plan} is {share:percent} faster, but its host link is not profiled: such a plan comes first "
                    "only when it is more than {gain:percent} faster (`meshwright probe --save` measures the link)"
                ),
                **values,
            )
        ]
    return [
        Message(
            (
                "{plan} is {share:percent} faster but {verdict}, and its host link is not profiled: such a plan comes "
                "first only when it is more than {gain:percent} faster (`meshwright probe --save` measures the link)"
            ),
            verdict=fit_message(priced),
            **values,
        )
    ]


def _breakdown_message(answer: SearchResult) -> Message:
    """Returns a sentence with the step time by kind, and the memory of the rank with the highest peak by kind, as
    fractions."""
    priced = answer.chosen.estimate
    items = {
        item: seconds
        for item, seconds in priced.time
        if item != "step" and seconds > MIN_TIME_FRACTION_NAMED * priced.time.step
    }
    shares = tuple(
        Message("{item} {share:percent}", item=term("time", item), share=seconds / priced.time.step)
        for item, seconds in sorted(items.items(), key=lambda it: -it[1])
    )
    kind, size = largest_memory_kind(priced.memory)
    return Message(
        "time: {shares}. memory: {reserved:bytes} of {limit:bytes} usable memory, {verdict}; most of it {kind} "
        "({size:bytes})",
        shares=shares,
        reserved=priced.memory.reserved,
        limit=priced.limit,
        verdict=fit_message(priced),
        kind=kind,
        size=size,
    )


def _slower_family_message(job: Job, answer: SearchResult, family: PlanFamily) -> Message:
    best = answer.chosen.estimate
    lost = [
        term
        for term in time_deltas(best, estimate(job, family.plan))
        if term.seconds > MIN_TIME_FRACTION_NAMED * best.time.step
    ][:2]
    share = family.seconds / best.time.step - 1.0
    return Message(
        "{family} by {share:percent} ({plan}: {terms})" if lost else "{family} by {share:percent} ({plan})",
        family=family_name(family.name),
        share=share,
        plan=family.plan.name,
        terms=describe_time_deltas(lost),
    )


def describe_time_deltas(lost: Sequence[TimeDelta]) -> tuple[Message, ...]:
    """Returns a text for each kind of time that takes longer."""
    return tuple(
        Message("{item} +{seconds:seconds}", item=term("time", delta.name), seconds=delta.seconds) for delta in lost
    )


def _remaining_families(found: Sequence[object]) -> tuple[Message, ...]:
    return (
        (Message("and {count:count} more", count=len(found) - MAX_FAMILIES_NAMED),)
        if len(found) > MAX_FAMILIES_NAMED
        else ()
    )
