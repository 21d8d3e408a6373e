"""Computes the bytes on each class of equal pipeline ranks, by kind of memory. cost_model.py and the search use them.

- Parameters: flat weights in the compute dtype. A rank stores full buffers, or at ZeRO 3 a shard of each.
- Gradients: flat gradients with as many elements as the weights. A rank stores full buffers, or from ZeRO 2 on a shard
  of each.
- Optimizer: main weights and states. A rank stores them for full buffers, or from ZeRO 1 on for a shard of each.
- Activations: saved activations of all micro-batches in flight, plus the transient peak of a backward.
- Buffers: transient full gradients before they are reduced to shards (ZeRO 2 and 3), gathered weights (ZeRO 3),
  pipeline messages, staging buffers, casts to float8, and conversions of an update.
- Host and files: the offloaded bytes of these kinds.

The module also computes the sizes of the flat buffers of pipeline ranks for a whole plan grid (`state_sizes`).

Sources: Rajbhandari et al., ZeRO, section 3; Korthikanti et al., arXiv 2205.05198, for activations under tensor and
sequence parallelism.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost import constants
from meshwright.planner.cost import optimizer as asked
from meshwright.planner.cost.activations import ActivationPeak
from meshwright.planner.cost.cost_context import CostContext
from meshwright.planner.cost.cp_ep_comm import shared_buffer_bytes
from meshwright.planner.cost.float8 import cast_bytes, cast_numel
from meshwright.planner.cost.offload import offload_fractions, swap_buffer_bytes
from meshwright.planner.cost.optimizer import (
    full_tensor_bytes,
    optimizer_state_bytes,
    shared_full_tensor_bytes,
    update_temp_bytes,
    updates_in_chunks,
)
from meshwright.planner.cost.plan_grid import (
    Array,
    PlanGrid,
    TpEpShape,
    broadcast_to_axis,
    pad_last_axis,
    shard_fraction,
    stack_schedules,
)
from meshwright.planner.cost.rank_contents import RankContents
from meshwright.spec.layout import ALIGN_NUMEL, resident_numel, shard_numel


class StateSizes(NamedTuple):
    """The elements of the flat buffers of each rank class, over GRID_AXES. `numel` is the elements of all dense
    parameter groups, `units` the number of these groups. The fields from `lone` to `largest` are those of
    `RankBuckets.other`. `staged_once`, `staged_twice` and `staged_often` are the lengths in `StageBuckets.staged`.

    With expert parallelism, the experts of each layer form a separate parameter group. `experts` is the elements of all
    these groups, `expert_units` the number of groups, and `expert` the elements of the largest. `shard` is the elements
    of the shards of a rank, experts included. `states_offloaded` and `weights_offloaded` are the elements in these
    shards whose states or weights are offloaded. `casts` is the elements of the weights with float8 products.
    """

    numel: Array
    units: Array
    lone: Array
    first: Array
    last: Array
    opening: Array
    closing: Array
    filling: Array
    largest: Array
    staged_once: Array
    staged_twice: Array
    staged_often: Array
    experts: Array
    expert_units: Array
    expert: Array
    shard: Array
    states_offloaded: Array
    weights_offloaded: Array
    casts: Array


class MemoryFootprint(NamedTuple):
    """The bytes of each rank class over GRID_AXES: on the device by kind, offloaded to host memory, and offloaded to
    files."""

    parameters: Array
    gradients: Array
    optimizer: Array
    activations: Array
    buffers: Array
    host: Array
    files: Array

    @property
    def total(self) -> Array:
        """Returns the bytes on the device at the memory peak."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers


def memory_footprint(
    setting: CostContext, box: PlanGrid, states: StateSizes, alive: ActivationPeak, tokens: Array
) -> MemoryFootprint:
    """Returns all bytes of each rank class. `alive` is the activation peak, `tokens` the tokens of a micro-batch
    (b)."""
    where = offload_fractions(box)
    parameters, gradients, stored = persistent_bytes(setting, box, states)
    weights_offloaded_bytes, sums_offloaded_bytes, states_offloaded_bytes = offloaded_bytes(
        setting, box, states, gradients
    )
    moving = transient_buffers(setting, box, states, tokens)
    at_head, other_backward = alive.at_head + moving.at_head, alive.other_backward + moving.other_backward
    absent = absent_gradient_bytes(setting, box, gradients)
    peak = np.maximum(np.maximum(at_head, other_backward) - absent, moving.at_end)
    activations = np.where(at_head > other_backward, alive.at_head, alive.other_backward)
    offloaded_states = states_offloaded_bytes + offloaded_weight_copy_bytes(setting, box, states)
    on_host = (
        (where.parameters > 0) * weights_offloaded_bytes
        + sums_offloaded_bytes
        + (where.optimizer > 0) * offloaded_states
    )
    in_files = (where.parameters_files > 0) * weights_offloaded_bytes + (where.optimizer_files > 0) * offloaded_states
    passing_by = swap_buffer_bytes(
        setting, box, largest_shard_numel(box, states), states.states_offloaded, states.weights_offloaded
    )
    return MemoryFootprint(
        parameters - weights_offloaded_bytes,
        gradients - sums_offloaded_bytes,
        stored - states_offloaded_bytes,
        activations,
        peak - activations + passing_by,
        on_host + alive.on_host,
        in_files + alive.in_files,
    )


