"""What a step measured, in the words of `Estimate`, and where a run stands.

The ledger of samples: which of them a step read, as few words that any number of ranks can add up, and what they must
come to.

Sample number n is the n-th of the data's order; batch b of B rows are the samples b B to b B + B - 1. What was read is
a count and the sum of (n + 1)^2
modulo 2^64 over the samples: a sample read twice or missed, or one in place of another, changes it; the sum over a
whole batch has a
closed form, so that a ledger of any length is proven at once.

>>> digest_samples([(3, 2), (0, 3)]) == digest_samples([(0, 5)])
True
>>> digest_samples([(0, 4), (5, 1)]) == digest_samples([(0, 5)])
False

The memory of one step over its time, as one rank measured it: RUN/memory/rank-N.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from pydantic import Field

from meshwright.core.codec import StrictModel
from meshwright.core.units import Bytes, Seconds

RECORDS_FILE_NAME = "records.jsonl"

RECORD_TAIL_BYTES = 1 << 16
"""Bytes at the end of the records in which the last one is looked for."""


class MoeStats(StrictModel):
    """What the experts of a model did in a step."""

    loads: tuple[tuple[float, ...], ...] = Field(
        description=(
            "of each mixture and each expert its pairs over the mean; of more than 1,024 experts the "
            "idlest and the busiest of each mixture"
        )
    )
    dropped: float = Field(default=0.0, description="share of the pairs that was beyond the capacity of its expert")
    balance_loss: float | None = Field(
        default=None, description="the part of the loss that balances experts, where the model has one"
    )


class StepRecord(StrictModel):
    """One line of `records.jsonl`. Times are seconds of the slowest rank, memory the bytes of the fullest."""

    step: int
    loss: float
    tokens: int = Field(description="labels that counted in the loss, over all ranks")
    gradient_norm: float
    lr: float
    seconds: float = Field(description="of the step, between two ends")
    data_seconds: float = Field(default=0.0, description="waiting for the batch")
    exposed: dict[str, float] = Field(
        default_factory=dict, description="seconds waiting for communication, by kind: data, tensor, pipeline"
    )
    sent: dict[str, float] = Field(
        default_factory=dict,
        description="bytes that a rank sent over the network, by kind; ranks of one host send none",
    )
    tokens_per_second: float = 0.0
    memory: dict[str, float] = Field(
        default_factory=dict,
        description=(
            "parameters, gradients, optimizer bytes; total: peak allocated, where measured; reserved: "
            "the most that was taken of the device, or by "
            "a process that shares no memory with other ranks; resident: that of the process behind the step"
        ),
    )
    loss_scale: float = 1.0
    skipped: bool = Field(default=False, description="a non-finite gradient: no rank updated")
    expert_load: float | None = Field(
        default=None,
        description="pairs of token and expert of the busiest expert over the mean, in the mixture where that is most",
    )
    experts: MoeStats | None = Field(default=None, description="of a model with experts")
    held_out_loss: float | None = None
    batch: int | None = Field(default=None, description="number in the order of the data, from 0")
    samples: str = Field(
        default="", description="what all ranks read of it: how many samples, and their numbers squared and added"
    )
    content: str = Field(default="", description="digest of the bytes that all ranks read")


class RunState(StrictModel):
    """Where a run stands; a checkpoint holds one."""

    step: int = 0
    samples: int = Field(default=0, description="sequences consumed since the start")
    seed: int = 1
    plan: str = ""
    loss_scale: float = 1.0
    good_steps: int = Field(default=0, description="steps since the loss scale last changed")


def last_recorded_step(end: bytes) -> int:
    """The step of the last whole record in the end of a file; -1 where there is none.

    >>> last_recorded_step(b'"x":1}\\n{"step":7,"loss":1.0}\\n{"step":8,"lo')
    7
    """
    for line in reversed(end.split(b"\n")):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return -1


DIGEST_MODULUS = 2**64


class SampleDigest(NamedTuple):
    """How many, and the sum of their squares."""

    number: int
    squares: int

    @property
    def text(self) -> str:
        return f"{self.number}:{self.squares:016x}"


def digest_samples(runs: Iterable[tuple[int, int]]) -> SampleDigest:
    """Of runs of samples, each a first number and a count."""
    listed = list(runs)
    squares = sum(_sum_of_squares(first + count) - _sum_of_squares(first) for first, count in listed)
    return SampleDigest(sum(count for _, count in listed), squares % DIGEST_MODULUS)


def digest_batch(batch: int, rows: int) -> SampleDigest:
    """What a step that reads a whole batch reads."""
    return digest_samples([(batch * rows, rows)])


def _sum_of_squares(number: int) -> int:
    """1 + 4 + ... + number^2."""
    return number * (number + 1) * (2 * number + 1) // 6


class AllocationEvent(StrictModel):
    """What came and went is so much from here on."""

    at: Seconds = Field(description="since the step began")
    activations: Bytes
    buffers: Bytes


class MemoryTimeline(StrictModel):
    """`held` lies under all moments: parameters, gradients, optimizer and what passes by, as bytes by kind."""

    rank: int
    step: int
    seconds: Seconds
    held: dict[str, Bytes]
    moments: tuple[AllocationEvent, ...]
    peak: AllocationEvent
    place: str = Field(default="", description="what ran at the peak: forward or backward of which module")

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(self.held.values()) + self.peak.activations + self.peak.buffers
