"""Prices of a box of plans: bytes on each kind of pipeline rank and seconds of a step, for all plans of the box at once.

step = m x (slowest rank's micro-batch) + bubble + messages + reductions not hidden + update
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwright.cost import context, expert, offload
from meshwright.cost.box import Array, Box, Cut, Layout, Order, lift
from meshwright.cost.buffers import FlatBuffers, Ranks
from meshwright.cost.collectives import group, send
from meshwright.cost.compute import Work, work
from meshwright.cost.flight import Moments, in_rounds, moments, turns
from meshwright.cost.memory import Footprint, States, activations, columns_of, footprint, kept_by_entry, message
from meshwright.cost.pipeline import idle, messages, stall
from meshwright.cost.practice import OURS, Practice
from meshwright.cost.reduction import traffic, update
from meshwright.cost.setting import Setting, setting
from meshwright.cost.stages import Kind, apart, kinds, partly
from meshwright.spec.job import Job
from meshwright.spec.plan import AXES, Context, Recompute, Schedule


class Seconds(NamedTuple):
    """Parts of a step over AXES; the first PER_MICRO_BATCH for each kind of rank and one micro-batch."""

    compute: Array
    recompute: Array
    tensor: Array
    context: Array
    expert: Array
    data: Array
    offload: Array
    bubble: Array
    messages: Array
    once: Array
    update: Array
    on_host: Array
    each: Array
    step: Array


PER_MICRO_BATCH = 7


class Passes(NamedTuple):
    """Seconds of one micro-batch over AXES: by kind, and all of it forward and backward; the backward of the longest block."""

    compute: Array
    recompute: Array
    tensor: Array
    context: Array
    expert: Array
    forward: Array
    backward: Array
    block_backward: Array


class Prices(NamedTuple):
    """Memory and time of a box of plans, kinds of pipeline ranks first."""

    footprint: Footprint
    seconds: Seconds

    @property
    def step(self) -> Array:
        """Seconds over `obsczf`."""
        return self.seconds.step[0]

    @property
    def allocated(self) -> Array:
        """Bytes on the fullest rank over `obsczf`."""
        return self.footprint.total.max(axis=0)

    @property
    def on_host(self) -> Array:
        """The most that one rank keeps on its host, over `obsczf`."""
        return self.footprint.host.max(axis=0)


class Waits(NamedTuple):
    """Seconds that a layer waits for context ranks, forward and backward, and for expert ranks in one direction, over (entry, b, s)."""

    forward: Array
    backward: Array
    expert: Array


class Pricer:
    """Prices boxes of plans of one job. Remembers what boxes share: kinds of ranks of an order, units of a stage."""

    def __init__(self, job: Job, practice: Practice = OURS) -> None:
        self.setting: Setting = setting(job, practice)
        self._kinds: dict[tuple[Order, int], tuple[Kind, ...]] = {}
        self._blocks = [entry.is_block for entry in self.setting.entries]
        self._work: dict[tuple[Cut, int], tuple[dict[float, int], Work | None]] = {}
        self.flat = FlatBuffers(self.setting)
        self._turns: dict[tuple[Order, int, int, int], Moments] = {}

    def price(self, box: Box) -> Prices:
        """Everything about every plan of `box`; whether its plans are legal is the caller's question."""
        return self.price_ranks(box, self.ranks(box))

    def price_ranks(self, box: Box, ranks: Ranks) -> Prices:
        """The same, of these ranks."""
        states = self.flat.states(box, ranks)
        return Prices(self._footprint(box, ranks, states), self._seconds(box, ranks, states))

    def ranks(self, box: Box) -> Ranks:
        """The kinds of pipeline ranks of each order, made equally many by kinds of no rank."""
        each = tuple(self.kinds(order, box.pp) for order in box.orders)
        width = max(map(len, each))
        return [[*found, *[found[0]._replace(number=0)] * (width - len(found))] for found in each]

    def floor(self, box: Box) -> Array:
        """Seconds over (o, b, s) below which no plan of `box` goes, however its data ranks, the ways of its context ranks and its host behave.

        What is left of a step: compute, the traffic of tensor, context and expert ranks in the usual order of axes, the bubble of these.
        """
        ranks, tokens = self.ranks(box), self._tokens(box)
        usual = [replace(box, layout=box.layout._replace(axes=AXES, context=way)) for way in (Context.ring, Context.ulysses)]
        one = self.work(usual[0])
        waiting = [forward + backward for forward, backward in (context.traffic(self.setting, way, tokens, one) for way in usual)]
        routed = 2.0 * expert.traffic(self.setting, usual[0], tokens)[:, :, None]
        layer = one.forward + one.backward + one.tensor_forward + one.tensor_backward + np.minimum(*waiting) + routed
        each = _over(np.array([[kind.layers.sum(axis=0) for kind in found] for found in ranks]).swapaxes(0, 1), layer)
        counts = lift(np.array([[kind.number for kind in found] for found in ranks]).T, "ro")
        longest, bubble = idle(each, counts, lift([order.virtual_stages for order in box.orders], "o"))
        step = lift([count for _, count in box.micro_batches], "b") * longest + bubble
        return np.asarray(step[0, ..., 0, 0, 0])

    def memory(self, box: Box, ranks: Ranks) -> Footprint:
        """Bytes on each of `ranks`."""
        return self._footprint(box, ranks, self.flat.states(box, ranks))

    def _tokens(self, box: Box) -> Array:
        """Of a micro-batch on one rank (b)."""
        return np.array([size for size, _ in box.micro_batches]) * self.setting.job.workload.sequence / box.cp

    # --- shared between boxes ---------------------------------------------------------------------------------------------------

    def kinds(self, order: Order, pp: int) -> tuple[Kind, ...]:
        key = (order, pp)
        if key not in self._kinds:
            self._kinds[key] = kinds(self.setting.entries, order, pp)
        return self._kinds[key]

    # --- memory -----------------------------------------------------------------------------------------------------------------

    def _footprint(self, box: Box, ranks: Ranks, states: States) -> Footprint:
        tokens = self._tokens(box)
        return footprint(self.setting, box, states, activations(self.setting, box, tokens, *self._moments(box, ranks)), tokens)

    def _moments(self, box: Box, ranks: Ranks) -> tuple[Array, Array]:
        """When each kind of rank can be fullest: running entries (r, o, b, moments), layers that keep (r, o, b, moments, entries)."""
        micro_batches = np.array([count for _, count in box.micro_batches])
        found = {
            (r, o): self._moments_of(order, box.layout, ranks[o][r], micro_batches)
            for o, order in enumerate(box.orders)
            for r in range(len(ranks[0]))
        }
        length = max(running.shape[1] for running, _ in found.values())
        shape = (len(ranks[0]), len(box.orders), len(micro_batches), length)
        running = np.zeros(shape, dtype=np.int64)
        layers = np.zeros((*shape, len(columns_of(self.setting, box))))
        fill = np.arange(length)
        for at, (entries, kept) in found.items():
            pick = fill % entries.shape[1]
            running[at], layers[at] = entries[:, pick], kept[:, pick]
        return running, layers

    def _moments_of(self, order: Order, layout: Layout, kind: Kind, micro_batches: Array) -> Moments:
        pp, recomputing = layout.pp, layout.recompute_layers
        if recomputing:
            kind = apart(kind, self._blocks, recomputing)
        if order.schedule != Schedule.interleaved:
            return moments(order, pp, kind, micro_batches)
        key = (order, pp, kind.rank, recomputing)
        if key not in self._turns:
            self._turns[key] = turns(order, pp, kind)
        return in_rounds(self._turns[key], pp, micro_batches)

    # --- time -------------------------------------------------------------------------------------------------------------------

    def passes(self, box: Box, ranks: Ranks) -> Passes:
        """Seconds of one micro-batch on each of `ranks`, before what data ranks and the host do beside it."""
        tokens, setting = self._tokens(box), self.setting
        one = self.work(box)
        layers = np.array([[kind.layers.sum(axis=0) for kind in found] for found in ranks]).swapaxes(0, 1)
        again = self._again(box, ranks, layers)
        forward, backward, tensor_forward, tensor_backward = (_over(layers, part) for part in one[:4])
        waits = Waits(*context.traffic(setting, box, tokens, one), expert.traffic(setting, box, tokens)[:, :, None])
        context_forward, context_backward, dispatch = (_over(layers, part) for part in waits)
        whole, core = (lift([choice == which for choice in box.recompute], "c") for which in (Recompute.layer, Recompute.selective))
        recompute = whole * _over(again, one.forward) + core * _over(layers * np.array(self._blocks), one.attention)
        repeated = Waits(*(whole * _over(again, part) for part in (one.tensor_forward, waits.forward, waits.expert)))
        return Passes(
            compute=forward + backward,
            recompute=recompute,
            tensor=tensor_forward + tensor_backward + repeated.forward,
            context=context_forward + context_backward + repeated.backward,
            expert=2.0 * dispatch + repeated.expert,
            forward=forward + tensor_forward + context_forward + dispatch,
            backward=backward + tensor_backward + context_backward + dispatch + recompute + sum(repeated),
            block_backward=self._block_backward(one, whole),
        )

    def work(self, box: Box) -> Work:
        """Of one layer of each entry; remembered by the tokens of a micro-batch, which boxes share."""
        key, parallel = (box.cut, box.strides["tp"]), np.array([False, True][: 1 + (box.tp > 1)])
        found, known = self._work.get(key, ({}, None))
        tokens = self._tokens(box)
        new = [count for count in tokens.tolist() if count not in found]
        if new:
            more = work(self.setting, *key, np.array(new), parallel)
            known = more if known is None else Work(*(np.concatenate(each, axis=1) for each in zip(known, more, strict=True)))
            found = {**found, **{count: len(found) + at for at, count in enumerate(new)}}
            self._work[key] = found, known
        assert known is not None
        rows, columns = [found[count] for count in tokens.tolist()], [int(choice) for choice in box.sequence_parallel]
        return Work(*(part[:, rows][:, :, columns] for part in known))

    def _seconds(self, box: Box, ranks: Ranks, states: States) -> Seconds:
        one = self.passes(box, ranks)
        data = traffic(self.setting, box, states, one.forward, one.backward)
        room = (np.maximum(one.forward - data.beside_forward, 0.0), np.maximum(one.backward - data.beside_backward, 0.0))
        hidden = self._offloaded(box, ranks, states, *room)
        updating, on_host = offload.update(self.setting, box, held(box, states), update(self.setting, box, states))
        each = (one.compute + one.recompute + one.tensor) + one.context + one.expert + data.each + hidden
        bubble = self._bubble(box, ranks, each, one.block_backward)
        passing = self._passing(box)
        once, last, late = (part.max(axis=0, keepdims=True) for part in (data.once, updating, on_host))
        step = (
            lift([count for _, count in box.micro_batches], "b") * each.max(axis=0, keepdims=True) + bubble + passing + once + last + late
        )
        return Seconds(*one[:5], data.each, hidden, bubble, passing, once, last, late, each, step)

    def _again(self, box: Box, ranks: Ranks, layers: Array) -> Array:
        """Blocks that recompute as a whole, where a plan does (r, o, entries)."""
        count = box.layout.recompute_layers
        if not count:
            return layers * np.array(self._blocks)
        return np.array([[partly(kind, self._blocks, count).sum(axis=0) for kind in found] for found in ranks]).swapaxes(0, 1)

    def _offloaded(self, box: Box, ranks: Ranks, states: States, before: Array, behind: Array) -> Array:
        """Seconds that a micro-batch waits for its host."""
        if not any(box.offload):
            return lift(0.0, "")
        count, keeps = box.layout.recompute_layers, [pair[0] for pair in kept_by_entry(self.setting, box, self._tokens(box))]
        tables = [[apart(kind, self._blocks, count).layers if count else kind.layers for kind in found] for found in ranks]
        blocks = np.array([entry.is_block for entry in columns_of(self.setting, box)])
        layers = np.array([[table.sum(axis=0) * blocks for table in found] for found in tables]).swapaxes(0, 1)
        saved = lift(np.einsum("roe,ebsc->robsc", layers, np.stack(keeps)), "robsc")
        resting = held(box, states, zero=3) * self.setting.recipe.size
        return offload.passing(self.setting, box, resting, saved, before, behind)

    def _bubble(self, box: Box, ranks: Ranks, each: Array, block_backward: Array) -> Array:
        counts = lift(np.array([[kind.number for kind in found] for found in ranks]).T, "ro")
        longest, bubble = idle(each, counts, lift([order.virtual_stages for order in box.orders], "o"))
        slack = longest - (each * counts).sum(axis=0, keepdims=True) / box.pp
        waiting = lift([stall(order, box.pp) for order in box.orders], "o") * block_backward
        return bubble + lift([count for _, count in box.micro_batches], "b") * np.maximum(waiting - slack, 0.0)

    def _passing(self, box: Box) -> Array:
        """Seconds of messages between pipeline ranks and of a vocabulary that both ends hold."""
        if box.pp == 1:
            return self.tie(box)
        passed = send(self.setting.fabric, message(self.setting, box, self._tokens(box)), box.pp, box.strides["pp"])
        hops = np.array([messages(order, box.pp, np.array([count for _, count in box.micro_batches])) for order in box.orders])
        return lift(hops, "ob") * passed + self.tie(box)

    def _block_backward(self, one: Work, recompute: Array) -> Array:
        """Seconds of the backward of the longest block."""
        blocks = [at for at, entry in enumerate(self.setting.entries) if entry.is_block] or [0]
        backward, again = (
            lift(part[blocks].max(axis=0), "bs") for part in (one.backward + one.tensor_backward, one.forward + one.tensor_forward)
        )
        return backward + recompute * again

    def tie(self, box: Box) -> Array:
        """Seconds in which the first and the last stage sum the gradients of a vocabulary that both hold (z)."""
        copies = [entry for entry in self.setting.entries if entry.copy]
        if box.pp == 1 or not copies:
            return lift(np.zeros(len(box.shards)), "z")
        ends = group(self.setting.fabric, 2, box.strides["pp"] * box.pp // 2)
        size = sum(entry.aligned(box.cut) for entry in copies) * self.setting.recipe.size
        return lift(ends.reduce(size / box.holders), "z")


def held(box: Box, states: States, zero: int = 1) -> Array:
    """Elements that one rank holds of what ranks share from this ZeRO stage on."""
    stage = lift([each.zero for each in box.shards], "z")
    dense = states.numel / np.where(stage >= zero, lift(box.holders, "z"), 1)
    return dense + states.experts / np.where(stage >= zero, lift(box.expert_holders, "z"), 1)


def _over(layers: Array, part: Array) -> Array:
    """Seconds of the layers of a rank, over AXES, from those of one layer (entry, b, s)."""
    return lift(np.einsum("roe,ebs->robs", layers, part), "robs")
