"""How parameters lie in flat buffers: the one rule that the runtime builds by and the planner counts by, so that both
agree to the byte.

[Note: flat layout] The layers of each virtual stage, in forward order, are grouped into units; no unit spans two
stages. The first stage
holds 'embedding' (the vocabulary weight alone) and 'front', the last one 'back' and 'head'; where the head is tied and
on another stage than
the embedding, the last stage holds, after all else, one more 'embedding' layer with its own copy of the weight; the
head's bias stays in 'head'. ZeRO-3 gathers and frees layer by layer: one
unit a layer. Below it a unit is a bucket: layers in backward order until `bucket` bytes of gradients are reached. A
layer with a tied
weight is a unit alone, so that both of its holders shard it equally. Inside a unit stand first the tensors that tensor
parallelism
splits, then the whole ones (their gradients need one more sum under sequence parallelism: one contiguous run). Every
tensor begins at a
multiple of ALIGN elements, and the unit ends at a multiple of shards x ALIGN, so that shards are equal and aligned; by
`shard_weights` they are unequal and aligned.

A piece of a logical tensor: what one rank holds of it. Checkpoints are written and read in pieces, whatever the layout.

[Note: pieces] A tensor rank holds, along dimension `split`, the intervals `intervals` of the full tensor (several for a
fused projection),
laid one after the other: the local tensor. A shard of a flat buffer holds the run [start, stop) of that local tensor,
flattened.
`split` None: the local tensor is the full one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

ALIGN_NUMEL = 32

MAX_INFLIGHT_REDUCE = 2
"""Gradient reductions in flight at ZeRO 2 and 3, each of a full parameter group, while a third group fills."""

CHUNK_ELEMENTS = 1 << 19
"""Elements that an optimizer updates together if the update needs temporary memory or states are offloaded: 2 MiB of
each kind of float32 state."""

SWAP_BUFFERS = 4
"""Chunks of offloaded states in memory: one that is updated, one that is stored, two that are fetched."""


class ParamSlot(NamedTuple):
    """One tensor of a layer as the layout sees it."""

    name: str
    numel: int
    split: bool


class LayerParams(NamedTuple):
    """A layer's tensors on this tensor rank; `own_bucket` for a tied weight."""

    name: str
    slots: tuple[ParamSlot, ...]
    own_bucket: bool = False


class BucketLayout(NamedTuple):
    """A flat buffer: the offset of each tensor, the end of the split ones, the padded length."""

    layers: tuple[str, ...]
    offsets: dict[str, int]
    split_end: int
    numel: int


