"""Models the device memory outside of torch's allocator: the driver context and the buffers of NCCL communicators.

`Device.context` is the context of the driver and the kernels that are loaded when they first run. A process group with
NCCL becomes a communicator when it first transfers a tensor. `communicators` lists those of a rank;
tests/mesh/test_collective_order.py compares the list with the calls of the runtime. CPU ranks and devices of other
vendors have none.

A communicator with c channels has these buffers. Sources: NVIDIA/nccl at 5067397 (2.30.7), unless stated otherwise.

- Shared buffer for messages over the network, which every communicator allocates when it starts, also in one node
  (src/init.cc:1588-1593, src/transport/net.cc:642-664): 16 chunks for each of p channels. p is c, rounded up to a power
  of two (src/graph/paths.cc:978-991). A chunk has 512 KiB if all ranks are connected by NVLink in one node, else 128
  KiB (src/init.cc:818-837). The first message from another node allocates a second one for receiving.
- Connection from another rank of the node, for each channel: a buffer of 512 KiB (LL), 4.69 MiB (LL128) and 4 MiB
  (Simple, NCCL_BUFFSIZE), and the head of the sender (src/init.cc:810-828, src/transport/p2p.cc:402-412 and 486-491).
  Each of both is a multiple of 2 MiB (CUDA_IPC_MIN, src/include/comm.h:46): 10 MiB + 2 MiB.
- Connection to or from another node, for each channel: the same three buffers, 10 MiB on the device for sending and 10
  MiB for receiving (src/transport/net.cc:912-948 and 1098-1127). Messages use the shared buffers instead.

Collectives connect each rank with its neighbours of the ring once, and all-reduces between nodes also those of the
tree. Messages have their own connections, on p channels for each rank of the node over NVLink, else on 2
(src/graph/paths.cc:936-946). If the switch reduces (NVLS), each channel of 16 has two buffers of 8 x 128 KiB for each
rank of the node (src/transport/nvls.cc:160 and 427-430).

The number of channels depends on the search of NCCL in the topology. `channels` reproduces the numbers in published
logs: 12 on V100 and 24 on A100 (NVIDIA/nccl-tests issue 100), 16 on H800 (NVIDIA/nccl issue 892), 24 on H100, 64
message channels on B300 (issue 2363), 4 over PCIe (issue 1706), 16 between nodes (issues 1453 and 1538).

Published measurements: with 4 A100 each additional group of 2 ranks takes 544 MB, which is exactly this model, and each
larger group 688 MB, 27 % more (issue 964; NCCL of 2023 also connected trees inside a node). The first all-to-all of 8
H100 takes 3.28 GB, 6 % more than this model (issue 1685). No communicator of this project has been measured.

>>> communicator_bytes(GroupLinks(8, 300e9), Communicator(2, 1)) / 2**20
544.0
>>> round(communicator_bytes(GroupLinks(8, 450e9), Communicator(8, 1, reduces=False, peers=7)) / 1e9, 2)
3.09
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.catalog import read as catalog
from meshwright.core.quantities import parse_quantity
from meshwright.planner.cost.constants import MIN_SWITCH_REDUCE_RANKS
from meshwright.planner.cost.cost_context import CostContext
from meshwright.planner.cost.plan_grid import Array, PlanGrid, RankLayout, ZeroChoice, broadcast_to_axis

MIB = 2.0**20
SHARED_CHUNKS = 16
NVLINK_CHUNK_BYTES, OTHER_CHUNK_BYTES = 512 * 1024, 128 * 1024
RECEIVE_BYTES, SEND_HEAD_BYTES = 10 * MIB, 2 * MIB
SWITCH_BYTES_PER_RANK = 16 * 2 * 8 * 128 * 1024
PCIE_CHANNELS, PCIE_MESSAGE_CHANNELS = 4, 2
MAX_PCIE_BANDWIDTH = 64e9
"""Links with at most this many bytes/s in one direction are PCIe; NVLink is faster."""
CHANNEL_BANDWIDTH, WIDE_CHANNEL_BANDWIDTH, WIDE_CHANNELS = 12.5e9, 18.75e9, 24
"""Bytes/s of a channel over NVLink. From 24 channels on, channels are wider."""
MAX_NODE_CHANNELS, NODE_CHANNELS_PER_RANK = 16, 4
"""Channels between nodes: at most 16, and at most 4 for each rank that a node has in the communicator."""


class GroupLinks(NamedTuple):
    """The links of a communicator: `domain` consecutive devices are connected with `bandwidth` bytes/s in one
    direction. `switch`: whether the switch between them reduces."""

    domain: int
    bandwidth: float
    switch: bool = False

    @property
    def channels(self) -> int:
        """Returns the number of channels inside a node.

        >>> [GroupLinks(8, rate).channels for rate in (31e9, 150e9, 200e9, 300e9, 450e9, 900e9)]
        [4, 12, 16, 24, 24, 48]
        """
        if self.bandwidth <= MAX_PCIE_BANDWIDTH:
            return PCIE_CHANNELS
        wide = max(WIDE_CHANNELS, self.bandwidth / WIDE_CHANNEL_BANDWIDTH)
        return round(min(self.bandwidth / CHANNEL_BANDWIDTH, wide))


class Communicator(NamedTuple):
    """A communicator of `ranks` ranks at distance `stride`. `reduces`: whether it runs collectives, with which
    all-reduces are meant between nodes. `peers`: the number of other ranks with which a rank exchanges messages, those
    of all-to-alls included."""

    ranks: int
    stride: int
    reduces: bool = True
    peers: int = 0


@lru_cache(maxsize=1 << 14)
def communicator_bytes(links: GroupLinks, group: Communicator) -> float:
    """Returns the bytes of device memory of a communicator on one rank."""
    span = group.ranks * group.stride
    near = group.ranks if links.domain % span == 0 else min(max(links.domain // group.stride, 1), group.ranks)
    crosses, nvlink = near < group.ranks, links.bandwidth > MAX_PCIE_BANDWIDTH
    channels = links.channels
    if crosses:
        channels = min(channels, MAX_NODE_CHANNELS, NODE_CHANNELS_PER_RANK * near)
    message_channels = 1 << math.ceil(math.log2(channels))
    chunk = NVLINK_CHUNK_BYTES if nvlink and not crosses else OTHER_CHUNK_BYTES
    shared = message_channels * SHARED_CHUNKS * chunk
    total = 1.0 * shared * (1 + (crosses and group.peers > near - 1))
    if group.reduces:
        inside, outside = RECEIVE_BYTES + SEND_HEAD_BYTES, 2 * RECEIVE_BYTES
        ring = channels * (inside + (outside - inside) / near * crosses)
        total += ring * (1 + crosses) + SWITCH_BYTES_PER_RANK * near * (
            links.switch and near >= MIN_SWITCH_REDUCE_RANKS
        )
    connected = message_channels if nvlink else PCIE_MESSAGE_CHANNELS
    return total + min(group.peers, near - 1) * connected * (RECEIVE_BYTES + SEND_HEAD_BYTES)


class RankSplit(NamedTuple):
    """How ranks divide a sequence, in addition to the layout and the shards of the states. `ulysses_ranks` of the `cp`
    context ranks exchange heads."""

    cp: int = 1
    ulysses_ranks: int = 1
    sequence_parallel: bool = False


def communicators(
    layout: RankLayout, shards: ZeroChoice, split: RankSplit, tied: bool = False
) -> Iterator[Communicator]:
    """Yields the communicators of a rank. `tied`: whether the first and the last stage, on different ranks, both store
    a tied weight; then the result is that of these ranks.

    If all ranks differ along one axis only, they use the communicator of all ranks.

    >>> [len(list(communicators(RankLayout(tp, pp), ZeroChoice(1, 2, 8), RankSplit()))) for tp, pp in ((2, 4), (1, 1))]
    [5, 3]
    >>> list(communicators(RankLayout(1, 1), ZeroChoice(3, 1, 8), RankSplit()))
    [Communicator(ranks=8, stride=1, reduces=True, peers=0)]
    """
    data = shards.replicas * shards.holders
    strides = layout.strides(data)
    neighbours = min(2, layout.pp - 1)
    axes = [
        Communicator(layout.pp, strides["pp"], peers=neighbours),
        Communicator(shards.replicas, strides["dp"] * shards.holders),
        Communicator(shards.holders, strides["dp"]),
        Communicator(layout.tp, strides["tp"]),
    ]
    several = [each for each in axes if each.ranks > 1]
    if not several:
        return
    yield Communicator(layout.pp * layout.tp * data, 1, peers=neighbours if several == axes[:1] else 0)
    if len(several) > 1:
        yield from several
    if tied:
        yield Communicator(2, (layout.pp - 1) * strides["pp"])
    cp, heads = split.cp, split.ulysses_ranks
    if cp > heads:
        yield Communicator(cp // heads, strides["dp"] * heads, reduces=False, peers=1)
    if heads > 1:
        yield Communicator(heads, strides["dp"], reduces=False, peers=heads - 1)
    if layout.ep > 1:
        yield from _expert_communicators(layout, shards, split, strides)


def _expert_communicators(
    layout: RankLayout, shards: ZeroChoice, split: RankSplit, strides: dict[str, int]
) -> Iterator[Communicator]:
    """Yields the communicators of expert ranks. Source: [Note: expert ranks] in runtime/expert_parallel/groups.py. With
    sequence parallelism, tensor ranks have different tokens, and need not divide them."""
    data = shards.holders if shards.zero else split.cp
    dealt = math.gcd(layout.ep, data)
    joined, rests = layout.ep // dealt, data // dealt
    replicas = shards.replicas if shards.zero else shards.replicas // split.cp * rests
    tp, dp = strides["tp"], strides["dp"]
    steps = [dp] * (dealt > 1) + [tp * layout.expert_tp] * (joined > 1)
    groups = [
        Communicator(layout.ep, min(steps), peers=layout.ep - 1),
        Communicator(layout.expert_tp, tp),
        Communicator(1 if split.sequence_parallel else joined, tp * layout.expert_tp),
        Communicator(rests if shards.zero else 1, dp * dealt),
        Communicator(replicas, dp * (data if shards.zero else dealt)),
    ]
    yield from (each for each in groups if each.ranks > 1)


def driver_bytes(setting: CostContext, box: PlanGrid) -> Array:
    """Returns the bytes of device memory outside of the allocator over the axes `obsczf` of GRID_AXES."""
    if not uses_nccl(setting):
        return np.array(setting.device.context)
    link = setting.fabric.links[0]
    bandwidth = _nominal_bandwidth(setting.device.name, link.name) or link.bandwidth
    links = GroupLinks(setting.fabric.domain, bandwidth, link.adding > 1)
    contexts = tuple(zip(box.contexts.tolist(), box.ulysses_ranks.tolist(), strict=True))
    found = _communicator_sums(links, box.layout, box.shards, contexts, box.sequence_parallel)
    tied = any(entry.copy for entry in setting.entries) and box.pp > 1
    ends = communicator_bytes(links, Communicator(2, (box.pp - 1) * box.strides["pp"])) if tied else 0.0
    of_order = np.array([ends * (not order.rules.v_shape) for order in box.orders])
    return np.asarray((setting.device.context + broadcast_to_axis(found, "bsz") + broadcast_to_axis(of_order, "o"))[0])


@lru_cache(maxsize=1 << 12)
def _communicator_sums(
    links: GroupLinks,
    layout: RankLayout,
    shards: tuple[ZeroChoice, ...],
    contexts: tuple[tuple[int, int], ...],
    sequence_parallel: tuple[bool, ...],
) -> Array:
    """Returns the bytes of all communicators but that of tied weights, over (b, s, z). The result is too small for
    combinations that are not legal, whose context ranks are not part of the data ranks."""

    if layout.ep == 1:  # neither sequence parallelism nor the ZeRO stage changes the communicators
        shards = tuple(choice._replace(zero=0, lone=False) for choice in shards)
        sequence_parallel = (False,) * len(sequence_parallel)
    known = {
        pair: [
            [_communicator_sum(links, layout, choice, RankSplit(*pair, divided)) for choice in shards]
            for divided in sequence_parallel
        ]
        for pair in dict.fromkeys(contexts)
    }
    return np.array([known[pair] for pair in contexts])


@lru_cache(maxsize=1 << 16)
def _communicator_sum(links: GroupLinks, layout: RankLayout, shards: ZeroChoice, split: RankSplit) -> float:
    """Returns the bytes of all communicators of a rank but that of tied weights."""
    split = split if shards.replicas * shards.holders % split.cp == 0 else RankSplit()
    return sum(communicator_bytes(links, each) for each in communicators(layout, shards, split))


@lru_cache(maxsize=64)
def _has_nccl(device: str) -> bool:
    return catalog.devices().get(device, {}).get("vendor") == "nvidia"


@lru_cache(maxsize=64)
def _nominal_bandwidth(device: str, link: str) -> float:
    """Returns the bytes/s of the device's link in the catalogue, or 0 if `link` is another kind of link. A measured or
    assumed rate of the same link does not change its number of channels."""
    entry = catalog.devices()[device]["link"]
    return parse_quantity(entry["bandwidth"], "B/s") if entry["name"] == link else 0.0


def uses_nccl(setting: CostContext) -> bool:
    """Returns whether the communicators of NCCL count: on NVIDIA devices of the catalogue. For a device that only the
    user describes, `Device.context` states all bytes outside of the allocator."""
    return _has_nccl(setting.device.name)
