"""Describes clusters for the planner, and the raw measurements that calibrate a cluster.

`Cluster` describes devices, the links between them, and groups of identical nodes. Calibration returns a `Cluster` with
measured values in place of catalog values.

`ClusterProfile` describes the raw measurements of `probe`: devices, pairs of ranks, collectives. Calibration
(planner/cost) turns them into a `Cluster`.

The module also finds the tiers of a network, and its slow links, from measurements between pairs of ranks. It needs no
description of the network.

The bandwidths of all pairs are sorted. If the largest ratio between neighbouring values is at least TIER_GAP_RATIO,
this gap divides the pairs into near and far pairs. Ranks that near pairs connect, directly or through other ranks, form
a block. If all blocks have equal numbers of consecutive ranks, the links inside the blocks are one tier, and the links
between the blocks are another. Otherwise the network is one tier with outliers. A pair is an outlier if its bandwidth
is less than `SLOW_LINK_RATIO` times the upper tercile of the bandwidths of its tier. If all pairs of a rank are
outliers, the rank is reported instead of the pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from pydantic import Field

from meshwright.core.codec import OneLine, StrictModel
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.core.quantities import Bytes, BytesPerSecond, FlopsPerSecond, Seconds

MAX_CLUSTER_NODES = 2**20
"""Maximum number of nodes, or of devices of one node. No real cluster is larger."""


class Device(StrictModel):
    """One accelerator, or the fraction of a host's processor that one CPU rank gets."""

    name: OneLine = Field(description="name of the device, for display; names that begin with cpu are CPU ranks")
    memory: Bytes = Field(gt=0, description="bytes of device memory")
    bandwidth: BytesPerSecond = Field(description="bytes/s of device memory")
    peak: dict[str, FlopsPerSecond] = Field(
        description="FLOP/s of dense matrix products by precision: fp32, tf32, fp16, bf16, fp8, fp64"
    )
    efficiency: float = Field(
        default=0.8, ge=1e-3, le=1, description="fraction of peak that large matrix products reach"
    )
    sustained: dict[str, float] = Field(
        default_factory=dict,
        description="by precision, fraction of peak x efficiency that a warm device sustains for days",
    )
    attention: float = Field(
        default=0.75, gt=0, description="rate of FlashAttention-2 relative to large matrix products"
    )
    processors: int = Field(
        default=0,
        ge=0,
        description="processors (SMs) that compute the tiles of a matrix product; 0: tiling is not modelled",
    )
    launch: Seconds = Field(
        default=0.0, description="seconds of host time per small forward operation; 0: a default value"
    )
    context: Bytes = Field(default=0.0, description="bytes of device memory that the driver and its libraries use")
    share: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description=(
            "fraction of a processor that a CPU rank gets while all ranks compute; alone, it is 1/share times as fast"
        ),
    )
    price: float | None = Field(default=None, gt=0, description="price per device hour")
    power_watts: float = Field(default=0.0, ge=0, description="power limit of the device in watts; 0: unknown")
    source: str = Field(default="", description="where the values come from")


class Link(StrictModel):
    """One tier of the network, which connects each block of `span` consecutive devices. With `span` 0 it connects all
    devices of a node, or all nodes."""

    name: OneLine = Field(description="name of the link, for display")
    span: int = Field(
        default=0,
        ge=0,
        description="consecutive devices that the link connects; 0: all devices of a node, or all nodes",
    )
    bandwidth: BytesPerSecond = Field(ge=1, description="bytes/s per device in one direction")
    latency: Seconds = Field(default=5e-6, description="seconds of the smallest message")
    efficiency: float = Field(
        default=0.85, ge=1e-3, le=1, description="fraction of bandwidth that large collectives reach"
    )
    adding: float = Field(
        default=1.0,
        ge=1,
        description=(
            "bandwidth of an all-reduce in the switch (NVLink SHARP) relative to a ring; 1: the switch does not reduce"
        ),
    )
    meeting: Seconds = Field(
        default=0.0,
        ge=0,
        description=(
            "seconds of synchronization overhead of a collective after computing, per doubling of the number of "
            "ranks; all-reduces take twice as long"
        ),
    )


