"""Traffic of the data ranks: gradients summed while backward runs, weights gathered, and what of it is not hidden.

What runs beside what is the runtime's own order:

    ZeRO 0  all-reduce of each bucket during the last micro-batch's backward
    ZeRO 1  reduce-scatter during the same; then all-reduce over the replicas, then, after the update, all-gather of the weights: not hidden
    ZeRO 2  reduce-scatter during every backward; the rest as ZeRO 1
    ZeRO 3  all-gather before use, forward and backward, of blocks one ahead (ranks of one host meet and move nothing); reduce-scatter during every backward; replicas as above

On a host device communication is work of the same cores: nothing is hidden. Elsewhere communication C beside compute K adds max(C - K, 0) and slows what runs together (Galvatron's two-stream form). The last bucket has nothing
left to hide behind. Experts that lie on unlike ranks are reduced among the data ranks that hold the same ones. Volumes: Rajbhandari et al., ZeRO, section 7: 2 S a step below ZeRO 3, 3 S with it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from meshwright.cost import constants
from meshwright.cost.box import Array, Box, lift, portion
from meshwright.cost.collectives import PLAIN, Group, Wire, group, stack
from meshwright.cost.expert import stride
from meshwright.cost.hiding import beside
from meshwright.cost.memory import States, lie_once
from meshwright.cost.optimizer import products, state_bytes
from meshwright.cost.setting import Setting


class Traffic(NamedTuple):
    """Seconds not hidden, over AXES: for each micro-batch, and once a step; and those that run beside forward and backward of a micro-batch."""

    each: Array
    once: Array
    beside_forward: Array
    beside_backward: Array


class Volume(NamedTuple):
    """Flat buffers that one pair of groups reduces, over AXES: bytes, units, bytes that nothing gathers ahead, bytes of the last unit."""

    whole: Array
    units: Array
    lone: Array
    last: Array
    shard: Group
    scatter: Group
    replicate: Group


def axis_groups(setting: Setting, box: Box, wire: Wire = PLAIN) -> tuple[Group, Group]:
    """The shard group and the replica group of each z, over AXES. Below a shard group context ranks are replicas."""
    inner, holders = box.strides["dp"], [shards.holders for shards in box.shards]
    replicas, apart = [shards.replicas for shards in box.shards], [inner * count for count in holders]
    return _over(setting, holders, [inner] * len(holders), wire), _over(setting, replicas, apart, wire)


def expert_groups(setting: Setting, box: Box, wire: Wire = PLAIN) -> tuple[Group, Group]:
    """The same for experts: what is left of the shard group and its tensor ranks when each expert has its own."""
    inner, apart = stride(box) * box.layout.ep, box.layout.ep * box.layout.expert_tensor
    replicas = [shards.replicas if shards.zero else max(shards.replicas * box.tp // apart, 1) for shards in box.shards]
    beyond = [inner * int(holders) for holders in box.expert_holders]
    return _over(setting, box.expert_holders.tolist(), [inner] * len(replicas), wire), _over(setting, replicas, beyond, wire)


def _over(setting: Setting, ranks: list[int], strides: list[int], wire: Wire) -> Group:
    found = stack([group(setting.fabric, count, stride, wire) for count, stride in zip(ranks, strides, strict=True)])
    return Group(*(lift(values, "z") for values in found))


def traffic(setting: Setting, box: Box, states: States, forward: Array, backward: Array) -> Traffic:
    """`forward` and `backward`: seconds of one micro-batch on each kind of rank, beside which communication can run."""
    size, practice = setting.recipe.size, setting.practice
    sent = (practice.reduced or setting.recipe.gradient_size) / size
    if setting.on_host:
        forward, backward = forward * 0.0, backward * 0.0
    zero = box.zero
    dense = size * box.weight  # of unequal shards the largest is waited for
    coded = axis_groups(setting, box, setting.wire)
    plain = coded if setting.wire == PLAIN else axis_groups(setting, box)
    volumes = [Volume(states.numel * dense, states.units, states.lone * dense, states.first * dense, plain[0], *coded)]
    if box.layout.ep > 1:
        experts = states.experts * size
        coded = expert_groups(setting, box, setting.wire)
        plain = coded if setting.wire == PLAIN else expert_groups(setting, box)
        volumes.append(Volume(experts, states.expert_units, 0.0 * experts, 0.0 * experts, plain[0], *coded))
    scatter: Array = sum(each.scatter.gather(each.whole * sent, each.units) for each in volumes)
    over_replicas: Array = sum(each.replicate.reduce(each.whole * sent / each.shard.ranks, each.units) for each in volumes)
    if (local := setting.job.workload.local) is not None:
        over_replicas = over_replicas / local.steps  # once in so many, beside nothing
    once = lie_once(setting, box) if setting.shares_memory else 0.0
    moved = [each._replace(whole=each.whole * (1 - once), lone=each.lone * (1 - once)) for each in volumes]
    plainly = sent == 1 and setting.wire == PLAIN and not setting.shares_memory
    share: Array = scatter if plainly else sum(each.shard.gather(each.whole, each.units) + _opened(once, each.units) for each in moved)
    fetched_alone: Array = sum(each.shard.gather(each.lone) + _opened(once, np.minimum(each.units, 1)) for each in moved)

    ahead = share - fetched_alone
    at_three = fetched_alone * 2.0 + beside(ahead, forward) + beside(ahead + scatter, backward)
    at_two = beside(scatter, backward)
    each_micro_batch = np.where(zero == 3, at_three, np.where(zero == 2, at_two, 0.0))
    reduce = np.where(zero == 0, 0.0 if local else over_replicas, np.where(zero == 1, scatter, 0.0))
    if practice.reduce_hidden and not setting.on_host:
        last = [
            np.where(zero == 0, 0.0 if local else each.replicate.reduce(each.last * sent), each.scatter.gather(each.last * sent))
            for each in volumes
        ]
        reduce = beside(reduce, backward) + sum(last)
    fetched = beside(share, forward) if practice.gather_hidden else share
    after = np.where((zero == 0) & (local is None), 0.0, over_replicas) + np.where((zero == 1) | (zero == 2), fetched, 0.0)
    on_the_way = np.where(zero == 3, ahead, 0.0), np.where(zero == 3, ahead + scatter, np.where(zero == 2, scatter, 0.0))
    return Traffic(each_micro_batch + converted(setting, states), reduce + after, *on_the_way)


def _opened(once: Array | float, units: Array) -> Array:
    """Seconds in which weights that lie on a host once are opened instead of gathered."""
    return once * constants.OPENING * units


def whole_keys(setting: Setting, box: Box, layers: Array) -> Array:
    """Seconds in which tensor ranks sum the gradients of keys and values that all of them hold, once a step, each its shard; `layers` (r, o, entry)."""
    whole = [sum(each.numel for each in entry.own if each.overlaps(box.tp) and not each.frozen) for entry in setting.entries]
    if not any(whole):
        return lift(0.0, "")
    size = lift(layers @ np.array(whole, dtype=float), "ro") * setting.recipe.gradient_size * np.where(box.zero >= 1, portion(box), 1.0)
    return np.asarray(group(setting.fabric, box.tp, box.strides["tp"]).reduce(size))


def converted(setting: Setting, states: States) -> Array:
    """Seconds in which the gradients of a micro-batch become integers, where sums are exact: read twice, written, and added."""
    if not setting.recipe.exact:
        return 0.0 * states.numel
    moved = 2 * setting.recipe.size + 4 * setting.gradient
    return (states.numel + states.experts) * (moved / (setting.device.bandwidth * constants.MEMORY_SHARE))


def update(setting: Setting, box: Box, states: States) -> Array:
    """Seconds of the optimizer on each kind of rank: it reads and writes masters and states, reads gradients, writes weights."""
    recipe = setting.recipe
    master = recipe.state_size + state_bytes(setting)
    moved = constants.UPDATE_PASSES * (master + recipe.gradient_size) + (recipe.size if recipe.master else 0)
    return states.shard * (moved / (setting.device.bandwidth * constants.MEMORY_SHARE) + products(setting))
