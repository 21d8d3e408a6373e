"""Describes devices, the links between them, and groups of identical nodes. Calibration returns a `Cluster` with
measured values in place of catalog values."""

from __future__ import annotations

from pydantic import Field

from meshwright.core.codec import OneLine, StrictModel
from meshwright.core.quantities import Bytes, BytesPerSecond, FlopsPerSecond, Seconds

MAX_CLUSTER_NODES = 2**20
"""Maximum number of nodes, or of devices of one node. No real cluster is larger."""


class Device(StrictModel):
    """One accelerator, or the fraction of a host's processor that one CPU rank gets."""

    name: OneLine
    memory: Bytes = Field(gt=0)
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
    price: float | None = Field(default=None, ge=0, description="price per device hour")
    source: str = ""


class Link(StrictModel):
    """A tier of the network. It connects blocks of `span` consecutive devices; 0 means that it connects all devices."""

    name: OneLine
    span: int = Field(default=0, ge=0)
    bandwidth: BytesPerSecond = Field(ge=1, description="bytes/s per device in one direction")
    latency: Seconds = Field(default=5e-6)
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
            "seconds of synchronization overhead per collective and doubling of the ranks, if ranks compute in "
            "between; all-reduces take twice as long"
        ),
    )


class NodeGroup(StrictModel):
    """Identical nodes. Heterogeneous nodes form several groups."""

    nodes: int = Field(ge=1, le=MAX_CLUSTER_NODES)
    devices: int = Field(ge=1, le=MAX_CLUSTER_NODES, description="devices per node")
    device: Device
    link: Link = Field(description="link between the devices of a node")
    host_memory: Bytes = 0.0
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


class Cluster(StrictModel):
    """Groups of nodes and the network between nodes."""

    name: OneLine
    groups: tuple[NodeGroup, ...] = Field(min_length=1)
    network: Link = Field(description="network between nodes")
    failures_per_device_hour: float = Field(default=0.0, ge=0)
    budget: Bytes = Field(default=0.0, ge=0, description="bytes of device memory that a rank may use; 0: nearly all")

    @property
    def devices(self) -> int:
        """The number of devices."""
        return sum(group.nodes * group.devices for group in self.groups)

    @property
    def memory(self) -> float:
        """The memory of the smallest device in bytes. It limits every rank of a plan with equal ranks."""
        return min(group.device.memory for group in self.groups)

    def with_memory(self, memory: float) -> Cluster:
        """Returns the cluster with `memory` bytes on every device."""
        return self.but(groups=tuple(group.but(device=group.device.but(memory=memory)) for group in self.groups))

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s between a device and its host in the slowest group. It is 0 if the devices are CPU cores of the
        host."""
        return min(
            0.0 if group.device.name.lower().startswith("cpu") else group.host_bandwidth for group in self.groups
        )

    @property
    def storage_bandwidth(self) -> float:
        """Bytes/s between one device and the disk of its node while all devices of the node use the disk. The value is
        that of the slowest group; 0 without a disk."""
        return min(group.storage_bandwidth / group.devices for group in self.groups)

    @property
    def price(self) -> float | None:
        """The price of all devices per hour; None if a group has no price."""
        prices = [group.device.price for group in self.groups]
        if None in prices:
            return None
        return sum(group.nodes * group.devices * (group.device.price or 0.0) for group in self.groups)

    @property
    def devices_per_node(self) -> int:
        """The number of devices per node, in the nodes with the fewest devices."""
        return min(group.devices for group in self.groups)
