"""Describes the contents of the pipeline ranks of a schedule as arrays: layers, recomputed layers, saved activations at
the memory peak, and flat buffers.

There are few schedules and many grids. The arrays of a schedule are computed on first use and stacked for each grid
(`stack_schedules`).

A rank reaches its memory peak just before or during a backward pass. During the pass, activations are freed layer by
layer, and each layer needs transient memory. The points of a step at which the memory can peak are called moments.
`Schedule.in_flight` (spec/schedules) returns the micro-batches in flight on each stage of the rank at these moments. If
backward is split into B (gradients of inputs) and W (gradients of weights), the inputs of the matrix products of a
layer and the gradients of their outputs are stored until W. In V-shaped schedules, W follows directly after B at the
peak.
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
"""Whether the first blocks of a stage, and the later blocks, store activations until W (the weight gradients), if the
schedule has W."""

BackwardMoments = tuple[Array, Array, Array]
"""Three arrays: the layer run whose layer runs backward (..., moments), the number of layers with saved activations
(..., moments, layer runs), and the number of layers with data stored until W (..., moments, layer runs)."""


class PeakMoments(NamedTuple):
    """The moments (points of a step) at which the memory of a rank can peak.

    `layers` (b, r, moments, 2 or 3 x columns) has up to three groups of columns: the layers with saved activations, the
    layer whose backward runs, and, with deferred weight gradients, the layers with data stored until W. `at_head` (b,
    r, moments) marks where the running layer is the one that computes the loss.
    """

    layers: Array
    at_head: Array


class BucketLengths(NamedTuple):
    """Parameter groups by length. `times` is the number of groups of each length on each rank class (r, lengths).
    `other` has the other fields of `StateSizes` (field, r)."""

    times: Array
    lengths: Array
    other: Array


class RankContents:
    """The contents of the rank classes `kinds` of one schedule with `pp` ranks. The contents depend only on the model,
    not on devices."""

    def __init__(self, units: ModelBuckets, order: ScheduleChoice, pp: int, kinds: Sequence[RankClass]) -> None:
        self.entries, self.units, self.order, self.pp, self.kinds = units.entries, units, order, pp, kinds
        self.layers = np.array([kind.layers.sum(axis=0) for kind in kinds], dtype=float)
        self.numbers = np.array([kind.number for kind in kinds])
        self._again: dict[int, Array] = {}
        self._peak_moments: dict[tuple[int, StoredUntilW], tuple[dict[int, int], PeakMoments | None]] = {}
        self._flat: dict[tuple[TpEpShape, int | None], BucketLengths] = {}

    def again(self, count: int) -> Array:
        """Returns the number of recomputed blocks over (r, layer run) if the first `count` blocks of each virtual stage
        are recomputed."""
        if count not in self._again:
            blocks = [entry.is_block for entry in self.entries]
            self._again[count] = np.array(
                [recomputing_layers(kind, blocks, count).sum(axis=0) for kind in self.kinds], dtype=float
            )
        return self._again[count]

    def peak_moments(self, again: int, micro_batches: Sequence[int], waits: StoredUntilW = (True, True)) -> PeakMoments:
        """Returns the moments of possible memory peaks for each number of micro-batches (b). If the first `again`
        blocks of a stage differ from the others, each layer run has two columns: these blocks, and the other blocks."""
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
        """Returns the parameter groups of the ranks: buckets of `bucket` elements, or one group per layer if `bucket`
        is None."""
        if (cut, bucket) not in self._flat:
            found = [self.units.rank(kind.stages, cut, bucket) for kind in self.kinds]
            lengths = sorted(set().union(*(each.lengths for each in found)))
            times = np.array([[each.lengths.get(length, 0) for length in lengths] for each in found], dtype=float)
            other = np.array([each.other for each in found], dtype=float).T
            self._flat[cut, bucket] = BucketLengths(times, np.array(lengths, dtype=np.int64), other)
        return self._flat[cut, bucket]


def stack_schedules(arrays: Sequence[Array], kinds: int, orders: int = 1) -> Array:
    """Stacks the arrays of several schedules along a new axis `orders`. Schedules with fewer rank classes (axis
    `kinds`) repeat their first class."""
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
    """Returns the moments at which the memory of ranks of this class can peak, over (b, moments).

    `blocks` marks the columns with data stored until W, if the schedule has W. An empty `blocks` marks all columns.
    """
    if order.rules.in_rounds:
        return select_rounds(_round_moments(order, pp, kind), pp, micro_batches)
    return _backward_moments(order, pp, kind, micro_batches, np.array(blocks or [True] * kind.layers.shape[1]))


def _backward_moments(
    order: ScheduleChoice, pp: int, kind: RankClass, micro_batches: Array, waits: Array
) -> BackwardMoments:
    """Returns the moments of schedules whose activations depend on the number of micro-batches.

    B frees the activations layer by layer. For layers that `waits` marks, it keeps the inputs of matrix products until
    W and adds the gradients of their outputs.
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
    """Returns the moments of a schedule in rounds of pp micro-batches. Any number of rounds above one has the moments
    of two rounds."""
    rounds = np.minimum(np.maximum(micro_batches // pp, 1), 2) - 1
    return found[0][rounds], found[1][rounds], found[2][rounds]


def _round_moments(order: ScheduleChoice, pp: int, kind: RankClass) -> BackwardMoments:
    """Returns the moments for one round and for several rounds of micro-batches, over (rounds, moments)."""
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
    """Returns the layer runs of `content` in backward order, each with the layers whose activations are stored while it
    runs backward."""
    steps = []
    load = load.copy()
    for entry in np.flatnonzero(content)[::-1].tolist():
        steps.append((entry, load.copy()))
        load[entry] -= content[entry]
    return steps
