"""Computes lower bounds on the memory and the step time of a plan over all choices of recompute and offload. The search
(branch_and_bound.py) computes the cost of these choices only if the bounds allow the best plan.

[Note: least bytes] Compare a plan that recomputes some blocks with a plan that recomputes all blocks. During the
backward of a recomputed block, every other block stores at least its input, as with full recompute. During the backward
of a block that is not recomputed, this block stores all its activations. With full recompute it would also store its
input. So no plan needs less memory than full recompute minus one block input. The bound is the sum of states,
communication buffers and the activations of full recompute, minus one block input. The bound has a requirement: even
without its attention core or its recomputable tensors, a block must save at least as many bytes as its input has.

[Note: least seconds] The update of an offloaded optimizer overlaps with nothing, so its whole time adds to the step.
Offloaded weights add at least the slowdown of the compute that overlaps with the transfer. No micro-batch takes less
time than the transfer of its weights over the link. Let the transfer of activations take K seconds in each direction.
Let the forward and the backward, which overlap with the transfer, take P seconds together. Then the transfer adds the
larger of 2 K - (1 - slowdown) P and 2 K slowdown. Both expressions are linear in the number of recomputed blocks. Their
maximum is therefore smallest with all blocks recomputed, with no block recomputed, or where both expressions are equal.
The bound uses the rank with the least added time, and ignores data-parallel traffic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost import constants, offload
from meshwright.planner.cost.activations import activation_peak, layer_activations
from meshwright.planner.cost.communicators import driver_bytes
from meshwright.planner.cost.cost_model import CostModel, RankClasses, sharded_numel, sum_layers
from meshwright.planner.cost.dp_comm import dp_traffic, update_seconds
from meshwright.planner.cost.memory import (
    StateSizes,
    largest_shard_numel,
    offloaded_bytes,
    persistent_bytes,
    reserved_bytes,
    transient_buffers,
)
from meshwright.planner.cost.pipeline import (
    PassSplit,
    any_split_backward,
    min_bubble_seconds,
    slowest_rank_and_bubble,
)
from meshwright.planner.cost.plan_grid import Array, PlanGrid, RecomputeChoice, broadcast_to_axis
from meshwright.planner.cost.step_terms import step_terms
from meshwright.spec.enums import Offload, Recompute


class LowerBounds(NamedTuple):
    """Lower bounds over the axes `obsczf` of GRID_AXES. The axis c has length 1, since a bound is valid for all
    recompute choices.

    `taken` is the reserved bytes of a rank, `safe` these bytes with the safety margin. `more` is the seconds that
    offload adds to a step. `link` is the seconds of all weight transfers of a step, which no step can undercut.
    """

    taken: Array
    safe: Array
    more: Array
    link: Array


def lower_bounds(pricer: CostModel, box: PlanGrid, offloads: tuple[tuple[Offload, ...], ...]) -> LowerBounds:
    """Returns the bounds for the plans of `box` with each offload choice in `offloads`, for any recompute choice.
    `more` is relative to the first element of `offloads`: no offload, or the pinned choice."""
    given, box = box, replace(box, recompute=(RecomputeChoice(Recompute.full),), offload=offloads)
    setting, ranks = pricer.setting, pricer.ranks(box)
    states = pricer.states(box, ranks)
    tokens = box.tokens(setting.job.workload.sequence)
    alive = activation_peak(setting, box, ranks.of_order)
    moving = transient_buffers(setting, box, states, tokens)
    everything = persistent_bytes(setting, box, states)
    on_device = sum(everything) - sum(offloaded_bytes(setting, box, states, everything[1]))
    backward = np.maximum(
        alive.at_head + moving.at_head, alive.other_backward + moving.other_backward
    ) - _max_block_input_bytes(pricer, box)
    passing_by = offload.swap_buffer_bytes(
        setting, box, largest_shard_numel(box, states), states.states_offloaded, states.weights_offloaded
    )
    at_peak = (on_device + np.maximum(backward, moving.at_end) + passing_by).max(axis=0)
    taken, safe = reserved_bytes(setting, at_peak, driver_bytes(setting, box))
    device_update, host_update = offload.offloaded_update_seconds(
        setting, box, sharded_numel(box, states), update_seconds(setting, box, states)
    )
    updating = device_update.max(axis=0) + host_update.max(axis=0)
    more, link = updating - updating[..., :1], broadcast_to_axis(0.0, "")[0]
    if setting.host_bandwidth:
        where, counts = offload.offload_fractions(box), broadcast_to_axis(box.counts, "b")[0]
        weights = (
            where.parameters * sharded_numel(box, states, zero=3) * (2.0 * setting.recipe.size / setting.host_bandwidth)
        )
        waits = constants.OVERLAP_SLOWDOWN * weights + where.activations * _min_offload_wait_seconds(
            pricer, given, ranks, 1.0 / setting.host_bandwidth
        )
        more, link = more + counts * waits.min(axis=0), counts * weights.max(axis=0)
    if setting.storage_bandwidth:
        where, counts = offload.offload_fractions(box), broadcast_to_axis(box.counts, "b")[0]
        weights = (
            where.parameters_files
            * sharded_numel(box, states, zero=3)
            * (2.0 * setting.recipe.size / setting.storage_bandwidth)
        )
        waits = constants.OVERLAP_SLOWDOWN * weights + where.activations_files * _min_offload_wait_seconds(
            pricer, given, ranks, offload.disk_seconds_per_byte(setting)
        )
        more = more + counts * waits.min(axis=0)
        link = np.maximum(link, counts * weights.max(axis=0))
    return LowerBounds(taken, safe, more, link)


def _max_block_input_bytes(pricer: CostModel, box: PlanGrid) -> Array:
    """Returns the bytes of the largest block input, over axes (b, s) of GRID_AXES. If the model has no blocks, or does
    not meet the requirement of [Note: least bytes], returns infinity, with which the bound excludes no plan."""
    setting = pricer.setting
    blocks = [
        layer for entry, layer in zip(setting.entries, layer_activations(setting, box), strict=True) if entry.is_block
    ]
    if not blocks:
        return broadcast_to_axis(np.inf, "")
    contains_everywhere = all(
        (each.whole - np.maximum(each.core, each.derived) >= each.entering).all() for each in blocks
    )
    return (
        broadcast_to_axis(np.maximum.reduce([each.entering for each in blocks]), "bs")
        if contains_everywhere
        else broadcast_to_axis(np.inf, "")
    )


def _min_offload_wait_seconds(pricer: CostModel, box: PlanGrid, ranks: RankClasses, each: float) -> Array:
    """Returns the minimum seconds that recompute and offload of activations together add to a micro-batch, for each
    rank class in `ranks` ([Note: least seconds]). `each` is the seconds per byte in one direction. Returns 0, which is
    always a valid lower bound, if the first recompute choice of `box` is not `none`."""
    if box.recompute[0] != RecomputeChoice(Recompute.none):
        return broadcast_to_axis(0.0, "")
    box = replace(box, recompute=(RecomputeChoice(Recompute.none), RecomputeChoice(Recompute.full), *box.recompute[1:]))
    one, slowed = pricer.passes(box, ranks), constants.OVERLAP_SLOWDOWN
    again = one.backward - one.backward[..., :1, :, :]
    way = 2.0 * pricer.saved(box, ranks) * each
    seen = again + way - (1.0 - slowed) * (one.forward + one.backward)
    hidden = again + slowed * way
    (seen_none, seen_whole), (hidden_none, hidden_whole) = (
        np.moveaxis(line[..., :2, :, :], -3, 0)[..., None, :, :] for line in (seen, hidden)
    )
    before, after = seen_none - hidden_none, hidden_whole - seen_whole
    part = np.clip(np.divide(before, before + after, out=np.zeros_like(before), where=before * after > 0), 0.0, 1.0)
    equal = np.where(part > 0, seen_none + part * (seen_whole - seen_none), np.inf)
    return np.minimum(np.maximum(seen, hidden).min(axis=-3, keepdims=True), equal)


class StepFloor(NamedTuple):
    """A lower bound of the seconds of a step over axes (o, b, s) of GRID_AXES, and the longest passes of one
    micro-batch on any rank with full recompute, over GRID_AXES (they vary along b)."""

    seconds: Array
    forward: Array
    backward: Array


def step_floor(pricer: CostModel, box: PlanGrid) -> StepFloor:
    """Returns a lower bound of the seconds of a step without data-parallel communication. The bound is valid for all
    ZeRO, recompute and offload choices.

    The bound is the sum of compute, the communication of tensor, context and expert ranks, and the bubble.
    """
    ranks, counts = pricer.ranks(box), broadcast_to_axis(box.counts, "b")
    one, (context_forward, context_backward, dispatch) = pricer.layers(box)
    forward, backward = sum_layers(
        ranks.layers,
        np.stack(
            [
                one.forward + one.tensor_forward + context_forward + dispatch,
                one.backward + one.tensor_backward + context_backward + dispatch,
            ]
        ),
    )
    each, numbers = forward + backward, broadcast_to_axis(ranks.numbers, "ro")
    longest = each.max(axis=0, keepdims=True)
    if any_split_backward(box.orders) and box.pp > 1:
        weights = sum_layers(ranks.layers * pricer.blocks, one.weights[None])[0]
        bubble = min_bubble_seconds(box.orders, PassSplit(forward, backward - weights, weights), numbers)
    else:
        turns = broadcast_to_axis([order.virtual_stages for order in box.orders], "o")
        longest, bubble = slowest_rank_and_bubble(each, numbers, turns)
    passes = (part.max(axis=(0, 1, 3), keepdims=True) for part in (forward, each))
    return StepFloor(np.asarray((counts * longest + bubble)[0, ..., 0, 0, 0]), *passes)


def data_floor(pricer: CostModel, box: PlanGrid, floor: StepFloor) -> Array:
    """Returns a lower bound of the seconds that a step takes in addition to `floor`, over axes (o, b, z) of GRID_AXES:
    of data-parallel communication, the update, and the terms of a step. The bound is valid for all recompute choices.

    The bound is the communication of the smallest buffers of any rank and schedule, which overlaps with the longest
    passes. Smaller buffers and longer passes never make the exposed communication longer.
    """
    setting, states = pricer.setting, pricer.states(box, pricer.ranks(box))
    updating, on_host = offload.offloaded_update_seconds(
        setting, box, sharded_numel(box, states), update_seconds(setting, box, states)
    )
    smallest = StateSizes(*(part.min(axis=(0, 1), keepdims=True) for part in states))
    data = dp_traffic(setting, box, smallest, floor.forward, floor.backward)
    each = broadcast_to_axis(box.counts, "b") * data.each + data.once + step_terms(setting, box).sum(axis=0)
    return np.asarray((each[0] + updating.max(axis=0) + on_host.max(axis=0)).min(axis=5)[:, :, 0, 0])
