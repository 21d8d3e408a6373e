"""Models the time of collectives on the links between the ranks of a process group. All time formulas of planner/cost
use this model.

A ring collective of n ranks over a tensor of S bytes has the bandwidth B (Thakur, Rabenseifner, Gropp, 2005; NCCL). The
bytes take x seconds on the wire, and the hops take a seconds:

- all-gather, reduce-scatter: x = (n - 1) / n * S / B, and a is the latency of n - 1 hops
- all-reduce: both values are twice as large. Between nodes a tree may be faster. With TREE_BANDWIDTH_FRACTION of B, it
  has x = 2 S / B, and a is the latency of 2 log2(nodes) hops
- time = x + a + PIPELINE_FILL_FACTOR sqrt(x a)

The last term is the cost of filling a pipeline of chunks of optimal size (a + x + 2 sqrt(a x), Sanders and Speck,
2003). Because of this term, a collective needs tens of MiB to reach half of the bandwidth. If the switch reduces
(NVLink SHARP), an all-reduce inside a node runs at `adding` x B, and its pipeline is one hop deep.

Over gloo with one rank per node, ranks gather and scatter by an all-to-all, which takes as long as a ring. With several
ranks per node, gloo groups use a hierarchical collective. The data crosses the network once for each node, divided
among the links of the node's ranks (runtime/comm/topology.py). Let h nodes have m ranks each, and let far and near be
the bandwidths between and inside nodes. Then one direction takes (h - 1) / (h m) S / far + (m - 1) / m S / near
seconds. Gradient compression (`CompressionRatio`) changes only the first term of this sum.

Ranks that compute between collectives also have synchronisation overhead: `Link.meeting` seconds for each doubling of
the number of ranks, and twice as much in an all-reduce. The profiler measures this overhead for CPU ranks; for other
ranks it is 0.

A process group has `ranks` ranks at distance `stride`, and begins at a multiple of ranks * stride. A domain is a set of
consecutive devices with a fast link, such as a node. A group is inside a domain if the size of the domain is a multiple
of ranks * stride. Otherwise several rings cross the domains at the same time. There is one ring over the network link
of each rank that the group has in a domain. B is then the sum of the bandwidths of these network links, but at most the
bandwidth inside a domain.

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
    MAX_FILL_FACTOR,
    MIN_SWITCH_REDUCE_RANKS,
    PIPELINE_FILL_FACTOR,
    RING_HOP_FACTOR,
    TREE_BANDWIDTH_FRACTION,
)
from meshwright.planner.cost.plan_grid import Array
from meshwright.spec.cluster import Cluster, Link


class LinkModel(NamedTuple):
    """The links of a cluster. `near` connects `domain` consecutive devices, `far` connects devices of different
    domains. `handed`: whether gathers are all-to-alls, as between CPU ranks over gloo."""

    domain: int
    near: Link
    far: Link
    handed: bool = False


def link_model(cluster: Cluster) -> LinkModel:
    """Returns the slowest link of each tier over all node groups, and the smallest domain."""
    near = min((each.link for each in cluster.groups), key=lambda link: link.bandwidth * link.efficiency)
    domain = min(each.link.span or each.devices for each in cluster.groups)
    if domain >= cluster.devices:
        return LinkModel(cluster.devices, near, near)
    on_hosts = any(each.device.name.lower().startswith("cpu") for each in cluster.groups)
    return LinkModel(domain, near, cluster.network, handed=on_hosts)


UNLIMITED_FILL = 1e9
"""Value of `CollectiveRates.fill` where no limit of the chunk size is known."""


class CollectiveRates(NamedTuple):
    """The communication rates of a process group, as numbers or arrays.

    `bandwidth` is the bytes/s of a ring all-reduce, `adding` of an all-reduce in the switch, and `gathering` of an
    all-gather or reduce-scatter. `turn` is the seconds of half of a ring all-reduce to start and to pass its hops,
    `walk` the same seconds of an all-gather. `tree` is the seconds to start a tree and to pass its hops in one
    direction. `meeting` is the synchronisation overhead of an all-gather in seconds. `fill` is the longest time to fill
    the pipeline of chunks, divided by the seconds of the hops.
    """

    ranks: Any
    bandwidth: Any
    adding: Any
    turn: Any
    tree: Any
    gathering: Any
    meeting: Any
    walk: Any
    fill: Any

    def gather(self, size: Any, calls: Any = 1.0) -> Any:
        """Returns the seconds of `calls` all-gathers or reduce-scatters of full tensors with `size` bytes in total."""
        return (
            _pipelined_seconds((self.ranks - 1) / self.ranks * size / self.gathering, calls * self.walk, self.fill)
            + calls * self.meeting
        )

    def reduce(self, size: Any, calls: Any = 1.0) -> Any:
        """Returns the seconds of `calls` all-reduces of tensors with `size` bytes in total, by the fastest
        algorithm."""
        whole, hops = 2.0 * (self.ranks - 1) / self.ranks * size, calls * (2.0 * self.turn)
        ring = _pipelined_seconds(whole / self.bandwidth, hops, self.fill)
        switch = (
            whole / self.adding
            + hops
            + PIPELINE_FILL_FACTOR * np.sqrt(whole / self.adding * (hops / np.maximum(self.ranks - 1, 1)))
        )
        tree = _pipelined_seconds(
            2.0 / TREE_BANDWIDTH_FRACTION * size / self.bandwidth, calls * (2.0 * self.tree), self.fill
        )
        return np.minimum(np.minimum(ring, tree), np.where(self.adding > self.bandwidth, switch, ring)) + calls * (
            2.0 * self.meeting
        )


def _pipelined_seconds(wire: Any, hops: Any, fill: Any = UNLIMITED_FILL) -> Any:
    """Returns the seconds of a transfer in chunks. The size of chunks is optimal, until `fill` limits it."""
    return wire + hops + np.minimum(PIPELINE_FILL_FACTOR * np.sqrt(wire * hops), fill * hops)


class CompressionRatio(NamedTuple):
    """The compressed bytes of gradients between nodes divided by the uncompressed bytes, for a reduce-scatter and for
    an all-reduce."""

    scatter: float = 1.0
    reduce: float = 1.0
    gathered: bool = False
    """Whether each of h nodes sends its complete compressed data to all other nodes. A node then sends (h - 1) times
    the bytes of the data instead of 2 (h - 1) / h times."""

    def reducing(self, nodes: int) -> float:
        """Returns the bytes of a compressed all-reduce over `nodes` nodes divided by those of an uncompressed ring.

        >>> CompressionRatio(0.25, 0.25, True).reducing(2), CompressionRatio().reducing(2)
        (0.25, 1.0)
        """
        return self.reduce * (nodes / 2 if self.gathered else 1.0)


UNCOMPRESSED = CompressionRatio()


def collective_rates(
    links: LinkModel, ranks: int, stride: int, wire: CompressionRatio = UNCOMPRESSED
) -> CollectiveRates:
    """Returns the rates of a group of `ranks` ranks at distance `stride`. `wire` is the compression ratio between
    nodes.

    >>> inside = Link(name="in", bandwidth=100.0, efficiency=1.0)
    >>> outside = Link(name="out", bandwidth=9.0, efficiency=1.0)
    >>> collective_rates(LinkModel(7, inside, outside), 2, 1).bandwidth  # some groups of 2 cross domains of 7
    9.0
    """
    near, far = links.near, links.far
    if ranks == 1:
        return CollectiveRates(1, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, UNLIMITED_FILL)
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
            turn,
            UNLIMITED_FILL,
        )
    concurrent = max(links.domain // stride, 1) if ranks * stride > links.domain else 1
    nodes = ceil(ranks / concurrent)
    share = far.bandwidth * far.efficiency * concurrent
    bandwidth = min(share, near.bandwidth * near.efficiency) if concurrent > 1 else share
    turn = COLLECTIVE_START_SECONDS + (ranks - nodes) * near.latency + (nodes - 1) * far.latency
    walk = turn if links.handed else turn + (RING_HOP_FACTOR - 1.0) * (nodes - 1) * far.latency
    if links.handed and concurrent > 1:
        gathering, bandwidth = (
            _hierarchical_bandwidth(links, ranks, concurrent, times) for times in (wire.scatter, wire.reducing(nodes))
        )
    else:
        gathering, bandwidth = bandwidth / wire.scatter, bandwidth / wire.reducing(nodes if links.handed else ranks)
    tree = COLLECTIVE_START_SECONDS + ceil(log2(nodes)) * far.latency + (concurrent - 1) * near.latency
    meeting = log2(concurrent) * near.meeting + log2(nodes) * far.meeting
    fill = UNLIMITED_FILL if links.handed else MAX_FILL_FACTOR
    return CollectiveRates(ranks, bandwidth, bandwidth, turn, tree, gathering, meeting, walk, fill)


def _hierarchical_bandwidth(links: LinkModel, ranks: int, concurrent: int, times: float) -> float:
    """Returns the bandwidth in bytes/s of a ring that would take as long as the hierarchical collective. `concurrent`
    is the number of the group's ranks in a domain. `times` is the compression ratio between nodes.

    >>> inside = Link(name="in", bandwidth=1e12, efficiency=1.0)
    >>> outside = Link(name="out", bandwidth=10.0, efficiency=1.0)
    >>> links = LinkModel(2, inside, outside)
    >>> # of 40 bytes each far link carries 10 in 1 s; in a ring of 4 ranks, each rank sends 30 bytes
    >>> round(_hierarchical_bandwidth(links, 4, 2, 1.0), 3), round(_hierarchical_bandwidth(links, 4, 2, 0.25), 3)
    (30.0, 120.0)
    """
    near, far = links.near, links.far
    across = times * (ranks // concurrent - 1) / ranks / (far.bandwidth * far.efficiency)
    return (ranks - 1) / ranks / (across + (concurrent - 1) / concurrent / (near.bandwidth * near.efficiency))


def stack_rates(groups: Sequence[CollectiveRates]) -> CollectiveRates:
    """Returns one `CollectiveRates` whose fields are arrays over `groups`."""
    return CollectiveRates(*(np.array(values, dtype=float) for values in zip(*groups, strict=True)))


def all_to_all_seconds(links: LinkModel, ranks: Any, stride: int, size: Array, calls: float = 1.0) -> Array:
    """Returns the seconds of `calls` all-to-alls over `ranks` ranks at distance `stride`. Each rank sends `size` bytes
    in total. Near and far links transfer at the same time."""
    near = links.domain % (ranks * stride) == 0
    concurrent = np.where(near, ranks, np.minimum(max(links.domain // stride, 1), ranks))
    inside = (concurrent - 1) / ranks * size / (links.near.bandwidth * links.near.efficiency)
    outside = (ranks - concurrent) / ranks * size / (links.far.bandwidth * links.far.efficiency)
    hops = COLLECTIVE_START_SECONDS + (concurrent - 1) * links.near.latency + (ranks - concurrent) * links.far.latency
    meeting = np.log2(concurrent) * links.near.meeting + np.log2(ranks / concurrent) * links.far.meeting
    return np.asarray(_pipelined_seconds(np.maximum(inside, outside), calls * hops) + calls * meeting)


def dispatch_seconds(links: LinkModel, ranks: int, stride: int, size: Array, top_k: float) -> Array:
    """Returns the seconds of a dispatch to experts that sends a token once to each node. `size` is the bytes of all
    `top_k` copies of a rank's tokens, which the links inside a node carry. Near and far links transfer at the same
    time, and all messages start together.

    >>> nvlink, wire = Link(name="a", bandwidth=1e12, efficiency=1.0), Link(name="b", bandwidth=1e9, efficiency=1.0)
    >>> # 16 ranks on 2 nodes: half of the tokens of each of 2 copies, or 3/4 of the tokens once
    >>> seconds = dispatch_seconds(LinkModel(8, nvlink, wire), 16, 1, np.array(2e9), 2.0)
    >>> round(float(seconds), 2), round(float(all_to_all_seconds(LinkModel(8, nvlink, wire), 16, 1, np.array(2e9))), 2)
    (0.75, 1.02)
    """
    near = links.domain % (ranks * stride) == 0
    nodes = 1 if near else -(-ranks // max(min(links.domain // stride, ranks), 1))
    reached = (nodes - 1) * (1.0 - (1.0 - 1.0 / nodes) ** top_k)
    inside = size / (links.near.bandwidth * links.near.efficiency) * (1.0 - 1.0 / (ranks / nodes))
    outside = size / top_k * reached / (links.far.bandwidth * links.far.efficiency)
    start = COLLECTIVE_START_SECONDS + links.near.latency + (nodes > 1) * links.far.latency
    return np.asarray(np.maximum(inside, outside) + start)


def p2p_seconds(links: LinkModel, size: Array, ranks: Any = 0, stride: int = 1) -> Array:
    """Returns the seconds of a message of `size` bytes between the slowest two neighbours of a group. The group has
    `ranks` ranks at distance `stride`. If `ranks` is 0, the group spans several domains."""
    near = np.where(np.equal(ranks, 0), links.domain + 1, ranks * stride)
    inside, outside = (
        size / (link.bandwidth * link.efficiency) + link.latency + link.meeting for link in (links.near, links.far)
    )
    return np.where(links.domain % near == 0, inside, outside)
