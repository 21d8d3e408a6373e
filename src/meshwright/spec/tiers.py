"""Tiers of a network found from what pairs of ranks measured, also when nobody described it; and what is odd among them.

Rule: bandwidths are sorted; the widest gap between neighbours splits them into near and far where it is wider than GAP. Ranks that near pairs
join, directly or through others, are a block. Blocks of equal length, consecutive ranks each, are a tier; anything else is one tier with odd
pairs. A pair is odd that carries less than ODD of the middle of its tier: a rank all of whose pairs are odd is named instead of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from meshwright.spec.measurement import Pair

GAP = 2.0
ODD = 0.6
FEW = 1 / 3
"""A rank apart from the others is odd, no tier, where fewer than this part of all ranks are like it."""


class Tiers(NamedTuple):
    """`span`: ranks of a block, consecutive; 0: one tier. `odd`: lines that say what is slow."""

    span: int
    odd: tuple[str, ...]


def tiers(pairs: Sequence[Pair], ranks: int, odd: float = ODD) -> Tiers:
    """`odd`: the part of the middle of its tier that an odd pair carries at most.

    >>> def pair(a, b, rate): return Pair(first=a, second=b, latency=1e-5, bandwidth=rate)
    >>> flat = [pair(a, b, 1e9 if a // 2 == b // 2 else 1e8) for a in range(4) for b in range(a + 1, 4)]
    >>> tiers(flat, 4)
    Tiers(span=2, odd=())
    >>> tiers([pair(a, b, 5e7 if b == 2 else 1e8) for a in range(3) for b in range(a + 1, 3)], 3).odd
    ('all links of rank 2 carry 50 % of what the others do (50.0 MB/s of 100.0 MB/s)',)
    """
    span = _span(pairs, ranks)
    near = [pair for pair in pairs if span and pair.first // span == pair.second // span]
    far = [pair for pair in pairs if not (span and pair.first // span == pair.second // span)]
    return Tiers(span, (*_odd(near, odd), *_odd(far, odd)))


def _span(pairs: Sequence[Pair], ranks: int) -> int:
    rates = sorted(pair.bandwidth for pair in pairs)
    gaps = [(high / low, high) for low, high in pairwise(rates)]
    wide, border = max(gaps, default=(1.0, 0.0))
    if wide < GAP:
        return 0
    blocks = _joined([pair for pair in pairs if pair.bandwidth >= border], ranks)
    length = len(blocks[0])
    even = all(len(block) == length and block == list(range(block[0], block[0] + length)) for block in blocks)
    return length if even and 1 < length < ranks else 0


def _joined(pairs: Sequence[Pair], ranks: int) -> list[list[int]]:
    """Ranks in blocks, each joined by `pairs`."""
    block = list(range(ranks))
    for pair in pairs:
        kept, gone = sorted((block[pair.first], block[pair.second]))
        block = [kept if each == gone else each for each in block]
    return [[rank for rank in range(ranks) if block[rank] == each] for each in sorted(set(block))]


def _odd(pairs: Sequence[Pair], odd: float) -> list[str]:
    """Lines for the slow among pairs of one tier: for a rank, or for one pair."""
    from meshwright.base.units import show_rate

    if len(pairs) < 3:
        return []
    middle = sorted(pair.bandwidth for pair in pairs)[len(pairs) * 2 // 3]
    slow = [pair for pair in pairs if pair.bandwidth < odd * middle]
    said, named = [], set()
    for rank in sorted({rank for pair in slow for rank in (pair.first, pair.second)}):
        own = [pair for pair in pairs if rank in (pair.first, pair.second)]
        if len(own) > 1 and all(pair in slow for pair in own):
            rate = median(pair.bandwidth for pair in own)
            said.append(
                f"all links of rank {rank} carry {rate / middle:.0%} of what the others do ({show_rate(rate)} of {show_rate(middle)})"
            )
            named.add(rank)
    for pair in slow:
        if not named & {pair.first, pair.second}:
            share = pair.bandwidth / middle
            said.append(
                f"the link between ranks {pair.first} and {pair.second} carries {share:.0%} of what the others do ({show_rate(pair.bandwidth)})"
            )
    return [line.replace("%", " %") for line in said]
