"""Prices of a box of plans: bytes on each kind of pipeline rank and seconds of a step, for all plans of the box at once.

step = m x (slowest rank's micro-batch) + bubble + messages + reductions not hidden + update
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwright.cost import constants, context, expert, offload
from meshwright.cost.box import Again, Array, Box, Cut, Order, lift, portion
from meshwright.cost.buffers import states
from meshwright.cost.collectives import group, send
from meshwright.cost.compute import Work, host_launch, work
from meshwright.cost.held import Held, stack
from meshwright.cost.kept import kept
from meshwright.cost.memory import Footprint, States, activations, footprint, message
from meshwright.cost.pipeline import Halves, idle, least_bubble, messages, separate, stall
from meshwright.cost.pipeline import bubble as bubble_of
from meshwright.cost.practice import OURS, Practice
from meshwright.cost.reduction import Traffic, traffic, update, whole_keys
from meshwright.cost.setting import Setting, setting
from meshwright.cost.stages import Kind, kinds, ranks
from meshwright.cost.units import FlatUnits
from meshwright.spec.job import Job
from meshwright.spec.plan import AXES, IN_BLOCKS, Recompute, sends


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
    """Seconds of one micro-batch over AXES: by kind, and all of it forward and backward; of backward the gradients of weights that are put off
    where an order separates them; the backward of the longest block."""

    compute: Array
    recompute: Array
    tensor: Array
    context: Array
    expert: Array
    forward: Array
    backward: Array
    weights: Array
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


class Ranks(NamedTuple):
    """The kinds of pipeline ranks of each order: layers of each entry (r, o, entry), how many there are of a kind (r, o)."""

    of_order: tuple[Held, ...]
    layers: Array
    numbers: Array

    @classmethod
    def of(cls, found: Sequence[Held]) -> Ranks:
        """Made equally many by kinds of no rank."""
        numbers = np.zeros((max(len(held.kinds) for held in found), len(found)))
        for o, held in enumerate(found):
            numbers[: len(held.kinds), o] = held.numbers
        return cls(tuple(found), stack([held.layers for held in found], kinds=0), numbers)

    def doing(self, recompute: Sequence[Again], blocks: Array, *kinds: Recompute) -> Array:
        """Blocks that recompute as one of `kinds` (r, o, entry, c)."""
        found, every = np.zeros((*self.layers.shape, len(recompute))), self.layers * blocks
        for c, choice in enumerate(recompute):
            if choice.some:
                first = stack([held.again(choice.blocks(held.order)) for held in self.of_order], kinds=0)
                found[..., c] = (choice.kind in kinds) * first + (choice.rest in kinds) * (every - first)
            elif choice.kind in kinds:
                found[..., c] = every
        return found

    def sending(self, box: Box, blocks: Array, kind: Recompute) -> Array:
        """Of these with `kind`, those whose activations may wait elsewhere."""
        if not box.offload_layers:
            return self.doing(box.recompute, blocks, kind)
        return self.first(box, blocks)[..., None] * np.array([choice.kind == kind for choice in box.recompute])

    def first(self, box: Box, blocks: Array) -> Array:
        """Blocks whose activations wait elsewhere where any do (r, o, entry)."""
        if not box.offload_layers:
            return self.layers * blocks
        return stack([held.again(box.offload_layers) for held in self.of_order], kinds=0)


class Pricer:
    """Prices boxes of plans of one job. Remembers what boxes share: what the ranks of an order hold, seconds of layers."""

    def __init__(self, job: Job, practice: Practice = OURS, like: Pricer | None = None) -> None:
        """`like`: of the same model on other devices, with which it shares what those do not change."""
        self.setting: Setting = setting(job, practice)
        self.flat: FlatUnits = like.flat if like else FlatUnits(self.setting.entries)
        self._held: dict[tuple[Order, int, bool], Held] = like._held if like else {}
        self._blocks = np.array([entry.is_block for entry in self.setting.entries])
        self._work: dict[tuple[Cut, int], tuple[dict[float, int], Work | None]] = {}

    def price(self, box: Box) -> Prices:
        """Everything about every plan of `box`; whether its plans are legal is the caller's question."""
        return self.price_ranks(box, self.ranks(box))

    def price_ranks(self, box: Box, ranks: Ranks) -> Prices:
        """The same, of these ranks."""
        found = self.states(box, ranks)
        return Prices(self.memory(box, ranks, found), self.seconds(box, ranks, found))

    def states(self, box: Box, ranks: Ranks) -> States:
        """The flat buffers of each of `ranks`."""
        return states(self.setting, box, ranks.of_order, ranks.layers)

    def floor(self, box: Box) -> Array:
        """Seconds over (o, b, s) below which no plan of `box` goes, however its data ranks, its order of axes and its host behave.

        What is left of a step: compute, the traffic of tensor, context and expert ranks in the usual order of axes, the bubble of these.
        """
        box, ranks = replace(box, layout=box.layout._replace(axes=AXES)), self.ranks(box)
        one, waits = self._layers(box)
        each = _over(ranks.layers, (sum(one[:4]) + sum(waits[:2]) + 2.0 * waits[2])[None])[0]
        longest = each.max(axis=0, keepdims=True)
        if separate(box.orders) and box.pp > 1:
            forward = _over(ranks.layers, (one.forward + one.tensor_forward + waits[0] + waits[2])[None])[0]
            weights = _over(ranks.layers * self._blocks, one.weights[None])[0]
            bubble = least_bubble(box.orders, Halves(forward, each - forward - weights, weights), lift(ranks.numbers, "ro"))
        else:
            longest, bubble = idle(each, lift(ranks.numbers, "ro"), lift([order.virtual_stages for order in box.orders], "o"))
        return np.asarray((lift(box.counts, "b") * longest + bubble)[0, ..., 0, 0, 0])

    def memory(self, box: Box, ranks: Ranks, found: States | None = None) -> Footprint:
        """Bytes on each of `ranks`."""
        tokens = self._tokens(box)
        alive = activations(self.setting, box, tokens, ranks.of_order)
        return footprint(self.setting, box, found or self.states(box, ranks), alive, tokens)

    # --- shared between boxes ---------------------------------------------------------------------------------------------------

    def ranks(self, box: Box, each: bool = False) -> Ranks:
        """The kinds of pipeline ranks of each order; or `each` of them by itself."""
        return Ranks.of([self.held(order, box.pp, each) for order in box.orders])

    def alone(self, box: Box, found: Sequence[Kind]) -> Ranks:
        """These, which nothing else asks for."""
        return Ranks.of([Held(self.flat, order, box.pp, found) for order in box.orders])

    def held(self, order: Order, pp: int, each: bool = False) -> Held:
        key = (order, pp, each)
        if key not in self._held:
            found = (ranks if each else kinds)(self.setting.entries, order, pp)
            self._held[key] = Held(self.flat, order, pp, found)
        return self._held[key]

    def _tokens(self, box: Box) -> Array:
        return box.tokens(self.setting.job.workload.sequence)

    # --- time -------------------------------------------------------------------------------------------------------------------

    def _layers(self, box: Box) -> tuple[Work, tuple[Array, Array, Array]]:
        """One layer of each entry over (entry, b, s): its work; its waits for context ranks, forward and backward, and for experts one way."""
        tokens, one = self._tokens(box), self.work(box)
        forward, backward = context.traffic(self.setting, box, tokens, one)
        return one, (forward, backward, expert.traffic(self.setting, box, tokens)[:, :, None] + 0.0 * forward)

    def passes(self, box: Box, ranks: Ranks, whole: bool = True) -> Passes:
        """Seconds of one micro-batch on each of `ranks`, before what data ranks and the host do beside it. `whole`: they are stages, not layers of one."""
        one, waits = self._layers(box)
        forward, backward, tensor_forward, tensor_backward, context_forward, context_backward, dispatch = _over(
            ranks.layers, np.stack([*one[:4], *waits])
        )
        kinds_of_recompute = {kind for choice in box.recompute for kind in (choice.kind, choice.rest)}
        recompute = tensor_again = context_again = dispatch_again = np.zeros((1,) * forward.ndim)
        if Recompute.full in kinds_of_recompute:
            again = np.stack([one.forward, one.tensor_forward, waits[0], waits[2]])
            recompute, tensor_again, context_again, dispatch_again = _over_some(
                ranks.doing(box.recompute, self._blocks, Recompute.full), again
            )
        if Recompute.sac in kinds_of_recompute:
            recompute = recompute + _over_some(ranks.doing(box.recompute, self._blocks, Recompute.sac), one.derived[None])[0]
        if Recompute.attn in kinds_of_recompute:
            core = lift([choice.kind == Recompute.attn for choice in box.recompute], "c")
            recompute = recompute + core * _over(ranks.layers * self._blocks, one.attention[None])[0]
        weights = np.zeros((1,) * forward.ndim)
        if separate(box.orders):
            rest = (ranks.layers * self._blocks)[..., None] - ranks.doing(box.recompute, self._blocks, *IN_BLOCKS)
            weights = _over_some(rest, one.weights[None])[0]
            sent = [sends(choice) for choice in box.offload]
            if any(sent):  # what was fetched does not wait for W
                stay = np.minimum(rest, (ranks.layers * self._blocks - ranks.first(box, self._blocks))[..., None])
                weights = np.where(lift(sent, "f"), _over_some(stay, one.weights[None])[0], weights)
        repeated = tensor_again + context_again + dispatch_again
        if whole:
            times = lift([order.virtual_stages for order in box.orders], "o")
            forward, backward = (part + times * each for part, each in zip((forward, backward), each_pass(self.setting), strict=True))
        return Passes(
            compute=forward + backward,
            recompute=recompute,
            tensor=tensor_forward + tensor_backward + tensor_again,
            context=context_forward + context_backward + context_again,
            expert=2.0 * dispatch + dispatch_again,
            forward=forward + tensor_forward + context_forward + dispatch,
            backward=backward + tensor_backward + context_backward + dispatch + recompute + repeated,
            weights=weights,
            block_backward=self._block_backward(one, lift([choice.kind == Recompute.full for choice in box.recompute], "c")),
        )

    def work(self, box: Box) -> Work:
        """Of one layer of each entry; remembered by the tokens of a micro-batch, which boxes share."""
        key, parallel = (box.cut, box.strides["tp"]), np.array([False, True][: 1 + (box.tp > 1)])
        found, known = self._work.get(key, ({}, None))
        tokens = self._tokens(box).tolist()
        new = sorted(set(tokens) - found.keys())
        if new:
            more = work(self.setting, *key, np.array(new), parallel)
            known = more if known is None else Work(*(np.concatenate(each, axis=1) for each in zip(known, more, strict=True)))
            found = {**found, **{count: len(found) + at for at, count in enumerate(new)}}
            self._work[key] = found, known
        assert known is not None
        chosen = np.ix_(range(len(self._blocks)), [found[count] for count in tokens], [int(choice) for choice in box.sequence_parallel])
        return Work(*(part[chosen] for part in known))

    def seconds(self, box: Box, ranks: Ranks, found: States) -> Seconds:
        """Parts of a step, `found` being the flat buffers of `ranks`."""
        one = self.passes(box, ranks)
        data = traffic(self.setting, box, found, one.forward, one.backward)
        hidden = self._offloaded(box, ranks, found, one, data)
        updating, on_host = offload.update(self.setting, box, held(box, found), update(self.setting, box, found))
        each = (one.compute + one.recompute + one.tensor) + one.context + one.expert + data.each + hidden
        bubble = self._bubble(box, ranks, each, one)
        passing = self._passing(box)
        once, last, late = (
            part.max(axis=0, keepdims=True) for part in (data.once + whole_keys(self.setting, box, ranks.layers), updating, on_host)
        )
        step = lift(box.counts, "b") * each.max(axis=0, keepdims=True) + bubble + passing + once + last + late
        return Seconds(*one[:5], data.each, hidden, bubble, passing, once, last, late, each, step)

    def _offloaded(self, box: Box, ranks: Ranks, found: States, one: Passes, data: Traffic) -> Array:
        """Seconds that a micro-batch waits for its host."""
        if not any(box.offload):
            return lift(0.0, "")
        saved = self.saved(box, ranks)
        room = (np.maximum(one.forward - data.beside_forward, 0.0), np.maximum(one.backward - data.beside_backward, 0.0))
        weights = held(box, found, zero=3) * self.setting.recipe.size
        return offload.passing(self.setting, box, weights, held(box, found, zero=2), saved, *room)

    def saved(self, box: Box, ranks: Ranks) -> Array:
        """Bytes that the blocks of each of `ranks` whose activations may wait elsewhere keep of a micro-batch until its backward."""
        tokens = self._tokens(box)
        layers = [kept(self.setting, entry, box, tokens) for entry in self.setting.entries]
        found = 0.0
        for kind in {kind for choice in box.recompute for kind in (choice.kind, choice.rest)}:
            each = np.stack([layer.when([kind])[0][..., 0] for layer in layers])
            found = found + np.einsum("roec,ebs->robsc", ranks.sending(box, self._blocks, kind), each)
        return lift(found, "robsc")

    def _bubble(self, box: Box, ranks: Ranks, each: Array, one: Passes) -> Array:
        counts = lift(ranks.numbers, "ro")
        longest, bubble = idle(each, counts, lift([order.virtual_stages for order in box.orders], "o"))
        apart = [o for o, order in enumerate(box.orders) if separate([order])]
        if apart:
            weights = np.broadcast_to(one.weights, (*one.weights.shape[:1], len(box.orders), *one.weights.shape[2:]))[:, apart]
            forward, whole = one.forward[:, apart], each[:, apart]
            bubble[:, apart] = bubble_of(
                [box.orders[o] for o in apart], Halves(forward, whole - forward - weights, weights), counts[:, apart]
            )
        late = [stall(order, box.pp) for order in box.orders]
        if not any(late):
            return bubble
        slack = longest - (each * counts).sum(axis=0, keepdims=True) / box.pp
        return bubble + lift(box.counts, "b") * np.maximum(lift(late, "o") * one.block_backward - slack, 0.0)

    def _passing(self, box: Box) -> Array:
        """Seconds of messages between pipeline ranks and of a vocabulary that both ends hold."""
        if box.pp == 1:
            return self.tie(box)
        passed = send(self.setting.fabric, message(self.setting, box, self._tokens(box)), box.pp, box.strides["pp"])
        hops = np.array([messages(order, box.pp, box.counts) for order in box.orders])
        return lift(hops, "ob") * passed + self.tie(box)

    def _block_backward(self, one: Work, recompute: Array) -> Array:
        """Seconds of the backward of the longest block."""
        blocks = self._blocks if self._blocks.any() else np.arange(len(self._blocks)) == 0
        backward, again = (
            lift(part[blocks].max(axis=0), "bs") for part in (one.backward + one.tensor_backward, one.forward + one.tensor_forward)
        )
        return backward + recompute * again

    def tie(self, box: Box) -> Array:
        """Seconds in which the first and the last stage sum the gradients of a vocabulary that both hold (z)."""
        copies = [entry for entry in self.setting.entries if entry.copy]
        if box.pp == 1 or not copies:
            return lift(0.0, "")
        ends = group(self.setting.fabric, 2, box.strides["pp"] * box.pp // 2)
        size = sum(entry.aligned(box.cut) for entry in copies) * self.setting.recipe.size
        return lift(ends.reduce(size * box.weight / box.holders), "z")


def held(box: Box, states: States, zero: int = 1) -> Array:
    """Elements that one rank holds of what ranks share from this ZeRO stage on."""
    dense = states.numel * np.where(box.zero >= zero, portion(box), 1)
    return dense + states.experts / np.where(box.zero >= zero, lift(box.expert_holders, "z"), 1)


def each_pass(setting: Setting) -> tuple[float, float]:
    """Seconds that a virtual stage takes for a micro-batch beside its layers, forward and backward."""
    seconds = constants.HOST_PASS * host_launch(setting) * setting.on_host / (1.0 + constants.BACKWARD)
    return seconds, constants.BACKWARD * seconds


def _over(layers: Array, parts: Array) -> Array:
    """Seconds of the layers of a rank, over AXES, from those of one layer (part, entry, b, s)."""
    found = layers.reshape(-1, layers.shape[-1]) @ parts.reshape(*parts.shape[:2], -1)
    return found.reshape(len(parts), *layers.shape[:2], *parts.shape[2:], 1, 1, 1)


def _over_some(layers: Array, parts: Array) -> Array:
    """The same of layers that differ by recompute (r, o, entry, c)."""
    found = layers.swapaxes(2, 3).reshape(-1, layers.shape[2]) @ parts.reshape(*parts.shape[:2], -1)
    shape = (*layers.shape[:2], layers.shape[3], *parts.shape[2:])
    return np.moveaxis(found.reshape(len(parts), *shape), 3, 5)[..., None, None]
