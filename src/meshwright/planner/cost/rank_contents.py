"""Describes what the pipeline ranks of an order hold, as arrays: layers, recomputed layers, saved activations at the
memory peak, and flat buffers.

Orders are few and grids are many. The arrays of an order are computed once, on first use, and stacked for each grid
(`stack_schedules`).

A rank is at its memory peak just before a backward pass, or inside it: while the pass walks back through its layers,
their activations are freed, and each layer needs transient memory. `Schedule.in_flight` (spec/schedules) states how
many micro-batches each stage of the rank holds at these moments. Where backward is split, the inputs of the matrix
products of a layer and the gradients of their outputs are held until W. On the ranks of a V, B frees nothing of them
but W follows at once wherever a rank is at its peak.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost.buckets import ModelBuckets
from meshwright.planner.cost.cost_context import HEAD
from meshwright.planner.cost.plan_grid import Array, ScheduleChoice, TpEpShape
from meshwright.planner.cost.rank_classes import RankClass, recomputing_layers, split_recomputing

StoredUntilW = tuple[bool, bool]
"""Whether the first blocks of a stage, and the later ones, store their activations until W, where the order has it."""

BackwardMoments = tuple[Array, Array, Array]
"""The entry whose layer runs backward (..., moments). Then, for each entry, the layers with saved activations, and
those that wait for W (..., moments, entries)."""


class PeakMoments(NamedTuple):
    """Stores the moments at which the memory of a rank can peak.

    `layers` (b, r, moments, 2 or 3 x columns) has three groups of columns: the layers with saved activations, the layer
    whose backward runs, and, with a split backward, the layers that wait for W. `at_head` (b, r, moments) says whether
    the running layer ends in the loss.
    """

    layers: Array
    at_head: Array


class BucketLengths(NamedTuple):
    """Stores units by their length: the number on each rank (r, lengths), the lengths, and the other fields of
    `StateSizes` (field, r)."""

    times: Array
    lengths: Array
    other: Array


class RankContents:
    """Describes the kinds of pipeline ranks of one order, `kinds`, of `pp` ranks. It depends on the model alone, not on
    devices."""

    def __init__(self, units: ModelBuckets, order: ScheduleChoice, pp: int, kinds: Sequence[RankClass]) -> None:
        self.entries, self.units, self.order, self.pp, self.kinds = units.entries, units, order, pp, kinds
        self.layers = np.array([kind.layers.sum(axis=0) for kind in kinds], dtype=float)
        self.numbers = np.array([kind.number for kind in kinds])
        self._again: dict[int, Array] = {}
        self._peak_moments: dict[tuple[int, StoredUntilW], tuple[dict[int, int], PeakMoments | None]] = {}
        self._flat: dict[tuple[TpEpShape, int | None], BucketLengths] = {}

    def again(self, count: int) -> Array:
        """Returns the blocks that recompute when the first `count` of each virtual stage do (r, entry)."""
        if count not in self._again:
            blocks = [entry.is_block for entry in self.entries]
            self._again[count] = np.array(
                [recomputing_layers(kind, blocks, count).sum(axis=0) for kind in self.kinds], dtype=float
            )
        return self._again[count]

    def peak_moments(self, again: int, micro_batches: Sequence[int], waits: StoredUntilW = (True, True)) -> PeakMoments:
        """Returns the peak moments for each number of micro-batches (b). Where the first `again` blocks of a stage
        differ, each entry has two columns: these blocks, and the others."""
        limit = self.order.rules.in_flight_limit(self.pp)
        if limit is not None:
            micro_batches = [min(count, limit) for count in micro_batches]
        rows, known = self._peak_moments.get((again, waits), ({}, None))
        new = sorted(set(micro_batches) - rows.keys())
        if new:
            more = self._moments(again, np.array(new), waits)
            known = (
                more
                if known is None
                else PeakMoments(*(np.concatenate(both) for both in zip(known, more, strict=True)))
            )
            rows = {**rows, **{count: len(rows) + at for at, count in enumerate(new)}}
            self._peak_moments[again, waits] = rows, known
        assert known is not None
        chosen = [rows[count] for count in micro_batches]
        return PeakMoments(known.layers[chosen], known.at_head[chosen])

    def _moments(self, again: int, micro_batches: Array, waits: StoredUntilW) -> PeakMoments:
        blocks = [entry.is_block for entry in self.entries]
        heads = np.array(
            [entry.layer.name == HEAD and not entry.copy for entry in self.entries for _ in range(2 if again else 1)]
        )
        waiting = [block and wait for block in blocks for wait in (waits if again else waits[1:])]
        found = [
            peak_moments(
                self.order, self.pp, split_recomputing(kind, blocks, again) if again else kind, micro_batches, waiting
            )
            for kind in self.kinds
        ]
        fill, columns = np.arange(max(running.shape[1] for running, _, _ in found)), len(heads)
        groups = 2 + self.order.rules.defers_weights
        layers = np.zeros((len(micro_batches), len(found), len(fill), groups * columns))
        at_head = np.zeros(layers.shape[:3], dtype=bool)
        for r, (running, stored, until_w) in enumerate(found):
            pick = fill % running.shape[1]
            layers[:, r, :, :columns] = stored[:, pick]
            layers[:, r, :, columns : 2 * columns] = running[:, pick, None] == np.arange(columns)
            if groups == 3:
                layers[:, r, :, 2 * columns :] = until_w[:, pick]
            at_head[:, r] = heads[running[:, pick]]
        return PeakMoments(layers, at_head)

    def flat(self, cut: TpEpShape, bucket: int | None) -> BucketLengths:
        """Returns the flat buffers: buckets of `bucket` elements, or one unit a layer."""
        if (cut, bucket) not in self._flat:
            found = [self.units.rank(kind.stages, cut, bucket) for kind in self.kinds]
            lengths = sorted(set().union(*(each.lengths for each in found)))
            times = np.array([[each.lengths.get(length, 0) for length in lengths] for each in found], dtype=float)
            other = np.array([each.other for each in found], dtype=float).T
            self._flat[cut, bucket] = BucketLengths(times, np.array(lengths, dtype=np.int64), other)
        return self._flat[cut, bucket]


def stack_schedules(arrays: Sequence[Array], kinds: int, orders: int = 1) -> Array:
    """Stacks the arrays of several orders along a new axis `orders`. Orders with fewer kinds of ranks (axis `kinds`)
    repeat their first kind."""
    width = max(array.shape[kinds] for array in arrays)
    wide = (
        array if array.shape[kinds] == width else np.take(array, _pad_with_first(array.shape[kinds], width), axis=kinds)
        for array in arrays
    )
    return np.stack(list(wide), axis=orders)


def _pad_with_first(length: int, width: int) -> Array:
    return np.where(np.arange(width) < length, np.arange(width), 0)


def peak_moments(
    order: ScheduleChoice, pp: int, kind: RankClass, micro_batches: Array, blocks: Sequence[bool] = ()
) -> BackwardMoments:
    """Returns the moments at which ranks of this class can be at their peak, over (b, moments).

    `blocks` says which columns wait for W where the schedule has it; without it all do.
    """
    if order.rules.in_rounds:
        return select_rounds(_round_moments(order, pp, kind), pp, micro_batches)
    return _backward_moments(order, pp, kind, micro_batches, np.array(blocks or [True] * kind.layers.shape[1]))


def _backward_moments(
    order: ScheduleChoice, pp: int, kind: RankClass, micro_batches: Array, waits: Array
) -> BackwardMoments:
    """Returns the moments of schedules whose activations depend on the number of micro-batches.

    What does not wait for W is freed by B, layer by layer. Of what `waits`, all but the inputs of products is freed,
    and the gradients of their outputs are added.
    """
    rules = order.rules
    waits = waits & rules.splits_backward
    running, rows, until_w = [], [], []
    for turn, alive, deferred in rules.in_flight(kind.rank, pp, order.virtual_stages, micro_batches):
        load = sum(
            np.broadcast_to(count, micro_batches.shape)[:, None] * kind.layers[at] for at, count in enumerate(alive)
        )
        done = np.broadcast_to(deferred, micro_batches.shape)[:, None] * kind.layers[turn]
        for entry in np.flatnonzero(kind.layers[turn]).tolist():
            passed = np.where(np.arange(len(waits)) > entry, kind.layers[turn], 0)
            running.append(np.full(len(micro_batches), entry))
            rows.append(load - np.where(waits & (not rules.defers_weights), 0, passed))
            until_w.append(np.where(waits & rules.defers_weights, done + passed, 0 * rows[-1]))
    return np.stack(running, axis=1), np.stack(rows, axis=1), np.stack(until_w, axis=1)


def select_rounds(found: BackwardMoments, pp: int, micro_batches: Array) -> BackwardMoments:
    """Returns the moments of a schedule in rounds, which are the same from two rounds of pp micro-batches on."""
    rounds = np.minimum(np.maximum(micro_batches // pp, 1), 2) - 1
    return found[0][rounds], found[1][rounds], found[2][rounds]


def _round_moments(order: ScheduleChoice, pp: int, kind: RankClass) -> BackwardMoments:
    """Returns the moments with one round of micro-batches, and with more, over (rounds, moments)."""
    cases = []
    for rounds in (1, 2):
        moments = order.rules.in_flight(kind.rank, pp, order.virtual_stages, rounds * pp)
        loads = np.array([moment.alive for moment in moments]) @ kind.layers
        peaks = sorted({0, *loads.argmax(axis=0).tolist()})
        cases.append([step for at in peaks for step in _walk_backward(loads[at], kind.layers[moments[at].turn])])
    length = len(cases[-1])
    cases = [(case * length)[:length] for case in cases]
    rows = np.array([[row for _, row in case] for case in cases])
    return np.array([[entry for entry, _ in case] for case in cases]), rows, 0 * rows


def _walk_backward(load: Array, content: Array) -> list[tuple[int, Array]]:
    """Returns each entry of `content` in backward order, with the layers that are held while it runs."""
    steps = []
    load = load.copy()
    for entry in np.flatnonzero(content)[::-1].tolist():
        steps.append((entry, load.copy()))
        load[entry] -= content[entry]
    return steps
