"""Distributes a batch over the data replicas of a plan: the rows of each micro-batch, and the number of micro-batches
by speed."""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.spec.plan import Plan


def first_row(plan: Plan, batch: int, replica: int) -> int:
    """Returns the first row of the batch that `replica` reads.

    >>> from meshwright.spec.plan import parse_plan
    >>> first_row(parse_plan("dp2.mb4.ga3-1"), 16, 1), first_row(parse_plan("dp2.mb4"), 16, 1)
    (12, 8)
    >>> first_row(parse_plan("dp2.mb4-2"), 12, 1)
    8
    """
    count = plan.micro_batches(batch)
    counts = plan.shares or (count,) * plan.dp
    return sum(counts[earlier] * plan.micro_batch_of(earlier) for earlier in range(replica))


def micro_batch_rows(plan: Plan, batch: int, replica: int) -> list[tuple[int, int]]:
    """Returns the first row and the number of rows of each micro-batch of `replica`.

    >>> from meshwright.spec.plan import parse_plan
    >>> micro_batch_rows(parse_plan("dp2.mb4-3.ga1-2"), 10, 1)
    [(4, 3), (7, 3)]
    """
    first, size = first_row(plan, batch, replica), plan.micro_batch_of(replica)
    return [(first + index * size, size) for index in range(plan.micro_batches(batch, replica))]


def micro_batches_by_speed(speeds: Sequence[float], count: int) -> tuple[int, ...]:
    """Returns the number of micro-batches of each replica. They add up to `count`, each replica has at least one, and
    the slowest replica ends as early as possible.

    Each micro-batch goes to the replica that would finish it first, which is optimal.

    >>> micro_batches_by_speed([1.0, 2.0], 24), micro_batches_by_speed([1.0, 1.0, 1.0], 8)
    ((8, 16), (3, 3, 2))
    >>> micro_batches_by_speed([1.0, 100.0], 4)
    (1, 3)
    """
    counts = [1] * len(speeds)
    for _ in range(count - len(speeds)):
        first = min(range(len(speeds)), key=lambda replica: (counts[replica] + 1) / speeds[replica])
        counts[first] += 1
    return tuple(counts)
