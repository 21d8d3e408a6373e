"""Micro-batches by speed: how many of a batch each replica takes so that all are done as early as possible."""

from __future__ import annotations

from collections.abc import Sequence


def by_speed(speeds: Sequence[float], count: int) -> tuple[int, ...]:
    """`count` micro-batches over replicas of these speeds, at least one each. Each goes to whoever would be done with it first, which is optimal.

    >>> by_speed([1.0, 2.0], 24), by_speed([1.0, 1.0, 1.0], 8), by_speed([1.0, 100.0], 4)
    ((8, 16), (3, 3, 2), (1, 3))
    """
    held = [1] * len(speeds)
    for _ in range(count - len(speeds)):
        first = min(range(len(speeds)), key=lambda replica: (held[replica] + 1) / speeds[replica])
        held[first] += 1
    return tuple(held)
