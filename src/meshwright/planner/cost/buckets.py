"""Computes the exact number of elements of the flat buffers of a stage ([Note: flat layout]). Consecutive equal layers
are handled together. Each parameter group has one flat buffer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.planner.cost.constants import MAX_INFLIGHT_REDUCE
from meshwright.planner.cost.cost_context import LayerRun
from meshwright.planner.cost.plan_grid import TpEpShape

StageCounts = tuple[tuple[tuple[int, ...], int], ...]
"""The distinct virtual stages of a rank. Each item: the number of layers of each layer run on the stage, and the number
of stages with this content."""


class BucketRun(NamedTuple):
    """`times` consecutive equal parameter groups of `end` elements each, before padding to the shards.
    `gathered_ahead`: whether each group's all-gather is prefetched during the previous group."""

    end: int
    times: int
    gathered_ahead: bool = False


class StageBuckets(NamedTuple):
    """The parameter groups of one virtual stage in forward order. All lengths are in elements before padding.

    `first` and `last` are the first and the last group. `opening` is the two groups whose reductions are still in
    flight when a backward ends. `closing` is the two groups whose reductions a backward starts first. `filling` is the
    largest group between `first` and `last`, `largest` the largest of all groups. `lone` is the groups without
    prefetch. `staged` is the length of the staging buffers for one backward, two backwards, and three or more.
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
    """Returns the number of elements of one layer, and its properties for the flat layout."""
    return LayerNumel(entry.aligned(cut), entry.raw(cut), entry.own_bucket, entry.is_block)


def bucket_runs(layers: Sequence[tuple[LayerNumel, int]], bucket: int) -> list[BucketRun]:
    """Returns the parameter groups below ZeRO 3, in forward order. Starting from the last layer, each group takes whole
    layers until it has `bucket` elements.

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
    gradients. `line`: the lengths of the gradients in the order in which backward computes them ([Note: in turn] in
    runtime/comm/shm/progress.py).

    >>> staging_numel([9, 1]), staging_numel([9, 1, 9, 1]), staging_numel([9, 9, 9, 9])
    (10, 19, 27)
    """
    three = [sorted(line[max(at - MAX_INFLIGHT_REDUCE, 0) : at + 1], reverse=True) for at in range(len(line))]
    return sum(max(each[k] for each in three if len(each) > k) for k in range(min(MAX_INFLIGHT_REDUCE + 1, len(line))))


class RankBuckets(NamedTuple):
    """The parameter groups of all virtual stages of a rank. `lengths` is the number of groups of each length. `other`
    has fields of `StageBuckets`: first the sums of `number`, `lone`, `first` and `last` over the stages, then the
    maxima of `opening`, `closing`, `filling`, `largest` and `staged`."""

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

    def units(self, content: tuple[int, ...], cut: TpEpShape, bucket: int | None) -> StageBuckets:
        """Returns the parameter groups of a stage. `content`: the number of layers of each layer run on the stage."""
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
