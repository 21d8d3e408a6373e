"""Prices of a box of plans: bytes on each kind of pipeline rank and seconds of a step, for all plans of the box at once.

step = m x (slowest rank's micro-batch) + bubble + messages + reductions not hidden + update
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.cost.box import Array, Box, Order, lift
from meshwright.cost.collectives import group, send
from meshwright.cost.compute import Work, work
from meshwright.cost.flight import Moments, in_rounds, moments, turns
from meshwright.cost.memory import Footprint, States, activations, footprint, message
from meshwright.cost.pipeline import idle, messages, stall
from meshwright.cost.practice import OURS, Practice
from meshwright.cost.reduction import traffic, update
from meshwright.cost.setting import Setting, setting
from meshwright.cost.stages import Content, Kind, kinds
from meshwright.cost.units import Sized, Units, sized, units
from meshwright.spec.job import Job
from meshwright.spec.layout import ALIGN
from meshwright.spec.plan import Recompute, Schedule


class Seconds(NamedTuple):
    """Parts of a step over AXES; the first four for each kind of rank and one micro-batch."""

    compute: Array
    recompute: Array
    tensor: Array
    data: Array
    bubble: Array
    messages: Array
    once: Array
    update: Array
    each: Array
    step: Array


class Prices(NamedTuple):
    """Memory and time of a box of plans, kinds of pipeline ranks first."""

    footprint: Footprint
    seconds: Seconds

    @property
    def step(self) -> Array:
        """Seconds over `obscz`."""
        return self.seconds.step[0]

    @property
    def allocated(self) -> Array:
        """Bytes on the fullest rank over `obscz`."""
        return self.footprint.total.max(axis=0)


_LARGEST = tuple(map(Units._fields.index, ("opening", "closing", "filling", "largest")))

Ranks = list[list[Kind]]
"""For each order the pipeline ranks that are priced, equally many."""


class Pricer:
    """Prices boxes of plans of one job. Remembers what boxes share: kinds of ranks of an order, units of a stage."""

    def __init__(self, job: Job, practice: Practice = OURS) -> None:
        self.setting: Setting = setting(job, practice)
        self._kinds: dict[tuple[Order, int], tuple[Kind, ...]] = {}
        self._sized: dict[int, tuple[Sized, ...]] = {}
        self._turns: dict[tuple[Order, int, int], Moments] = {}
        self._units: dict[tuple[int, int | None, Content], Units] = {}

    def price(self, box: Box) -> Prices:
        """Everything about every plan of `box`; whether its plans are legal is the caller's question."""
        each = tuple(self.kinds(order, box.pp) for order in box.orders)
        width = max(map(len, each))
        ranks = [[*found, *[found[0]._replace(number=0)] * (width - len(found))] for found in each]
        states = self._states(box, ranks)
        return Prices(self._footprint(box, ranks, states), self._seconds(box, ranks, states))

    def memory(self, box: Box, ranks: Ranks) -> Footprint:
        """Bytes on each of `ranks`."""
        return self._footprint(box, ranks, self._states(box, ranks))

    def _tokens(self, box: Box) -> Array:
        return np.array([size for size, _ in box.micro_batches]) * self.setting.job.workload.sequence

    # --- shared between boxes ---------------------------------------------------------------------------------------------------

    def kinds(self, order: Order, pp: int) -> tuple[Kind, ...]:
        key = (order, pp)
        if key not in self._kinds:
            self._kinds[key] = kinds(self.setting.entries, order, pp)
        return self._kinds[key]

    def units(self, content: Content, tp: int, bucket: int | None) -> Units:
        key = (tp, bucket, content)
        if key not in self._units:
            if tp not in self._sized:
                self._sized[tp] = tuple(sized(entry, tp) for entry in self.setting.entries)
            self._units[key] = units(list(zip(self._sized[tp], content, strict=True)), bucket)
        return self._units[key]

    # --- memory -----------------------------------------------------------------------------------------------------------------

    def _states(self, box: Box, ranks: Ranks) -> States:
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
        shape = (len(ranks[0]), len(ranks))
        other = np.zeros((8, *shape))
        lengths: dict[int, int] = {}
        uses: list[tuple[int, int, int]] = []
        for o, kinds_of_order in enumerate(ranks):
            for r, kind in enumerate(kinds_of_order):
                held = [(self.units(content, box.tp, bucket), count) for content, count in kind.stages]
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
        line = ALIGN * np.array([each.dp_shard for each in box.shards])
        numel = table @ (-(-np.array(list(lengths))[:, None] // line) * line)
        return States(lift(numel.reshape(*shape, -1), "roz"), *(lift(values, "ro") for values in other))

    def _footprint(self, box: Box, ranks: Ranks, states: States) -> Footprint:
        tokens = self._tokens(box)
        return footprint(self.setting, box, states, activations(self.setting, box, tokens, *self._moments(box, ranks)), tokens)

    def _moments(self, box: Box, ranks: Ranks) -> tuple[Array, Array]:
        """When each kind of rank can be fullest: running entries (r, o, b, moments), layers that keep (r, o, b, moments, entries)."""
        micro_batches = np.array([count for _, count in box.micro_batches])
        found = {
            (r, o): self._moments_of(order, box.pp, ranks[o][r], micro_batches)
            for o, order in enumerate(box.orders)
            for r in range(len(ranks[0]))
        }
        length = max(running.shape[1] for running, _ in found.values())
        shape = (len(ranks[0]), len(box.orders), len(micro_batches), length)
        running = np.zeros(shape, dtype=np.int64)
        layers = np.zeros((*shape, len(self.setting.entries)))
        fill = np.arange(length)
        for at, (entries, kept) in found.items():
            pick = fill % entries.shape[1]
            running[at], layers[at] = entries[:, pick], kept[:, pick]
        return running, layers

    def _moments_of(self, order: Order, pp: int, kind: Kind, micro_batches: Array) -> Moments:
        if order.schedule != Schedule.interleaved:
            return moments(order, pp, kind, micro_batches)
        key = (order, pp, kind.rank)
        if key not in self._turns:
            self._turns[key] = turns(order, pp, kind)
        return in_rounds(self._turns[key], pp, micro_batches)

    # --- time -------------------------------------------------------------------------------------------------------------------

    def _seconds(self, box: Box, ranks: Ranks, states: States) -> Seconds:
        tokens = self._tokens(box)
        sequence_parallel = np.array(box.sequence_parallel)
        one = work(self.setting, box.tp, tokens, sequence_parallel)
        layers = np.array([[kind.layers.sum(axis=0) for kind in found] for found in ranks]).swapaxes(0, 1)
        blocks = layers * np.array([entry.is_block for entry in self.setting.entries])
        forward, backward, tensor_forward, tensor_backward = (lift(np.einsum("roe,ebs->robs", layers, part), "robs") for part in one)
        again, tensor_again = (lift(np.einsum("roe,ebs->robs", blocks, part), "robs") for part in (one.forward, one.tensor_forward))
        recompute = lift([choice == Recompute.layer for choice in box.recompute], "c")
        tensor = tensor_forward + tensor_backward + recompute * tensor_again
        before, behind = forward + tensor_forward, backward + tensor_backward + recompute * (again + tensor_again)
        data = traffic(self.setting, box, states, before, behind)
        updating = update(self.setting, box, states)

        each = (forward + backward + recompute * again + tensor) + data.each
        counts = lift(np.array([[kind.number for kind in found] for found in ranks]).T, "ro")
        longest, bubble = idle(each, counts, lift([order.virtual_stages for order in box.orders], "o"))
        micro_batches = np.array([count for _, count in box.micro_batches])
        count = lift(micro_batches, "b")
        slack = longest - (each * counts).sum(axis=0, keepdims=True) / box.pp
        waiting = lift([stall(order, box.pp) for order in box.orders], "o") * self._block_backward(one, recompute)
        bubble = bubble + count * np.maximum(waiting - slack, 0.0)
        passed = send(self.setting.fabric, message(self.setting, box, tokens)) if box.pp > 1 else 0.0
        hops = np.array([messages(order, box.pp, micro_batches) for order in box.orders])
        passing = lift(hops, "ob") * passed + self._tie(box)
        once = data.once.max(axis=0, keepdims=True)
        last = updating.max(axis=0, keepdims=True)
        step = count * longest + bubble + passing + once + last
        return Seconds(forward + backward, recompute * again, tensor, data.each, bubble, passing, once, last, each, step)

    def _block_backward(self, one: Work, recompute: Array) -> Array:
        """Seconds of the backward of the longest block."""
        blocks = [at for at, entry in enumerate(self.setting.entries) if entry.is_block] or [0]
        backward, again = (
            lift(part[blocks].max(axis=0), "bs") for part in (one.backward + one.tensor_backward, one.forward + one.tensor_forward)
        )
        return backward + recompute * again

    def _tie(self, box: Box) -> Array:
        """Seconds in which the first and the last stage sum the gradients of a vocabulary that both hold (z)."""
        copies = [entry for entry in self.setting.entries if entry.copy]
        if box.pp == 1 or not copies:
            return lift(np.zeros(len(box.shards)), "z")
        ends = group(self.setting.fabric, 2, self.setting.job.cluster.devices // 2)
        size = sum(entry.aligned(box.tp) for entry in copies) * self.setting.recipe.size
        return lift(ends.reduce(size / np.array([each.dp_shard for each in box.shards])), "z")
