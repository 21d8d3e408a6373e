"""Plans that were not chosen as text and as data: one beside the chosen plan, or the best of every family. Differences that are shown add up
to the gap that is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.base.units import show_bytes, show_seconds
from meshwright.report.plans import broken, entry_data, label, show_step
from meshwright.report.text import columns, folded, whole_parts
from meshwright.spec.estimate import Estimate
from meshwright.words.say import name, say, tell
from meshwright.words.verdict import KINDS, largest_kind, verdict

if TYPE_CHECKING:
    from meshwright.search.answer import Answer
    from meshwright.search.why_not import Against

DIGITS = 4
"""Of a step, in tables of differences."""


def against_text(answer: Answer, found: Against, language: str = "en") -> str:
    """The verdict in one sentence, then the two plans item by item."""
    chosen = answer.chosen
    lines = [folded(say(sentence, language)) for sentence in _outcome(answer, found)]
    if found.estimate is not None and found.plan is not None and found.plan != chosen.plan:
        lines += ["", time_table(chosen.estimate, found.estimate, language), "", memory_table(chosen.estimate, found.estimate, language)]
    return "\n".join(lines)


def _outcome(answer: Answer, found: Against) -> list[Any]:
    """What the answer is, in a sentence or two."""
    if found.estimate is None or found.plan is None:
        return [tell("against.illegal", asked=found.asked, faults=found.faults)]
    chosen, priced = answer.chosen, found.estimate
    step = chosen.estimate.time.step
    values: dict[str, Any] = {
        "plan": found.plan.name,
        "chosen": chosen.name,
        "gap": abs(_gap(chosen.estimate, priced)),
        "share": abs(priced.time.step / step - 1.0),
        "verdict": verdict(priced),
    }
    said = [tell(f"against.{found.outcome}", **values)]
    if priced.is_crowded:
        said.append(tell("estimate.note", note=priced.notes[-1]))
    elif found.outcome == "unfit":
        kind, size = largest_kind(priced.memory)
        alone = tell("against.alone", kind=kind, size=size) if size > priced.limit else tell("against.most", kind=kind, size=size)
        said.append(tell("against.memory", reserved=priced.memory.reserved, limit=priced.limit, alone=alone))
    return said


def _digits(chosen: Estimate, other: Estimate) -> tuple[str, float, int]:
    """The unit of both steps, its seconds, and the digits behind the point."""
    longest = max(chosen.time.step, other.time.step)
    unit, factor = next((unit, factor) for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)) if longest >= factor or unit == "us")
    return unit, factor, max(DIGITS - 1 - math.floor(math.log10(longest / factor)), 0) if longest else 0


def _gap(chosen: Estimate, other: Estimate) -> float:
    """Seconds between the two steps, as the table shows them."""
    _, factor, digits = _digits(chosen, other)
    ours, theirs = (round(priced.time.step / factor, digits) for priced in (chosen, other))
    return factor * (theirs - ours)


def time_table(chosen: Estimate, other: Estimate, language: str = "en") -> str:
    """Both steps item by item, in whole units of their last digit, so that rows and columns add up."""
    unit, factor, digits = _digits(chosen, other)
    items = [item for item, _ in chosen.time if item != "step" and (getattr(chosen.time, item) or getattr(other.time, item))]
    step = factor / 10**digits
    ours, theirs = (whole_parts([getattr(priced.time, item) for item in items], step) for priced in (chosen, other))

    def shown(count: int, sign: str = "") -> str:
        return f"{count / 10**digits:{sign},.{digits}f} {unit}"

    rows = [[label("time a step", language), *(label(head, language) for head in ("chosen", "asked", "difference"))]]
    for item, mine, theirs_of_it in (*zip(items, ours, theirs, strict=True), ("step", sum(ours), sum(theirs))):
        rows.append([say(name("time", item), language), shown(mine), shown(theirs_of_it), shown(theirs_of_it - mine, "+")])
    return columns(rows)


def memory_table(chosen: Estimate, other: Estimate, language: str = "en") -> str:
    """Bytes of both on their fullest ranks."""
    rows = [[label("memory a device", language), *(label(head, language) for head in ("chosen", "asked", "difference"))]]
    for kind in (*KINDS, "total", "reserved"):
        mine, theirs = getattr(chosen.memory, kind), getattr(other.memory, kind)
        apart = f"{'+' if theirs >= mine else '-'}{show_bytes(abs(theirs - mine))}"
        rows.append([say(name("memory", kind), language), show_bytes(mine), show_bytes(theirs), apart])
    return columns(rows)


def families_text(answer: Answer, families: Sequence[Against], language: str = "en") -> str:
    """The best plan of every family that lost: by how much, and the item of time that is most of its loss."""
    from meshwright.search.explain import family_name

    if not families:
        return say(tell("why.alone"), language)
    rows = [[label(head, language) for head in ("family", "best plan", "verdict", "takes", "loss", "by")]]
    step = answer.chosen.estimate.time.step
    for found in families:
        assert found.plan is not None and found.estimate is not None
        priced = found.estimate
        fits = found.outcome != "unfit"
        most = max(found.terms, key=lambda term: term.seconds, default=None)
        rows.append(
            [
                say(family_name(found.asked), language),
                found.plan.name,
                label(str(priced.verdict), language),
                show_step(priced.time.step) if fits else show_bytes(priced.memory.reserved),
                f"{priced.time.step / step - 1.0:+.0%}" if fits else "-",
                f"{say(name('time', most.name), language)} +{show_seconds(most.seconds)}" if fits and most and most.seconds > 0 else "-",
            ]
        )
    return columns(broken(rows, at=1))


def lost_data(found: Against) -> dict[str, Any]:
    """A plan that was not chosen. `terms` sum to `gap`."""
    return {
        "asked": found.asked,
        "outcome": str(found.outcome),
        "entry": entry_data(found.plan, found.estimate) if found.plan is not None and found.estimate is not None else None,
        "gap": found.gap,
        "terms": [{"name": term.name, "seconds": term.seconds} for term in found.terms],
        "faults": list(found.faults),
    }


def against_data(answer: Answer, found: Against) -> dict[str, Any]:
    """The answer of `plan --why-not --json`."""
    return {"chosen": entry_data(answer.chosen.plan, answer.chosen.estimate), **lost_data(found)}
