"""Which link between hosts is slow, asked in the middle of a run: it is named, and every rank says the same."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hosts import hosts
from pool import Pool

import meshwright.runtime.profiler.links as asked
from meshwright.runtime.build.parallelize import make_parallel_context
from meshwright.runtime.profiler.links import describe_slow_links, measure_links
from meshwright.spec.plan import Plan

LATENCY, RATE, SLOW = 1e-5, 1e9, 1e7
"""Of every link in seconds, and bytes a second of a sound and of a slow one."""


def slow_between(each: int, slow: set[frozenset[int]]) -> tuple[list[str], int]:
    """What is said where the links of `slow` are slow by the clock of all ranks, `each` to a host; and how often this
    rank gave a sign of life."""
    swap, me, beats, now = asked._exchange, dist.get_rank(), [], [0.0]

    def swap_by_clock(sent: torch.Tensor, out: torch.Tensor, other: int) -> None:
        swap(sent, out, other)
        now[0] += LATENCY + sent.nbytes / (SLOW if frozenset((me, other)) in slow else RATE)

    asked._exchange, asked.time = swap_by_clock, SimpleNamespace(perf_counter=lambda: now[0])  # type: ignore[attr-defined]
    try:
        with hosts(each):
            mesh = make_parallel_context(Plan(dp_replicate=dist.get_world_size()))
            found = measure_links(mesh, lambda: beats.append(me))
    finally:
        asked._exchange, asked.time = swap, time  # type: ignore[attr-defined]
    return [words for _, words in describe_slow_links(found, mesh.plan.world)], len(beats)


@pytest.mark.parametrize(
    ("world", "each", "slow", "words"),
    [
        (4, 1, [(2, 0), (2, 1), (2, 3)], "all links of rank 2 reach "),
        (4, 1, [(1, 3)], "the link between ranks 1 and 3 reaches "),
        (4, 2, [(0, 2)], "the link between the hosts of ranks 0 and 2 carries "),
    ],
)
def test_the_slow_link_between_hosts_is_named_alike_on_all_ranks(
    ranks: Pool, world: int, each: int, slow: list[tuple[int, int]], words: str
) -> None:
    found = ranks.run(world, slow_between, each, {frozenset(pair) for pair in slow})
    for rank, (said, beats) in enumerate(found):
        assert len(said) == 1 and said[0].startswith(words) and said == found[0][0]
        assert beats == (world // each - 1 if rank % each == 0 else 0)


def test_ranks_of_one_host_have_no_links_to_ask_for(ranks: Pool) -> None:
    assert ranks.run(2, slow_between, 2, set()) == [([], 0), ([], 0)]
