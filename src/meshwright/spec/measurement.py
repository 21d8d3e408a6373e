"""What `probe` measured, as it was measured: devices, pairs of ranks, collectives. Calibration (cost.calibration) makes a `Cluster` of it."""

from __future__ import annotations

from pydantic import Field

from meshwright.base.codec import Noun
from meshwright.base.units import Bytes, BytesPerSecond, FlopsPerSecond, Seconds

QUIET = 0.15
"""Processors that other programs may keep busy before a measurement counts as disturbed."""


class Product(Noun):
    """Rate of square matrix products of `size`, in seconds of the device's own."""

    precision: str
    size: int
    rate: FlopsPerSecond


class Measured(Noun):
    """One rank's device. Rates are those of a device that has a processor for itself; `share` is the part of one that it gets beside the others."""

    rank: int
    host: str = Field(description="ranks of equal name read each other's memory, or are devices of one machine")
    name: str
    products: tuple[Product, ...]
    trained: FlopsPerSecond = Field(
        default=0.0, description="rate of a layer's products forward and backward, fp32 on cores; 0: not measured"
    )
    bandwidth: BytesPerSecond = Field(description="of its memory, read and written by element-wise work")
    attention: FlopsPerSecond = Field(default=0.0, description="rate of fused attention in fp32; 0: not measured")
    launch: Seconds = Field(default=0.0, description="of the processor for one small operation with autograd, forward; 0: not measured")
    share: float = Field(default=1.0, gt=0)
    own: float = Field(
        default=0.0, ge=0, description="the part that is its own by the number of processors, ranks and quotas; 0: not known"
    )
    memory: Bytes
    host_memory: Bytes = 0.0
    storage: BytesPerSecond = 0.0
    host_bandwidth: BytesPerSecond = 0.0
    update: float = Field(
        default=0.0, ge=0, description="parameters that its processors update in a second, AdamW in fp32; 0: not measured"
    )

    def peak(self, precision: str) -> float:
        """The best rate that its products reached, 0 where none was measured."""
        return max((each.rate for each in self.products if each.precision == precision), default=0.0)


class Pair(Noun):
    """Two ranks that send to each other: seconds of the smallest message, bytes/s of a large one, one direction."""

    first: int
    second: int
    latency: Seconds
    bandwidth: BytesPerSecond


class Timing(Noun):
    """One collective of `ranks` ranks that are `stride` apart, over a whole tensor of `size` bytes."""

    kind: str = Field(description="all_reduce, reduce_scatter, all_gather or all_to_all")
    ranks: int
    stride: int
    size: Bytes
    seconds: Seconds


class Measurement(Noun):
    """Everything, of all ranks."""

    devices: tuple[Measured, ...] = Field(min_length=1)
    pairs: tuple[Pair, ...] = ()
    timings: tuple[Timing, ...] = ()
    meetings: tuple[Timing, ...] = Field(
        default=(), description="the same, of ranks that compute in between: by how much each lengthens that"
    )
    seconds: Seconds = Field(default=0.0, description="that it took")
    busy: float = Field(default=0.0, ge=0, description="processors that others kept busy meanwhile")

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each host, hosts in the order of their first rank."""
        found: dict[str, list[int]] = {}
        for device in self.devices:
            found.setdefault(device.host, []).append(device.rank)
        return tuple(map(tuple, found.values()))
