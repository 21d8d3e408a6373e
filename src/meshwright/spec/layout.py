"""How parameters lie in flat buffers: the one rule that the runtime builds by and the planner counts by, so that both agree to the byte.

[Note: flat layout] The layers of each virtual stage, in forward order, are grouped into units; no unit spans two stages. The first stage
holds 'embedding' (the vocabulary weight alone) and 'front', the last one 'back' and 'head'; where the head is tied and on another stage than
the embedding, the last stage holds, after all else, one more 'embedding' layer with its own copy of the weight; the head's bias stays in 'head'. ZeRO-3 gathers and frees layer by layer: one
unit a layer. Below it a unit is a bucket: layers in backward order until `bucket` bytes of gradients are reached. A layer with a tied
weight is a unit alone, so that both of its holders shard it equally. Inside a unit stand first the tensors that tensor parallelism
splits, then the whole ones (their gradients need one more sum under sequence parallelism: one contiguous run). Every tensor begins at a
multiple of ALIGN elements, and the unit ends at a multiple of shards x ALIGN, so that shards are equal and aligned; by `shard_weights` they are unequal and aligned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

ALIGN = 32


class Slot(NamedTuple):
    """One tensor of a layer as the layout sees it."""

    name: str
    numel: int
    split: bool


class LayerSlots(NamedTuple):
    """A layer's tensors on this tensor rank; `alone` for a tied weight."""

    name: str
    slots: tuple[Slot, ...]
    alone: bool = False


class Unit(NamedTuple):
    """A flat buffer: the offset of each tensor, the end of the split ones, the padded length."""

    layers: tuple[str, ...]
    offsets: dict[str, int]
    split_end: int
    numel: int


def align(count: int, to: int = ALIGN) -> int:
    return -(-count // to) * to


def unit_of(layers: Sequence[LayerSlots], shards: int) -> Unit:
    """One flat buffer for `layers`."""
    offsets: dict[str, int] = {}
    end = 0
    for split in (True, False):
        for layer in layers:
            for slot in layer.slots:
                if slot.split == split:
                    offsets[slot.name] = end
                    end = align(end + slot.numel)
        if split:
            split_end = end
    return Unit(tuple(layer.name for layer in layers), offsets, split_end, align(end, shards * ALIGN))


def shard_bounds(numel: int, shards: int, weights: Sequence[int] = ()) -> list[int]:
    """Where the shards of a unit of `numel` elements begin, and the last one ends: each at least ALIGN, the rest by `weights`, equally without.

    >>> shard_bounds(384, 4), shard_bounds(384, 4, (1, 1, 2, 4)), shard_bounds(384, 4, (2, 2, 2, 2))
    ([0, 96, 192, 288, 384], [0, 64, 128, 224, 384], [0, 96, 192, 288, 384])
    """
    rest, total = numel // ALIGN - shards, sum(weights) or shards
    before = [sum(weights[:shard]) if weights else shard for shard in range(shards + 1)]
    return [ALIGN * (shard + rest * weight // total) for shard, weight in enumerate(before)]


def units(layers: Sequence[LayerSlots], zero: int, shards: int, bucket: int, size: int) -> list[Unit]:
    """The flat buffers of one virtual stage, in forward order. `size` is the bytes of one gradient element."""
    if zero == 3:
        return [unit_of([layer], shards) for layer in layers if layer.slots]
    groups: list[list[LayerSlots]] = []
    room = 0
    for layer in reversed(layers):
        if not layer.slots:
            continue
        if layer.alone:
            groups.append([layer])
            room = 0
            continue
        if room <= 0:
            groups.append([])
            room = bucket
        groups[-1].insert(0, layer)
        room -= sum(slot.numel for slot in layer.slots) * size
    return [unit_of(group, shards) for group in reversed(groups)]
