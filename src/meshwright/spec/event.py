"""Describes the events of a run: faults and the reactions to them. RUN/events.jsonl has one `RunEvent` per line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from pydantic import Field

from meshwright.core.codec import StrictModel, TranslatableText
from meshwright.core.messages import Message, pack_messages, unpack_messages

EVENTS_FILE_NAME = "events.jsonl"


class RunEvent(StrictModel):
    """A fault, or a reaction to one. Times are in seconds.

    A generation is one start of all ranks, counted from 0. Each recovery begins a new generation.
    """

    kind: Literal[
        "fault",
        "recovery",
        "verdict",
        "resize",
        "save",
        "unsaved",
        "degraded",
        "spike",
        "divergence",
        "bad_data",
        "node_joined",
        "node_lost",
        "node_leaving",
        "slow",
        "rebalanced",
        "rebalance_result",
        "device_readmitted",
        "run_extended",
    ]
    at: float = Field(description="time of detection, in seconds since 1970")
    generation: int = 0
    rank: int | None = Field(default=None, description="the failed or slow rank")
    cause: TranslatableText = ""
    phase: str = Field(default="", description="phase of the step that the rank was in")
    step: int = Field(default=0, description="step in progress; of a recovery: the last step that was not lost")
    detection: float = Field(default=0.0, description="seconds between the last heartbeat of the rank and the decision")
    decision: TranslatableText = ""
    batches: tuple[int, int] | None = Field(
        default=None, description="of a loss spike: range [first, stop) of skipped batches in data order"
    )
    source: str = Field(
        default="", description="of a recovery: where the state came from: memory, disk, or empty for the initial state"
    )
    lost: int = Field(default=0, description="completed steps that are executed again")
    seconds: float = Field(
        default=0.0,
        description=(
            "of a recovery: seconds from the decision to the end of the next new step; of a "
            "complete or failed save: seconds that training waited"
        ),
    )
    parts: dict[str, float] = Field(
        default_factory=dict, description="seconds of each part of `seconds`: end, start, join, build, restore, step"
    )
    plan: str = ""
    ranks: tuple[int, ...] = Field(
        default=(), description="of slow: ranks that take longer to compute than other ranks"
    )
    slots: tuple[int, ...] = Field(
        default=(), description="devices of the machine, counted from 0, that are excluded or readmitted"
    )
    predicted: float = Field(default=0.0, description="of a reaction to a slow rank: predicted speedup of a step")
    measured: float = Field(default=0.0, description="of rebalance_result: measured speedup of a step")
    node: str = Field(default="", description="the node that joined, was lost, or leaves")

    def to_line(self) -> str:
        """Returns the event as a line of the file. Its field `messages` has the templates and fields of `cause` and
        `decision`, so that a report in another language can translate them."""
        texts = {"cause": self.cause, "decision": self.decision}
        messages = {name: pack_messages(text) for name, text in texts.items() if isinstance(text, Message)}
        event = self.model_dump(exclude_defaults=True) | ({"messages": messages} if messages else {})
        return json.dumps(event, separators=(",", ":"))


def device_names(slots: Sequence[int], name: Callable[[int], str] = str) -> Message:
    """Returns the names of the devices in `slots`, such as "device 2"."""
    names = ", ".join(map(name, slots))
    return Message("devices {names}" if len(slots) > 1 else "device {names}", names=names)


def parse_events(text: str) -> Iterator[RunEvent]:
    """Yields the events of the lines of a log. Skips incomplete lines and lines that another version wrote."""
    for line in text.splitlines():
        try:
            event = json.loads(line)
            messages = event.pop("messages", {})
            texts = {name: unpack_messages(messages[name]) for name in messages.keys() & {"cause", "decision"}}
            yield RunEvent.model_validate(event | texts)
        except (ValueError, AttributeError):  # invalid JSON or invalid fields
            continue
