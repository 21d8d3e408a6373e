"""Bytes on each kind of pipeline rank, by kind of memory.

    parameters   flat weights in the compute type: whole, at ZeRO 3 a shard
    gradients    the same length: whole, from ZeRO 2 on a shard
    optimizer    master weights and states: whole, from ZeRO 1 on a shard
    activations  what layers keep for backward, for all micro-batches in flight, and what the fullest moment of a backward adds
    buffers      whole gradients on their way to their shards (ZeRO 2, 3), gathered weights (ZeRO 3), the float32 gradient of an update

Sources: Rajbhandari et al., ZeRO, section 3; Korthikanti et al., arXiv 2205.05198, for activations under tensor and sequence parallelism.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.cost import constants
from meshwright.cost.box import Array, Box, lift
from meshwright.cost.compute import local_share
from meshwright.cost.setting import BLOCK, HEAD, Entry, Setting
from meshwright.spec.model import Layer
from meshwright.spec.plan import Recompute

NOWHERE = -1e30
"""Bytes at a moment that a rank does not have: less than anything that comes on top."""


class States(NamedTuple):
    """Elements of the flat buffers of each kind of rank, over AXES; the fields are those of `Units`, over all stages of a rank."""

    numel: Array
    units: Array
    lone: Array
    first: Array
    last: Array
    opening: Array
    closing: Array
    filling: Array
    largest: Array


class Alive(NamedTuple):
    """Bytes of activations at the fullest moment of the head's backward (less than nothing without a head), and of any other's."""

    at_head: Array
    elsewhere: Array


class Footprint(NamedTuple):
    """Bytes over AXES, kinds of ranks first."""

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    buffers: Array

    @property
    def total(self) -> Array:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def footprint(setting: Setting, box: Box, states: States, alive: Alive, tokens: Array) -> Footprint:
    """Everything on each kind of rank."""
    recipe, optimizer = setting.recipe, setting.job.workload.optimizer
    zero, shards = (lift([getattr(each, name) for each in box.shards], "z") for name in ("zero", "dp_shard"))
    shard = states.numel / shards
    parameters = np.where(zero == 3, shard, states.numel) * recipe.size
    gradients = np.where(zero >= 2, shard, states.numel) * setting.gradient
    held = np.where(zero >= 1, shard, states.numel) * (recipe.master + optimizer.states * recipe.state_size)
    moving = moved(setting, box, states, tokens)
    at_head, elsewhere = alive.at_head + moving.at_head, alive.elsewhere + moving.elsewhere
    fullest = np.maximum(np.maximum(at_head, elsewhere), moving.at_end)
    activations = np.where(at_head > elsewhere, alive.at_head, alive.elsewhere)
    return Footprint(parameters, gradients, held, activations, fullest - activations)


class Moving(NamedTuple):
    """Bytes of gradients and weights on their way, over AXES: while the head runs backward, while others do, when the update runs."""

    at_head: Array
    elsewhere: Array
    at_end: Array


def moved(setting: Setting, box: Box, states: States, tokens: Array) -> Moving:
    """Buffers that come and go.

    ZeRO 2 and 3 reduce each unit as soon as it is whole; the reductions that one backward starts last are waited for by the next one, so
    that with several micro-batches they lie beside all activations. ZeRO 3 holds the layer that runs and the one fetched ahead.
    """
    size, head = setting.recipe.size, setting.head
    zero, shards = (lift([getattr(each, name) for each in box.shards], "z") for name in ("zero", "dp_shard"))
    again = lift([count > 1 for _, count in box.micro_batches], "b")
    copies = np.where(shards > 1, (constants.GLOO_COPIES if setting.on_host else 1) + 1 / shards, 1)
    left = np.where(again, states.opening, 0) * copies
    waiting = np.maximum(left, states.closing * copies) + states.filling
    elsewhere = np.where(zero == 3, waiting + 2 * states.filling, np.where(zero == 2, waiting, 0))
    at_head = np.where(zero == 3, left + states.last, np.where(zero == 2, left, 0))
    if head is not None:
        gradient = head.largest(box.tp) + np.where(zero >= 2, states.last, 0)
        at_head = at_head + np.maximum(gradient - lift(tokens * (head.layer.fixed_split / box.tp / size), "b"), 0)
    messages = constants.MESSAGES_HELD * message(setting, box, tokens) / size
    at_head, elsewhere = at_head + messages, elsewhere + messages
    sent = states.numel * size if setting.on_host else 0
    master = np.where(zero >= 1, states.largest / shards, states.largest) * setting.recipe.master
    at_end = np.maximum(np.where((zero >= 1) & (zero <= 2) & (shards > 1), sent, 0), master)
    return Moving(at_head * size, elsewhere * size, at_end)


def message(setting: Setting, box: Box, tokens: Array) -> Array:
    """Bytes of one hidden state on its way to the next pipeline rank, over (b, s); none without a pipeline."""
    hidden = (
        max((entry.layer.output for entry in setting.entries if entry.is_block), default=0.0) * setting.recipe.size if box.pp > 1 else 0.0
    )
    return lift((tokens * hidden)[:, None] / np.where(box.sequence_parallel, box.tp, 1), "bs")


def kept(setting: Setting, entry: Entry, box: Box, tokens: Array) -> tuple[Array, Array]:
    """Bytes that a layer keeps of one micro-batch until its backward, and that it needs besides while it runs backward, over (b, s, c)."""
    layer, size = entry.layer, setting.recipe.size
    shape = (len(tokens), len(box.sequence_parallel), len(box.recompute))
    if entry.copy:
        return np.zeros(shape), np.zeros(shape)
    sequence_parallel = np.array(box.sequence_parallel)
    divided = np.where(sequence_parallel & (layer.name == BLOCK), box.tp, 1)
    split = (layer.saved_split * size + layer.fixed_split) / box.tp
    whole = (layer.saved_whole * size + layer.fixed_whole) / divided
    saved = (tokens[:, None] * (split + whole))[:, :, None]
    passing = (tokens[:, None] * (layer.transient * size * local_share(layer, size, box.tp, sequence_parallel)))[:, :, None]
    if layer.name == HEAD:
        passing = passing + host_copy(setting, layer, box.tp, tokens)
    gradient = entry.largest(box.tp) * size if entry.is_block else 0
    again = np.array([choice == Recompute.layer for choice in box.recompute]) & entry.is_block
    entering = (tokens[:, None] * (layer.output * size / divided))[:, :, None]
    return np.where(again, entering, saved), passing + np.where(again, saved, 0.0) + gradient


def host_copy(setting: Setting, layer: Layer, tp: int, tokens: Array) -> Array:
    """On a host device torch makes a float32 copy of low-precision logits before it takes their logarithms, over (b, s, c)."""
    copied = setting.on_host and setting.recipe.size < constants.LOSS_ELEMENT
    return (tokens * (layer.fixed_split / tp if copied else 0.0))[:, None, None]


def activations(setting: Setting, box: Box, tokens: Array, running: Array, layers: Array) -> Alive:
    """The fullest moments of each kind of rank, over AXES without z.

    `running` (r, o, b, moments) is the entry whose layer runs backward, `layers` (r, o, b, moments, entries) what is kept then.
    """
    pairs = [kept(setting, entry, box, tokens) for entry in setting.entries]
    live = np.stack([pair[1] for pair in pairs])
    batch = np.arange(len(tokens))[:, None]
    moment = live[running, batch]
    for column, (keeps, _) in enumerate(pairs):
        moment = moment + layers[..., column, None, None] * keeps[:, None]
    heads = np.array([entry.layer.name == HEAD and not entry.copy for entry in setting.entries])
    at_head = heads[running][..., None, None]
    return Alive(*(np.where(chosen, moment, NOWHERE).max(axis=3)[..., None] for chosen in (at_head, ~at_head)))


def reserved(setting: Setting, allocated: Array) -> tuple[Array, Array]:
    """What the allocator takes for `allocated` bytes, with the driver's own: as estimated, and with the margin that makes a plan safe."""
    if setting.on_host:
        return allocated + setting.device.context, allocated + setting.device.context
    return (
        allocated * constants.ALLOCATOR + setting.device.context,
        allocated * constants.ALLOCATOR_SAFE + setting.device.context,
    )


def usable(setting: Setting) -> float:
    """Bytes of the device that a rank can take."""
    return setting.device.memory * constants.USABLE
