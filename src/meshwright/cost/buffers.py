"""The flat buffers of pipeline ranks, whole boxes at a time: how many units of which length they have, and how long these are when shared out."""

from __future__ import annotations

from typing import Any

import numpy as np

from meshwright.cost.box import Array, Box, Cut, lift
from meshwright.cost.memory import States
from meshwright.cost.setting import Setting
from meshwright.cost.stages import Content, Kind
from meshwright.cost.units import Sized, Units, sized, units
from meshwright.spec.layout import ALIGN

_LARGEST = tuple(map(Units._fields.index, ("opening", "closing", "filling", "largest")))

Ranks = list[list[Kind]]
"""For each order the pipeline ranks that are priced, equally many."""


class FlatBuffers:
    """Those of one job. Remembers what boxes share."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._sized: dict[Cut, tuple[Sized, ...]] = {}
        self._units: dict[tuple[Cut, int | None, Content], Units] = {}
        self._flat: dict[tuple[Any, ...], tuple[Array, Array, Array]] = {}

    def states(self, box: Box, ranks: Ranks) -> States:
        """The flat buffers of each kind of rank: by buckets, at ZeRO 3 by layers."""
        size = self.setting.recipe.size
        stages = {each.zero for each in box.shards}
        below = self._buffers(box, ranks, max(-(-box.bucket // size), 1)) if stages - {3} else None
        three = self._buffers(box, ranks, None) if 3 in stages else None
        if below is None or three is None:
            return below or three  # type: ignore[return-value]
        zero = lift([each.zero for each in box.shards], "z")
        return States(*(np.where(zero == 3, late, early) for early, late in zip(below, three, strict=True)))

    def _buffers(self, box: Box, ranks: Ranks, bucket: int | None) -> States:
        key = (box.cut, bucket, *(kind.stages for found in ranks for kind in found))
        if key not in self._flat:
            self._flat[key] = self._flat_of(box.cut, ranks, bucket)
        table, lengths, other = self._flat[key]
        numel = table @ padded(lengths[:, None], box.holders)
        dense = (lift(values, "ro") for values in other)
        return States(lift(numel.reshape(*other.shape[1:], -1), "roz"), *dense, *self._experts(box, ranks))  # type: ignore[call-arg]

    def _flat_of(self, cut: Cut, ranks: Ranks, bucket: int | None) -> tuple[Array, Array, Array]:
        """How many units of which length each kind of rank has, the lengths, and the other fields of its `States`."""
        shape = (len(ranks[0]), len(ranks))
        other = np.zeros((8, *shape))
        lengths: dict[int, int] = {}
        uses: list[tuple[int, int, int]] = []
        for o, kinds_of_order in enumerate(ranks):
            for r, kind in enumerate(kinds_of_order):
                held = [(self.units(content, cut, bucket), count) for content, count in kind.stages]
                uses += [
                    (r * shape[1] + o, lengths.setdefault(run.end, len(lengths)), run.times * count)
                    for stage, count in held
                    for run in stage.runs
                ]
                other[:, r, o] = (
                    sum(stage.number * count for stage, count in held),
                    sum(stage.lone * count for stage, count in held),
                    held[0][0].first,
                    held[-1][0].last,
                    *(max(stage[field] for stage, _ in held) for field in _LARGEST),
                )
        rows, columns, counts = np.array(uses, dtype=np.int64).reshape(-1, 3).T
        table = np.zeros((shape[0] * shape[1], len(lengths)))
        np.add.at(table, (rows, columns), counts)
        return table, np.array(list(lengths)), other

    def _experts(self, box: Box, ranks: Ranks) -> tuple[Array, Array, Array]:
        """Elements of the experts of each kind of rank, how many layers have any, the largest of them; where they are units of their own."""
        if box.layout.ep == 1:
            none = lift(0.0, "")
            return none, none, none
        each = np.array([entry.experts(box.cut) for entry in self.setting.entries])
        layers = np.array([[kind.layers.sum(axis=0) for kind in found] for found in ranks]).swapaxes(0, 1)
        numel = layers @ padded(each[:, None], box.expert_holders)
        largest = ((layers > 0) * each).max(axis=-1)
        return lift(numel, "roz"), lift(layers @ (each > 0), "ro"), lift(largest, "ro")

    def units(self, content: Content, cut: Cut, bucket: int | None) -> Units:
        key = (cut, bucket, content)
        if key not in self._units:
            if cut not in self._sized:
                self._sized[cut] = tuple(sized(entry, cut) for entry in self.setting.entries)
            self._units[key] = units(list(zip(self._sized[cut], content, strict=True)), bucket)
        return self._units[key]


def padded(elements: Array, holders: Array) -> Array:
    """As long as so many equal, aligned shards are."""
    line = ALIGN * holders
    return -(-elements // line) * line