def persistent_bytes(setting: CostContext, box: PlanGrid, states: StateSizes) -> tuple[Array, Array, Array]:
    """Returns the bytes of parameters, of gradients and of optimizer states on each rank class, including offloaded
    bytes."""
    recipe, zero = setting.recipe, box.zero
    whole, shard = states.numel + states.experts, states.shard
    parameters = np.where(zero == 3, shard, whole) * recipe.size
    gradients = np.where(zero >= 2, shard, whole) * setting.gradient + np.where(
        zero == 0, states.numel * setting.practice.bucketed * (box.data > 1), 0
    )
    if setting.practice.once_per_step and box.pp > 1:
        parameters = parameters + np.where(zero == 3, whole, 0) * recipe.size
        gradients = gradients + np.where(zero >= 2, whole, 0) * (setting.practice.reduced or setting.gradient)
    trained = setting.trained(box.tp)
    updated = np.where(zero >= 1, shard, whole)
    gradients = (gradients + asked.residual_bytes(setting, box, whole, updated)) * trained
    stored = (
        updated * (recipe.master + optimizer_state_bytes(setting)) + asked.diloco_state_bytes(setting, updated)
    ) * trained
    return parameters, gradients, stored


def absent_gradient_bytes(setting: CostContext, box: PlanGrid, gradients: Array) -> Array:
    """Returns the bytes of gradients that do not exist yet when activations have their peak, at the beginning of a
    backward (`RuntimeModel.fleeting`). The first gradient is that of the head. `gradients` is the bytes of all
    gradients of the rank."""
    if not setting.practice.fleeting:
        return 0.0 * gradients
    first = setting.head.largest(box.cut) * setting.gradient if setting.head is not None else 0
    return np.maximum(gradients - first, 0.0) * broadcast_to_axis(box.counts == 1, "b")


def offloaded_bytes(
    setting: CostContext, box: PlanGrid, states: StateSizes, gradients: Array
) -> tuple[Array, Array, Array]:
    """Returns the offloaded bytes of parameters, of gradients and of optimizer states, in host memory and in files
    together. `gradients` is the bytes of all gradients of the rank."""
    if not any(box.offload):
        return (broadcast_to_axis(0.0, ""),) * 3
    weights, sums, optimizer = (removed > 0 for removed in offload_fractions(box).offloaded)
    trained, each = (
        setting.trained(box.tp),
        setting.recipe.master + optimizer_state_bytes(setting),
    )
    return (
        weights * states.weights_offloaded * setting.recipe.size,
        sums * gradients,
        optimizer * states.states_offloaded * each * trained,
    )


def offloaded_weight_copy_bytes(setting: CostContext, box: PlanGrid, states: StateSizes) -> Array:
    """Returns the bytes of the copy of resident weights that is stored with offloaded optimizer states, in host memory
    or in a file. The CPU updates this copy if there are no main weights. The result is 0 on a CPU rank, with main
    weights, and for weights that are offloaded themselves."""
    if setting.on_host or setting.recipe.master or not any(box.offload):
        return broadcast_to_axis(0.0, "")
    weights, _, optimizer = (removed > 0 for removed in offload_fractions(box).offloaded)
    stay = np.maximum(states.states_offloaded - weights * states.weights_offloaded, 0)
    return optimizer * stay * setting.recipe.size * setting.trained(box.tp)


class TransientBuffers(NamedTuple):
    """The bytes of transient and permanent buffers, over GRID_AXES: during the backward of the head, during the
    backward of any other layer, and during the update."""

    at_head: Array
    other_backward: Array
    at_end: Array


