"""Which pins contradict each other, named together with the reason."""

from __future__ import annotations

from itertools import combinations
from typing import Any

from meshwright.base.errors import InputError
from meshwright.search.space import Space
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

AT_MOST = 3
"""Pins that are named together."""


def conflict(job: Job) -> str:
    """One line for the fewest pins that leave no plan at all, whatever rules of the model say; empty when there are none."""
    for count in range(1, min(len(job.pins), AT_MOST) + 1):
        for names in combinations(job.pins, count):
            pins = {name: job.pins[name] for name in names}
            if empty(job.but(pins=pins)):
                written = " and ".join(f"{name}={shown(value)}" for name, value in pins.items())
                reason = reason_of(pins) or f"no plan for {job.cluster.devices} devices has {'it' if count == 1 else 'them all'}"
                return f"pin{'s' if count > 1 else ''} {written}{' contradict each other' if count > 1 else ''}: {reason}"
    return ""


def empty(job: Job) -> bool:
    """Whether the pins leave nothing to consider; not so where one says nothing without another, such as a number of blocks without what they do."""
    try:
        space = Space(job)
    except InputError:
        return False
    return not any(True for _ in space.boxes()) and not space.considered


def reason_of(pins: dict[str, Any]) -> str:
    """What a plan with these pins, and nothing else, breaks; empty when nothing."""
    given = {("dp_replicate" if name == "dp" else name): value for name, value in pins.items()}
    try:
        Plan().but(**given)
    except InputError as error:
        return str(error).removeprefix("$: ")
    return ""


def shown(value: Any) -> str:
    """A pin's value as it is written.

    >>> shown((1, 2)), shown(True), shown("full")
    ('[1,2]', 'true', 'full')
    """
    if isinstance(value, tuple):
        return "[" + ",".join(map(str, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)
