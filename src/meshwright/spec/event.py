"""What went wrong in a run and what was done about it: RUN/events.jsonl holds an `Event` a line, a fault first and then
its recovery."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from meshwright.core.codec import StrictModel

EVENTS_FILE_NAME = "events.jsonl"


class RunEvent(StrictModel):
    """Times are seconds. A generation is one set of ranks, counted from 0; a recovery begins the next one."""

    kind: Literal[
        "fault",
        "recovery",
        "verdict",
        "resize",
        "save",
        "unsaved",
        "spike",
        "divergence",
        "quarantine",
        "came",
        "lost",
        "leaving",
        "slow",
        "shares",
        "gained",
        "returned",
        "longer",
    ]
    at: float = Field(description="when it was noticed, since 1970")
    generation: int = 0
    rank: int | None = Field(default=None, description="the culprit")
    cause: str = ""
    phase: str = Field(default="", description="what the culprit was doing")
    step: int = Field(default=0, description="the step in progress; of a recovery: the last step that was not lost")
    detection: float = Field(
        default=0.0, description="seconds between the culprit's last sign of life and the decision"
    )
    decision: str = ""
    batches: tuple[int, int] | None = Field(
        default=None, description="of a spike: [first, stop) in the order of the data, which are left out"
    )
    source: str = Field(default="", description="of a recovery: memory, disk, or empty for the beginning")
    lost: int = Field(default=0, description="steps that had ended and were run again")
    seconds: float = Field(
        default=0.0,
        description="of a recovery: from the decision to the end of the next new step; of a save, done or failed: for which training waited",
    )
    parts: dict[str, float] = Field(
        default_factory=dict, description="of `seconds`: end, start, join, build, restore, step"
    )
    plan: str = ""
    ranks: tuple[int, ...] = Field(default=(), description="of slow: those that compute longer than their peers")
    slots: tuple[int, ...] = Field(
        default=(), description="devices of the machine, counted from 0, that are left out, or come back"
    )
    predicted: float = Field(
        default=0.0, description="of a change because of a slow rank: how many times as fast a step should be"
    )
    measured: float = Field(default=0.0, description="of gained: how many times as fast it is")
    node: str = Field(default="", description="that came, was lost, or is asked to leave")


def parse_events(text: str) -> Iterator[RunEvent]:
    """The events that the lines of a journal hold. A line that a kill cut off, or that another version wrote, is left
    out."""
    for line in text.splitlines():
        try:
            yield RunEvent.model_validate(json.loads(line))
        except ValueError:  # of JSON or of the fields
            continue
