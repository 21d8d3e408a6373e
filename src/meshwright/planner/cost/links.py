"""Models the time of collectives on the links between the ranks of a group.

A ring collective of n ranks has S bytes of the whole tensor and bandwidth B (Thakur, Rabenseifner, Gropp, 2005; NCCL).
Its bytes take x seconds on the wire, and its hops take a seconds:

- all-gather, reduce-scatter: x = (n - 1) / n * S / B, a = n - 1 hops
- all-reduce: twice both; or a tree between nodes, if faster, with x = 2 S / B, a = 2 log2(nodes) hops
- time = x + a + PIPELINE_FILL_FACTOR sqrt(x a)

The last term is the cost of filling a pipeline of chunks of optimal size (a + x + 2 sqrt(a x), Sanders and Speck,
2003). Because of this term, a collective needs tens of MiB to reach half of the bandwidth. If the switch reduces
(NVLink SHARP), an all-reduce inside a node runs at `adding` x B, and its pipeline is one hop deep.

Over gloo with one rank per node, ranks gather and scatter by an all-to-all, which takes as long as a ring. Several
ranks per node use a hierarchical collective: the data crosses the network once for each node, spread over its ranks
(runtime/comm/topology.py). With h nodes of m ranks, one direction takes (h - 1) / (h m) S / far + (m - 1) / m S /
near, where far and near are bandwidths. Gradient compression (`CompressionRatio`) changes only the first term.

Ranks that compute between collectives also have synchronisation overhead. It is `meeting` of the link for each doubling
of the ranks, and twice as much in an all-reduce. The profiler measures it for CPU ranks; for other ranks it is 0.

Rings that cross nodes leave each node once for each rank of the group in it, over the network link of this rank. B is
then the lesser of two bandwidths: that of the link inside the node, and the sum of these network links. A group has
`ranks` ranks at distance `stride`, and begins at a multiple of ranks * stride. It is inside a domain if the size of the
domain is a multiple of ranks * stride.

>>> nvlink = Link(name="NVLink", bandwidth=300e9, latency=3e-6, efficiency=1.0)
>>> links = LinkModel(8, nvlink, Link(name="IB", bandwidth=25e9, efficiency=1.0))
>>> round(float(collective_rates(links, 8, 1).gather(8e9)), 4)       # 7/8 of 8 GB at 300 GB/s, 7 hops and the pipeline
0.0249
>>> # 8 network links carry a ring over whole nodes, 1 a ring of one rank each
>>> collective_rates(links, 32, 1).bandwidth, collective_rates(links, 4, 8).bandwidth
(200000000000.0, 25000000000.0)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2
from typing import Any, NamedTuple

import numpy as np

from meshwright.planner.cost.constants import (
    COLLECTIVE_START_SECONDS,
    MIN_SWITCH_REDUCE_RANKS,
    PIPELINE_FILL_FACTOR,
    TREE_BANDWIDTH_FRACTION,
)
from meshwright.planner.cost.plan_grid import Array
from meshwright.spec.cluster import Cluster, Link


class LinkModel(NamedTuple):
    """The slowest links over all node groups. `near` connects `domain` neighbouring devices, `far` connects all
    devices. `handed`: whether gathers are all-to-alls."""

    domain: int
    near: Link
    far: Link
    handed: bool = False


def link_model(cluster: Cluster) -> LinkModel:
    """Returns the slowest links over all node groups."""
    near = min((each.link for each in cluster.groups), key=lambda link: link.bandwidth * link.efficiency)
    domain = min(each.link.span or each.devices for each in cluster.groups)
    if domain >= cluster.devices:
        return LinkModel(cluster.devices, near, near)
    on_hosts = any(each.device.name.lower().startswith("cpu") for each in cluster.groups)
    return LinkModel(domain, near, cluster.network, handed=on_hosts)


class CollectiveRates(NamedTuple):
    """The communication rates of a process group, as numbers or arrays.

    `bandwidth` is the bytes/s of a ring, `adding` that of an all-reduce in the switch. `turn` is the seconds of the
    hops of one ring step, `tree` those of a tree. `gathering` is the bytes/s of a gather, `meeting` the seconds of
    synchronisation overhead.
    """

    ranks: Any
    bandwidth: Any
    adding: Any
    turn: Any
    tree: Any
    gathering: Any
    meeting: Any

    def gather(self, size: Any, calls: Any = 1.0) -> Any:
        """Returns the seconds of `calls` all-gathers or reduce-scatters with `size` bytes in total."""
        return (
            _pipelined_seconds((self.ranks - 1) / self.ranks * size / self.gathering, calls * self.turn)
            + calls * self.meeting
        )

    def reduce(self, size: Any, calls: Any = 1.0) -> Any:
        """Returns the seconds of `calls` all-reduces with `size` bytes in total."""
        whole, hops = 2.0 * (self.ranks - 1) / self.ranks * size, calls * (2.0 * self.turn)
        ring = _pipelined_seconds(whole / self.bandwidth, hops)
        switch = (
            whole / self.adding
            + hops
            + PIPELINE_FILL_FACTOR * np.sqrt(whole / self.adding * (hops / np.maximum(self.ranks - 1, 1)))
        )
        tree = _pipelined_seconds(2.0 / TREE_BANDWIDTH_FRACTION * size / self.bandwidth, calls * (2.0 * self.tree))
        return np.minimum(np.minimum(ring, tree), np.where(self.adding > self.bandwidth, switch, ring)) + calls * (
            2.0 * self.meeting
        )


def _pipelined_seconds(wire: Any, hops: Any) -> Any:
    return wire + hops + PIPELINE_FILL_FACTOR * np.sqrt(wire * hops)


class CompressionRatio(NamedTuple):
    """The ratio of compressed to uncompressed gradient bytes between nodes, for a reduce-scatter and for an
    all-reduce."""

    scatter: float = 1.0
    reduce: float = 1.0
    gathered: bool = False
    """Whether each node sends all of its data to all other nodes. This takes (h - 1) instead of 2 (h - 1) / h times the
    bytes."""

    def reducing(self, nodes: int) -> float:
        """Returns the factor on the bytes of an all-reduce over `nodes` nodes.

        >>> CompressionRatio(0.25, 0.25, True).reducing(2), CompressionRatio().reducing(2)
        (0.25, 1.0)
        """
        return self.reduce * (nodes / 2 if self.gathered else 1.0)


UNCOMPRESSED = CompressionRatio()


def collective_rates(
    links: LinkModel, ranks: int, stride: int, wire: CompressionRatio = UNCOMPRESSED
) -> CollectiveRates:
    """Returns the rates of a group. `wire` is the compression ratio of gradients.

    >>> inside = Link(name="in", bandwidth=100.0, efficiency=1.0)
    >>> outside = Link(name="out", bandwidth=9.0, efficiency=1.0)
    >>> collective_rates(LinkModel(7, inside, outside), 2, 1).bandwidth
    9.0
    """
    near, far = links.near, links.far
    if ranks == 1:
        return CollectiveRates(1, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0)
    if links.domain % (ranks * stride) == 0:
        rate = near.bandwidth * near.efficiency
        adding = rate * (near.adding if ranks >= MIN_SWITCH_REDUCE_RANKS else 1.0)
        turn = COLLECTIVE_START_SECONDS + (ranks - 1) * near.latency
        return CollectiveRates(
            ranks,
            rate,
            adding,
            turn,
            COLLECTIVE_START_SECONDS + ceil(log2(ranks)) * near.latency,
            rate,
            log2(ranks) * near.meeting,
        )
    concurrent = max(links.domain // stride, 1) if ranks * stride > links.domain else 1
    nodes = ceil(ranks / concurrent)
    share = far.bandwidth * far.efficiency * concurrent
    bandwidth = min(share, near.bandwidth * near.efficiency) if concurrent > 1 else share
    turn = COLLECTIVE_START_SECONDS + (ranks - nodes) * near.latency + (nodes - 1) * far.latency
    if links.handed and concurrent > 1:
        gathering, bandwidth = (
            _hierarchical_bandwidth(links, ranks, concurrent, times) for times in (wire.scatter, wire.reducing(nodes))
        )
    else:
        gathering, bandwidth = bandwidth / wire.scatter, bandwidth / wire.reducing(nodes if links.handed else ranks)
    tree = COLLECTIVE_START_SECONDS + ceil(log2(nodes)) * far.latency + (concurrent - 1) * near.latency
    return CollectiveRates(
        ranks, bandwidth, bandwidth, turn, tree, gathering, log2(concurrent) * near.meeting + log2(nodes) * far.meeting
    )


def _hierarchical_bandwidth(links: LinkModel, ranks: int, concurrent: int, times: float) -> float:
    """Returns the bandwidth in bytes/s of a ring that would take as long as the hierarchical collective. `times`: the
    compression ratio between nodes.

    >>> inside = Link(name="in", bandwidth=1e12, efficiency=1.0)
    >>> outside = Link(name="out", bandwidth=10.0, efficiency=1.0)
    >>> links = LinkModel(2, inside, outside)
    >>> # of 4 bytes each rank sends 1, a ring would send 3 over 2 links
    >>> round(_hierarchical_bandwidth(links, 4, 2, 1.0), 3), round(_hierarchical_bandwidth(links, 4, 2, 0.25), 3)
    (30.0, 120.0)
    """
    near, far = links.near, links.far
    across = times * (ranks // concurrent - 1) / ranks / (far.bandwidth * far.efficiency)
    return (ranks - 1) / ranks / (across + (concurrent - 1) / concurrent / (near.bandwidth * near.efficiency))


def stack_rates(groups: Sequence[CollectiveRates]) -> CollectiveRates:
    """Returns the rates of several groups as arrays in one `CollectiveRates`."""
    return CollectiveRates(*(np.array(values, dtype=float) for values in zip(*groups, strict=True)))


def all_to_all_seconds(links: LinkModel, ranks: Any, stride: int, size: Array, calls: float = 1.0) -> Array:
    """Returns the seconds of `calls` all-to-alls in which each rank sends `size` bytes in total. Near and far links
    transfer at the same time."""
    near = links.domain % (ranks * stride) == 0
    concurrent = np.where(near, ranks, np.minimum(max(links.domain // stride, 1), ranks))
    inside = (concurrent - 1) / ranks * size / (links.near.bandwidth * links.near.efficiency)
    outside = (ranks - concurrent) / ranks * size / (links.far.bandwidth * links.far.efficiency)
    hops = COLLECTIVE_START_SECONDS + (concurrent - 1) * links.near.latency + (ranks - concurrent) * links.far.latency
    meeting = np.log2(concurrent) * links.near.meeting + np.log2(ranks / concurrent) * links.far.meeting
    return np.asarray(_pipelined_seconds(np.maximum(inside, outside), calls * hops) + calls * meeting)


def p2p_seconds(links: LinkModel, size: Array, ranks: Any = 0, stride: int = 1) -> Array:
    """Returns the seconds of a message of `size` bytes between neighbours of a group, for the slowest pair. The group
    has `ranks` ranks at distance `stride`; 0 means all ranks."""
    near = np.where(np.equal(ranks, 0), links.domain + 1, ranks * stride)
    inside, outside = (
        size / (link.bandwidth * link.efficiency) + link.latency + link.meeting for link in (links.near, links.far)
    )
    return np.where(links.domain % near == 0, inside, outside)
