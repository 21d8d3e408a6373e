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
    bandwidth: BytesPerSecond = Field(description="of its memory")
    peak: dict[str, FlopsPerSecond] = Field(
        description="dense matrix products by precision: fp32, tf32, fp16, bf16, fp8, fp64"
    )
    efficiency: float = Field(default=0.8, ge=1e-3, le=1, description="share of peak that large matrix products reach")
    sustained: dict[str, float] = Field(
        default_factory=dict, description="by precision, the part of that which a warm device keeps up for days"
    )
    attention: float = Field(
        default=0.75, gt=0, description="rate of FlashAttention-2 over that of large matrix products"
    )
    processors: int = Field(
        default=0, ge=0, description="that share the tiles of a product; 0: products lose nothing to tiles"
    )
    launch: Seconds = Field(default=0.0, description="of its host for one small operation, forward; 0: what is usual")
    context: Bytes = Field(default=0.0, description="memory that the driver and its libraries take")
    price: float | None = Field(default=None, ge=0, description="per device hour")
    source: str = ""


class Link(StrictModel):
    """A tier of the network. It connects blocks of `span` consecutive devices; 0 means that it connects all devices."""

    name: OneLine
    span: int = Field(default=0, ge=0)
    bandwidth: BytesPerSecond = Field(ge=1, description="of one device, one direction")
    latency: Seconds = Field(default=5e-6)
    efficiency: float = Field(
        default=0.85, ge=1e-3, le=1, description="share of bandwidth that large collectives reach"
    )
    adding: float = Field(
        default=1.0, ge=1, description="rate of all-reduces over that of rings, where the switch adds"
    )
    meeting: Seconds = Field(
        default=0.0,
        ge=0,
        description="that two ranks lose besides where they compute before they meet; four twice as much",
    )


class NodeGroup(StrictModel):
    """Identical nodes. Heterogeneous nodes form several groups."""

    nodes: int = Field(ge=1, le=MAX_CLUSTER_NODES)
    devices: int = Field(ge=1, le=MAX_CLUSTER_NODES, description="per node")
    device: Device
    link: Link = Field(description="between the devices of a node")
    host_memory: Bytes = 0.0
    storage_bandwidth: BytesPerSecond = Field(
        default=0.0, description="of the local disk of a node, which its devices share"
    )
    host_bandwidth: BytesPerSecond = Field(
        default=0.0, description="between a device and its host, one direction, while its neighbours use theirs"
    )
    host_update: float = Field(
        default=0.0,
        ge=0,
        description=(
            "parameters that the processors of a node update in a second, for all of its devices; 0: not measured"
        ),
    )


class Cluster(StrictModel):
    """Groups of nodes and the network between nodes."""

    name: OneLine
    groups: tuple[NodeGroup, ...] = Field(min_length=1)
    network: Link = Field(description="between nodes")
    failures_per_device_hour: float = Field(default=0.0, ge=0)
    budget: Bytes = Field(default=0.0, ge=0, description="that a rank may take of its device; 0: nearly all of it")

    @property
    def devices(self) -> int:
        """The number of devices."""
        return sum(group.nodes * group.devices for group in self.groups)

    @property
    def memory(self) -> float:
        """The memory of the smallest device in bytes. It limits every rank of an even plan."""
        return min(group.device.memory for group in self.groups)

    def with_memory(self, memory: float) -> Cluster:
        """Returns the cluster with `memory` bytes on every device."""
        return self.but(groups=tuple(group.but(device=group.device.but(memory=memory)) for group in self.groups))

    @property
    def host_bandwidth(self) -> float:
        """Bytes/s between a device and its host in the slowest group. 0 if the devices are the CPU cores of the
        host."""
        return min(
            0.0 if group.device.name.lower().startswith("cpu") else group.host_bandwidth for group in self.groups
        )

    @property
    def storage_bandwidth(self) -> float:
        """Bytes/s between one device and the disk of its node while the other devices of the node use the disk too. The
        value is that of the slowest group; 0 without a disk."""
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
