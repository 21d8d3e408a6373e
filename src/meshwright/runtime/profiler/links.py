"""Finds slow links between hosts. Between two steps of a run, hosts send to each other in rounds of disjoint pairs.

The first rank of each host sends for the host. Both hosts of a pair send at the same time, with growing sizes until the
transfer is long enough to time. The result is the fastest of several transfers, because no other traffic uses the links
between steps. A run measures links only after its ranks wait longer than before (train/straggler.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from meshwright.core.messages import Message
from meshwright.core.units import show_rate
from meshwright.runtime.backend import backend_of
from meshwright.runtime.device import host_id
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.profiler.collectives import LARGE_MESSAGE_BYTES, MAX_MESSAGE_BYTES, MIN_TRANSFER_SECONDS
from meshwright.spec.measurement import SLOW_LINK_RATIO, LinkSample, find_network_tiers

NUM_EXCHANGES = 3
SIMILAR_RATE_FACTOR = 2.0
"""A link is reported together with the slowest link if its rate is at most this many times the slowest rate. The factor
allows for short delays, such as those of ranks on busy CPUs."""

MAX_ROUNDS = 32
"""Maximum number of rounds. If there are more hosts, each host is measured with only this many other hosts."""


def measure_links(mesh: ParallelContext, beat: Callable[[], None] = lambda: None) -> list[LinkSample]:
    """Measures pairs of hosts between their first ranks. Returns the pairs on every rank, an empty list if all ranks
    are on one host. All ranks call it. `beat` reports that the rank is alive."""
    hosts: list[Any] = list(mesh.topology.shm_host_ids)
    if mesh.plan.world > 1 and not all(hosts or [""]):
        hosts = [None] * mesh.plan.world
        dist.all_gather_object(hosts, host_id())
    firsts = [hosts.index(host) for host in dict.fromkeys(hosts)]
    if len(firsts) < 2:
        return []
    mine = []
    for pairs in list(pair_rounds(len(firsts)))[:MAX_ROUNDS]:
        for pair in pairs:
            first, second = (firsts[place] for place in pair)
            if mesh.rank in (first, second):
                beat()
                found = _measure_pair(first, second, mesh)
                mine += [found] if mesh.rank == first else []
    every: list[Any] = [None] * mesh.plan.world
    dist.all_gather_object(every, mine)
    return sorted((pair for each in every for pair in each), key=lambda pair: (pair.first, pair.second))


def pair_rounds(hosts: int) -> Iterator[list[tuple[int, int]]]:
    """Yields rounds of disjoint pairs of hosts. Every two hosts are a pair in exactly one round.

    >>> list(pair_rounds(4))
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    >>> list(pair_rounds(3))
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    places = list(range(hosts + hosts % 2))
    half = len(places) // 2
    for _ in places[1:]:
        facing = zip(places[:half], reversed(places[half:]), strict=True)
        yield sorted((min(pair), max(pair)) for pair in facing if max(pair) < hosts)
        places = [places[0], places[-1], *places[1:-1]]


def find_slow_links(
    mesh: ParallelContext, beat: Callable[[], None] = lambda: None
) -> list[tuple[tuple[int, ...], str]]:
    """Returns the ranks and a description of each slow link. All ranks call it together and get the same result."""
    return describe_slow_links(measure_links(mesh, beat), mesh.plan.world)


def describe_slow_links(pairs: Sequence[LinkSample], ranks: int) -> list[tuple[tuple[int, ...], str]]:
    """Returns the ranks and a description of each slow link among `pairs`.

    >>> def pair(first, second, rate): return LinkSample(first=first, second=second, latency=1e-5, bandwidth=rate)
    >>> describe_slow_links([pair(0, 2, 1e6)], 4)
    [((0, 2), 'the link between the hosts of ranks 0 and 2 carries 1.00 MB/s')]
    >>> describe_slow_links([pair(0, 1, 1e6), pair(0, 2, 1.1e6), pair(1, 2, 1e6)], 3)
    [((), 'no link between hosts is slower than the others: 1.00 MB/s each')]
    """
    if not pairs:
        return []
    if len(pairs) == 1:
        (pair,) = pairs
        words = Message(
            "the link between the hosts of ranks {first} and {second} carries {bandwidth}",
            first=pair.first,
            second=pair.second,
            bandwidth=show_rate(pair.bandwidth),
        )
        return [((pair.first, pair.second), words)]
    rates = [pair.bandwidth for pair in pairs]
    odd = find_network_tiers(pairs, ranks, min(SLOW_LINK_RATIO, SIMILAR_RATE_FACTOR * min(rates) / median(rates))).odd
    if not odd:
        return [
            (
                (),
                Message(
                    "no link between hosts is slower than the others: {median} each", median=show_rate(median(rates))
                ),
            )
        ]
    return [((), line) for line in odd]


def _measure_pair(first: int, second: int, mesh: ParallelContext) -> LinkSample:
    """Returns the measurement of a pair of hosts, which is equal on both: that of the slower direction."""
    other = second if mesh.rank == first else first
    latency, size, large = _exchange_seconds(other, 1, mesh), LARGE_MESSAGE_BYTES, 0.0
    while large - latency < MIN_TRANSFER_SECONDS and size <= MAX_MESSAGE_BYTES:
        large, size = _exchange_seconds(other, size // 4, mesh), 4 * size
    return LinkSample(first=first, second=second, latency=latency, bandwidth=size / 4 / max(large - latency, 1e-9))


def _exchange_seconds(other: int, numel: int, mesh: ParallelContext) -> float:
    """Returns the seconds of the fastest of NUM_EXCHANGES exchanges. Each is timed on the slower rank."""
    sent = torch.ones(numel, device=mesh.device)
    out = torch.empty_like(sent)
    tries = torch.zeros(NUM_EXCHANGES, dtype=torch.float64, device=mesh.device)
    for number in range(NUM_EXCHANGES):
        _exchange(tries[:1], torch.empty_like(tries[:1]), other)  # synchronises both ranks before the clock starts
        began = time.perf_counter()
        _exchange(sent, out, other)
        tries[number] = time.perf_counter() - began
    theirs = torch.empty_like(tries)
    _exchange(tries, theirs, other)
    return float(torch.maximum(tries, theirs).min())


def _exchange(sent: torch.Tensor, out: torch.Tensor, other: int) -> None:
    """Sends `sent` to rank `other` and receives `out` from it at the same time."""
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, other), dist.P2POp(dist.irecv, out, other)]):
        work.wait()
    backend_of(sent.device).synchronize(sent.device)