def align_numel(count: int, to: int = ALIGN_NUMEL) -> int:
    return -(-count // to) * to


def bucket_layout(layers: Sequence[LayerParams], shards: int) -> BucketLayout:
    """One flat buffer for `layers`."""
    offsets: dict[str, int] = {}
    end = 0
    for split in (True, False):
        for layer in layers:
            for slot in layer.slots:
                if slot.split == split:
                    offsets[slot.name] = end
                    end = align_numel(end + slot.numel)
        if split:
            split_end = end
    return BucketLayout(
        tuple(layer.name for layer in layers), offsets, split_end, align_numel(end, shards * ALIGN_NUMEL)
    )


def bucket_gaps(unit: BucketLayout, numels: Mapping[str, int]) -> list[slice]:
    """What lies between and behind the tensors of a buffer, of which each has so many elements.

    >>> bucket_gaps(BucketLayout(("block.0",), {"a": 0, "b": 32}, 0, 64), {"a": 32, "b": 30})
    [slice(62, 64, None)]
    """
    found, end = [], 0
    for start, stop in sorted((offset, offset + numels[name]) for name, offset in unit.offsets.items()):
        found += [slice(end, start)] if end < start else []
        end = stop
    return found + ([slice(end, unit.numel)] if end < unit.numel else [])


def shard_bounds(numel: int, shards: int, weights: Sequence[int] = ()) -> list[int]:
    """Where the shards of a unit of `numel` elements begin, and the last one ends: each at least ALIGN, the rest by
    `weights`, equally without.

    >>> shard_bounds(384, 4), shard_bounds(384, 4, (1, 1, 2, 4)), shard_bounds(384, 4, (2, 2, 2, 2))
    ([0, 96, 192, 288, 384], [0, 64, 128, 224, 384], [0, 96, 192, 288, 384])
    """
    sums = [0, *accumulate(tuple(weights) or (1,) * shards)]
    return [
        0,
        *accumulate(shard_numel(numel, shards, ShardWeight(before, past, sums[-1])) for before, past in pairwise(sums)),
    ]


class ShardWeight(NamedTuple):
    """Of the weights of all shards the sum before one of them, the sum with it, and all."""

    before: int
    past: int
    total: int


def shard_numel(numel: Any, shards: Any, heft: ShardWeight) -> Any:
    """Elements of one shard of a unit; arrays of units give arrays.

    >>> shard_numel(384, 4, ShardWeight(4, 8, 8))
    160
    """
    rest = numel // ALIGN_NUMEL - shards
    return ALIGN_NUMEL * (1 + rest * heft.past // heft.total - rest * heft.before // heft.total)


# --- what waits elsewhere
# -----------------------------------------------------------------------------------------------------


def resident_numel(numel: Any, share: Any) -> Any:
    """Of a rank's run of a unit, `numel` elements, the first so many stay where `share` hundredths wait: whole lines of
    ALIGN, at least the share waits.
    Arrays of runs, or of shares, give arrays.

    >>> [resident_numel(320, share) for share in (0, 1, 50, 99, 100)]
    [320, 288, 160, 0, 0]
    """
    return numel // ALIGN_NUMEL * (100 - share) // 100 * ALIGN_NUMEL


class OffloadSplit(NamedTuple):
    """Elements `start` to `stop` of a run whose weights wait elsewhere, or not, and whose states do."""

    start: int
    stop: int
    weights_wait: bool
    states_wait: bool


def offload_splits(numel: int, weights: int, states: int) -> list[OffloadSplit]:
    """A run of which so many hundredths of the weights, and of the states, wait: where both do, the weights that wait
    are those whose states do first.

    >>> [[part.stop for part in offload_splits(320, *percent)] for percent in ((0, 0), (40, 70), (100, 100))]
    [[320], [96, 192, 320], [320]]
    """
    cuts = sorted({0, resident_numel(numel, weights), resident_numel(numel, states), numel})
    return [
        OffloadSplit(start, stop, start >= resident_numel(numel, weights), start >= resident_numel(numel, states))
        for start, stop in pairwise(cuts)
    ]


def bucket_layouts(layers: Sequence[LayerParams], zero: int, shards: int, bucket: int, size: int) -> list[BucketLayout]:
    """The flat buffers of one virtual stage, in forward order. `size` is the bytes of one gradient element. Layers
    without an element have none."""
    layers = [layer for layer in layers if any(slot.numel for slot in layer.slots)]
    if zero == 3:
        return [bucket_layout([layer], shards) for layer in layers]
    groups: list[list[LayerParams]] = []
    room = 0
    for layer in reversed(layers):
        if layer.own_bucket:
            groups.append([layer])
            room = 0
            continue
        if room <= 0:
            groups.append([])
            room = bucket
        groups[-1].insert(0, layer)
        room -= sum(slot.numel for slot in layer.slots) * size
    return [bucket_layout(group, shards) for group in reversed(groups)]


class ShardMetadata(NamedTuple):
    """`name` is the model's own parameter name behind a kind: 'model/lm_head.weight',
    'optimizer/exp_avg/lm_head.weight'."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: int | None
    intervals: tuple[tuple[int, int], ...]
    start: int
    stop: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the tensor rank's part.

        >>> ShardMetadata("w", (8, 4), "float32", 0, ((0, 2), (4, 6)), 0, 16).local_shape
        (4, 4)
        """
        if self.split is None:
            return self.shape
        size = sum(stop - start for start, stop in self.intervals)
        return (*self.shape[: self.split], size, *self.shape[self.split + 1 :])
