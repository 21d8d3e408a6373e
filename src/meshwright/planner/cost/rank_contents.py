"""Describes what the pipeline ranks of a schedule store: layers, saved activations at the memory peak, and flat
buffers. The memory and time formulas of the cost model read these descriptions as arrays.

Layers: the plan assigns blocks to virtual stages. Other layers are on the stage of the blocks next to them. Equal
layers that follow each other form a layer run (cost_context.py). Most pipeline ranks have equal layers, so they form
one class. `group_equal_ranks` describes each class by its first rank, which has the most micro-batches in flight.

Memory peak: a rank reaches its memory peak just before or during a backward. During a backward, activations are freed
layer by layer, and each layer needs transient memory. The points of a step at which the memory can peak are called
moments. `Schedule.in_flight` (spec/schedules) returns the micro-batches in flight on each stage of the rank at these
moments. A schedule may split backward into B (gradients of inputs) and W (gradients of weights). Then the inputs of the
matrix products of a layer and the gradients of their outputs are stored until W. In V-shaped schedules, W follows
directly after B at the peak.

Flat buffers: each parameter group has one flat buffer. The module computes the exact number of elements
([Note: flat layout] in spec/layout.py), for a whole layer run at a time.

There are few schedules and many grids. The arrays of a schedule are computed on first use. For each grid,
`stack_schedules` joins the arrays of its schedules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost.constants import MAX_INFLIGHT_REDUCE
from meshwright.planner.cost.cost_context import HEAD, LayerRun
from meshwright.planner.cost.plan_grid import Array, ScheduleChoice, TpEpShape
from meshwright.spec.enums import ScheduleName
from meshwright.spec.schedules.schedule import find_schedule, stage_to_rank

StageContent = tuple[int, ...]
"""The number of layers of each layer run on one virtual stage."""


class RankClass(NamedTuple):
    """Pipeline ranks with equal layers. `rank` is the first of these ranks, `number` the number of ranks.

    `layers` is the number of layers by virtual stage of the rank (rows) and layer run (columns). `stages` is the
    distinct rows of `layers`, each with the number of stages that have these layers.
    """

    rank: int
    number: int
    layers: Array
    stages: tuple[tuple[StageContent, int], ...]


def stage_contents(entries: Sequence[LayerRun], order: ScheduleChoice) -> Array:
    """Returns the number of layers by virtual stage (rows) and layer run (columns). A layer between two blocks is on
    the stage of the block before it."""
    ends = np.cumsum(order.stage_layers)
    starts = ends - order.stage_layers
    last = len(ends) - 1
    table = np.zeros((len(ends), len(entries)), dtype=np.int64)
    for column, entry in enumerate(entries):
        if entry.copy:
            table[last, column] = int(last > 0)
        elif entry.is_block:
            first, past = entry.first_block, entry.first_block + entry.layer.repeat
            table[:, column] = np.clip(np.minimum(ends, past) - np.maximum(starts, first), 0, None)
        else:
            table[min(int(np.searchsorted(ends, entry.first_block)), last), column] = entry.layer.repeat
    return table


def stages_by_rank(table: Array, order: ScheduleChoice, pp: int) -> Array:
    """Rearranges `table`, whose rows are virtual stages. The first two axes of the result are the index of the stage on
    its rank, and the pipeline rank."""
    owner = stage_to_rank(np.arange(len(table)), pp, order.rules.v_shape)  # type: ignore[arg-type]
    return table[np.argsort(owner, kind="stable").reshape(pp, order.virtual_stages).T]


def list_ranks(entries: Sequence[LayerRun], order: ScheduleChoice, pp: int) -> list[RankClass]:
    """Returns every pipeline rank as a separate class."""
    table = stages_by_rank(stage_contents(entries, order), order, pp)
    return [_rank_class(rank, 1, table[:, rank]) for rank in range(pp)]


def group_equal_ranks(entries: Sequence[LayerRun], order: ScheduleChoice, pp: int) -> tuple[RankClass, ...]:
    """Returns the classes of pipeline ranks, in the order of their first rank."""
    table = stages_by_rank(stage_contents(entries, order), order, pp)
    found: dict[tuple[bytes, int], list[int]] = {}
    for rank in range(pp):
        # In V-shaped schedules, later ranks have more micro-batches of their second stage in flight, and this stage may
        # be the larger one.
        distinct = order.rules.v_shape and order.given
        found.setdefault((table[:, rank].tobytes(), rank * distinct), []).append(rank)
    return tuple(_rank_class(same[0], len(same), table[:, same[0]]) for same in found.values())


def recomputing_layers(kind: RankClass, blocks: Sequence[bool], recomputing: int) -> Array:
    """Returns how many of the first `recomputing` blocks of each virtual stage (rows) belong to each layer run
    (columns). `blocks` marks the layer runs of blocks."""
    content = kind.layers * np.array(blocks)
    before = np.cumsum(content, axis=1) - content
    return np.clip(recomputing - before, 0, content)


def split_recomputing(kind: RankClass, blocks: Sequence[bool], recomputing: int) -> RankClass:
    """Returns `kind` with two columns for each layer run: layers among the first `recomputing` blocks of a stage, and
    other layers."""
    again = recomputing_layers(kind, blocks, recomputing)
    return kind._replace(layers=np.stack([again, kind.layers - again], axis=2).reshape(len(again), -1))


def _rank_class(rank: int, count: int, layers: Array) -> RankClass:
    return RankClass(rank, count, layers, tuple(Counter(map(tuple, layers.tolist())).items()))


StoredUntilW = tuple[bool, bool]
"""Two flags, for the first blocks of a stage and for the later blocks: whether these blocks store data until W (the
weight gradients), if the schedule splits backward."""

BackwardMoments = tuple[Array, Array, Array]
"""Three arrays. The first is the index of the layer run that runs backward (..., moments). The second is the number of
layers with saved activations (..., moments, layer runs). The third is the number of layers with data stored until W
(..., moments, layer runs)."""


class PeakMoments(NamedTuple):
    """The moments (points of a step) at which the memory of a rank can peak.

    `layers` (b, r, moments, 2 or 3 x columns) is numbers of layers in up to three groups of columns: layers with saved
    activations, the layer that runs backward, and, with deferred weight gradients, layers with data stored until W. A
    group has one or two columns for each layer run. `at_head` (b, r, moments) marks the moments at which the head, the
    layer that computes the loss, runs backward.
    """

    layers: Array
    at_head: Array


class BucketLengths(NamedTuple):
    """Parameter groups by length in elements. `times` is the number of groups of each length on each rank class (r,
    lengths). `other` is `RankBuckets.other` of each rank class (field, r)."""

    times: Array
    lengths: Array
    other: Array


class RankContents:
    """The contents of the rank classes `kinds` of one schedule with `pp` pipeline ranks. The contents do not depend on
    devices."""

    def __init__(self, units: ModelBuckets, order: ScheduleChoice, pp: int, kinds: Sequence[RankClass]) -> None:
        self.entries, self.units, self.order, self.pp, self.kinds = units.entries, units, order, pp, kinds
        self.layers = np.array([kind.layers.sum(axis=0) for kind in kinds], dtype=float)
        self.numbers = np.array([kind.number for kind in kinds])
        self._again: dict[int, Array] = {}
        self._peak_moments: dict[tuple[int, StoredUntilW], tuple[dict[int, int], PeakMoments | None]] = {}
        self._flat: dict[tuple[TpEpShape, int | None], BucketLengths] = {}

    def again(self, count: int) -> Array:
        """Returns, over (r, layer run), the number of blocks that are among the first `count` blocks of their virtual
        stage."""
        if count not in self._again:
            blocks = [entry.is_block for entry in self.entries]
            self._again[count] = np.array(
                [recomputing_layers(kind, blocks, count).sum(axis=0) for kind in self.kinds], dtype=float
            )
        return self._again[count]

    def peak_moments(self, again: int, micro_batches: Sequence[int], waits: StoredUntilW = (True, True)) -> PeakMoments:
        """Returns the moments of possible memory peaks for each number of micro-batches (b).

        If `again` is above 0, each layer run has two columns: the first `again` blocks of each stage, and the other
        blocks. `waits` is whether these two types of blocks store data until W.
        """
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
        """Returns the parameter groups of the rank classes: buckets of `bucket` elements, or one group per layer (ZeRO
        3) if `bucket` is None."""
        if (cut, bucket) not in self._flat:
            found = [self.units.rank(kind.stages, cut, bucket) for kind in self.kinds]
            lengths = sorted(set().union(*(each.lengths for each in found)))
            times = np.array([[each.lengths.get(length, 0) for length in lengths] for each in found], dtype=float)
            other = np.array([each.other for each in found], dtype=float).T
            self._flat[cut, bucket] = BucketLengths(times, np.array(lengths, dtype=np.int64), other)
        return self._flat[cut, bucket]


def peak_moments(
    order: ScheduleChoice, pp: int, kind: RankClass, micro_batches: Array, blocks: Sequence[bool] = ()
) -> BackwardMoments:
    """Returns the moments at which the memory of ranks of this class can peak, over (b, moments).

    `blocks` marks the columns with data stored until W, if the schedule splits backward. An empty `blocks` marks all
    columns.
    """
    if order.rules.in_rounds:
        return select_rounds(_round_moments(order, pp, kind), pp, micro_batches)
    return _backward_moments(order, pp, kind, micro_batches, np.array(blocks or [True] * kind.layers.shape[1]))


def _backward_moments(
    order: ScheduleChoice, pp: int, kind: RankClass, micro_batches: Array, waits: Array
) -> BackwardMoments:
    """Returns the moments of a schedule that does not run micro-batches in rounds. B frees the activations layer by
    layer. In layers that `waits` marks, the inputs of matrix products and the gradients of their outputs are stored
    until W."""
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
            rows.append(load - (passed if rules.defers_weights else np.where(waits, 0, passed)))
            if rules.defers_weights:
                until_w.append(np.where(waits, done + passed, 0 * load))
    stored = np.stack(rows, axis=1)
    return np.stack(running, axis=1), stored, np.stack(until_w, axis=1) if until_w else 0 * stored


def select_rounds(found: BackwardMoments, pp: int, micro_batches: Array) -> BackwardMoments:
    """Returns the moments of a schedule that runs micro-batches in rounds of pp. `found` has the moments of one round
    and of two rounds. More rounds have the moments of two rounds."""
    rounds = np.minimum(np.maximum(micro_batches // pp, 1), 2) - 1
    return found[0][rounds], found[1][rounds], found[2][rounds]


def _round_moments(order: ScheduleChoice, pp: int, kind: RankClass) -> BackwardMoments:
    """Returns the moments for one round and for two rounds of micro-batches, over (rounds, moments)."""
    cases = []
    for rounds in (1, 2):
        alive, turns = _rounds_in_flight(order.schedule, order.actions, order.virtual_stages, kind.rank, pp, rounds)
        loads = alive @ kind.layers
        peaks = sorted({0, *loads.argmax(axis=0).tolist()})
        cases.append([step for at in peaks for step in _walk_backward(loads[at], kind.layers[turns[at]])])
    length = len(cases[-1])
    cases = [(case * length)[:length] for case in cases]
    rows = np.array([[row for _, row in case] for case in cases])
    return np.array([[entry for entry, _ in case] for case in cases]), rows, 0 * rows


@lru_cache(maxsize=1 << 12)
def _rounds_in_flight(
    schedule: ScheduleName, actions: tuple[str, ...], virtual_stages: int, rank: int, pp: int, rounds: int
) -> tuple[Array, tuple[int, ...]]:
    """Returns `Schedule.in_flight` for `rounds` rounds of micro-batches: the micro-batches in flight on each stage of
    the rank (moments, stages), and the stage that runs backward at each moment."""
    moments = find_schedule(schedule, actions).in_flight(rank, pp, virtual_stages, rounds * pp)
    return np.array([moment.alive for moment in moments]), tuple(moment.turn for moment in moments)


def _walk_backward(load: Array, content: Array) -> list[tuple[int, Array]]:
    """Returns one pair for each layer run of `content`, in backward order. The first item is the index of the layer
    run. The second item is an array over all layer runs: the number of their layers that have saved activations when
    the backward of this layer run starts. `load` is this array before the first backward. `content`: the number of
    layers of each layer run whose backward runs."""
    steps = []
    load = load.copy()
    for entry in np.flatnonzero(content)[::-1].tolist():
        steps.append((entry, load.copy()))
        load[entry] -= content[entry]
    return steps


StageCounts = tuple[tuple[tuple[int, ...], int], ...]
"""The distinct virtual stages of a rank, as pairs: the number of layers of each layer run on the stage, and the number
of stages with these layers."""


class BucketRun(NamedTuple):
    """`times` consecutive equal parameter groups of `end` elements each, before padding to the shards.
    `gathered_ahead`: whether each group's all-gather is prefetched during the previous group."""

    end: int
    times: int
    gathered_ahead: bool = False