def transient_buffers(setting: CostContext, box: PlanGrid, states: StateSizes, tokens: Array) -> TransientBuffers:
    """Returns the bytes of the buffers. `tokens` is the tokens of a micro-batch (b).

    ZeRO 2 and 3 reduce each parameter group as soon as its gradient is complete. The last reductions of a backward
    finish during the next backward. With several micro-batches, the buffers of these reductions therefore exist at the
    peak of activations. Ranks of one host reduce through permanent staging buffers. ZeRO 3 stores the full weights of
    the running layer and of the prefetched layer, unless the ranks of a host share the full weights. Casts of weights
    to float8 exist until the last backward.
    """
    size, head, where = setting.recipe.size, setting.head, offload_fractions(box)
    zero, shards = box.zero, broadcast_to_axis(box.holders, "z")
    again = broadcast_to_axis(np.minimum(box.counts - 1, constants.MAX_INFLIGHT_REDUCE), "b")
    before = np.where(states.units > 1, again > 0, again / constants.MAX_INFLIGHT_REDUCE)
    sent_whole = setting.on_host and not setting.shares_memory
    wide = setting.recipe.gradient_size / size
    in_slots, borrowed = staging_buffers(setting, box, states)
    copies = np.where(shards > 1, constants.GLOO_REDUCE_BUFFERS if sent_whole else 1 - in_slots, 1)
    # From the second micro-batch on, a reduced gradient needs a buffer until it is accumulated.
    pending = shard_fraction(box) * (shards > 1)
    left = states.opening * before * (copies + pending * (again > 1)) * wide
    filling = np.maximum(states.filling, states.expert)
    waiting = np.maximum(left, states.closing * (copies + pending * (again > 0)) * wide) + filling * wide * (
        1 - in_slots
    )
    tied, fetched = tied_vocab_numel(setting, box), 1 - shared_on_host(setting, box)
    last = np.maximum(states.last, tied)
    other_backward = np.where(zero == 3, waiting + 2 * filling * fetched, np.where(zero == 2, waiting, 0)) + np.where(
        zero >= 2, tied * wide, 0
    )
    at_head = np.where(zero == 3, left + last * fetched, np.where(zero == 2, left, 0))
    if head is not None:
        cut, whole = TpEpShape(box.tp), head.largest(TpEpShape(box.tp))
        separate_here = setting.separate_wgrad_numel(head, cut, box.pp > 1) if box.loss_chunks == 1 else whole
        gradient = separate_here + np.where(zero >= 2, last * (1 - in_slots), 0)
        at_head = at_head + np.maximum(
            gradient - broadcast_to_axis(tokens * (head.layer.fixed_split / box.tp / size), "b"), 0
        )
    message_buffers = constants.P2P_BUFFERS_SHARED_MEMORY if setting.shares_memory else constants.P2P_BUFFERS
    messages = message_buffers * p2p_message_bytes(setting, box, tokens) / size
    messages = messages + cast_bytes(box, states.casts) / size
    at_head, other_backward = at_head + messages, other_backward + messages
    sent = (states.numel + states.experts) * size if sent_whole else 0
    largest = largest_shard_numel(box, states)
    there = where.optimizer + where.optimizer_files
    removed = there + where.parameters_files * (not setting.recipe.master)
    some = np.minimum(largest, constants.CHUNK_ELEMENTS) if setting.on_host else largest * (1.0 - there)
    at_once = some if updates_in_chunks(setting) else np.where(removed > 0, some, largest)
    # The device updates resident states, so it fetches the offloaded gradients of these states.
    back = where.gradients * (1.0 - there) * largest * setting.gradient
    master = (
        at_once * update_temp_bytes(setting)
        + back
        + largest * full_tensor_bytes(setting) * ((shards > 1) | (box.tp > 1))
    )
    at_end = np.maximum(np.where((zero >= 1) & (zero <= 2) & (shards > 1), sent, 0), master)
    stays = largest * shared_full_tensor_bytes(setting) * ((shards > 1) | (box.tp > 1)) + borrowed * wide * size
    stays = stays + broadcast_to_axis(shared_buffer_bytes(setting, box, tokens), "b")
    return TransientBuffers(at_head * size + stays, other_backward * size + stays, at_end + stays)


def shared_on_host(setting: CostContext, box: PlanGrid) -> Array:
    """Returns 1 where ranks share full weights in host memory, else 0, over GRID_AXES. Ranks share full weights at ZeRO
    3 if all ranks are CPU processes of one host, a shard group has several ranks, and weights are not offloaded.
    Source: runtime/zero/group_weights.py."""
    where = offload_fractions(box)
    stay = where.parameters + where.parameters_files == 0
    return (stay & (box.zero == 3) & (broadcast_to_axis(box.holders, "z") > 1)) * (1.0 * setting.shares_memory)


