"""Describes what a training run records: the measurements of each step, events, and the results of proof runs.

`StepRecord` describes the measurements of a step, with the names of `Estimate`. `RunState` describes the state of a
training run, which checkpoints contain.

The digest of samples shows which samples a step has read. A digest is small, and the digests of ranks can be added.
Samples are numbered in the order of the data. Batch b of B rows has the samples b * B to b * B + B - 1. The digest has
the number of samples, and the sum of (n + 1)^2 over the sample numbers n, modulo 2^64. The digest changes if a sample
is read twice, missed or replaced. The sum over a whole batch has a closed form, so that many steps can be verified at
once.

>>> digest_samples([(3, 2), (0, 3)]) == digest_samples([(0, 5)])
True
>>> digest_samples([(0, 4), (5, 1)]) == digest_samples([(0, 5)])
False

`MemoryTimeline` is the memory of one step over time, as one rank measured it: RUN/memory/rank-N.json.

`RunEvent` describes the events of a run: faults and the reactions to them. RUN/events.jsonl has one `RunEvent` per
line.

`ProofResult` describes the result of a proof run, which compares a small batch under the plan on the real ranks with
one device (train/proof/proof_run.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, TypeAdapter

from meshwright.core.codec import StrictModel, TranslatableText
from meshwright.core.errors import InputError
from meshwright.core.messages import Message, pack_messages, unpack_messages
from meshwright.core.quantities import Bytes, Seconds

RECORDS_FILE_NAME = "records.jsonl"

RECORD_TAIL_BYTES = 1 << 16
"""The search for the last record reads only this number of bytes at the end of the record file."""


class MoeStats(StrictModel):
    """Expert statistics of one step."""

    loads: tuple[tuple[float, ...], ...] = Field(
        description=(
            "(token, expert) pairs of each expert of each MoE layer, divided by the mean; only minimum and "
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
    tokens: int = Field(
        description=(
            "tokens of the global batch: rows times sequence, with prompts and padding, whether or not they have a "
            "label (as Megatron-LM and torchtitan count); without token ids, such as for images: rows"
        )
    )
    gradient_norm: float
    lr: float
    seconds: float = Field(description="seconds of the step, with the wait for its batch")
    data_seconds: float = Field(default=0.0, description="seconds of waiting for the batch")
    between_seconds: float = Field(
        default=0.0,
        description=(
            "seconds from the end of the previous step to the beginning of this step, without waits for saves: "
            "validation loss, replica checks, in-memory checkpoints, agreement; 0 for the first step after a start"
        ),
    )
    exposed: dict[str, float] = Field(
        default_factory=dict, description="seconds of waiting for communication, by kind: data, tensor, pipeline, ..."
    )
    sent: dict[str, float] = Field(
        default_factory=dict,
        description="bytes that a rank sent over the network, by kind; ranks that share a host's memory send none",
    )
    tokens_per_second: float = 0.0
    rates: dict[str, float] = Field(
        default_factory=dict,
        description=(
            "labels_per_token: labels in the loss, divided by tokens; tokens_per_second_per_device; mfu (model FLOPs "
            "utilisation): FLOPs that the model needs, divided by the seconds and the nominal FLOP/s of all devices. A "
            "backward counts as two forwards, causal attention counts its half, recompute counts nothing. CPU ranks "
            "have no nominal peak, so they have no mfu"
        ),
    )
    memory: dict[str, float] = Field(
        default_factory=dict,
        description=(
            "bytes by kind (parameters, ...); total: peak allocated; reserved: peak reserved on "
            "the device (CPU, one rank per host: peak RSS); resident: RSS after the step; on a CPU also its parts "
            "process (Python and its libraries) and copies (in-memory checkpoints)"
        ),
    )
    loss_scale: float = 1.0
    skipped: bool = Field(default=False, description="whether a non-finite gradient prevented the update on all ranks")
    experts: MoeStats | None = Field(default=None, description="expert statistics; null if the model has no experts")
    held_out_loss: float | None = None
    batch: int | None = Field(default=None, description="index of the batch in data order, from 0")
    samples: str = Field(
        default="",
        description="digest of the samples that all ranks read: their count, and the sum of the squares of (index + 1)",
    )
    content: str = Field(default="", description="digest of the bytes that all ranks read")

    @property
    def expert_load(self) -> float | None:
        """Returns the (token, expert) pairs of the busiest expert, divided by the mean, in the layer with the largest
        ratio; None if the model has no experts."""
        return max(map(max, self.experts.loads), default=None) if self.experts else None

    def with_rates(self, devices: int, ideal_seconds: float) -> StepRecord:
        """Returns the record with its rates per device. `ideal_seconds`: the seconds of a step at an MFU of 1, or 0.

        >>> record = StepRecord(step=1, loss=2.0, tokens=64, gradient_norm=1, lr=1, seconds=2)
        >>> record.with_rates(4, 0.5).rates, record.with_rates(4, 0.0).rates
        ({'tokens_per_second_per_device': 8.0, 'mfu': 0.25}, {'tokens_per_second_per_device': 8.0})
        """
        if not self.tokens or not self.seconds:
            return self
        rates = {**self.rates, "tokens_per_second_per_device": self.tokens / self.seconds / devices}
        if ideal_seconds:
            rates["mfu"] = ideal_seconds / self.seconds
        return self.model_copy(update={"rates": rates})


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
        """Returns the digest as text: the number of samples, a colon, and the sum in 16 hexadecimal digits."""
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
    """The bytes of dynamic memory from the time `at` until the next event."""

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
        """Returns the bytes at the peak."""
        return sum(self.resident.values()) + self.peak.activations + self.peak.buffers


EVENTS_FILE_NAME = "events.jsonl"


class RunEvent(StrictModel):
    """A fault, or a reaction to a fault. Times are in seconds.

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
        "ended",
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
            "complete or failed save: seconds that training waited; of the end of training: seconds "
            "after the last step, without saves"
        ),
    )
    parts: dict[str, float] = Field(
        default_factory=dict,
        description=(
            "seconds of each part of `seconds`: end, start, join, build, restore, step, and the detection of further "
            "faults; also `unfinished`, the seconds of the interrupted step before `seconds` began"
        ),
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
    """Yields the events in the lines of RUN/events.jsonl. Skips incomplete lines and lines that another version
    wrote."""
    for line in text.splitlines():
        try:
            event = json.loads(line)
            messages = event.pop("messages", {})
            texts = {name: unpack_messages(messages[name]) for name in messages.keys() & {"cause", "decision"}}
            yield RunEvent.model_validate(event | texts)
        except (ValueError, AttributeError):  # invalid JSON or invalid fields
            continue


ProofMode = Annotated[int, Field(ge=1)] | Literal["auto", "start", "never"]
"""When proofs run. `start`: before the first update, and before the second if the first proof took at most
CHEAP_PROOF_SECONDS. Also before updates 10, 100 and 1,000, if the previous proof took at most CHEAP_PROOF_FRACTION of
the time of the run so far. `auto`: like `start`, but only if a proof is cheap (`is_proof_cheap`). A number n: like
`start`, and also every n steps. `never`: no proof."""

CHEAP_PROOF_SECONDS, CHEAP_PROOF_FRACTION, CHEAP_PROOF_STEPS = 5.0, 0.01, 1000
"""A proof is cheap if it takes at most CHEAP_PROOF_SECONDS, or at most CHEAP_PROOF_FRACTION of the time of
CHEAP_PROOF_STEPS steps."""


def is_proof_cheap(seconds: float, step: float) -> bool:
    """Returns whether a proof of `seconds` seconds is cheap in a training run whose steps take `step` seconds. In the
    example, the first proof takes at most 5 s, the second at most 1 % of 1,000 steps, the third neither.

    >>> is_proof_cheap(4.0, 0.01), is_proof_cheap(60.0, 10.0), is_proof_cheap(60.0, 1.0)
    (True, True, False)
    """
    return seconds <= CHEAP_PROOF_SECONDS or seconds <= CHEAP_PROOF_FRACTION * CHEAP_PROOF_STEPS * step


class ProofCost(StrictModel):
    """The planner's estimate of a proof. If there is no estimate, all values are 0."""

    seconds: float = 0.0
    step: float = Field(default=0.0, description="seconds of a training step")
    length: int = Field(default=0, description="tokens of each row that the proof reads; 0: all")
    rounding: float = Field(
        default=0.0,
        description="additional seconds if the rounding of float32 has to be measured; 0 for other precisions",
    )


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
        """Returns the differences as one line, which is empty if the results are equal."""
        loss_limit, gradient_limit = self.tolerance
        said = [f"loss by {self.loss:.2g}"] if not self.loss <= loss_limit else []
        if not self.gradient <= gradient_limit:
            said.append(f"gradient of {self.where} by {self.gradient:.2g} (tolerance {gradient_limit:.1g})")
        elif said:
            said[0] += f" (tolerance {loss_limit:.1g})"
        if self.labels[0] != self.labels[1]:
            said.append(f"{self.labels[1]} valid labels under the plan, {self.labels[0]} on one device")
        for names, where in ((self.missing, "on one device"), (self.extra, "under the plan")):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                said.append(f"{names[0]}{more} {'get' if more else 'gets'} a gradient only {where}")
        return "; ".join(filter(None, (", ".join(said), self.first)))


class RecordedProof(NamedTuple):
    """A proof as a training run records it, in one line of JSON. A run that resumes under the same plan reads this
    line. If the proof found the plan equal to one device, the run does not repeat the proof before its first update.
    For each tensor of a batch, `sizes` has the smallest and the largest size of each dimension over all proofs of the
    run."""

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