class StageBuckets(NamedTuple):
    """The parameter groups of one virtual stage in forward order. All lengths are in elements before padding.

    `first` and `last` are the first and the last group. `opening` is the sum of the first two groups, whose reductions
    are still in flight when a backward ends. `closing` is the sum of the last two groups, whose reductions a backward
    starts first. `filling` is the largest group between `first` and `last`, `largest` the largest of all groups. With
    one group, `opening` is twice its length, `closing` is 0 and `filling` is its length. `lone` is the sum of the
    groups without prefetch. `staged` is the length of the staging buffers for one backward, for two, and for three or
    more.
    """

    runs: tuple[BucketRun, ...]
    number: int
    first: int
    last: int
    opening: int
    closing: int
    filling: int
    largest: int
    lone: int
    staged: tuple[int, int, int]


class LayerNumel(NamedTuple):
    """The elements of one layer of a layer run on one tensor rank, with padding (`aligned`) and without (`raw`)."""

    aligned: int
    raw: int
    own_bucket: bool
    is_block: bool


def layer_numel(entry: LayerRun, cut: TpEpShape) -> LayerNumel:
    """Returns the number of elements of one layer of the run `entry`, and the properties that determine its parameter
    group."""
    return LayerNumel(entry.aligned(cut), entry.raw(cut), entry.own_bucket, entry.is_block)


