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
from meshwright.cost.setting import BLOCK, Entry, Setting
from meshwright.spec.plan import Recompute


class States(NamedTuple):
    """Elements of the flat buffers of each kind of rank, over AXES: all; units; the last complete; fetched alone; bytes of buffers."""

    numel: Array
    units: Array
    first: Array
    lone: Array
    reducing: Array
    gathered: Array
    largest: Array


class Footprint(NamedTuple):
    """Bytes over AXES, kinds of ranks first."""

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    buffers: Array

    @property
    def total(self) -> Array:
        return (self.parameters + self.gradients + self.optimizer + self.buffers) + self.activations


def footprint(setting: Setting, box: Box, states: States, activations: Array) -> Footprint:
    """Everything on each kind of rank."""
    recipe, optimizer = setting.recipe, setting.job.workload.optimizer
    zero = lift([shards.zero for shards in box.shards], "z")
    shard = states.numel / lift([shards.dp_shard for shards in box.shards], "z")
    parameters = np.where(zero == 3, shard, states.numel) * recipe.size
    gradients = np.where(zero >= 2, shard, states.numel) * recipe.size
    held = np.where(zero >= 1, shard, states.numel) * (recipe.master + optimizer.states * recipe.state_size)
    copies = constants.GLOO_COPIES if setting.on_host else 1
    moving = np.where(zero == 3, states.gathered, np.where(zero == 2, states.reducing * copies, 0)) * recipe.size
    updated = np.where(zero >= 1, states.largest / lift([shards.dp_shard for shards in box.shards], "z"), states.largest)
    updating = updated * recipe.master
    buffers = np.maximum(moving, updating - activations) if recipe.master else moving
    return Footprint(parameters, gradients, held, activations, buffers)


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
    again = np.array([choice == Recompute.layer for choice in box.recompute]) & entry.is_block
    entering = (tokens[:, None] * (layer.output * size / divided))[:, :, None]
    return np.where(again, entering, saved), passing + np.where(again, saved, 0.0)


def activations(setting: Setting, box: Box, tokens: Array, running: Array, layers: Array) -> Array:
    """The fullest moment of each kind of rank, over AXES without z.

    `running` (r, o, b, moments) is the entry whose layer runs backward, `layers` (r, o, b, moments, entries) what is kept then.
    """
    pairs = [kept(setting, entry, box, tokens) for entry in setting.entries]
    live = np.stack([pair[1] for pair in pairs])
    batch = np.arange(len(tokens))[:, None]
    moment = live[running, batch]
    for column, (keeps, _) in enumerate(pairs):
        moment = moment + layers[..., column, None, None] * keeps[:, None]
    return moment.max(axis=3)[..., None]


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
