"""Defines the layout of parameters in flat buffers. The runtime allocates the buffers and the planner counts their
bytes with these functions, so that both agree to the byte.

[Note: flat layout] The layers of each virtual stage, in forward order, are divided into parameter groups. Each group
has one flat buffer, as in FSDP. No group spans two stages. The first stage also has the layers 'embedding' (the
vocabulary weight) and 'front' (all other parameters before the blocks). The last stage also has 'back' (all other
parameters after the blocks) and 'head'. If the head is tied to an embedding on another stage, the last stage ends with
a second 'embedding' layer, a replica of the weight. The head's bias stays in 'head'.

At ZeRO 3 each layer is a group, because ZeRO 3 gathers and frees layer by layer. At ZeRO 0 to 2 a group is a bucket:
layers in backward order until their gradients have `bucket` bytes. A layer with a tied weight forms a separate group,
so that both stages with this weight shard it equally.

Inside a group the tensors that tensor parallelism shards come first, then the replicated tensors. Under sequence
parallelism the gradients of the replicated tensors need an additional sum over the tensor ranks. With this order, the
sum covers one contiguous range. Every tensor begins at a multiple of `ALIGN_NUMEL` elements. The group ends at a
multiple of shards x `ALIGN_NUMEL`, so that shards are aligned and equal (unequal with `shard_weights`).

[Note: pieces] A piece is the part of a logical tensor that one rank has. Checkpoints are written and read in pieces, so
that they do not depend on the layout. A tensor rank has the intervals `intervals` of the full tensor along dimension
`split`; a fused projection has several intervals. Their concatenation is the local tensor. A shard of a flat buffer has
the range [start, stop) of the flattened local tensor. If `split` is None, the local tensor is the full one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

ALIGN_NUMEL = 32

LAYERS_BEFORE_BLOCKS = ("embedding", "front")
"""The layers whose parameters a forward uses before the first block."""

MAX_INFLIGHT_REDUCE = 2
"""Maximum number of gradient reductions in flight at ZeRO 2 and 3. Each reduction covers one parameter group, while
backward computes the gradients of the next group."""

CHUNK_ELEMENTS = 1 << 19
"""Elements that an optimizer updates at a time if the update needs temporary memory or states are offloaded. This is 2
MiB of each float32 state."""

SOFTMAX_PARTS = 8
"""Number of parts in which the softmax of low-precision logits is computed. One part at a time is in float32."""

MAX_TENSOR_CHUNKS = 4
"""Maximum number of chunks in which tensor ranks exchange a hidden state while they multiply."""

MIN_TENSOR_CHUNK_BYTES = {"gloo": 1 << 18, "nccl": 1 << 24}
"""Minimum bytes of a chunk of a hidden state, by collective library. NCCL needs messages of 16 MiB for half of its
bandwidth on one node. On gloo, smaller chunks would take as long as their latency."""

NF4_BLOCK_NUMEL, NF4_BLOCK_BYTES = 64, 34
"""Weights of a block of a frozen weight in 4 bits, and the bytes of the block: its codes and its scale
(analysis/nf4.py)."""

NF4_BITS = 8 * NF4_BLOCK_BYTES / NF4_BLOCK_NUMEL
"""Bits of a frozen weight that is stored in 4 bits, with its part of the scale."""

SWAP_BUFFERS = 4
"""Chunks of offloaded states in memory: one is being updated, one is being stored, and two are being fetched."""


class ParamSlot(NamedTuple):
    """One tensor of a layer on one tensor rank, with `numel` local elements. `split`: whether tensor parallelism shards
    it."""

    name: str
    numel: int
    split: bool


class LayerParams(NamedTuple):
    """The tensors of a layer on one tensor rank. `own_bucket`: whether they form a separate parameter group, as a tied
    weight does."""

    name: str
    slots: tuple[ParamSlot, ...]
    own_bucket: bool = False


class BucketLayout(NamedTuple):
    """The layout of a flat buffer, in elements: `offsets` of the tensors, the end of the tensors that tensor
    parallelism shards, and the padded length `numel`."""

    layers: tuple[str, ...]
    offsets: dict[str, int]
    split_end: int
    numel: int


def align_numel(count: int, to: int = ALIGN_NUMEL) -> int:
    """Returns `count` rounded up to a multiple of `to`."""
    return -(-count // to) * to


def bucket_layout(layers: Sequence[LayerParams], shards: int) -> BucketLayout:
    """Returns the layout of one flat buffer that contains `layers`."""
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
    """Returns the gaps between and after the tensors of a buffer. `numels` gives the elements of each tensor.

    >>> bucket_gaps(BucketLayout(("block.0",), {"a": 0, "b": 32}, 0, 64), {"a": 32, "b": 30})
    [slice(62, 64, None)]
    """
    found, end = [], 0
    for start, stop in sorted((offset, offset + numels[name]) for name, offset in unit.offsets.items()):
        found += [slice(end, start)] if end < start else []
        end = stop
    return found + ([slice(end, unit.numel)] if end < unit.numel else [])


def shard_bounds(numel: int, shards: int, weights: Sequence[int] = ()) -> list[int]:
    """Returns the `shards` + 1 bounds of the shards of a parameter group of `numel` elements. Each shard has at least
    `ALIGN_NUMEL` elements. The remaining elements are distributed in proportion to `weights`, or equally if `weights`
    is empty.

    >>> shard_bounds(384, 4), shard_bounds(384, 4, (1, 1, 2, 4)), shard_bounds(384, 4, (2, 2, 2, 2))
    ([0, 96, 192, 288, 384], [0, 64, 128, 224, 384], [0, 96, 192, 288, 384])
    """
    sums = [0, *accumulate(tuple(weights) or (1,) * shards)]
    return [
        0,
        *accumulate(shard_numel(numel, shards, ShardWeight(before, past, sums[-1])) for before, past in pairwise(sums)),
    ]


class ShardWeight(NamedTuple):
    """The weight of one shard as cumulative sums: of the weights before it, of the weights up to and including it, and
    of all weights."""

    before: int
    past: int
    total: int


def shard_numel(numel: Any, shards: Any, heft: ShardWeight) -> Any:
    """Returns the number of elements of the shard with weight `heft`, in a parameter group of `numel` elements that is
    divided into `shards` shards. `numel` and `shards` may be arrays.

    >>> shard_numel(384, 4, ShardWeight(4, 8, 8))
    160
    """
    rest = numel // ALIGN_NUMEL - shards
    return ALIGN_NUMEL * (1 + rest * heft.past // heft.total - rest * heft.before // heft.total)


# --- offloaded parts


def resident_numel(numel: Any, share: Any) -> Any:
    """Returns how many of the `numel` elements of a rank's shard stay on the device if `share` percent are offloaded.
    These are the first elements of the shard. Their number is a multiple of `ALIGN_NUMEL`, rounded down, so that at
    least `share` percent are offloaded.

    `numel` and `share` may be arrays.

    >>> [resident_numel(320, share) for share in (0, 1, 50, 99, 100)]
    [320, 288, 160, 0, 0]
    """
    return numel // ALIGN_NUMEL * (100 - share) // 100 * ALIGN_NUMEL


class OffloadSplit(NamedTuple):
    """Elements `start` to `stop` of a shard, and whether their weights and their optimizer states are offloaded."""

    start: int
    stop: int
    weights_wait: bool
    states_wait: bool


def offload_splits(numel: int, weights: int, states: int) -> list[OffloadSplit]:
    """Splits a shard. `weights` is the percentage of its weights that are offloaded, `states` that of its optimizer
    states. Both percentages count from the end of the shard, so that the two offloaded ranges overlap as much as
    possible.

    >>> [[part.stop for part in offload_splits(320, *percent)] for percent in ((0, 0), (40, 70), (100, 100))]
    [[320], [96, 192, 320], [320]]
    """
    cuts = sorted({0, resident_numel(numel, weights), resident_numel(numel, states), numel})
    return [
        OffloadSplit(start, stop, start >= resident_numel(numel, weights), start >= resident_numel(numel, states))
        for start, stop in pairwise(cuts)
    ]


def bucket_layouts(layers: Sequence[LayerParams], zero: int, shards: int, bucket: int, size: int) -> list[BucketLayout]:
    """Returns the flat buffers of one virtual stage, in forward order. `zero` is the ZeRO stage, `bucket` the minimum
    bytes of a bucket, and `size` the bytes of one gradient element. Layers without elements have no buffer."""
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
    """The metadata of one piece ([Note: pieces]). `name` is the kind of state followed by the model's parameter name:
    'model/lm_head.weight', 'optimizer/exp_avg/lm_head.weight'."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: int | None
    intervals: tuple[tuple[int, int], ...]
    start: int
    stop: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Returns the shape of the local tensor on the tensor rank.

        >>> ShardMetadata("w", (8, 4), "float32", 0, ((0, 2), (4, 6)), 0, 16).local_shape
        (4, 4)
        """
        if self.split is None:
            return self.shape
        size = sum(stop - start for start, stop in self.intervals)
        return (*self.shape[: self.split], size, *self.shape[self.split + 1 :])
