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
from meshwright.planner.cost.activations import activation_bytes, activation_peak
from meshwright.planner.cost.cost_model import CostModel, RankClasses, sharded_numel
from meshwright.planner.cost.dp_comm import update_seconds
from meshwright.planner.cost.memory import (
    largest_shard_numel,
    offloaded_bytes,
    persistent_bytes,
    reserved_bytes,
    transient_buffers,
)
from meshwright.planner.cost.plan_grid import Array, PlanGrid, RecomputeChoice, broadcast_to_axis
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
    alive = activation_peak(setting, box, tokens, ranks.of_order)
    moving = transient_buffers(setting, box, states, tokens)
    everything = persistent_bytes(setting, box, states)
    on_device = sum(everything) - sum(offloaded_bytes(setting, box, states, everything[1]))
    backward = np.maximum(
        alive.at_head + moving.at_head, alive.other_backward + moving.other_backward
    ) - _max_block_input_bytes(pricer, box)
    passing_by = offload.swap_buffer_bytes(
        setting, box, largest_shard_numel(box, states), states.states_offloaded, states.weights_offloaded
    )
    taken, safe = reserved_bytes(setting, (on_device + np.maximum(backward, moving.at_end) + passing_by).max(axis=0))
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
        activation_bytes(setting, entry, box, box.tokens(setting.job.workload.sequence))
        for entry in setting.entries
        if entry.is_block
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