def staging_buffers(setting: CostContext, box: PlanGrid, states: StateSizes) -> tuple[Array, Array]:
    """Returns two arrays over GRID_AXES. The first is 1 where gradients are written to staging buffers that other ranks
    of the host read, else 0. The second is the elements of these buffers."""
    in_slots = ((box.zero >= 2) & (broadcast_to_axis(box.holders, "z") > 1)) * (1.0 * setting.shares_memory)
    passes = broadcast_to_axis(box.counts, "b")
    dense = np.where(passes > 2, states.staged_often, np.where(passes > 1, states.staged_twice, states.staged_once))
    experts = np.minimum(states.expert_units * passes, constants.MAX_INFLIGHT_REDUCE + 1) * states.expert
    return in_slots, in_slots * (dense + experts)


def tied_vocab_numel(setting: CostContext, box: PlanGrid) -> float:
    """Returns the elements of a tied vocabulary without a pipeline. The rank stores the full gradient of this weight
    from the backward of the head until the backward of the embedding. With a pipeline, the first and the last rank have
    separate replicas of the weight, and the result is 0."""
    return (
        float(sum(entry.aligned(box.cut) for entry in setting.entries if entry.own_bucket and not entry.copy))
        if box.pp == 1
        else 0.0
    )


def largest_shard_numel(box: PlanGrid, states: StateSizes) -> Array:
    """Returns the maximum number of elements of one parameter group that a rank updates: of its shard from ZeRO 1 on,
    else of the full group."""
    return np.maximum(
        states.largest * np.where(box.zero >= 1, shard_fraction(box), 1),
        states.expert / broadcast_to_axis(box.expert_holders, "z"),
    )


def p2p_message_bytes(setting: CostContext, box: PlanGrid, tokens: Array) -> Array:
    """Returns the bytes of the hidden states in a message to the next pipeline rank, over axes (b, s) of GRID_AXES, or
    0 without a pipeline."""
    hidden = (
        max((entry.layer.output for entry in setting.entries if entry.is_block), default=0.0) * setting.recipe.size
        if box.pp > 1
        else 0.0
    )
    return broadcast_to_axis((tokens * hidden)[:, None] / np.where(box.sequence_parallel, box.tp, 1), "bs")


def reserved_bytes(setting: CostContext, allocated: Array, driver: Array | float) -> tuple[Array, Array]:
    """Returns the bytes that the allocator reserves for `allocated` bytes, plus the bytes outside of the allocator
    (`driver_bytes`): the expected value, and a value with a safety margin. Both are equal on a CPU."""
    if setting.on_host:
        return allocated + driver, allocated + driver
    return (
        allocated * constants.ALLOCATOR_OVERHEAD + driver,
        allocated * constants.SAFE_ALLOCATOR_OVERHEAD + driver,
    )


def memory_limit(setting: CostContext) -> float:
    """Returns the bytes that a rank may use on its device: the usable memory, or the user's memory budget if it is
    lower."""
    return min(physical_limit(setting), setting.job.cluster.budget or math.inf)


def physical_limit(setting: CostContext) -> float:
    """Returns the usable memory of a device in bytes. A plan is tight if its reserved bytes with the safety margin
    exceed this value. A user's budget is compared only with the expected reserved bytes."""
    return setting.device.memory * constants.USABLE_MEMORY_FRACTION


