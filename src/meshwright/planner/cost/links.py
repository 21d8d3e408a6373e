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

Nodes form larger blocks, such as racks, pods and sites, each with a network to the other blocks of its tier. The rule
is the same for each tier: a group uses the tiers up to the first one whose blocks contain it. A ring over n ranks has
one hop to the next block for each block that it crosses, so its hops are divided among the tiers and add up to n - 1. B
is the minimum over these tiers. Over gloo, the data of all other blocks passes the network of a tier.

>>> nvlink = Link(name="NVLink", bandwidth=300e9, latency=3e-6, efficiency=1.0)
>>> links = LinkModel((8,), (nvlink, Link(name="IB", bandwidth=25e9, efficiency=1.0)))
>>> round(float(collective_rates(links, 8, 1).gather(8e9)), 4)       # 7/8 of 8 GB at 300 GB/s, 7 hops and the pipeline
0.0249
>>> # 8 network links carry a ring over whole nodes, 1 a ring of one rank each
>>> float(collective_rates(links, 32, 1).bandwidth), collective_rates(links, 4, 8).bandwidth
(200000000000.0, 25000000000.0)
>>> sites = LinkModel((8, 64), (*links.links, Link(name="WAN", bandwidth=1e9, efficiency=1.0)))
>>> # two sites of 64 devices: 64 links of 1 GB/s; one rank of each site: 1
>>> [float(collective_rates(sites, *group).bandwidth) for group in ((128, 1), (2, 64))]
[64000000000.0, 1000000000.0]
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import pairwise
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
    """The links of a cluster by tier, from the innermost to the outermost. `links[i]` connects the devices of each
    block of `spans[i]` consecutive devices. The last link, which has no span, connects all devices. `handed`: whether
    gathers are all-to-alls, as between CPU ranks over gloo."""

    spans: tuple[int, ...]
    links: tuple[Link, ...]
    handed: bool = False

    @property
    def domain(self) -> int:
        """Returns the number of devices of a block of the innermost tier."""
        return self.spans[0]

    @property
    def rates(self) -> tuple[float, ...]:
        """Returns the bytes/s per device that large messages reach on each tier."""
        return tuple(link.bandwidth * link.efficiency for link in self.links)

    def tier(self, ranks: Iterable[int]) -> int:
        """Returns the index of the innermost tier that connects all of the global `ranks`."""
        ranks = tuple(ranks)
        inside = (at for at, span in enumerate(self.spans) if len({rank // span for rank in ranks}) == 1)
        return next(inside, len(self.spans))


def link_model(cluster: Cluster) -> LinkModel:
    """Returns the tiers of the cluster: inside a domain, between nodes, and the outer tiers (`Cluster.tiers`). The
    slowest link inside nodes and the smallest domain of all node groups count. Tiers outside of a block that contains
    all devices are omitted. No outer tier is faster than the tier inside of it, because its messages pass both."""
    near = min((each.link for each in cluster.groups), key=lambda link: link.bandwidth * link.efficiency)
    domain = min(each.link.span or each.devices for each in cluster.groups)
    if domain >= cluster.devices:
        return LinkModel((cluster.devices,), (near, near))
    on_hosts = any(each.device.name.lower().startswith("cpu") for each in cluster.groups)
    spans, links = [domain], [near, cluster.network]
    for link in cluster.tiers:
        inner = links[-1]
        if not 0 < inner.span < cluster.devices:
            break
        spans.append(inner.span)
        links.append(link.but(bandwidth=min(link.bandwidth, inner.bandwidth * inner.efficiency / link.efficiency)))
    return LinkModel(tuple(spans), tuple(links), handed=on_hosts)


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


def ranks_by_tier(links: LinkModel, ranks: int, stride: int) -> tuple[int, ...]:
    """Returns how many ranks of a group are in one block of each tier that the group uses, innermost first. The last
    value is `ranks`.

    >>> near, far = Link(name="a", bandwidth=1.0), Link(name="b", bandwidth=1.0)
    >>> tiers = LinkModel((8, 64), (near, far, far))
    >>> [ranks_by_tier(tiers, *group) for group in ((8, 1), (4, 8), (16, 16), (128, 1))]
    [(8,), (1, 4), (1, 4, 16), (8, 64, 128)]
    """
    counts: list[int] = []
    for span in links.spans:
        if span % (ranks * stride) == 0:
            break
        inside = max(span // stride, 1) if ranks * stride > span else 1
        counts.append(max([inside, *counts[-1:]]))
    return (*counts, ranks)


def collective_rates(
    links: LinkModel, ranks: int, stride: int, wire: CompressionRatio = UNCOMPRESSED
) -> CollectiveRates:
    """Returns the rates of a group of `ranks` ranks at distance `stride`. `wire` is the compression ratio between
    nodes.

    >>> inside = Link(name="in", bandwidth=100.0, efficiency=1.0)
    >>> outside = Link(name="out", bandwidth=9.0, efficiency=1.0)
    >>> collective_rates(LinkModel((7,), (inside, outside)), 2, 1).bandwidth  # some groups of 2 cross domains of 7
    9.0
    """
    near = links.links[0]
    if ranks == 1:
        return CollectiveRates(1, 1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, UNLIMITED_FILL)
    counts = ranks_by_tier(links, ranks, stride)
    rate = near.bandwidth * near.efficiency
    if len(counts) == 1:
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
    concurrent, blocks = counts[0], [ceil(ranks / count) for count in counts]
    hops = [(before - after, link) for (before, after), link in zip(pairwise(blocks), links.links[1:], strict=False)]
    levels = [(before / after, link) for (before, after), link in zip(pairwise(blocks), links.links[1:], strict=False)]
    rings = [outer * count for outer, count in zip(links.rates[1:], counts[:-1], strict=False)]
    bandwidth = reduce(np.minimum, [*rings, rate] if concurrent > 1 else rings)
    turn = COLLECTIVE_START_SECONDS + (ranks - blocks[0]) * near.latency + sum(hop * link.latency for hop, link in hops)
    walk = turn if links.handed else turn + sum((RING_HOP_FACTOR - 1.0) * hop * link.latency for hop, link in hops)
    nodes = blocks[0]
    if links.handed and (concurrent > 1 or len(counts) > 2):
        gathering, bandwidth = (
            _hierarchical_bandwidth(links, counts, times) for times in (wire.scatter, wire.reducing(nodes))
        )
    else:
        gathering, bandwidth = bandwidth / wire.scatter, bandwidth / wire.reducing(nodes if links.handed else ranks)
    tree = (
        COLLECTIVE_START_SECONDS
        + sum(ceil(log2(ratio)) * link.latency for ratio, link in levels)
        + (concurrent - 1) * near.latency
    )
    meeting = log2(concurrent) * near.meeting + sum(log2(ratio) * link.meeting for ratio, link in levels)
    fill = UNLIMITED_FILL if links.handed else MAX_FILL_FACTOR
    return CollectiveRates(ranks, bandwidth, bandwidth, turn, tree, gathering, meeting, walk, fill)


def _hierarchical_bandwidth(links: LinkModel, counts: tuple[int, ...], times: float) -> float:
    """Returns the bandwidth in bytes/s of a ring that would take as long as the hierarchical collective. `counts` is
    the number of the group's ranks in a block of each tier. `times` is the compression ratio between nodes.

    >>> inside = Link(name="in", bandwidth=1e12, efficiency=1.0)
    >>> outside = Link(name="out", bandwidth=10.0, efficiency=1.0)
    >>> links = LinkModel((2,), (inside, outside))
    >>> # of 40 bytes each far link carries 10 in 1 s; in a ring of 4 ranks, each rank sends 30 bytes
    >>> [round(_hierarchical_bandwidth(links, (2, 4), times), 3) for times in (1.0, 0.25)]
    [30.0, 120.0]
    """
    near, ranks, concurrent = links.links[0], counts[-1], counts[0]
    across = reduce(
        np.maximum,
        [
            times * (ranks // concurrent - count // concurrent) / ranks / outer
            for outer, count in zip(links.rates[1:], counts[:-1], strict=False)
        ],
    )
    return (ranks - 1) / ranks / (across + (concurrent - 1) / concurrent / (near.bandwidth * near.efficiency))


def stack_rates(groups: Sequence[CollectiveRates]) -> CollectiveRates:
    """Returns one `CollectiveRates` whose fields are arrays over `groups`."""
    return CollectiveRates(*(np.stack(values) for values in zip(*groups, strict=True)))


def _ranks_in_blocks(links: LinkModel, ranks: Any, stride: int) -> list[Any]:
    """Returns how many ranks of an all-to-all over `ranks` ranks at distance `stride` are in one block of each tier."""
    inner = [
        np.where(span % (ranks * stride) == 0, ranks, np.minimum(max(span // stride, 1), ranks)) for span in links.spans
    ]
    return [*inner, ranks]


def all_to_all_seconds(links: LinkModel, ranks: Any, stride: int, size: Array, calls: float = 1.0) -> Array:
    """Returns the seconds of `calls` all-to-alls over `ranks` ranks at distance `stride`. Each rank sends `size` bytes
    in total. The links of all tiers transfer at the same time. The network between nodes also carries what is sent to
    other blocks of nodes."""
    counts = _ranks_in_blocks(links, ranks, stride)
    near, rates = links.links[0], links.rates
    wire = (counts[0] - 1) / ranks * size / rates[0]
    hops, meeting = COLLECTIVE_START_SECONDS + (counts[0] - 1) * near.latency, np.log2(counts[0]) * near.meeting
    for rate, link, (inside, here) in zip(rates[1:], links.links[1:], pairwise(counts), strict=True):
        wire = np.maximum(wire, (ranks - inside) / ranks * size / rate)
        hops = hops + (here - inside) * link.latency
        meeting = meeting + np.log2(here / inside) * link.meeting
    return np.asanyarray(_pipelined_seconds(wire, calls * hops) + calls * meeting)


def dispatch_seconds(links: LinkModel, ranks: int, stride: int, size: Array, top_k: float) -> Array:
    """Returns the seconds of a dispatch to experts that sends a token once to each node. `size` is the bytes of all
    `top_k` copies of a rank's tokens, which the links inside a node carry. The links of all tiers transfer at the same
    time, and all messages start together.

    >>> nvlink, wire = Link(name="a", bandwidth=1e12, efficiency=1.0), Link(name="b", bandwidth=1e9, efficiency=1.0)
    >>> # 16 ranks on 2 nodes: half of the tokens of each of 2 copies, or 3/4 of the tokens once
    >>> links = LinkModel((8,), (nvlink, wire))
    >>> seconds = dispatch_seconds(links, 16, 1, np.array(2e9), 2.0)
    >>> round(float(seconds), 2), round(float(all_to_all_seconds(links, 16, 1, np.array(2e9))), 2)
    (0.75, 1.02)
    """
    counts = [max(int(count), 1) for count in _ranks_in_blocks(links, ranks, stride)]
    blocks = [-(-ranks // count) for count in counts]
    nodes = blocks[0]
    wire, latency = size / links.rates[0] * (1.0 - 1.0 / (ranks / nodes)), 0.0
    reached = 1.0 - (1.0 - 1.0 / nodes) ** top_k
    for rate, link, (inside, here) in zip(links.rates[1:], links.links[1:], pairwise(blocks), strict=True):
        others = nodes - -(-nodes // inside)
        wire = np.maximum(wire, size / top_k * (others * reached) / rate)
        latency = max(latency, (inside > here) * link.latency)
    return np.asanyarray(wire + (COLLECTIVE_START_SECONDS + links.links[0].latency + latency))


def p2p_seconds(links: LinkModel, size: Array, ranks: Any, stride: int) -> Array:
    """Returns the seconds of a message of `size` bytes between the slowest two neighbours of a group. The group has
    `ranks` ranks at distance `stride`."""
    each = [size / rate + link.latency + link.meeting for rate, link in zip(links.rates, links.links, strict=True)]
    found = each[-1]
    for span, seconds in reversed([*zip(links.spans, each, strict=False)]):
        found = np.where(span % (ranks * stride) == 0, seconds, found)
    return np.asanyarray(found)
