"""What a step measured, in the words of `Estimate`, and where a run stands."""

from __future__ import annotations

import json

from pydantic import Field

from meshwright.base.codec import Noun

RECORDS = "records.jsonl"

LAST = 1 << 16
"""Bytes at the end of the records in which the last one is looked for."""


class Mixtures(Noun):
    """What the experts of a model did in a step."""

    loads: tuple[tuple[float, ...], ...] = Field(
        description="of each mixture and each expert its pairs over the mean; of more than 1,024 experts the idlest and the busiest of each mixture"
    )
    dropped: float = Field(default=0.0, description="share of the pairs that was beyond the capacity of its expert")
    balance_loss: float | None = Field(default=None, description="the part of the loss that balances experts, where the model has one")


class StepRecord(Noun):
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
        default_factory=dict, description="bytes that a rank sent over the network, by kind; ranks of one host send none"
    )
    tokens_per_second: float = 0.0
    memory: dict[str, float] = Field(
        default_factory=dict,
        description="parameters, gradients, optimizer bytes; total: peak allocated, where measured; reserved: the most that was taken of the device, or by "
        "a process that shares no memory with other ranks; resident: that of the process behind the step",
    )
    loss_scale: float = 1.0
    skipped: bool = Field(default=False, description="a non-finite gradient: no rank updated")
    expert_load: float | None = Field(
        default=None, description="pairs of token and expert of the busiest expert over the mean, in the mixture where that is most"
    )
    experts: Mixtures | None = Field(default=None, description="of a model with experts")
    held_out_loss: float | None = None
    batch: int | None = Field(default=None, description="number in the order of the data, from 0")
    samples: str = Field(default="", description="what all ranks read of it: how many samples, and their numbers squared and added")
    content: str = Field(default="", description="digest of the bytes that all ranks read")


class RunState(Noun):
    """Where a run stands; a checkpoint holds one."""

    step: int = 0
    samples: int = Field(default=0, description="sequences consumed since the start")
    seed: int = 1
    plan: str = ""
    loss_scale: float = 1.0
    good_steps: int = Field(default=0, description="steps since the loss scale last changed")


def last_step(end: bytes) -> int:
    """The step of the last whole record in the end of a file; -1 where there is none.

    >>> last_step(b'"x":1}\\n{"step":7,"loss":1.0}\\n{"step":8,"lo')
    7
    """
    for line in reversed(end.split(b"\n")):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return -1
