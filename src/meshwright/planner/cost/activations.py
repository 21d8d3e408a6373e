"""Computes the memory of activations for memory.py and cost_model.py: the bytes of one layer, and the peak on each
class of equal pipeline ranks.

`activation_bytes` computes the activations that a layer saves for backward, and the transient memory of its backward.

[Note: in pieces] torch.compile does not trace into some layers of this project: expert layers, and layers with a
deferred weight gradient. So torch.compile produces several graphs per block, with these layers between the graphs. The
activation function of a gated feed-forward and the next matrix product are then in different graphs, so the result of
the activation function is saved.

`activation_peak` computes the peak of saved activations on each class of pipeline ranks, with recompute and offload.
The points of a step at which the memory of a rank can peak are called moments. The schedule determines the moments, and
the number of layers of each layer run with saved activations at each moment (rank_contents.py). The peak is the moment
with the most bytes.

Source: Korthikanti et al., arXiv 2205.05198, for activations under tensor and sequence parallelism.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost import constants
from meshwright.planner.cost.compute import local_fraction
from meshwright.planner.cost.cost_context import BLOCK, HEAD, CostContext, LayerRun
from meshwright.planner.cost.cp_ep_comm import cp_backward_elements
from meshwright.planner.cost.offload import offload_fractions
from meshwright.planner.cost.pipeline import any_split_backward
from meshwright.planner.cost.plan_grid import (
    GRID_AXES,
    Array,
    PlanGrid,
    RecomputeChoice,
    are_blocks_compiled,
    broadcast_to_axis,
    pad_last_axis,
    stack_schedules,
)
from meshwright.planner.cost.rank_contents import PeakMoments, RankContents
from meshwright.spec.enums import PER_BLOCK_RECOMPUTE, Recompute
from meshwright.spec.model import LayerSpec


class ActivationBytes(NamedTuple):
    """The activation bytes of one layer for one micro-batch, over axes (b, s) of GRID_AXES.

    `whole` is saved for backward without recompute, `entering` with full recompute. `core` is the part of `whole` that
    belongs to the attention core. `derived` is the part of `whole` that selective recompute does not save, and
    `at_once` is the peak of the recomputed tensors in backward. `passing` is the additional transient memory of
    backward. `gates` is saved in addition by a compiled block if weight gradients are deferred. `deferred` is stored
    from B (the gradients of inputs) until W (the weight gradients).
    """

    whole: Array
    entering: Array
    core: Array
    derived: Array
    at_once: Array
    passing: Array
    gates: Array
    deferred: Array

    def until_w(self, kinds: Sequence[Recompute]) -> Array:
        """Returns the bytes that a layer stores between B and W for each recompute kind in `kinds` (axis c), over axes
        (b, s, c) of GRID_AXES. The stored tensors are the inputs of matrix products and the gradients of the outputs.
        Blocks with selective or full recompute store nothing until W."""
        return np.stack([(kind not in PER_BLOCK_RECOMPUTE) * self.deferred for kind in kinds], axis=-1)

    def when(self, kinds: Sequence[Recompute]) -> tuple[Array, Array]:
        """Returns the saved bytes and the additional transient bytes of backward, as two arrays over axes (b, s, c) of
        GRID_AXES. The axis c has the recompute kinds `kinds`."""
        cases = {
            Recompute.none: (self.whole, 0.0 * self.whole),
            Recompute.attn: (self.whole - self.core, self.core),
            Recompute.sac: (self.whole - self.derived, self.at_once),
            Recompute.full: (self.entering, self.whole),
        }
        saved, alive = (np.stack([cases[kind][part] for kind in kinds], axis=-1) for part in range(2))
        return saved, self.passing[..., None] + alive


def layer_activations(setting: CostContext, box: PlanGrid) -> list[ActivationBytes]:
    """Returns the activation bytes of one layer of each layer run for one micro-batch. Results are cached by the choice
    of micro-batch, because many grids have equal choices."""
    key = ("activations", box.cut, box.pp > 1, box.sequence_parallel, box.loss_chunks)
    rows, known = setting.cache.get(key, ({}, None))
    unknown = [choice for choice in dict.fromkeys(box.micro_batches) if choice not in rows]
    for is_compiled in sorted({choice.compile for choice in unknown}):
        new = tuple(choice for choice in unknown if choice.compile == is_compiled)
        more, shape = replace(box, micro_batches=new), (len(new), len(box.sequence_parallel))
        tokens = more.tokens(setting.job.workload.sequence)
        parts = [activation_bytes(setting, entry, more, tokens) for entry in setting.entries]
        found = np.stack([np.stack([np.broadcast_to(part, shape) for part in layer]) for layer in parts])
        known = found if known is None else np.concatenate([known, found], axis=2)
        rows = {**rows, **{choice: len(rows) + at for at, choice in enumerate(new)}}
        setting.cache[key] = rows, known
    chosen = known[:, :, [rows[choice] for choice in box.micro_batches]]
    return [ActivationBytes(*layer) for layer in chosen]


def activation_bytes(setting: CostContext, entry: LayerRun, box: PlanGrid, tokens: Array) -> ActivationBytes:
    """Returns the activation bytes of one layer of the run `entry` for one micro-batch. `tokens` is the tokens of a
    micro-batch on one rank (b). Either all micro-batch choices of `box` have compiled blocks, or none."""
    layer, size, is_compiled = entry.layer, setting.recipe.size, box.micro_batches[0].compile
    shape = (len(tokens), len(box.sequence_parallel))
    if entry.copy:
        return ActivationBytes(*(np.zeros(shape) for _ in ActivationBytes._fields))
    cut, sequence = box.cut, setting.job.workload.sequence
    sequence_parallel = np.array(box.sequence_parallel)
    divided = np.where(sequence_parallel & (layer.name == BLOCK), box.tp, 1)
    routed = layer.routed_saved * (setting.imbalance - 1.0) if box.layout.ep > 1 else 0.0
    split = ((layer.saved_split + routed) * size + layer.fixed_split + layer.core_context * sequence) / box.tp
    split += layer.key_value_width * size * replicated_kv_fraction(layer, box.tp)
    # Backward of a block begins with the feed-forward, so the recomputed bytes of the feed-forward are the peak.
    at_once = tokens[:, None] * ((layer.derived_split * size + layer.derived_fixed_split) / box.tp)
    derived = at_once + tokens[:, None] * ((layer.derived_whole * size + layer.derived_fixed_whole) / divided)
    fused = is_compiled * tokens[:, None] * _fused_activation_bytes(layer, size, box.tp, divided)
    pieces = layer.routed > 0
    if is_compiled and pieces:  # layers that torch.compile does not trace save their inputs
        derived, at_once = fused, 0.0 * at_once
    elif is_compiled:  # one kernel fuses the element-wise operations of a function
        at_once = at_once - tokens[:, None] * ((layer.fused_split - layer.fused_gates) * size)
    # Both the input and the output of the all-to-all after attention are saved.
    copied = (tokens * (box.ulysses_ranks > 1) * (layer.query_width * size / box.tp))[:, None]
    core = (tokens * ((layer.core_fixed + layer.core_context * sequence) / box.tp))[:, None] + copied
    whole = (layer.saved_whole * size + layer.fixed_whole) / divided
    alive = layer.transient
    if is_compiled and layer.fused_split and not pieces:
        # A fused kernel writes one of the two gradients with the feed-forward's inner width over the other gradient.
        alive = (layer.transient + layer.output) / 2.0
    own = alive * size * local_fraction(layer, size, box.tp, sequence_parallel)
    across = (cp_backward_elements(setting, box, layer) * size / box.tp)[:, None]
    # When attention runs backward, the activations of the feed-forward (`2.0 * own`) are already freed.
    passing = tokens[:, None] * np.maximum(own, across - 2.0 * own)
    passing = passing + unfolded_map_bytes(setting, layer, tokens)
    if layer.name == HEAD and box.loss_chunks > 1:
        return _chunked_loss_bytes(setting, entry, box, tokens, whole)
    if layer.name == HEAD:
        passing = passing + cpu_logits_bytes(setting, layer, box.tp, tokens)
    gradient = (
        (entry.largest(cut) if is_compiled else setting.separate_wgrad_numel(entry, cut, box.pp > 1)) * size
        if entry.is_block
        else 0
    )
    return ActivationBytes(
        tokens[:, None] * (split + whole) + copied - fused,
        tokens[:, None] * (layer.output * size / divided),
        np.broadcast_to(core, shape),
        np.broadcast_to(derived - fused, shape),
        np.broadcast_to(at_once, shape),
        passing + gradient,
        np.broadcast_to(tokens[:, None] * (layer.fused_gates * size * (is_compiled and not pieces)), shape),
        tokens[:, None] * (split + whole)
        + copied
        - (fused if layer.routed else tokens[:, None] * _unread_bytes(layer, size, box.tp, divided)),
    )


def _unread_bytes(layer: LayerSpec, size: int, tp: int, divided: Array) -> Array:
    """Returns the saved bytes per token that B frees, because no matrix product reads them in W. Outputs of matrix
    products are not included, since gradients of equal size replace them. `divided` is `tp` for blocks with sequence
    parallelism, else 1."""
    return (layer.fused_split * size + layer.fused_fixed_split) / tp + (
        layer.fused_whole * size + layer.fused_fixed_whole
    ) / divided


def _fused_activation_bytes(layer: LayerSpec, size: int, tp: int, divided: Array) -> Array:
    """Returns the bytes per token that an eager block saves and a compiled block does not save ([Note: in pieces]).
    `divided` is `tp` for blocks with sequence parallelism, else 1."""
    split, fixed = (0.0, 0.0) if layer.routed else (layer.fused_split, layer.fused_fixed_split)
    return (split * size + fixed) / tp + (layer.fused_whole * size + layer.fused_fixed_whole) / divided


def deferred_wgrad_bytes(
    box: PlanGrid, layers: Sequence[ActivationBytes], table: Array, deferred: Array, each: int
) -> Array | float:
    """Returns the additional bytes that compiled blocks save at each moment if the schedule splits backward. `table`
    (b, o, r, moments, columns) is the number of layers of each column.

    Only the columns that `deferred` marks count. The result is over (b, o, r, moments, s x c). `each` is the length of
    the axis c.
    """
    if not (are_blocks_compiled(box).any() and any_split_backward(box.orders) and deferred.any()):
        return 0.0
    split_backward = np.array([any_split_backward([order]) for order in box.orders]).reshape(1, -1, 1, 1, 1)
    columns = len(deferred) // len(layers)
    more = np.stack([layer.gates for layer in layers for _ in range(columns)], axis=1) * deferred[:, None]
    weights = np.concatenate([more, more, 0.0 * more], axis=1)[:, : table.shape[4]].repeat(each, axis=2)
    return split_backward * (table.reshape(len(table), -1, table.shape[4]) @ weights).reshape(*table.shape[:4], -1)


def replicated_kv_fraction(layer: LayerSpec, tp: int) -> float:
    """Returns the fraction of all keys and values that a tensor rank stores in addition to an even shard. The result is
    above 0 only if there are fewer key-value heads than tensor ranks."""
    heads = layer.key_value_heads
    return 1.0 / heads - 1.0 / tp if 0 < heads < tp else 0.0


def _chunked_loss_bytes(
    setting: CostContext, entry: LayerRun, box: PlanGrid, tokens: Array, whole: float | Array
) -> ActivationBytes:
    """Returns the activation bytes of a head with a chunked loss. `whole` is the bytes per token of the head's input.

    The head saves the gradient of its weight, and instead of its input the gradient of its input. The logits and
    probabilities of one chunk are transient. Source: runtime/loss.py, [Note: gradients at once].
    """
    layer, size = entry.layer, setting.recipe.size
    some = tokens / box.loss_chunks
    passing = (some * (layer.transient * size + layer.fixed_split) / box.tp)[:, None] + cpu_logits_bytes(
        setting, layer, box.tp, some
    )
    transient = tokens[:, None] * whole + entry.largest(box.cut) * size
    shape = (len(tokens), len(box.sequence_parallel))
    none = np.zeros(shape)
    return ActivationBytes(
        np.broadcast_to(transient, shape), none, none, none, none, np.broadcast_to(passing, shape), none, none
    )


def cpu_logits_bytes(setting: CostContext, layer: LayerSpec, tp: int, tokens: Array) -> Array:
    """Returns the bytes of the float32 copy of low-precision logits on a CPU, over axes (b, s) of GRID_AXES. Only one
    of SOFTMAX_PARTS parts is copied at a time. Returns 0 on other devices and for float32 logits."""
    copied = setting.on_host and setting.recipe.size < constants.LOSS_ELEMENT_BYTES
    return (tokens * (layer.fixed_split / tp / constants.SOFTMAX_PARTS if copied else 0.0))[:, None]


def unfolded_map_bytes(setting: CostContext, layer: LayerSpec, tokens: Array) -> Array:
    """Returns the bytes of the unfolded input of a convolution on a CPU, over axes (b, s) of GRID_AXES: each element is
    copied once for each element of the kernel. torch unfolds a single small image in float32 and uses oneDNN otherwise
    (pytorch/pytorch aten/src/ATen/native/Convolution.cpp, `use_mkldnn`)."""
    kernel = max((prod(parameter.shape[2:]) for parameter in layer.parameters if len(parameter.shape) == 4), default=0)
    small = setting.on_host and setting.recipe.size == 4 and layer.output <= constants.ONEDNN_MIN_MAP
    rows = tokens / setting.job.workload.sequence
    return ((rows == 1) * (kernel * layer.output * setting.recipe.size * small))[:, None]


ABSENT_MOMENT_BYTES = -1e30
"""Placeholder for the bytes at a moment that does not count for a peak. The value is so negative that such a moment is
never the peak."""


class ActivationPeak(NamedTuple):
    """The peak bytes of saved activations of a rank. On the device there are two peaks: during the backward of the head
    (`at_head`, negative on ranks without a head), and during the backward of any other layer (`other_backward`).
    `on_host` and `in_files` are the offloaded bytes."""

    at_head: Array
    other_backward: Array
    on_host: Array
    in_files: Array


class MomentBytes(NamedTuple):
    """The activation bytes at the moments, the points of a step at which the memory of ranks can peak.

    A column is the layers of one layer run in one state. There are up to three groups of columns, one for each
    state: layers with saved activations, the layer that runs backward, and, if the schedule defers weight gradients,
    layers with data stored until W (the weight gradients). `layers` is the number of layers of each column (b, o, r,
    moments, columns), `weights` the bytes of one such layer (b, columns, s x c). `saved` is the sum of their products
    over the columns (b, o, r, moments, s x c). `at_head` marks the moments at which the head runs backward. `blocks`
    and `waiting` mark columns of the first group: offload of activations applies to `blocks`, and the layers in
    `waiting` store data until W.
    """

    saved: Array
    layers: Array
    weights: Array
    at_head: Array
    blocks: Array
    waiting: Array

    @property
    def columns(self) -> int:
        """Returns the number of columns of a group."""
        return len(self.blocks)

    def bytes_of(self, layers: Array, first: int = 0) -> Array:
        """Returns the bytes of several columns at each moment. `layers` is the number of layers in each of these
        columns, `first` the index of the first of these columns in `weights`."""
        weights = self.weights[:, first : first + layers.shape[4]]
        return (layers.reshape(len(weights), -1, layers.shape[4]) @ weights).reshape(self.saved.shape)


def activation_peak(setting: CostContext, box: PlanGrid, ranks: Sequence[RankContents]) -> ActivationPeak:
    """Returns the activation peak of each rank class, over GRID_AXES (the axis z has length 1). `ranks` has the
    contents for each schedule. Recompute choices with one kind for all blocks are computed together, other choices one
    by one."""
    layers = layer_activations(setting, box)
    whole_choices = [at for at, again in enumerate(box.recompute) if not again.some]
    # With a split backward, blocks with selective or full recompute save nothing until W. Source:
    # runtime/weight_gradients.py.
    split_backward = any_split_backward(box.orders)
    until_b = [at for at in whole_choices if split_backward and box.recompute[at].kind in PER_BLOCK_RECOMPUTE]
    groups = [group for group in ([at for at in whole_choices if at not in until_b], until_b) if group] + [
        [at] for at, again in enumerate(box.recompute) if again.some
    ]
    found = [
        _uniform_activation_peak(setting, box, layers, [box.recompute[at] for at in group], ranks) for group in groups
    ]
    if len(found) == 1:
        return found[0]
    order = np.argsort([at for group in groups for at in group])
    head, others = (
        np.concatenate(parts, axis=GRID_AXES.index("c"))[..., order, :, :]
        for parts in zip(*(each[:2] for each in found), strict=True)
    )
    if not any(box.offload):
        return ActivationPeak(head, others, *found[0][2:])
    removed = (
        np.concatenate(parts, axis=GRID_AXES.index("c"))[..., order, :, :]
        for parts in zip(*(each[2:] for each in found), strict=True)
    )
    return ActivationPeak(head, others, *removed)


def _uniform_activation_peak(
    setting: CostContext,
    box: PlanGrid,
    layers: Sequence[ActivationBytes],
    chosen: Sequence[RecomputeChoice],
    ranks: Sequence[RankContents],
) -> ActivationPeak:
    """Computes the peak for several recompute choices with one kind for all blocks, or for one choice with another kind
    for the first blocks of a stage than for the later blocks. For such a choice each layer run has two columns: the
    first blocks of a stage, and the other blocks."""
    moments = _moment_bytes(setting, box, layers, chosen, ranks)
    parts = len(box.sequence_parallel), len(chosen)
    every = moments.saved + deferred_wgrad_bytes(box, layers, moments.layers, moments.waiting, len(chosen))
    if any(box.offload):
        return _offloaded_activation_peak(setting, box, layers, moments, every, parts)
    return ActivationPeak(
        _max_moment(every, moments.at_head, parts),
        _max_moment(every, ~moments.at_head, parts),
        broadcast_to_axis(0.0, ""),
        broadcast_to_axis(0.0, ""),
    )


def _moment_bytes(
    setting: CostContext,
    box: PlanGrid,
    layers: Sequence[ActivationBytes],
    chosen: Sequence[RecomputeChoice],
    ranks: Sequence[RankContents],
) -> MomentBytes:
    part, count = box.offload_layers if any(box.offload) else 0, box.counts.tolist()
    some = chosen[0].some or part > 0
    does = (chosen[0].kind, chosen[0].rest) if chosen[0].some else (chosen[0].kind,) * 2
    waits = does[0] not in PER_BLOCK_RECOMPUTE, does[1] not in PER_BLOCK_RECOMPUTE
    at_once = [
        stored.peak_moments(chosen[0].blocks(stored.order) if chosen[0].some else part, count, waits)
        for stored in ranks
    ]
    length = max(each.at_head.shape[2] for each in at_once)
    fill = np.arange(length)
    wide = [
        each if each.at_head.shape[2] == length else PeakMoments(*(part[:, :, fill % part.shape[2]] for part in each))
        for each in at_once
    ]
    most = max(each.layers.shape[3] for each in wide)
    table = stack_schedules([pad_last_axis(each.layers, most) for each in wide], kinds=1)
    at_head = stack_schedules([each.at_head for each in wide], kinds=1)[..., None]
    kinds, rest = [choice.kind for choice in chosen], [choice.rest if choice.some else choice.kind for choice in chosen]
    never = [Recompute.none] * len(chosen)
    has_until_w = most > 2 * len(layers) * (1 + some)
    groups = [
        (*each.when(which), each.until_w(which)) if has_until_w else each.when(which)
        for each, entry in zip(layers, setting.entries, strict=True)
        for which in ((kinds, rest) if entry.is_block else (never, never))[: 1 + some]
    ]
    weights = np.concatenate([np.stack(group, axis=1) for group in zip(*groups, strict=True)], axis=1).reshape(
        len(count), most, -1
    )
    shape = (*table.shape[:4], weights.shape[2])
    return MomentBytes(
        (table.reshape(len(count), -1, table.shape[4]) @ weights).reshape(shape),
        table,
        weights,
        at_head,
        np.array([entry.is_block and not (part and behind) for entry in setting.entries for behind in range(1 + some)]),
        np.array([entry.is_block and wait for entry in setting.entries for wait in (waits if some else waits[1:])]),
    )


def _offloaded_activation_peak(
    setting: CostContext,
    box: PlanGrid,
    layers: Sequence[ActivationBytes],
    moments: MomentBytes,
    resident: Array,
    parts: tuple[int, int],
) -> ActivationPeak:
    """Computes the peak for all offload choices. `resident` is the bytes at each moment without offload; these bytes
    apply to choices that do not offload activations. `parts` is the lengths of the axes s and c."""
    columns, blocks, at_head = moments.columns, moments.blocks, moments.at_head
    stays = 1.0 + (moments.layers[..., columns : 2 * columns] * blocks).sum(axis=-1, keepdims=True)
    stored = moments.layers[..., :columns] * blocks
    resting, every = moments.bytes_of(np.maximum(stored - stays, 0.0)), moments.bytes_of(stored)
    where = offload_fractions(box)
    sent = where.activations + where.activations_files
    fetched = moments.waiting & ~blocks  # fetched activations are not stored until W
    left = moments.saved + deferred_wgrad_bytes(box, layers, moments.layers, fetched, parts[1]) - resting
    if moments.layers.shape[4] > 2 * columns:
        left = left - moments.bytes_of(moments.layers[..., 2 * columns :] * blocks, 2 * columns)
    head, others = (
        np.where(sent > 0, _max_moment(left, which, parts), _max_moment(resident, which, parts))
        for which in (at_head, ~at_head)
    )
    copied, passing, removed = (
        _max_moment(part, np.ones_like(at_head), parts) for part in (every, every - resting, resting)
    )
    # With one stage, backward follows the last forward directly, so the runtime does not offload the last blocks.
    removed = removed if box.pp == 1 else copied
    # On accelerators, data for a file passes through host memory. These bytes count only if the size of the host memory
    # is known.
    by_host = not setting.on_host and setting.host_memory > 0
    pinned = where.activations_files * passing * by_host
    return ActivationPeak(head, others, where.activations * removed + pinned, where.activations_files * removed)


def _max_moment(moment: Array, chosen: Array, parts: tuple[int, int]) -> Array:
    """Returns the maximum of `moment` (b, o, r, moments, s x c) over the moments that `chosen` marks. The result is
    over GRID_AXES. `parts` is the lengths of the axes s and c."""
    largest = np.where(chosen, moment, ABSENT_MOMENT_BYTES).max(axis=3)
    return largest.reshape(*largest.shape[:3], *parts).transpose(2, 1, 0, 3, 4)[..., None, None]
