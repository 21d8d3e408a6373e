"""Computes lower bounds for recompute and offload before either is priced: the least bytes and the least seconds of a
plan.

[Note: least bytes] Compare a plan that recomputes some blocks with one that recomputes all. In the backward of a
recomputed block, every other block stores at least its input, as when all recompute. In the backward of another block,
that block stores all of its activations, as a recomputed block does then, except for its input. So no plan needs less
than full recompute minus one block input. The bound is states, traffic buffers, and activations where all blocks
recompute, minus one such input. It is valid where a block without its attention core or its recomputable part saves no
less than its input.

[Note: least seconds] An offloaded optimizer hides nothing: the step changes by the time of the update. Weights on the
host cost at least the slowdown of the overlapped compute, and no micro-batch is faster than the link. Activations with
K seconds of transfer, overlapped with passes of P seconds, cost the larger of 2 K - (1 - slowdown) P and 2 K slowdown.
Both are linear in the number of recomputed blocks. So the minimum is at all blocks, at none, or where the two are
equal. The bound takes the rank that gains least, and no data-parallel traffic.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost import constants, offload
from meshwright.planner.cost.activation_peak import activation_peak
from meshwright.planner.cost.activations import activation_bytes
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
    """Stores bounds over `obsczf`, with one c for all choices of recompute. They are the bytes of a rank, as estimated
    and with the margin; the seconds more than without offload; and the seconds of the whole step on the link."""

    taken: Array
    safe: Array
    more: Array
    link: Array


def lower_bounds(pricer: CostModel, box: PlanGrid, offloads: tuple[tuple[Offload, ...], ...]) -> LowerBounds:
    """Returns the bounds of the plans of `box` with each of `offloads`, for any choice of recompute. The first of
    `offloads` offloads nothing."""
    given, box = box, replace(box, recompute=(RecomputeChoice(Recompute.full),), offload=offloads)
    setting, ranks = pricer.setting, pricer.ranks(box)
    states = pricer.states(box, ranks)
    tokens = box.tokens(setting.job.workload.sequence)
    alive = activation_peak(setting, box, tokens, ranks.of_order)
    moving = transient_buffers(setting, box, states, tokens)
    everything = persistent_bytes(setting, box, states)
    on_device = sum(everything) - sum(offloaded_bytes(setting, box, states, everything[1]))
    backward = np.maximum(alive.at_head + moving.at_head, alive.elsewhere + moving.elsewhere) - _max_block_input_bytes(
        pricer, box
    )
    passing_by = offload.swap_buffer_bytes(
        setting, box, largest_shard_numel(box, states), states.states_offloaded, states.weights_offloaded
    )
    taken, safe = reserved_bytes(setting, (on_device + np.maximum(backward, moving.at_end) + passing_by).max(axis=0))
    there, elsewhere = offload.offloaded_update_seconds(
        setting, box, sharded_numel(box, states), update_seconds(setting, box, states)
    )
    updating = there.max(axis=0) + elsewhere.max(axis=0)
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
    """Returns the input bytes of the block with the most of them, over (b, s); infinite where [Note: least bytes] is
    not valid."""
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
    """Returns the least seconds that a micro-batch of each of `ranks` waits for offloaded activations, its recompute
    included. `each`: seconds of one byte in one direction; [Note: least seconds]."""
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
