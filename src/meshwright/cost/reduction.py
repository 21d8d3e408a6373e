"""Traffic of the data ranks: gradients summed while backward runs, weights gathered, and what of it is not hidden.

What runs beside what is the runtime's own order:

    ZeRO 0  all-reduce of each bucket during the last micro-batch's backward
    ZeRO 1  reduce-scatter during the same; then all-reduce over the replicas, then, after the update, all-gather of the weights: not hidden
    ZeRO 2  reduce-scatter during every backward; the rest as ZeRO 1
    ZeRO 3  all-gather before use, forward and backward, of blocks one ahead; reduce-scatter during every backward; replicas as above

On a host device communication is work of the same cores: nothing is hidden. Elsewhere communication C beside compute K adds max(C - K, 0) and slows what runs together (Galvatron's two-stream form). The last bucket has nothing
left to hide behind. Volumes: Rajbhandari et al., ZeRO, section 7: 2 S a step below ZeRO 3, 3 S with it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.cost import constants
from meshwright.cost.box import Array, Box, lift
from meshwright.cost.collectives import Group, group, stack
from meshwright.cost.memory import States
from meshwright.cost.setting import Setting


class Traffic(NamedTuple):
    """Seconds not hidden, over AXES: for each micro-batch, and once a step."""

    each: Array
    once: Array


def axis_groups(setting: Setting, box: Box) -> tuple[Group, Group]:
    """The shard group and the replica group of each z, over AXES."""
    shard = stack([group(setting.fabric, shards.dp_shard, box.tp) for shards in box.shards])
    replicate = stack([group(setting.fabric, shards.dp_replicate, box.tp * shards.dp_shard) for shards in box.shards])
    return Group(*(lift(values, "z") for values in shard)), Group(*(lift(values, "z") for values in replicate))


def beside(communication: Array, compute: Array) -> Array:
    """Seconds that `communication` adds to `compute` that runs at the same time.

    >>> float(beside(np.array(3.0), np.array(2.0)))
    1.26
    """
    return np.maximum(communication - compute, 0.0) + constants.OVERLAP_SLOWDOWN * np.minimum(communication, compute)


def traffic(setting: Setting, box: Box, states: States, forward: Array, backward: Array) -> Traffic:
    """`forward` and `backward`: seconds of one micro-batch on each kind of rank, beside which communication can run."""
    size = setting.recipe.size
    if setting.on_host:
        forward, backward = forward * 0.0, backward * 0.0
    zero = lift([shards.zero for shards in box.shards], "z")
    shard, replicate = axis_groups(setting, box)
    whole = states.numel * size
    last = states.first * size
    scatter = shard.gather(whole, states.units)
    over_replicas = replicate.reduce(whole / shard.ranks, states.units)
    share = shard.gather(whole, states.units)

    alone = states.lone * size
    fetched_alone = shard.gather(alone)
    ahead = share - fetched_alone
    at_three = fetched_alone * 2.0 + beside(ahead, forward) + beside(ahead + scatter, backward)
    at_two = beside(scatter, backward)
    each = np.where(zero == 3, at_three, np.where(zero == 2, at_two, 0.0))

    reduce = np.where(zero == 0, over_replicas, np.where(zero == 1, scatter, 0.0))
    hidden_behind_last = beside(reduce, backward)
    tail = np.where(zero == 0, replicate.reduce(last), shard.gather(last))
    after = np.where(zero == 0, 0.0, over_replicas) + np.where((zero == 1) | (zero == 2), share, 0.0)
    return Traffic(each, hidden_behind_last + tail + after)


def update(setting: Setting, box: Box, states: States) -> Array:
    """Seconds of the optimizer on each kind of rank: it reads and writes masters and states, reads gradients, writes weights."""
    recipe, states_per_element = setting.recipe, setting.job.workload.optimizer.states
    shards = lift([each.dp_shard if each.zero else 1 for each in box.shards], "z")
    master = recipe.state_size + states_per_element * recipe.state_size
    moved = constants.UPDATE_PASSES * (master + recipe.size) + (recipe.size if recipe.master else 0)
    return states.numel / shards * (moved / (setting.device.bandwidth * constants.MEMORY_SHARE))