class NodeGroup(StrictModel):
    """Identical nodes. Heterogeneous nodes form several groups."""

    nodes: int = Field(ge=1, le=MAX_CLUSTER_NODES, description="number of nodes")
    devices: int = Field(ge=1, le=MAX_CLUSTER_NODES, description="devices per node")
    device: Device = Field(description="device, or its name in the catalog")
    link: Link = Field(description="link between the devices of a node")
    host_memory: Bytes = Field(default=0.0, description="bytes of host memory of a node")
    storage_bandwidth: BytesPerSecond = Field(
        default=0.0, description="bytes/s of a node's local disk, shared by all devices of the node"
    )
    host_bandwidth: BytesPerSecond = Field(
        default=0.0,
        description=(
            "bytes/s between a device and its host in one direction, while the node's other devices transfer too"
        ),
    )
    host_update: float = Field(
        default=0.0,
        ge=0,
        description="parameters per second that the CPUs of a node update for all devices of the node; 0: not measured",
    )


class ClusterRates(StrictModel):
    """Rates of a cluster that a job file may change, if all nodes are equal."""

    network: BytesPerSecond | None = Field(
        default=None, ge=1, description="bytes/s per device of the network between nodes"
    )
    link: BytesPerSecond | None = Field(default=None, ge=1, description="bytes/s per device of the link inside a node")
    efficiency: float | None = Field(
        default=None, ge=1e-3, le=1, description="fraction of peak that large matrix products reach"
    )


