"""What was found slow in a run, what was decided because of it, and what that gained: predicted beside measured.

Rule: a gain is that of the last change that promised as much; a change that another one followed within its first steps was not measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.report.text import columns
from meshwright.spec.event import Event
from meshwright.words.lines import translated
from meshwright.words.say import name, say, tell

MOST = 20
"""Decisions that are listed; of more the last ones."""


class Decision(NamedTuple):
    """Gains are how many times as fast a step becomes; 0: not known."""

    step: int
    ranks: str
    words: str
    predicted: float = 0.0
    measured: float = 0.0


def decisions(events: Sequence[Event]) -> list[Decision]:
    """Every verdict and every change, in order."""
    found: list[Decision] = []
    for event in events:
        ranks = ", ".join(map(str, event.ranks))
        if event.kind == "slow":
            words = f"{event.cause}: {event.decision}" if event.decision else event.cause
            found.append(Decision(event.step, ranks, words, event.predicted))
        elif event.kind == "shares":
            found.append(Decision(event.step, ranks, f"{event.plan} from here on", event.predicted))
        elif event.kind == "returned":
            devices = f"device{'s' if len(event.slots) > 1 else ''} {', '.join(map(str, event.slots))}"
            found.append(Decision(event.step, ranks, f"{devices} comes back: {event.cause}", event.predicted))
        elif event.kind == "gained":
            promised = [at for at, each in enumerate(found) if each.predicted == event.predicted and not each.measured]
            for at in promised[-1:]:
                found[at] = found[at]._replace(measured=event.measured)
    return found


def decisions_text(events: Sequence[Event], language: str = "en") -> str:
    """A table; empty where nobody was slow."""
    rows = decisions(events)
    if not rows:
        return ""
    shown = [
        (
            str(row.step),
            row.ranks,
            translated(row.words, language),
            *(f"{gain:.2f}" if gain else "" for gain in (row.predicted, row.measured)),
        )
        for row in rows[-MOST:]
    ]
    more = [(say(tell("broke.more", count=len(rows) - MOST), language),)] if len(rows) > MOST else []
    head = [say(name("broke", word), language) for word in ("step", "rank", "slow", "faster", "measured")]
    return columns([head, *more, *shown], "  ")
