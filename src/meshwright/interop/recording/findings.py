"""The result of a comparison: findings, the comparison of each step, and its JSON and text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from meshwright.core.messages import Message

KIND_NAMES = {
    "weights": Message("weights"),
    "inputs": Message("inputs"),
    "dropout": Message("dropout mask"),
    "output": Message("output"),
    "labels": Message("number of labels"),
    "loss": Message("loss"),
    "gradient": Message("gradient"),
    "clipping": Message("clipping"),
    "options": Message("optimizer options"),
    "update": Message("update"),
}
"""The compared values, in the order in which they are compared."""
MAX_LISTED_RANKS = 4


@dataclass
class Finding:
    """A difference. `amount` and `limit` are relative differences. `cause` is a name for programs, `why` the cause as a
    sentence."""

    step: int
    kind: str
    module: str
    ranks: list[int]
    amount: float
    limit: float
    cause: str
    why: str

    def data(self) -> dict[str, Any]:
        """Returns the finding as JSON data."""
        numbers = {
            name: value if math.isfinite(value) else None
            for name, value in (("amount", self.amount), ("limit", self.limit))
        }
        return {**vars(self), **numbers, "kind": self.kind, "why": str(self.why)}

    def line(self) -> Message:
        """Returns the finding as one line."""
        where = self.module or Message("the whole model")
        shown = ", ".join(str(rank) for rank in self.ranks[:MAX_LISTED_RANKS])
        ranks = Message("rank {ranks}", ranks=shown) if len(self.ranks) == 1 else Message("ranks {ranks}", ranks=shown)
        more = Message(" and {count} more", count=len(self.ranks) - MAX_LISTED_RANKS)
        return Message(
            "step {step}: {kind} of {where} on {ranks}{more} differs by {amount} (limit {limit}): {why}",
            step=self.step,
            kind=KIND_NAMES[self.kind],
            where=where,
            ranks=ranks,
            more=more if len(self.ranks) > MAX_LISTED_RANKS else "",
            amount=f"{self.amount:.1e}",
            limit=f"{self.limit:.1e}",
            why=self.why,
        )


@dataclass
class StepComparison:
    """What was compared in one step. Losses are means over the valid labels; `recorded_loss` is None if the loop called
    no cross entropy. The other numbers are the largest relative differences."""

    step: int
    loss: float
    recorded_loss: float | None
    labels: int
    recorded_labels: int | None
    micro_batches: int
    outputs: int = 0
    output: float = 0.0
    gradients: int = 0
    gradient: float = 0.0
    gradient_at: str = ""
    norm: float = 0.0
    updates: int = 0
    update: float = 0.0

    def line(self) -> Message:
        """Returns the comparison as one line."""
        return Message(
            "step {step}: micro-batches {micro}, loss {loss}, {labels:count label}; largest differences: "
            "{outputs:count output} "
            "{output}, {gradients:count gradient} {gradient} at {where}, {updates}",
            step=self.step,
            micro=self.micro_batches,
            loss=f"{self.loss:.6g}",
            labels=self.labels,
            outputs=self.outputs,
            output=f"{self.output:.1e}",
            gradients=self.gradients,
            gradient=f"{self.gradient:.1e}",
            where=self.gradient_at or "-",
            updates=Message("{updates:count update} {update}", updates=self.updates, update=f"{self.update:.1e}")
            if self.updates
            else Message("updates not compared"),
        )


@dataclass
class RecordingReport:
    """The comparison of a recording with one device. `equal`: whether no finding was made."""

    engine: str
    model: str
    world: int
    replicas: int
    stages: int
    precision: str
    versions: dict[str, str]
    steps: list[StepComparison] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Returns whether the recording equals one device."""
        return not self.findings

    def data(self) -> dict[str, Any]:
        """Returns the report as JSON data."""
        return {
            "equal": self.equal,
            **{
                name: getattr(self, name)
                for name in ("engine", "model", "world", "replicas", "stages", "precision", "versions")
            },
            "steps": [
                {
                    key: None if isinstance(value, float) and not math.isfinite(value) else value
                    for key, value in vars(each).items()
                }
                for each in self.steps
            ],
            "findings": [each.data() for each in self.findings],
            "notes": [str(note) for note in self.notes],
        }

    def lines(self) -> Iterator[Message]:
        """Yields the report as lines of text, without the findings."""
        yield Message(
            "{model} under {engine}, {world:count rank}: {replicas:count replica}, {stages:count stage}; compared "
            "with one "
            "device in float64, rounding measured in {precision}",
            model=self.model,
            engine=self.engine,
            world=self.world,
            replicas=self.replicas,
            stages=self.stages,
            precision=self.precision,
        )
        for step in self.steps:
            yield step.line()
        for note in self.notes:
            yield Message("note: {note}", note=note)
