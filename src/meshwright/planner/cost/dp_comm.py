"""Models data-parallel communication: gradient reductions, weight gathers, and their exposed seconds. The module also
models the seconds of the optimizer update on the device. cost_model.py adds all these seconds to the step.

The communication of the runtime, and the compute with which it overlaps:

- ZeRO 0: all-reduce of each bucket during the backward of the last micro-batch.
- Frozen weights (LoRA) have no gradients, so they are only gathered at ZeRO 3.
- ZeRO 1: reduce-scatter during the backward of the last micro-batch, then all-reduce over the replicas. All-gather of
  the weights during the first forward after the update.
- ZeRO 2: as ZeRO 1, but with a reduce-scatter during every backward.
- ZeRO 3: all-gather of the weights in forward and in backward, prefetched by one block. (If the ranks of a host share
  their memory, they synchronise and move no data.) Reduce-scatter during every backward. All-reduce over the replicas
  as in ZeRO 1.

On a CPU, communication uses the same cores as compute, so nothing overlaps. On other devices, communication of C
seconds that overlaps with compute of K seconds adds max(C - K, 0) seconds. Compute and communication also slow each
other down (Galvatron's two-stream model). No compute overlaps with the reduction of the last bucket. Expert gradients
are reduced among the data ranks that have the same experts. With S bytes of gradients, each rank moves 2 S bytes per
step below ZeRO 3 and 3 S bytes at ZeRO 3 (Rajbhandari et al., ZeRO, section 7). Other runtimes differ:
`RuntimeModel.replicas_hidden`, `gather_hidden`, `once_per_step` and `messages` (cost_context.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost import constants
from meshwright.planner.cost.cost_context import CostContext, UpdateMessages
from meshwright.planner.cost.cp_ep_comm import expert_stride
from meshwright.planner.cost.links import UNCOMPRESSED, CollectiveRates, CompressionRatio, collective_rates, stack_rates
from meshwright.planner.cost.memory import StateSizes, shared_on_host
from meshwright.planner.cost.optimizer import newton_schulz_seconds, optimizer_state_bytes
from meshwright.planner.cost.overlap import overlapped
from meshwright.planner.cost.plan_grid import Array, PlanGrid, broadcast_to_axis, shard_fraction


class DpTraffic(NamedTuple):
    """The seconds of data-parallel communication over GRID_AXES: exposed per micro-batch (`each`), exposed once per
    step (`once`), and overlapped with the forward and with the backward of one micro-batch."""

    each: Array
    once: Array
    overlapped_forward: Array
    overlapped_backward: Array


class ReductionVolume(NamedTuple):
    """The flat buffers that one shard group and one replica group reduce, over GRID_AXES.

    `whole` is the bytes of all buffers, `units` the number of parameter groups. `lone` is the bytes of groups without
    prefetch, `last` the bytes of the group that is reduced last. The rates are: of the shard group without gradient
    compression (`shard`), of the shard group with compression (`scatter`), and of the replica group with compression
    (`replicate`).
    """

    whole: Array
    units: Array
    lone: Array
    last: Array
    shard: CollectiveRates
    scatter: CollectiveRates
    replicate: CollectiveRates


def dp_group_rates(
    setting: CostContext, box: PlanGrid, wire: CompressionRatio = UNCOMPRESSED
) -> tuple[CollectiveRates, CollectiveRates]:
    """Returns the communication rates of the shard group and of the replica group, over GRID_AXES. The rates vary along
    z. Context ranks outside the shard group count as replicas. `wire` is the compression ratio."""
    inner, holders = box.strides["dp"], [shards.holders for shards in box.shards]
    replicas, separate = [shards.replicas for shards in box.shards], [inner * count for count in holders]
    return _rates_by_choice(setting, holders, [inner] * len(holders), wire), _rates_by_choice(
        setting, replicas, separate, wire
    )


def expert_group_rates(
    setting: CostContext, box: PlanGrid, wire: CompressionRatio = UNCOMPRESSED
) -> tuple[CollectiveRates, CollectiveRates]:
    """Returns the communication rates of the shard group and of the replica group of expert weights, over GRID_AXES.
    With expert parallelism, an expert has fewer data ranks than a dense weight."""
    inner, separate = expert_stride(box) * box.layout.ep, box.layout.ep * box.layout.expert_tp
    replicas = [
        shards.replicas if shards.zero else max(shards.replicas * box.tp // separate, 1) for shards in box.shards
    ]
    beyond = [inner * int(holders) for holders in box.expert_holders]
    return _rates_by_choice(setting, box.expert_holders.tolist(), [inner] * len(replicas), wire), _rates_by_choice(
        setting, replicas, beyond, wire
    )


def _rates_by_choice(
    setting: CostContext, ranks: list[int], strides: list[int], wire: CompressionRatio
) -> CollectiveRates:
    key = ("rates", *ranks, *strides, wire)
    if key not in setting.cache:
        found = stack_rates(
            [
                collective_rates(setting.fabric, count, stride, wire)
                for count, stride in zip(ranks, strides, strict=True)
            ]
        )
        setting.cache[key] = CollectiveRates(*(broadcast_to_axis(values, "z") for values in found))
    return setting.cache[key]  # type: ignore[no-any-return]


def dp_traffic(setting: CostContext, box: PlanGrid, states: StateSizes, forward: Array, backward: Array) -> DpTraffic:
    """Returns the seconds of data-parallel communication. `forward` and `backward` are the seconds of one micro-batch
    on each rank class; communication can overlap with them. `states` is the sizes of the flat buffers."""
    practice, zero, local = setting.practice, box.zero, setting.job.workload.local
    if setting.on_host:
        forward, backward = forward * 0.0, backward * 0.0
    volumes = reduction_volumes(setting, box, states)
    trained = setting.trained(box.tp)
    sent = _sent_fraction(setting) * trained
    scatter: Array = sum(each.scatter.gather(each.whole * sent, each.units) for each in volumes)
    over_replicas: Array = sum(
        each.replicate.reduce(each.whole * sent / each.shard.ranks, each.units) for each in volumes
    )
    if local is not None:
        # Local SGD reduces over replicas once in `steps` steps, and no compute overlaps with this reduction.
        over_replicas = over_replicas / local.steps
    # Runtimes that communicate once per step reduce at ZeRO 2 and 3 as at ZeRO 1, and gather weights before the step.
    once = (zero >= 2) & (setting.practice.once_per_step and box.pp > 1)
    share, fetched_separately = _unshard_seconds(setting, box, volumes, scatter if trained == 1 else None)
    ahead = share - fetched_separately
    at_three = fetched_separately * 2.0 + overlapped(ahead, forward) + overlapped(ahead + scatter, backward)
    at_two = overlapped(scatter, backward)
    each_micro_batch = np.where(once, 0.0, np.where(zero == 3, at_three, np.where(zero == 2, at_two, 0.0)))
    hidden = practice.replicas_hidden and local is None
    at_one = _zero_one_reduce_seconds(setting, volumes, sent, scatter)
    with_backward = np.where(zero == 1, at_one, 0.0) + np.where(once, scatter, 0.0) + hidden * over_replicas
    reduce = np.where(zero == 0, 0.0 if local else over_replicas, with_backward)
    room = backward
    if hidden:  # reductions and gathers during every backward leave less time
        during = np.where(zero >= 2, scatter, 0.0) + np.where(zero == 3, ahead, 0.0)
        room = np.maximum(backward - np.where(once, 0.0, during), 0.0)
    if practice.reduce_hidden and not setting.on_host:
        last = [
            np.where(
                zero == 0,
                0.0 if local else each.replicate.reduce(each.last * sent),
                each.scatter.gather(each.last * sent),
            )
            for each in volumes
        ]
        reduce = overlapped(reduce, room) + sum(last)
    fetched = np.where((zero == 3) | practice.gather_hidden, overlapped(share, forward), share)
    after = np.where((zero == 0) & (local is None), 0.0, (1.0 - hidden) * over_replicas) + np.where(
        once | (zero == 1) | (zero == 2), np.where(once, 1.0, trained) * fetched, 0.0
    )
    on_the_way = (
        np.where((zero == 3) & ~once, ahead, 0.0),
        np.where(once, 0.0, np.where(zero == 3, ahead + scatter, np.where(zero == 2, scatter, 0.0))),
    )
    return DpTraffic(each_micro_batch + fixed_point_seconds(setting, states), reduce + after, *on_the_way)


def reduction_volumes(setting: CostContext, box: PlanGrid, states: StateSizes) -> list[ReductionVolume]:
    """Returns the flat buffers that are reduced: the buffers of dense weights, and with expert parallelism also the
    buffers of expert weights."""
    size = setting.recipe.size
    dense = size * box.weight  # the largest of uneven shards determines the time
    coded = dp_group_rates(setting, box, setting.wire)
    plain = coded if setting.wire == UNCOMPRESSED else dp_group_rates(setting, box)
    volumes = [
        ReductionVolume(states.numel * dense, states.units, states.lone * dense, states.first * dense, plain[0], *coded)
    ]
    if box.layout.ep > 1:
        experts = states.experts * size
        coded = expert_group_rates(setting, box, setting.wire)
        plain = coded if setting.wire == UNCOMPRESSED else expert_group_rates(setting, box)
        volumes.append(ReductionVolume(experts, states.expert_units, 0.0 * experts, 0.0 * experts, plain[0], *coded))
    return volumes


def _zero_one_reduce_seconds(
    setting: CostContext, volumes: Sequence[ReductionVolume], sent: float, scatter: Array
) -> Array:
    """Returns the seconds in which ZeRO 1 reduces the gradients in the shard group. `sent` is the bytes of a gradient
    element divided by those of a weight element, `scatter` the seconds of one reduce-scatter for each parameter
    group."""
    if setting.practice.messages == UpdateMessages.owners:
        return np.asanyarray(sum(each.scatter.reduce(each.whole * sent, each.units) for each in volumes))
    if setting.practice.messages == UpdateMessages.whole and not setting.practice.reduce_hidden:
        return np.asanyarray(sum(each.scatter.reduce(each.whole * sent) for each in volumes))
    return scatter


def _weights_per_unit(setting: CostContext) -> int:
    return max(len(entry.own) for entry in setting.entries)


def _slice_copy_seconds(setting: CostContext, volume: ReductionVolume) -> Array:
    """Returns the host seconds to copy the slice of each weight and each shard rank out of a message with all
    weights."""
    return volume.units * _weights_per_unit(setting) * volume.shard.ranks * constants.SLICE_COPY_SECONDS


def _update_messages(setting: CostContext, box: PlanGrid, volume: ReductionVolume) -> Array:
    """Returns the number of collectives that gather the weights of `volume`, over GRID_AXES."""
    match setting.practice.messages:
        case UpdateMessages.whole:
            return np.where(box.zero == 1, 1.0, volume.units)
        case UpdateMessages.owners:
            weights = volume.units * _weights_per_unit(setting)
            return np.where(box.zero == 1, np.minimum(volume.shard.ranks, weights), volume.units)
    return volume.units


def _sent_fraction(setting: CostContext) -> float:
    """Returns the bytes of a gradient element in a reduction divided by the bytes of a weight element."""
    return (setting.practice.reduced or setting.recipe.gradient_size) / setting.recipe.size


def _unshard_seconds(
    setting: CostContext, box: PlanGrid, volumes: Sequence[ReductionVolume], scatter: Array | None
) -> tuple[Array, Array]:
    """Returns the seconds of the all-gathers of all weights, and the part of these seconds that is not prefetched.
    `scatter` is the seconds of a reduce-scatter of all gradients, which are also those of an all-gather of equally many
    bytes in equally many messages, or None if some weights are frozen and have no gradients."""
    once = shared_on_host(setting, box) if setting.shares_memory else 0.0
    moved = [each._replace(whole=each.whole * (1 - once), lone=each.lone * (1 - once)) for each in volumes]
    separately: Array = sum(
        each.shard.gather(each.lone) + _shared_unshard_seconds(once, np.minimum(each.units, 1)) for each in moved
    )
    if (
        scatter is not None
        and _sent_fraction(setting) == 1
        and setting.wire == UNCOMPRESSED
        and setting.practice.messages == UpdateMessages.layers
        and not setting.shares_memory
    ):
        return scatter, separately
    whole: Array = sum(
        each.shard.gather(each.whole, _update_messages(setting, box, each)) + _shared_unshard_seconds(once, each.units)
        for each in moved
    )
    if setting.practice.messages == UpdateMessages.whole:
        whole = whole + sum(np.where(box.zero == 1, _slice_copy_seconds(setting, each), 0.0) for each in moved)
    return whole, separately


def _shared_unshard_seconds(once: Array | float, units: Array) -> Array:
    """Returns the seconds to unshard `units` parameter groups. `once` is 1 where weights are stored once per host, else
    0; the result is 0 where `once` is 0."""
    return once * constants.SHARED_UNSHARD_SECONDS * units


def replicated_kv_reduce_seconds(setting: CostContext, box: PlanGrid, layers: Array) -> Array:
    """Returns the seconds per step in which tensor ranks all-reduce the gradients of those key and value weights that
    are replicated over tensor ranks (fewer key-value heads than tensor ranks). From ZeRO 1 on, each rank reduces only
    its shard. `layers` is the number of layers (r, o, layer run)."""
    whole = [
        sum(each.numel for each in entry.own if each.overlaps(box.tp) and not each.frozen) for entry in setting.entries
    ]
    if not any(whole):
        return broadcast_to_axis(0.0, "")
    size = (
        broadcast_to_axis(layers @ np.array(whole, dtype=float), "ro")
        * setting.recipe.gradient_size
        * np.where(box.zero >= 1, shard_fraction(box), 1.0)
    )
    return np.asanyarray(collective_rates(setting.fabric, box.tp, box.strides["tp"]).reduce(size))


def fixed_point_seconds(setting: CostContext, states: StateSizes) -> Array:
    """Returns the seconds to convert the gradients of a micro-batch to integers and to add them, or 0 if sums are not
    exact (`Recipe.exact`). Only memory traffic counts."""
    if not setting.recipe.exact:
        return 0.0 * states.numel
    moved = 2 * setting.recipe.size + 4 * setting.gradient
    return (states.numel + states.experts) * (
        moved / (setting.device.bandwidth * constants.MEMORY_BANDWIDTH_EFFICIENCY)
    )


def update_seconds(setting: CostContext, box: PlanGrid, states: StateSizes) -> Array:
    """Returns the seconds of the optimizer update on each rank class, if the device updates its whole shard. The update
    reads and writes main weights and states, and reads gradients. With main weights it also writes the weights in the
    compute dtype. Muon's matrix products are included."""
    recipe = setting.recipe
    master = recipe.state_size + optimizer_state_bytes(setting)
    moved = constants.OPTIMIZER_STATE_PASSES * (master + recipe.gradient_size) + (recipe.size if recipe.master else 0)
    trained = setting.trained(box.tp)
    return (states.shard * trained) * (
        moved / (setting.device.bandwidth * constants.MEMORY_BANDWIDTH_EFFICIENCY) + newton_schulz_seconds(setting)
    )
