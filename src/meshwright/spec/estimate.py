"""Describes the memory and time that the planner predicts for a plan. `StepRecord` has the measured values under the
same names.

The fit status has three values. A plan fits, is tight, or does not fit (in device memory or in host memory). It is
tight if it may not fit with a fragmented allocator, or if it is not expected to fit but may, because the memory of such
plans is predicted with an error. It does not fit only if the lower end of the interval of its memory exceeds the
limit.
"""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from meshwright.core.codec import StrictModel, TranslatableText
from meshwright.core.messages import Message, term


class MemoryBreakdown(StrictModel):
    """Bytes of one rank at its memory peak. `buffers` are temporary buffers, and `total` is the sum of the five kinds.
    `driver` is outside of the allocator: the context of the driver and the buffers of communicators. `reserved` adds
    the overhead of the allocator to `total`, and `driver`."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    total: float
    driver: float = 0.0
    reserved: float


class TimeBreakdown(StrictModel):
    """Seconds of one step. `tensor`, `data`, `pipeline`, `context` and `expert` are communication by kind of
    parallelism. Each field counts only exposed time, so that the fields add up to `step`."""

    compute: float = 0.0
    recompute: float = 0.0
    bubble: float = 0.0
    tensor: float = 0.0
    data: float = 0.0
    pipeline: float = 0.0
    context: float = 0.0
    expert: float = 0.0
    offload: float = 0.0
    step: float = 0.0


class Interval(StrictModel):
    """The range in which nine of ten measured values lie, by the errors on published measurements."""

    low: float
    high: float


class FitStatus(StrEnum):
    """Whether a plan fits in memory."""

    fits = "fits"
    tight = "tight"
    no = "no"


FIT_STATUS_ORDER = (FitStatus.no, FitStatus.tight, FitStatus.fits)
"""The values of FitStatus from the worst to the best."""


class Estimate(StrictModel):
    """The predicted cost of one plan. `memory` is the memory of the rank with the highest peak. If devices differ, it
    is the memory of the rank with the least headroom. `per_stage` has one item for each pipeline rank. `fits`: whether
    the plan is expected to fit; the search ranks only such plans."""

    memory: MemoryBreakdown
    per_stage: tuple[MemoryBreakdown, ...]
    time: TimeBreakdown
    tokens_per_second: float
    mfu: float
    fits: bool
    verdict: FitStatus = FitStatus.fits
    limit: float = Field(default=0.0, description="bytes of device memory that a rank can use")
    step_interval: Interval | None = Field(
        default=None, description="seconds of a step: the range of nine of ten measured runs; None for CPU ranks"
    )
    memory_interval: Interval | None = Field(
        default=None, description="bytes that the peak rank allocates: the range of nine of ten measured runs"
    )
    offloaded: float = Field(
        default=0.0,
        description="bytes offloaded to host memory and disk on the rank with the most; not included in `memory`",
    )
    in_files: float = Field(
        default=0.0, description="bytes offloaded to disk on the rank with the most; included in `offloaded`"
    )
    crowded: float = Field(
        default=0.0,
        description="bytes of offloaded tensors that exceed host memory, on the rank with the largest excess",
    )
    first: float = Field(
        default=0.0, description="additional seconds of the first step after a launch, to compile the blocks"
    )
    notes: tuple[TranslatableText, ...] = Field(
        default=(), description="assumptions of the estimate for this plan, and effects that it leaves out"
    )

    def over(self, steps: int) -> float:
        """Returns the mean seconds of a step over `steps` steps. It includes the extra time of the first step."""
        return self.time.step + self.first / steps

    @property
    def is_crowded(self) -> bool:
        """Returns whether host memory is too small for the offloaded tensors, but device memory is sufficient."""
        return self.crowded > 0 <= self.spare

    @property
    def spare(self) -> float:
        """Returns the headroom on the device: the bytes between `memory.reserved` and `limit`. It is negative if the
        plan does not fit on the device."""
        return self.limit - self.memory.reserved


MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers")


def fit_message(estimate: Estimate) -> Message:
    """Returns the fit status with its margin, in bytes and as a fraction of the limit."""
    margin = abs(estimate.spare)
    values = {"spare": margin, "share": margin / estimate.limit if estimate.limit else 0.0}
    if estimate.is_crowded:
        return Message(
            "does not fit, needs {over:bytes} more host memory for offload; {spare:bytes} ({share:percent}) headroom "
            "on the device",
            **values,
            over=estimate.crowded,
        )
    if estimate.verdict == FitStatus.no:
        return Message("does not fit, {spare:bytes} ({share:percent}) too much", **values)
    if not estimate.fits:
        return Message("probably does not fit, expected {spare:bytes} ({share:percent}) too much", **values)
    if estimate.verdict == FitStatus.tight:
        return Message("tight, {spare:bytes} ({share:percent}) headroom", **values)
    return Message("fits, {spare:bytes} ({share:percent}) headroom", **values)


def largest_memory_kind(memory: MemoryBreakdown) -> tuple[Message, float]:
    """Returns the kind of memory with the most bytes, and its bytes."""
    kind = max(MEMORY_KINDS, key=lambda kind: getattr(memory, kind))
    return term("memory", kind), getattr(memory, kind)
