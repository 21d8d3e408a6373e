"""The flat buffers of pipeline ranks, whole boxes at a time: how many units of which length they have, and how long these are when shared out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.cost.box import Array, Box, lift
from meshwright.cost.held import Held, stack
from meshwright.cost.memory import States
from meshwright.cost.setting import Setting
from meshwright.spec.layout import ALIGN, shard_of, stays


def states(setting: Setting, box: Box, ranks: Sequence[Held], layers: Array) -> States:
    """The flat buffers of each kind of rank: by buckets, at ZeRO 3 by layers. `layers` (r, o, entry)."""
    three = [shards.zero == 3 for shards in box.shards]
    apart = _experts(setting, box, layers)
    below = None if all(three) else _buffers(box, ranks, max(-(-box.bucket // setting.recipe.size), 1))
    late = _buffers(box, ranks, None) if any(three) else None
    found = below or late or []
    if below is not None and late is not None:
        found = [np.where(lift(three, "z"), last, first) for first, last in zip(below, late, strict=True)]
    (numel, *runs), (experts, *expert_runs), other = found[:4], apart[:4], found[4:]
    return States(numel, *other, experts, *apart[4:], *(run + more for run, more in zip(runs, expert_runs, strict=True)))  # type: ignore[call-arg]


def _buffers(box: Box, ranks: Sequence[Held], bucket: int | None) -> list[Array]:
    """Elements over (r, o, z), those of a rank's runs, and of these what waits (`_runs`), then the other fields over (r, o)."""
    found = [held.flat(box.cut, bucket) for held in ranks]
    width = max(len(each.lengths) for each in found)
    lengths, times = np.zeros((len(found), width), dtype=np.int64), []
    for o, each in enumerate(found):
        lengths[o, : len(each.lengths)] = each.lengths
        times.append(np.pad(each.times, ((0, 0), (0, width - len(each.lengths)))) if len(each.lengths) < width else each.times)
    whole, number = padded(lengths[:, :, None], box.holders), stack(times, kinds=0, orders=0)
    even = whole // box.holders
    own = shard_of(whole, box.holders, box.heft) if box.heft else even if box.weight == 1.0 else box.weight * even
    sums = [
        (number @ each.reshape(*lengths.shape, -1)).reshape(*number.shape[:2], len(box.holders), -1).swapaxes(0, 1)
        for each in (whole, *_runs(box, own))
    ]
    other = stack([each.other for each in found], kinds=1, orders=2)
    return [*(lift(each, "rozf") for each in sums), *(lift(values, "ro") for values in other)]


def _runs(box: Box, own: Array) -> tuple[Array, Array, Array]:
    """Elements of runs, and of each what waits where its states do, and where its weights do: over one axis more, the shares that are priced at once."""
    shares = (np.rint(100 * np.asarray(share)).astype(np.int64).reshape(-1) for share in (box.offload_share, box.weights_share))
    states_away, weights_away = (own[..., None] if (share == 100).all() else _away(own[..., None], share) for share in shares)
    return own[..., None], states_away, weights_away


def _away(own: Array, share: Array) -> Array:
    """Of shards by memory, which are of no whole length yet, nearly."""
    return own - stays(own, share) if own.dtype == np.int64 else own * share / 100


def _experts(setting: Setting, box: Box, layers: Array) -> list[Array]:
    """Elements of the experts of each kind of rank, of its runs and of what waits of these, how many layers have any, the largest of them; where they are
    units of their own."""
    if box.layout.ep == 1:
        return [lift(0.0, "")] * 6
    each = np.array([entry.experts(box.cut) for entry in setting.entries])
    whole = padded(each[:, None], box.expert_holders)
    sums = [
        (layers @ part.reshape(len(each), -1)).reshape(*layers.shape[:2], len(box.holders), -1)
        for part in (whole, *_runs(box, whole // box.expert_holders))
    ]
    largest = ((layers > 0) * each).max(axis=-1)
    return [*(lift(part, "rozf") for part in sums), lift(layers @ (each > 0), "ro"), lift(largest, "ro")]


def padded(elements: Array, holders: Array) -> Array:
    """As long as so many equal, aligned shards are."""
    line = ALIGN * holders
    return -(-elements // line) * line
