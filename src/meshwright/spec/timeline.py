"""The memory of one step over its time, as one rank measured it: RUN/memory/rank-N.json."""

from __future__ import annotations

from pydantic import Field

from meshwright.base.codec import Noun
from meshwright.base.units import Bytes, Seconds


class Moment(Noun):
    """What came and went is so much from here on."""

    at: Seconds = Field(description="since the step began")
    activations: Bytes
    buffers: Bytes


class Timeline(Noun):
    """`held` lies under all moments: parameters, gradients, optimizer and what passes by, as bytes by kind."""

    rank: int
    step: int
    seconds: Seconds
    held: dict[str, Bytes]
    moments: tuple[Moment, ...]
    peak: Moment
    place: str = Field(default="", description="what ran at the peak: forward or backward of which module")

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(self.held.values()) + self.peak.activations + self.peak.buffers