def state_sizes(setting: CostContext, box: PlanGrid, ranks: Sequence[RankContents], layers: Array) -> StateSizes:
    """Returns the sizes of the flat buffers of each rank class. A buffer contains a bucket, or at ZeRO 3 a layer.
    `layers` is the number of layers (r, o, layer run)."""
    three = [shards.zero == 3 for shards in box.shards]
    expert_numel = _expert_numel(setting, box, layers)
    bucket = max(-(-box.bucket // setting.recipe.size), 1)
    below = None if all(three) else _shared_buffer_numel(box, ranks, bucket)
    per_layer = _shared_buffer_numel(box, ranks, None) if any(three) else None
    found = below or per_layer or []
    if below is not None and per_layer is not None:
        found = [
            np.where(broadcast_to_axis(three, "z"), last, first) for first, last in zip(below, per_layer, strict=True)
        ]
    (numel, *runs), (experts, *expert_runs), other = found[:4], expert_numel[:4], found[4:]
    casts = np.array([cast_numel(setting, entry.layer, box.cut) for entry in setting.entries], dtype=float)
    return StateSizes(
        numel,
        *other,
        experts,
        *expert_numel[4:],
        *(run + more for run, more in zip(runs, expert_runs, strict=True)),
        broadcast_to_axis(layers @ casts, "ro"),
    )  # type: ignore[call-arg]


def _shared_buffer_numel(box: PlanGrid, ranks: Sequence[RankContents], bucket: int | None) -> list[Array]:
    """Returns the result of `_buffer_numel`, which grids and jobs share if they differ only in other choices."""
    shares = (box.offload_share, box.weights_share)
    if any(isinstance(share, np.ndarray) for share in shares):
        return _buffer_numel(box, ranks, bucket)
    holders = tuple(choice.holders for choice in box.shards)
    key, known = (tuple(ranks), box.cut, bucket, holders, box.weight, box.heft, *shares), ranks[0].units.shard_numel
    if key not in known:
        known[key] = _buffer_numel(box, ranks, bucket)
    return known[key]


def _buffer_numel(box: PlanGrid, ranks: Sequence[RankContents], bucket: int | None) -> list[Array]:
    """Returns a list of arrays. The first four count elements over axes (r, o, z, f) of GRID_AXES: of the padded
    buffers, of the rank's shards, and of these shards the elements with offloaded states and with offloaded weights.
    Then the fields of `RankBuckets.other` follow, over axes (r, o) of GRID_AXES."""
    found = [stored.flat(box.cut, bucket) for stored in ranks]
    width = max(len(each.lengths) for each in found)
    lengths, times = np.zeros((len(found), width), dtype=np.int64), []
    for o, each in enumerate(found):
        lengths[o, : len(each.lengths)] = each.lengths
        times.append(pad_last_axis(each.times, width))
    whole, number = padded_numel(lengths[:, :, None], box.holders), stack_schedules(times, kinds=0, orders=0)
    even = whole // box.holders
    own = shard_numel(whole, box.holders, box.heft) if box.heft else even if box.weight == 1.0 else box.weight * even
    sums = [
        (number @ each.reshape(*lengths.shape, -1)).reshape(*number.shape[:2], len(box.holders), -1).swapaxes(0, 1)
        for each in (whole, *_shard_numel(box, own))
    ]
    other = stack_schedules([each.other for each in found], kinds=1, orders=2)
    return [*(broadcast_to_axis(each, "rozf") for each in sums), *(broadcast_to_axis(values, "ro") for values in other)]


def _shard_numel(box: PlanGrid, own: Array) -> tuple[Array, Array, Array]:
    """Returns the elements of the shards `own`, and the elements with offloaded states and with offloaded weights. All
    arrays have an additional last axis: the offload fractions whose costs are computed together. This axis has length 1
    in the first array, and in an array whose fractions are all 100 %."""
    shares = (
        np.rint(100 * np.asarray(share)).astype(np.int64).reshape(-1)
        for share in (box.offload_share, box.weights_share)
    )
    states_offloaded, weights_offloaded = (
        own[..., None] if (share == 100).all() else _offloaded_numel(own[..., None], share) for share in shares
    )
    return own[..., None], states_offloaded, weights_offloaded


def _offloaded_numel(own: Array, share: Array) -> Array:
    """Returns the offloaded elements of the shards `own`. `share` is the offloaded percentage. The result is
    approximate if the exact length of the shards is not known."""
    return own - resident_numel(own, share) if own.dtype == np.int64 else own * share / 100


def _expert_numel(setting: CostContext, box: PlanGrid, layers: Array) -> list[Array]:
    """Returns arrays for the experts of each rank class under expert parallelism: elements of padded buffers, of the
    rank's shards, of these shards with offloaded states, and with offloaded weights. Then the number of layers with
    experts and the elements of the largest group follow. Without expert parallelism all arrays are 0."""
    if box.layout.ep == 1:
        return [broadcast_to_axis(0.0, "")] * 6
    each = np.array([entry.experts(box.cut) for entry in setting.entries])
    whole = padded_numel(each[:, None], box.expert_holders)
    sums = [
        (layers @ part.reshape(len(each), -1)).reshape(*layers.shape[:2], len(box.holders), -1)
        for part in (whole, *_shard_numel(box, whole // box.expert_holders))
    ]
    largest = ((layers > 0) * each).max(axis=-1)
    return [
        *(broadcast_to_axis(part, "rozf") for part in sums),
        broadcast_to_axis(layers @ (each > 0), "ro"),
        broadcast_to_axis(largest, "ro"),
    ]


def padded_numel(elements: Array, holders: Array) -> Array:
    """Returns the number of elements after padding to equal, aligned shards on `holders` ranks."""
    line = ALIGN_NUMEL * holders
    return -(-elements // line) * line
