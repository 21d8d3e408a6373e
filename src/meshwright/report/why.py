"""Formats the comparison of the chosen plan with other plans as text and as data. The other plans are a plan that the
user names (`plan --why-not`), or the best plans of all other families (`plan --why`).

Guarantees: the differences in the table of times add up to the difference of the step times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.core.messages import Message, mark_msgid, term, translate
from meshwright.core.units import show_bytes, show_seconds, show_step
from meshwright.report.plans import plan_data, table_heading, wrap_plan_names
from meshwright.report.text import align_columns, round_to_sum, wrap_text
from meshwright.spec.estimate import MEMORY_KINDS, Estimate, FitStatus, fit_message, largest_memory_kind
from meshwright.spec.job import Job

if TYPE_CHECKING:
    from meshwright.planner.search.best_plans import RankedPlan, SearchResult
    from meshwright.planner.search.explain import PlanComparison

STEP_DIGITS = 4
"""The number of significant digits of step times in tables of differences."""


OUTCOME_TEXTS = {
    "chosen": mark_msgid("{plan} is the chosen plan"),
    "slower": (mark_msgid("{plan} is slower than {chosen} by {gap:step} a step ({share:percent}); {verdict}")),
    "unmeasured": (
        mark_msgid(
            "{plan} is faster than {chosen} by {gap:step} a step ({share:percent}), but {reasons}: the gain is too "
            "small to rely on"
        )
    ),
    "tight": (
        mark_msgid(
            "{plan} is faster than {chosen} by {gap:step} a step ({share:percent}), but it is {verdict}: too "
            "little for a run that must not fail"
        )
    ),
    "faster": (
        mark_msgid(
            "{plan} is faster than {chosen} by {gap:step} a step ({share:percent}); {verdict}; the search does not "
            "try it, or ranks by another objective"
        )
    ),
    "unfit": mark_msgid("{plan} {verdict}"),
}
"""Message ids of the outcomes of a comparison with the chosen plan."""


def plan_comparison_text(answer: SearchResult, found: PlanComparison, language: str = "en") -> str:
    """Returns the result of the comparison in one or two sentences, then the times and the memory of both plans by
    kind."""
    chosen = answer.chosen
    lines = [wrap_text(translate(sentence, language)) for sentence in _outcome_messages(answer, found)]
    if found.estimate is not None and found.plan is not None and found.plan != chosen.plan:
        heads = table_heading("chosen", language), table_heading("asked", language)
        lines += ["", _difference_tables((chosen.estimate, found.estimate), heads, language)]
    return "\n".join(lines)


def plan_pair_text(first: RankedPlan, second: RankedPlan, language: str = "en") -> str:
    """Returns the comparison of two plans of one job: a sentence on each plan, then the times and the memory by
    kind."""
    gap = _step_gap(first.estimate, second.estimate)
    lines = [
        Message("{plan}: {step:step} a step; {verdict}", plan=each.name, step=each.estimate.time.step, verdict=fit)
        for each, fit in ((each, fit_message(each.estimate)) for each in (first, second))
    ]
    if gap:
        slow, fast = (second, first) if gap > 0 else (first, second)
        share = slow.estimate.time.step / fast.estimate.time.step - 1.0
        lines.append(
            Message(
                "{slow} is slower by {gap:step} a step ({share:percent})", slow=slow.name, gap=abs(gap), share=share
            )
        )
    tables = _difference_tables((first.estimate, second.estimate), (first.name, second.name), language)
    return "\n".join([*(wrap_text(translate(line, language)) for line in lines), "", tables])


def plan_pair_data(job: Job, first: RankedPlan, second: RankedPlan) -> dict[str, Any]:
    """Returns the data of `plan --compare --json`. `terms` are the differences by kind of time; they add up to `gap`,
    the step time of the second plan minus that of the first in seconds."""
    from meshwright.planner.search.explain import time_deltas

    terms = time_deltas(first.estimate, second.estimate)
    return {
        "plans": [plan_data(job, each.plan, each.estimate) for each in (first, second)],
        "gap": math.fsum(term.seconds for term in terms),
        "terms": [{"name": term.name, "seconds": term.seconds} for term in terms],
    }


def _difference_tables(pair: tuple[Estimate, Estimate], heads: tuple[str, str], language: str) -> str:
    """Returns the tables of times and memory of two estimates. `heads`: the headings of their columns."""
    return "\n".join([_time_table(*pair, heads, language), "", _memory_table(*pair, heads, language)])


def _outcome_messages(answer: SearchResult, found: PlanComparison) -> list[Any]:
    """Returns the result of the comparison as one or two messages."""
    if found.estimate is None or found.plan is None:
        return [Message("{asked} cannot run: {faults}", asked=found.name, faults=found.faults)]
    chosen, priced = answer.chosen, found.estimate
    step = chosen.estimate.time.step
    values: dict[str, Any] = {
        "plan": found.plan.name,
        "chosen": chosen.name,
        "gap": abs(_step_gap(chosen.estimate, priced)),
        "share": abs(priced.time.step / step - 1.0),
        "verdict": fit_message(priced),
        "reasons": found.reasons,
    }
    said = [Message(OUTCOME_TEXTS[found.outcome], **values)]
    if priced.is_crowded:
        said.append(Message("note: {note}", note=priced.notes[-1]))
    elif found.outcome == "unfit":
        kind, size = largest_memory_kind(priced.memory)
        largest_kind = (
            Message("{kind} alone take {size:bytes}", kind=kind, size=size)
            if size > priced.limit
            else Message("most of it: {kind}, {size:bytes}", kind=kind, size=size)
        )
        said.append(
            Message(
                "it needs {reserved:bytes} on the peak rank of {limit:bytes} usable memory; {alone}",
                reserved=priced.memory.reserved,
                limit=priced.limit,
                alone=largest_kind,
            )
        )
    return said


def _step_unit(chosen: Estimate, other: Estimate) -> tuple[str, float, int]:
    """Returns the unit for the step times of both plans, the length of this unit in seconds, and the number of
    decimals."""
    longest = max(chosen.time.step, other.time.step)
    unit, factor = next(
        (unit, factor) for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if longest >= factor or unit == "us"
    )
    return unit, factor, max(STEP_DIGITS - 1 - math.floor(math.log10(longest / factor)), 0) if longest else 0


def _step_gap(chosen: Estimate, other: Estimate) -> float:
    """Returns the difference between the step times of both plans in seconds, rounded as in the table."""
    _, factor, digits = _step_unit(chosen, other)
    ours, theirs = (round(priced.time.step / factor, digits) for priced in (chosen, other))
    return factor * (theirs - ours)


def _time_table(chosen: Estimate, other: Estimate, heads: tuple[str, str], language: str = "en") -> str:
    """Returns a table of the step times of both plans by kind, under the headings `heads`. Values are rounded so that
    rows and columns add up."""
    unit, factor, digits = _step_unit(chosen, other)
    items = [
        item for item, _ in chosen.time if item != "step" and (getattr(chosen.time, item) or getattr(other.time, item))
    ]
    step = factor / 10**digits
    ours, theirs = (round_to_sum([getattr(priced.time, item) for item in items], step) for priced in (chosen, other))

    def shown(count: int, sign: str = "") -> str:
        return f"{count / 10**digits:{sign},.{digits}f} {unit}"

    rows = [[table_heading("time a step", language), *heads, table_heading("difference", language)]]
    for item, mine, theirs_of_it in (*zip(items, ours, theirs, strict=True), ("step", sum(ours), sum(theirs))):
        rows.append(
            [
                translate(term("time", item), language),
                shown(mine),
                shown(theirs_of_it),
                shown(theirs_of_it - mine, "+"),
            ]
        )
    return align_columns(rows)


def _memory_table(chosen: Estimate, other: Estimate, heads: tuple[str, str], language: str = "en") -> str:
    """Returns a table with the bytes of both plans by kind, under the headings `heads`, for each plan on its
    peak-memory rank."""
    rows = [[table_heading("memory a device", language), *heads, table_heading("difference", language)]]
    for kind in (*MEMORY_KINDS, "total", "driver", "reserved"):
        mine, theirs = getattr(chosen.memory, kind), getattr(other.memory, kind)
        difference = f"{'+' if theirs >= mine else '-'}{show_bytes(abs(theirs - mine))}"
        rows.append([translate(term("memory", kind), language), show_bytes(mine), show_bytes(theirs), difference])
    return align_columns(rows)


def families_text(answer: SearchResult, families: Sequence[PlanComparison], language: str = "en") -> str:
    """Returns the best plan of every other family, with its additional time compared to the chosen plan, and the kind
    of time that contributes most to it."""
    from meshwright.planner.search.explain import family_name

    if not families:
        return translate(Message("no other family of plans is legal for this job"), language)
    rows = [[table_heading(head, language) for head in ("family", "best plan", "verdict", "takes", "loss", "by")]]
    step = answer.chosen.estimate.time.step
    for found in families:
        assert found.plan is not None and found.estimate is not None
        priced = found.estimate
        fits = found.outcome != "unfit"
        most = max(found.terms, key=lambda term: term.seconds, default=None)
        rows.append(
            [
                translate(family_name(found.name), language),
                found.plan.name,
                table_heading(str(priced.verdict if priced.fits else FitStatus.no), language),
                show_step(priced.time.step) if fits else show_bytes(priced.memory.reserved),
                f"{priced.time.step / step - 1.0:+.0%}" if fits else "-",
                f"{translate(term('time', most.name), language)} +{show_seconds(most.seconds)}"
                if fits and most and most.seconds > 0
                else "-",
            ]
        )
    return align_columns(wrap_plan_names(rows, at=1))


def plan_comparison_data(job: Job, found: PlanComparison) -> dict[str, Any]:
    """Returns the data of a plan that was not chosen. `terms` are the differences by kind of time; they add up to
    `gap`."""
    return {
        "asked": found.name,
        "outcome": str(found.outcome),
        "entry": plan_data(job, found.plan, found.estimate)
        if found.plan is not None and found.estimate is not None
        else None,
        "gap": found.gap,
        "terms": [{"name": term.name, "seconds": term.seconds} for term in found.terms],
        "faults": list(found.faults),
    }


def why_not_data(job: Job, answer: SearchResult, found: PlanComparison) -> dict[str, Any]:
    """Returns the data of `plan --why-not --json`."""
    return {"chosen": plan_data(job, answer.chosen.plan, answer.chosen.estimate), **plan_comparison_data(job, found)}
