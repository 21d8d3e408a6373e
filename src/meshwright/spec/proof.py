"""Describes the result of a proof run, which compares a small batch under the plan on the real ranks with one device
(train/proof/proof_run.py)."""

from __future__ import annotations

import json
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from meshwright.core.codec import StrictModel, TranslatableText
from meshwright.core.errors import InputError
from meshwright.core.messages import Message

ProofMode = Annotated[int, Field(ge=1)] | Literal["auto", "start", "never"]
"""When proofs run. `start`: before the first update, and on a sparse schedule after it. `auto`: like `start`, if a
proof is cheap. A number n: like `start`, and also every n steps."""

CHEAP_PROOF_SECONDS, CHEAP_PROOF_FRACTION, CHEAP_PROOF_STEPS = 5.0, 0.01, 1000
"""A proof is cheap if it takes at most CHEAP_PROOF_SECONDS, or at most CHEAP_PROOF_FRACTION of the time of
CHEAP_PROOF_STEPS steps."""


def is_proof_cheap(seconds: float, step: float) -> bool:
    """Returns whether a proof of `seconds` seconds is cheap in a training run whose steps take `step` seconds.

    >>> is_proof_cheap(4.0, 0.01), is_proof_cheap(60.0, 10.0), is_proof_cheap(60.0, 1.0)
    (True, True, False)
    """
    return seconds <= CHEAP_PROOF_SECONDS or seconds <= CHEAP_PROOF_FRACTION * CHEAP_PROOF_STEPS * step


class ProofCost(StrictModel):
    """The planner's estimate of a proof. If there is no estimate, all values are 0."""

    seconds: float = 0.0
    step: float = Field(default=0.0, description="seconds of a training step")
    length: int = Field(default=0, description="tokens of each row that the proof reads; 0: all")


class ProofResult(StrictModel):
    """The result of a proof. A relative difference is the norm of the difference divided by the norm of the value on
    one device. `first` names the first module that differs."""

    plan: str
    precision: str
    equal: bool
    step: int = Field(description="number of updates before the proof")
    loss: float = Field(description="relative difference of the loss")
    losses: tuple[float, float] = Field(description="loss on one device, and loss under the plan")
    gradient: float = Field(description="largest relative difference of a gradient")
    where: str = Field(description="parameter with the largest relative difference of a gradient")
    tolerance: tuple[float, float] = Field(
        description="tolerances of the loss, and of the gradient of parameter `where`"
    )
    parameters: int = Field(description="number of compared gradients")
    rounding: int = Field(
        default=0, description="number of compared gradients that consist only of rounding errors on both sides"
    )
    labels: tuple[int, int] = Field(description="number of valid labels on one device, and under the plan")
    missing: tuple[str, ...] = Field(default=(), description="parameters that receive a gradient on one device only")
    extra: tuple[str, ...] = Field(default=(), description="parameters that receive a gradient under the plan only")
    first: str = Field(default="", description="first module that differs, and in what; empty if all modules are equal")
    contents: tuple[str, ...] = Field(default=(), description="the compared batches")
    notes: tuple[TranslatableText, ...] = Field(default=(), description="statements that were not proven, with reasons")
    rows: int = 0
    seconds: float = 0.0
    bytes: int = Field(default=0, description="bytes gathered on rank 0 for the computation on one device")

    @property
    def line(self) -> str:
        """The differences as one line."""
        loss_limit, gradient_limit = self.tolerance
        said = [f"loss by {self.loss:.2g}"] if not self.loss <= loss_limit else []
        if not self.gradient <= gradient_limit:
            said.append(f"gradient of {self.where} by {self.gradient:.2g} (tolerance {gradient_limit:.1g})")
        elif said:
            said[0] += f" (tolerance {loss_limit:.1g})"
        if self.labels[0] != self.labels[1]:
            said.append(f"{self.labels[1]} labels for {self.labels[0]}")
        for names, where in ((self.missing, "one device"), (self.extra, "the plan")):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                said.append(f"a loss reaches {names[0]}{more} under {where} alone")
        return "; ".join(filter(None, (", ".join(said), self.first)))


class RecordedProof(NamedTuple):
    """A proof as a training run records it, in one line of JSON. A resumed run reads this line and needs no further
    proof. `sizes` is the smallest and largest batch sizes of all proofs of the run, by key and dimension."""

    result: ProofResult
    sizes: dict[str, tuple[tuple[int, int], ...]]

    def to_json(self) -> str:
        """Returns one line with the fields of the result and `sizes`."""
        return json.dumps(self.result.model_dump() | {"sizes": self.sizes}, separators=(",", ":"))

    @classmethod
    def from_json(cls, line: str) -> RecordedProof:
        """Parses a line. Raises ValueError if it is corrupt."""
        data = json.loads(line)
        sizes = data.pop("sizes", {}) if isinstance(data, dict) else {}
        known = TypeAdapter(dict[str, tuple[tuple[int, int], ...]]).validate_json(json.dumps(sizes))
        return cls(ProofResult.model_validate_json(json.dumps(data)), known)


def validate_proof_mode(mode: ProofMode) -> ProofMode:
    """Returns `mode`. Raises InputError if it is invalid."""
    if mode in ("auto", "start", "never") or (isinstance(mode, int) and not isinstance(mode, bool) and mode > 0):
        return mode
    raise InputError(
        Message("prove {mode!r} is not one of 'auto', 'start', 'never' or a number of steps: use 'auto'", mode=mode)
    )
