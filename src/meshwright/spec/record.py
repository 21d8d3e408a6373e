"""Describes the measurements of a step, with the same names as in `Estimate`, and the state of a training run.

The digest of samples shows which samples a step has read. A digest is small, and the digests of ranks can be added.
Samples are numbered in the order of the data; batch b of B rows has the samples from b B to b B + B - 1. The digest is
the number of samples, and the sum of (n + 1)^2 modulo 2^64 over the sample numbers n. The digest changes if a sample is
read twice, missed or replaced. The sum over a whole batch has a closed form, so that many steps can be verified at
once.

>>> digest_samples([(3, 2), (0, 3)]) == digest_samples([(0, 5)])
True
>>> digest_samples([(0, 4), (5, 1)]) == digest_samples([(0, 5)])
False

`MemoryTimeline` is the memory of one step over time, as one rank measured it: RUN/memory/rank-N.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import NamedTuple

from pydantic import Field

from meshwright.core.codec import StrictModel
from meshwright.core.quantities import Bytes, Seconds

RECORDS_FILE_NAME = "records.jsonl"

RECORD_TAIL_BYTES = 1 << 16
"""The number of bytes at the end of the record file in which the last record is searched."""


class MoeStats(StrictModel):
    """Expert statistics of one step."""

    loads: tuple[tuple[float, ...], ...] = Field(
        description=(
            "(token, expert) pairs of each expert of each MoE layer over the mean; minimum and "
            "maximum above 1,024 experts"
        )
    )
    dropped: float = Field(
        default=0.0, description="fraction of (token, expert) pairs dropped because they exceed the expert capacity"
    )
    balance_loss: float | None = Field(
        default=None, description="load-balancing part of the loss; null if the model has none"
    )


class StepRecord(StrictModel):
    """One line of `records.jsonl`. Times are the seconds of the slowest rank, memory is in bytes of the rank with the
    highest peak."""

    step: int
    loss: float
    tokens: int = Field(description="number of labels in the loss, over all ranks")
    gradient_norm: float
    lr: float
    seconds: float = Field(description="seconds from the end of the previous step to the end of this step")
    data_seconds: float = Field(default=0.0, description="seconds of waiting for the batch")
    exposed: dict[str, float] = Field(
        default_factory=dict, description="seconds of waiting for communication, by kind: data, tensor, pipeline, ..."
    )
    sent: dict[str, float] = Field(
        default_factory=dict,
        description="bytes that a rank sent over the network, by kind; ranks that share a host's memory send none",
    )
    tokens_per_second: float = 0.0
    memory: dict[str, float] = Field(
        default_factory=dict,
        description=(
            "bytes by kind (parameters, ...); total: peak allocated; reserved: peak reserved on "
            "the device (CPU, one rank per host: peak RSS); resident: RSS after the step"
        ),
    )
    loss_scale: float = 1.0
    skipped: bool = Field(default=False, description="whether a non-finite gradient prevented the update on all ranks")
    expert_load: float | None = Field(
        default=None,
        description=(
            "(token, expert) pairs of the busiest expert over the mean, in the MoE layer with the largest ratio"
        ),
    )
    experts: MoeStats | None = Field(default=None, description="expert statistics; null if the model has no experts")
    held_out_loss: float | None = None
    batch: int | None = Field(default=None, description="index of the batch in data order, from 0")
    samples: str = Field(
        default="",
        description="digest of the samples that all ranks read: their count, and the sum of the squares of (index + 1)",
    )
    content: str = Field(default="", description="digest of the bytes that all ranks read")


class RunState(StrictModel):
    """The state of a training run after a step. Each checkpoint contains it."""

    step: int = 0
    samples: int = Field(default=0, description="number of sequences read since the start of the run")
    seed: int = 1
    plan: str = ""
    loss_scale: float = 1.0
    good_steps: int = Field(default=0, description="steps since the last change of the loss scale")


def last_recorded_step(end: bytes) -> int:
    """Returns the step of the last complete record in `end`, the last bytes of a file. Returns -1 without a complete
    record.

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
    """The number of samples, and the sum of (n + 1)^2 over their numbers n, modulo 2^64."""

    number: int
    squares: int

    @property
    def text(self) -> str:
        """The digest as text."""
        return f"{self.number}:{self.squares:016x}"


def digest_samples(runs: Iterable[tuple[int, int]]) -> SampleDigest:
    """Returns the digest of ranges of samples. Each range is its first sample number and its number of samples."""
    listed = list(runs)
    squares = sum(_sum_of_squares(first + count) - _sum_of_squares(first) for first, count in listed)
    return SampleDigest(sum(count for _, count in listed), squares % DIGEST_MODULUS)


def digest_batch(batch: int, rows: int) -> SampleDigest:
    """Returns the digest of a step that reads batch `batch` of `rows` rows."""
    return digest_samples([(batch * rows, rows)])


def _sum_of_squares(number: int) -> int:
    """Returns 1 + 4 + ... + number^2."""
    return number * (number + 1) * (2 * number + 1) // 6


class AllocationEvent(StrictModel):
    """The bytes of dynamic memory from the time `at` on."""

    at: Seconds = Field(description="seconds since the start of the step")
    activations: Bytes
    buffers: Bytes


class MemoryTimeline(StrictModel):
    """The memory of one step over time. `resident` is the static memory by kind: parameters, gradients, optimizer
    states, and temporary buffers that exist during the whole step."""

    rank: int
    step: int
    seconds: Seconds
    resident: dict[str, Bytes]
    moments: tuple[AllocationEvent, ...]
    peak: AllocationEvent
    place: str = Field(default="", description="operation at the peak: forward or backward, and the module")

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(self.resident.values()) + self.peak.activations + self.peak.buffers
