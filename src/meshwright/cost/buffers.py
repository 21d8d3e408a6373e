"""The flat buffers of pipeline ranks, whole boxes at a time: how many units of which length they have, and how long these are when shared out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.cost.box import Array, Box, lift
from meshwright.cost.held import Held, stack
from meshwright.cost.memory import States
from meshwright.cost.setting import Setting
from meshwright.spec.layout import ALIGN


def states(setting: Setting, box: Box, ranks: Sequence[Held], layers: Array) -> States:
    """The flat buffers of each kind of rank: by buckets, at ZeRO 3 by layers. `layers` (r, o, entry)."""
    three = [shards.zero == 3 for shards in box.shards]
    apart = _experts(setting, box, layers)
    below = None if all(three) else _buffers(box, ranks, max(-(-box.bucket // setting.recipe.size), 1))
    late = _buffers(box, ranks, None) if any(three) else None
    if below is None or late is None:
        return States(*(below or late or ()), *apart)  # type: ignore[call-arg]
    return States(*(np.where(lift(three, "z"), last, first) for first, last in zip(below, late, strict=True)), *apart)  # type: ignore[call-arg]


def _buffers(box: Box, ranks: Sequence[Held], bucket: int | None) -> list[Array]:
    """Elements over (r, o, z), then the other fields over (r, o)."""
    found = [held.flat(box.cut, bucket) for held in ranks]
    width = max(len(each.lengths) for each in found)
    lengths, times = np.zeros((len(found), width), dtype=np.int64), []
    for o, each in enumerate(found):
        lengths[o, : len(each.lengths)] = each.lengths
        times.append(np.pad(each.times, ((0, 0), (0, width - len(each.lengths)))) if len(each.lengths) < width else each.times)
    numel = stack(times, kinds=0, orders=0) @ padded(lengths[:, :, None], box.holders)
    other = stack([each.other for each in found], kinds=1, orders=2)
    return [lift(numel.swapaxes(0, 1), "roz"), *(lift(values, "ro") for values in other)]


def _experts(setting: Setting, box: Box, layers: Array) -> tuple[Array, Array, Array]:
    """Elements of the experts of each kind of rank, how many layers have any, the largest of them; where they are units of their own."""
    if box.layout.ep == 1:
        none = lift(0.0, "")
        return none, none, none
    each = np.array([entry.experts(box.cut) for entry in setting.entries])
    numel = layers @ padded(each[:, None], box.expert_holders)
    largest = ((layers > 0) * each).max(axis=-1)
    return lift(numel, "roz"), lift(layers @ (each > 0), "ro"), lift(largest, "ro")


def padded(elements: Array, holders: Array) -> Array:
    """As long as so many equal, aligned shards are."""
    line = ALIGN * holders
    return -(-elements // line) * line
