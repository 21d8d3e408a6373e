"""Searches micro-batch sizes that differ between the groups of a heterogeneous cluster. uneven_batches.py uses these
plans if one size for all groups does not fit or divides the work too coarsely.

The searched plans are those of uneven_batches.py, but with one micro-batch size for each group. Each size is a divisor
of the batch. With ZeRO 0 and 1, replicas may have unequal numbers of micro-batches. With ZeRO 2 and 3, replicas
synchronize in every micro-batch and need equal numbers.

Let a group have R replicas. Let each replica have m sequences and t seconds per micro-batch, and f other seconds per
step. A replica finishes m (T - f) / t sequences by the time T. The step therefore ends at the following time or later
(the sums are over the groups):

    T = (batch + sum of R f m / t) / (sum of R m / t) + seconds of the common work after the last micro-batch

Choices of sizes are tried in ascending order of T, until T exceeds MAX_UNEVEN_STEP_RATIO times the best step time. For
each choice, replicas get whole micro-batches whose sequences add up to the batch exactly. The function `_exact_totals`
finds them with the set of reachable sums, stored as the bits of one integer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import gcd, inf
from typing import Any, NamedTuple

import numpy as np

from meshwright.planner.cost.plan_grid import Array, PlanGrid
from meshwright.spec.plan import Plan

MAX_UNEVEN_STEP_RATIO = 0.99
"""The maximum step time of a plan with uneven sizes, relative to the best plan so far. If the gain is smaller, the plan
with one size for all groups is preferred, because it is simpler."""

MAX_SPLIT_SIZE_CHOICES = 500
"""Maximum number of size choices for which the numbers of micro-batches are computed, for each table
(`MicroBatchTable`). The choices with the lowest T are used."""

MAX_SIZE_CHOICES = 2**17
"""Maximum number of size choices for which T is computed, for each table. If there are more choices, only the fastest
sizes of each group are used."""

MAX_REACHABLE_SUMS = 2**16
"""Maximum batch for which exact sums are searched, in units of the greatest common divisor of the batch and all
sizes."""


class GroupMicroBatches(NamedTuple):
    """The replicas of one group: the number of replicas, the sequences per micro-batch (`size`), the seconds per
    micro-batch (`each`), and the other seconds per step (`once`)."""

    replicas: int
    size: int
    each: float
    once: float

    def by(self, end: float) -> int:
        """Returns the number of micro-batches that one replica finishes by the time `end`, in seconds from the start of
        the step."""
        return int((end - self.once) / self.each + 1e-9)


class MicroBatchTable(NamedTuple):
    """The times of plans that differ only in the micro-batch sizes, over (group, size).

    `each` is the seconds per micro-batch (infinite if the plan does not fit), `once` the other seconds per step.
    `after` is the seconds of the common work after the last micro-batch. `at` is the index of the plans in `box` along
    the axes `osczf`.
    """

    box: PlanGrid
    at: tuple[int, ...]
    each: Array
    once: Array
    after: Array
    replicas: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """Returns the micro-batch sizes of the grid."""
        return [micro_batch.size for micro_batch in self.box.micro_batches]

    def least(self, batch: int) -> float:
        """Returns a lower bound of the seconds of a step, for the best choice of sizes."""
        counts = np.array(self.replicas)
        rate = (np.array(self.sizes) / self.each).max(axis=1)
        if not rate.all():
            return inf
        first, after = (np.where(np.isfinite(self.each), part, inf).min(axis=1) for part in (self.once, self.after))
        return float((batch + (counts * first * rate).sum()) / (counts * rate).sum() + after.max())


class GroupSeconds(NamedTuple):
    """The seconds of the plans of a grid on each group, over the axes `obsczf` of GRID_AXES. The fields are those of
    `MicroBatchTable`."""

    each: Sequence[Array]
    once: Sequence[Array]
    after: Sequence[Array]

    def least(self, sizes: Array, replicas: Array, batch: int) -> Array:
        """Returns lower bounds of the seconds of a step for the best choice of sizes (b), with length 1 along b. Each
        group has its fastest size, and the least seconds of all groups and sizes in which it does not compute."""
        rate = sum(
            count * (sizes / each).max(axis=1, keepdims=True) for count, each in zip(replicas, self.each, strict=True)
        )
        first = np.minimum.reduce([part.min(axis=1, keepdims=True) for part in self.once])
        last = np.maximum.reduce([part.min(axis=1, keepdims=True) for part in self.after])
        return np.asarray(batch / rate + first + last)


def micro_batch_tables(
    box: PlanGrid,
    seconds: GroupSeconds,
    fits: Callable[[Array], Sequence[Array]],
    replicas: Sequence[int],
    batch: int,
    best: float,
) -> Iterator[MicroBatchTable]:
    """Yields one table for each set of plans of `box` that differ only in the micro-batch size. Sets are omitted if
    they do not fit on a group, or cannot be faster than MAX_UNEVEN_STEP_RATIO times `best`. `fits` returns, for each
    group, whether plans fit, for those that its argument marks."""
    sizes = np.array([micro_batch.size for micro_batch in box.micro_batches]).reshape(1, -1, 1, 1, 1, 1)
    fast = seconds.least(sizes, np.array(replicas), batch) < MAX_UNEVEN_STEP_RATIO * best
    if not fast.any():
        return
    mask = np.broadcast_to(fast, box.shape)
    parts = [np.moveaxis(np.stack(part), 2, -1) for part in (*seconds, fits(mask))]
    per = np.where(parts[3] & np.moveaxis(mask, 1, -1), parts[0], inf)
    for at in np.argwhere(np.isfinite(per).any(axis=-1).all(axis=0)).tolist():
        row: tuple[Any, ...] = (slice(None), *at)
        yield MicroBatchTable(box, row[1:], per[row], parts[1][row], parts[2][row], tuple(replicas))


def uneven_micro_batch_plans(
    found: Sequence[MicroBatchTable], batch: int, best: float, score: Callable[[Plan], float]
) -> Iterator[tuple[float, Plan]]:
    """Yields plans with uneven sizes as pairs (score, plan). `score` computes the score of a plan, `best` is the lowest
    score so far. Each score is below MAX_UNEVEN_STEP_RATIO times `best`, and below MAX_UNEVEN_STEP_RATIO times the
    previous score."""
    ordered = sorted(((least, number) for number, table in enumerate(found) if (least := table.least(batch)) < inf))
    for least, number in ordered:
        if least >= MAX_UNEVEN_STEP_RATIO * best:
            return
        plan = _best_sizes(found[number], batch, best)
        if plan is not None and (scored := score(plan)) < MAX_UNEVEN_STEP_RATIO * best:
            best = scored
            yield scored, plan


def _best_sizes(table: MicroBatchTable, batch: int, best: float) -> Plan | None:
    """Returns the plan of `table` with the best sizes, or None if no step time is below MAX_UNEVEN_STEP_RATIO times
    `best`."""
    groups, counts = len(table.replicas), np.array(table.replicas)
    rates = np.array(table.sizes) / table.each
    fast = [
        sorted(np.argsort(-rate, kind="stable")[: int(MAX_SIZE_CHOICES ** (1 / groups))].tolist()) for rate in rates
    ]
    grid = np.stack(np.meshgrid(*fast, indexing="ij"), axis=-1).reshape(-1, groups)
    grid = grid[(grid != grid[:, :1]).any(axis=1) & (rates[np.arange(groups), grid] > 0).all(axis=1)]
    each, once, after = (part[np.arange(groups), grid] for part in (table.each, table.once, table.after))
    sizes = np.array(table.sizes)[grid]
    rate = counts * sizes / each
    together = after.max(axis=1)
    meets = table.box.shards[table.at[3]].zero > 1
    if meets:
        number_of, rest = np.divmod(batch, (counts * sizes).sum(axis=1))
        bound = np.where((rest > 0) | (number_of == 0), inf, number_of * each.max(axis=1) + once.max(axis=1)) + together
    else:
        bound = (batch + (once * rate).sum(axis=1)) / rate.sum(axis=1) + together
    found: Plan | None = None
    for at in np.argsort(bound, kind="stable")[:MAX_SPLIT_SIZE_CHOICES].tolist():
        if not bound[at] < MAX_UNEVEN_STEP_RATIO * best:
            break
        kinds = [
            GroupMicroBatches(*row)
            for row in zip(table.replicas, sizes[at].tolist(), each[at].tolist(), once[at].tolist(), strict=True)
        ]
        if meets:
            end, shares = bound[at] - together[at], tuple((int(number_of[at]),) * kind.replicas for kind in kinds)
        else:
            end, shares = split_batch_exactly(kinds, batch)
        if end + together[at] < MAX_UNEVEN_STEP_RATIO * best:
            best = (end + together[at]) / MAX_UNEVEN_STEP_RATIO
            found = _build_plan(table, tuple(grid[at].tolist()), shares)
    return found


def _build_plan(table: MicroBatchTable, sizes: tuple[int, ...], counts: tuple[tuple[int, ...], ...]) -> Plan:
    order, *rest = table.at
    plan = table.box.plan((order, 0, *rest))
    each = tuple(table.sizes[at] for at, counts_of_group in zip(sizes, counts, strict=True) for _ in counts_of_group)
    shares = tuple(count for counts_of_group in counts for count in counts_of_group)
    return plan.but(micro_batch=max(each), micro_batch_sizes=each, shares=shares if len(set(shares)) > 1 else ())


def split_batch_exactly(kinds: Sequence[GroupMicroBatches], batch: int) -> tuple[float, tuple[tuple[int, ...], ...]]:
    """Returns the seconds until the last replica ends, and the number of micro-batches of each replica by group. The
    micro-batches contain exactly `batch` sequences, each replica has at least one micro-batch, and the last replica
    ends as early as possible. The time is infinite if there is no such division, or if the batch exceeds
    MAX_REACHABLE_SUMS.

    >>> split_batch_exactly([GroupMicroBatches(1, 4, 4.0, 0.0), GroupMicroBatches(1, 1, 2.0, 0.0)], 11)
    (8.0, ((2,), (3,)))
    """
    unit = gcd(batch, *(kind.size for kind in kinds))
    fewest = sum(kind.replicas * kind.size for kind in kinds)
    if batch // unit > MAX_REACHABLE_SUMS or fewest > batch:
        return inf, ()
    rate = sum(kind.replicas * kind.size / kind.each for kind in kinds)
    end = (batch + sum(kind.replicas * kind.size * kind.once / kind.each for kind in kinds)) / rate
    end = max(end, *(kind.each + kind.once for kind in kinds))
    most = [max(kind.by(end), 1) for kind in kinds]
    while (totals := _exact_totals(kinds, most, batch // unit, unit)) is None:
        ends = [
            ((count + 1) * kind.each + kind.once, at)
            for at, (count, kind) in enumerate(zip(most, kinds, strict=True))
            if count * kind.size <= batch
        ]
        if not ends:
            return inf, ()
        # A large `once` may round `by` to 0, but each replica has at least one micro-batch.
        most[min(ends)[1]] += 1
    shares = tuple(
        tuple(total // kind.replicas + (at < total % kind.replicas) for at in range(kind.replicas))
        for total, kind in zip(totals, kinds, strict=True)
    )
    return max(
        counts_of_group[0] * kind.each + kind.once for counts_of_group, kind in zip(shares, kinds, strict=True)
    ), shares


def _exact_totals(kinds: Sequence[GroupMicroBatches], most: Sequence[int], batch: int, unit: int) -> list[int] | None:
    """Returns the total number of micro-batches of each group, or None if no numbers add up to `batch`. `batch` is the
    number of sequences of the batch divided by `unit`. `most` is the maximum number of micro-batches of a replica in
    each group. In the integers of `reached`, bit n is set if the sum n is reachable."""
    reached, mask = [1], (1 << (batch + 1)) - 1
    for kind, count in zip(kinds, most, strict=True):
        size, more = kind.size // unit, kind.replicas * (count - 1)
        bits, done = (reached[-1] << (kind.replicas * size)) & mask, 0
        while done < more:
            step = min(done + 1, more - done)
            bits |= (bits << (step * size)) & mask
            done += step
        reached.append(bits)
    if not reached[-1] >> batch & 1:
        return None
    totals, rest = [], batch
    for kind, count, before in reversed(list(zip(kinds, most, reached[:-1], strict=True))):
        size = kind.size // unit
        taken = next(
            number
            for number in range(kind.replicas, kind.replicas * count + 1)
            if rest >= number * size and before >> (rest - number * size) & 1
        )
        totals.append(taken)
        rest -= taken * size
    return totals[::-1]