def bucket_runs(layers: Sequence[tuple[LayerNumel, int]], bucket: int) -> list[BucketRun]:
    """Returns the parameter groups below ZeRO 3, in forward order. Groups are filled from the last layer backward. A
    group takes whole layers until it has at least `bucket` elements. A layer with `own_bucket` is a separate group.

    >>> block, head = LayerNumel(64, 50, False, True), LayerNumel(32, 10, False, False)
    >>> runs = bucket_runs([(block, 7), (head, 1)], 100)
    >>> [(run.end, run.times) for run in runs]  # from the back: head and two blocks reach 100, then two blocks each
    [(64, 1), (128, 2), (160, 1)]
    """
    found: list[BucketRun] = []
    room = 0
    for layer, count in reversed(layers):
        if not (layer.aligned and count):
            continue
        if layer.own_bucket:
            found.append(BucketRun(layer.aligned, count))
            room = 0
            continue
        each = -(-bucket // layer.raw)
        while count:
            if room > 0:
                taken = min(count, -(-room // layer.raw))
                found[-1] = BucketRun(found[-1].end + taken * layer.aligned, 1)
                room -= taken * layer.raw
            elif count >= each:
                taken = count // each * each
                found.append(BucketRun(each * layer.aligned, count // each))
            else:
                taken = 0
                found.append(BucketRun(0, 1))
                room = bucket
            count -= taken
    return found[::-1]


def per_layer_runs(layers: Sequence[tuple[LayerNumel, int]]) -> list[BucketRun]:
    """Returns the parameter groups at ZeRO 3: one per layer. A block prefetches the weights of the next block. The
    first block of a stage and layers outside blocks are not prefetched."""
    return [BucketRun(layer.aligned, count, layer.is_block) for layer, count in layers if layer.aligned and count]


def stage_buckets(layers: Sequence[tuple[LayerNumel, int]], bucket: int | None) -> StageBuckets:
    """Returns the parameter groups of one virtual stage: buckets of `bucket` elements, or the groups of ZeRO 3 if
    `bucket` is None."""
    runs = per_layer_runs(layers) if bucket is None else bucket_runs(layers, bucket)
    if not runs:
        return StageBuckets((), 0, 0, 0, 0, 0, 0, 0, 0, (0, 0, 0))
    line = [run.end for run in runs for _ in range(min(run.times, MAX_INFLIGHT_REDUCE))]
    lone = sum(run.end * run.times for run in runs if not run.gathered_ahead)
    lone += next((run.end for run in runs if run.gathered_ahead), 0)
    opening = sum(line[:MAX_INFLIGHT_REDUCE]) if len(line) > 1 else MAX_INFLIGHT_REDUCE * line[0]
    closing = sum(line[-MAX_INFLIGHT_REDUCE:]) if len(line) > 1 else 0
    filling = max(line[1:-1] or line[-1:])
    back = [run.end for run in reversed(runs) for _ in range(min(run.times, MAX_INFLIGHT_REDUCE + 1))]
    staged = staging_numel(back), staging_numel(back * 2), staging_numel(back * 3)
    return StageBuckets(
        tuple(runs),
        sum(run.times for run in runs),
        line[0],
        line[-1],
        opening,
        closing,
        filling,
        max(line),
        lone,
        staged,
    )


def staging_numel(line: Sequence[int]) -> int:
    """Returns the number of elements of the staging buffers in shared memory, from which other ranks read full
    gradients. `line` is the lengths of the gradients in backward order. Consecutive gradients, up to
    MAX_INFLIGHT_REDUCE + 1, are in buffers at the same time. Buffer k is as long as the k-th longest gradient in any of
    these windows ([Note: in turn] in runtime/comm/shm/progress.py).

    >>> # windows of three: the second list has (9, 1, 9) and (1, 9, 1), so its buffers have 9, 9 and 1 elements
    >>> staging_numel([9, 1]), staging_numel([9, 1, 9, 1]), staging_numel([9, 9, 9, 9])
    (10, 19, 27)
    """
    three = [sorted(line[max(at - MAX_INFLIGHT_REDUCE, 0) : at + 1], reverse=True) for at in range(len(line))]
    return sum(max(each[k] for each in three if len(each) > k) for k in range(min(MAX_INFLIGHT_REDUCE + 1, len(line))))


class RankBuckets(NamedTuple):
    """The parameter groups of all virtual stages of a rank. `lengths` is the number of groups of each length in
    elements.

    `other` has fields of `StageBuckets` in this order: the sums of `number` and `lone` over the stages, `first` of the
    first distinct stage, and `last` of the last distinct stage. Then the maxima of `opening`, `closing`, `filling`,
    `largest` and `staged` over the stages follow.
    """

    lengths: dict[int, int]
    other: tuple[int, ...]


class ModelBuckets:
    """Computes the parameter groups of the virtual stages of one model. Results are cached, because many schedules have
    equal stages."""

    def __init__(self, entries: Sequence[LayerRun]) -> None:
        self.entries = entries
        self._sized: dict[TpEpShape, tuple[LayerNumel, ...]] = {}
        self._units: dict[tuple[TpEpShape, int | None, tuple[int, ...]], StageBuckets] = {}
        self._ranks: dict[tuple[TpEpShape, int | None, StageCounts], RankBuckets] = {}
        self.shard_numel: dict[tuple[object, ...], list[Array]] = {}
        """The results of `memory._buffer_numel`, which do not depend on devices."""

    def units(self, content: tuple[int, ...], cut: TpEpShape, bucket: int | None) -> StageBuckets:
        """Returns the parameter groups of a stage. `content` is the number of layers of each layer run on the stage.
        `bucket` is as in `stage_buckets`."""
        key = (cut, bucket, content)
        if key not in self._units:
            if cut not in self._sized:
                self._sized[cut] = tuple(layer_numel(entry, cut) for entry in self.entries)
            self._units[key] = stage_buckets(list(zip(self._sized[cut], content, strict=True)), bucket)
        return self._units[key]

    def rank(self, stages: StageCounts, cut: TpEpShape, bucket: int | None) -> RankBuckets:
        """Returns the parameter groups of a rank with the virtual stages `stages`."""
        key = (cut, bucket, stages)
        if key not in self._ranks:
            found = [(self.units(content, cut, bucket), count) for content, count in stages]
            lengths: dict[int, int] = {}
            for stage, count in found:
                for run in stage.runs:
                    lengths[run.end] = lengths.get(run.end, 0) + run.times * count
            number, lone = (sum(getattr(stage, name) * count for stage, count in found) for name in ("number", "lone"))
            most = (
                max(getattr(stage, name) for stage, _ in found) for name in ("opening", "closing", "filling", "largest")
            )
            staged = (max(stage.staged[passes] for stage, _ in found) for passes in range(3))
            self._ranks[key] = RankBuckets(
                lengths, (number, lone, found[0][0].first, found[-1][0].last, *most, *staged)
            )
        return self._ranks[key]