class Cluster(StrictModel):
    """Groups of nodes and the network between nodes."""

    name: OneLine = Field(description="name of the cluster, for display")
    groups: tuple[NodeGroup, ...] = Field(
        min_length=1, description="groups of identical nodes, in the order of their ranks"
    )
    network: Link = Field(description="network between nodes")
    tiers: tuple[Link, ...] = Field(
        default=(),
        description=(
            "networks between larger blocks, such as racks, pods and sites, innermost first; `network` and each tier "
            "except the last state the devices of a block in `span`"
        ),
    )
    failures_per_device_hour: float = Field(
        default=0.0, ge=0, description="failures of a device per hour, for simulate --days; 0: unknown"
    )
    budget: Bytes = Field(default=0.0, ge=0, description="bytes of device memory that a rank may use; 0: nearly all")

    @property
    def devices(self) -> int:
        """Returns the number of devices."""
        return sum(group.nodes * group.devices for group in self.groups)

    @property
    def memory(self) -> float:
        """Returns the memory of the smallest device in bytes. It limits every rank of a plan with equal ranks."""
        return min(group.device.memory for group in self.groups)

    def with_memory(self, memory: float) -> Cluster:
        """Returns the cluster with `memory` bytes on every device."""
        return self.but(groups=tuple(group.but(device=group.device.but(memory=memory)) for group in self.groups))

    @property
    def rates(self) -> ClusterRates | None:
        """Returns the rates of the cluster, or None if it has several groups of nodes or several tiers of networks."""
        if len(self.groups) > 1 or self.tiers:
            return None
        (group,) = self.groups
        return ClusterRates(
            network=self.network.bandwidth, link=group.link.bandwidth, efficiency=group.device.efficiency
        )

    def with_rates(self, rates: ClusterRates) -> Cluster:
        """Returns the cluster with the rates that are set in `rates`.

        Raises: InputError if a rate is set and the cluster has several groups of nodes or several tiers of networks.
        """
        changes = rates.model_dump(exclude_none=True)
        if not changes:
            return self
        if self.rates is None:
            raise InputError(
                Message(
                    "cluster.rates is for clusters of equal nodes without tiers; change the rates of {name} in a "
                    "cluster file",
                    name=self.name,
                )
            )
        (group,), changed = self.groups, self.rates.but(**changes)
        group = group.but(
            link=group.link.but(bandwidth=changed.link), device=group.device.but(efficiency=changed.efficiency)
        )
        return self.but(groups=(group,), network=self.network.but(bandwidth=changed.network))

    @property
    def host_bandwidth(self) -> float:
        """Returns the bytes/s between a device and its host in the slowest group. Returns 0 if the devices are CPU
        cores of the host."""
        return min(
            0.0 if group.device.name.lower().startswith("cpu") else group.host_bandwidth for group in self.groups
        )

    @property
    def storage_bandwidth(self) -> float:
        """Returns the bytes/s between one device and the disk of its node while all devices of the node use it. The
        slowest group counts. Returns 0 without a disk."""
        return min(group.storage_bandwidth / group.devices for group in self.groups)

    @property
    def price(self) -> float | None:
        """Returns the price of all devices per hour, or None if a group has no price."""
        prices = [group.device.price for group in self.groups]
        if None in prices:
            return None
        return sum(group.nodes * group.devices * (group.device.price or 0.0) for group in self.groups)

    @property
    def blocks(self) -> int:
        """Returns the number of blocks that the outermost network connects: sites, racks, or nodes without `tiers`."""
        if self.tiers:
            return -(-self.devices // (self.network, *self.tiers)[-2].span)
        return sum(group.nodes for group in self.groups)

    @property
    def devices_per_node(self) -> int:
        """Returns the smallest number of devices per node of any group."""
        return min(group.devices for group in self.groups)


MAX_BUSY_PROCESSORS = 0.15
"""If other programs use more processors than this during a measurement, it counts as disturbed."""


class MatmulSample(StrictModel):
    """The rate of square matrix products of side `size`."""

    precision: str
    size: int
    rate: FlopsPerSecond


class DeviceProfile(StrictModel):
    """The measurements of the device of one rank. For a CPU rank, the rates are those with a whole processor, and
    `share` is the fraction of a processor that the rank gets while all ranks run."""

    rank: int
    host: str = Field(description="host ID; ranks with the same ID share memory, or use devices of the same machine")
    name: str
    products: tuple[MatmulSample, ...]
    trained: FlopsPerSecond = Field(
        default=0.0,
        description=(
            "FLOP/s of a layer's matrix products in forward and backward (CPU: fp32, GPU: bf16); 0: not measured"
        ),
    )
    warm: FlopsPerSecond = Field(
        default=0.0, description="FLOP/s of the same products after seconds of work, on an accelerator; 0: not measured"
    )
    clock: float = Field(default=0.0, ge=0, description="clock in Hz during `warm`; 0: unknown")
    power: float = Field(default=0.0, ge=0, description="power in W during `warm`; 0: unknown")
    gpudirect: bool = Field(default=False, description="whether network cards read device memory directly")
    bandwidth: BytesPerSecond = Field(
        description="bytes/s of device memory in element-wise operations, reads plus writes"
    )
    attention: FlopsPerSecond = Field(
        default=0.0, description="FLOP/s of fused attention (CPU: fp32, GPU: bf16); 0: not measured"
    )
    launch: Seconds = Field(
        default=0.0, description="processor seconds of a small forward operation with autograd; 0: not measured"
    )
    share: float = Field(default=1.0, gt=0)
    own: float = Field(
        default=0.0,
        ge=0,
        description="fraction of a processor that ranks per processor and CPU quota allow; 0: unknown",
    )
    memory: Bytes
    host_memory: Bytes = 0.0
    storage: BytesPerSecond = 0.0
    host_bandwidth: BytesPerSecond = 0.0
    update: float = Field(
        default=0.0,
        ge=0,
        description="parameters per second of an AdamW update in fp32 on the host; 0: not measured",
    )

    def peak(self, precision: str) -> float:
        """Returns the best measured rate of matrix products in `precision`; 0 if none was measured."""
        return max((each.rate for each in self.products if each.precision == precision), default=0.0)


class LinkSample(StrictModel):
    """A measurement between two ranks: seconds of the smallest message, and bytes/s of a large message in one
    direction."""

    first: int
    second: int
    latency: Seconds
    bandwidth: BytesPerSecond
    kind: str = Field(default="", description="nvswitch, nvlink or pcie; '': not on one host, or unknown")


class CollectiveSample(StrictModel):
    """A measurement of one collective among `ranks` ranks, each `stride` ranks after the previous one. `size` is the
    bytes of the full tensor."""

    kind: str = Field(description="all_reduce, reduce_scatter, all_gather or all_to_all")
    ranks: int
    stride: int
    size: Bytes
    seconds: Seconds


class ClusterProfile(StrictModel):
    """All measurements of all ranks, as `probe` returns them."""

    devices: tuple[DeviceProfile, ...] = Field(min_length=1)
    pairs: tuple[LinkSample, ...] = ()
    timings: tuple[CollectiveSample, ...] = ()
    meetings: tuple[CollectiveSample, ...] = Field(
        default=(),
        description="collectives between matrix products: seconds by which each collective lengthens the computation",
    )
    seconds: Seconds = Field(default=0.0, description="seconds of the whole measurement")
    busy: float = Field(
        default=0.0, ge=0, description="mean number of processors that other programs used during the measurement"
    )

    @property
    def hosts(self) -> tuple[tuple[int, ...], ...]:
        """Returns the ranks of each host. Hosts are in the order of their lowest rank."""
        found: dict[str, list[int]] = {}
        for device in self.devices:
            found.setdefault(device.host, []).append(device.rank)
        return tuple(map(tuple, found.values()))


TIER_GAP_RATIO = 2.0
SLOW_LINK_RATIO = 0.6


class NetworkTiers(NamedTuple):
    """The tiers of a network. `span` is the number of consecutive ranks in a block of the inner tier; 0 means that
    there is only one tier. `odd` has a line for each slow rank or link."""

    span: int
    odd: tuple[str, ...]


def find_network_tiers(pairs: Sequence[LinkSample], ranks: int, odd: float = SLOW_LINK_RATIO) -> NetworkTiers:
    """Finds the tiers of a network. A pair is an outlier if its bandwidth is below `odd` times the upper tercile of the
    bandwidths of its tier.

    >>> def pair(a, b, rate): return LinkSample(first=a, second=b, latency=1e-5, bandwidth=rate)
    >>> flat = [pair(a, b, 1e9 if a // 2 == b // 2 else 1e8) for a in range(4) for b in range(a + 1, 4)]
    >>> find_network_tiers(flat, 4)
    NetworkTiers(span=2, odd=())
    >>> find_network_tiers([pair(a, b, 5e7 if b == 2 else 1e8) for a in range(3) for b in range(a + 1, 3)], 3).odd
    ('all links of rank 2 reach 50 % of the bandwidth of the others (50.0 MB/s of 100.0 MB/s)',)
    """
    span = _tier_span(pairs, ranks)
    near = [pair for pair in pairs if span and pair.first // span == pair.second // span]
    far = [pair for pair in pairs if not (span and pair.first // span == pair.second // span)]
    return NetworkTiers(span, (*_describe_slow_links(near, odd), *_describe_slow_links(far, odd)))


def _tier_span(pairs: Sequence[LinkSample], ranks: int) -> int:
    rates = sorted(pair.bandwidth for pair in pairs)
    gaps = [(high / low, high) for low, high in pairwise(rates)]
    wide, border = max(gaps, default=(1.0, 0.0))
    if wide < TIER_GAP_RATIO:
        return 0
    blocks = _connected_blocks([pair for pair in pairs if pair.bandwidth >= border], ranks)
    length = len(blocks[0])
    even = all(len(block) == length and block == list(range(block[0], block[0] + length)) for block in blocks)
    return length if even and 1 < length < ranks else 0


def _connected_blocks(pairs: Sequence[LinkSample], ranks: int) -> list[list[int]]:
    """Returns the blocks of ranks that `pairs` connect, directly or through other ranks."""
    block = list(range(ranks))
    for pair in pairs:
        first, second = sorted((block[pair.first], block[pair.second]))
        block = [first if each == second else each for each in block]
    return [[rank for rank in range(ranks) if block[rank] == each] for each in sorted(set(block))]


def _describe_slow_links(pairs: Sequence[LinkSample], odd: float) -> list[str]:
    """Returns one line for each slow rank or slow pair of one tier."""
    from meshwright.core.units import show_rate

    if len(pairs) < 3:
        return []
    middle = sorted(pair.bandwidth for pair in pairs)[len(pairs) * 2 // 3]
    slow = [pair for pair in pairs if pair.bandwidth < odd * middle]
    said: list[str] = []
    named: set[int] = set()
    for rank in sorted({rank for pair in slow for rank in (pair.first, pair.second)}):
        own = [pair for pair in pairs if rank in (pair.first, pair.second)]
        if len(own) > 1 and all(pair in slow for pair in own):
            rate = median(pair.bandwidth for pair in own)
            said.append(
                Message(
                    "all links of rank {rank} reach {rate:.0f} % of the bandwidth of the others ({rate_2} of {middle})",
                    rank=rank,
                    rate=100 * rate / middle,
                    rate_2=show_rate(rate),
                    middle=show_rate(middle),
                )
            )
            named.add(rank)
    for pair in slow:
        if not named & {pair.first, pair.second}:
            share = 100 * pair.bandwidth / middle
            said.append(
                Message(
                    "the link between ranks {first} and {second} reaches {share:.0f} % of the bandwidth of the others "
                    "({bandwidth})",
                    first=pair.first,
                    second=pair.second,
                    share=share,
                    bandwidth=show_rate(pair.bandwidth),
                )
            )
    return said
