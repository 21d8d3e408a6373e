"""Computes the activations that a layer saves for backward, and the transient memory of its backward.

[Note: in pieces] torch.compile does not trace into some layers of this project: tensor-parallel layers, expert layers,
and layers with a deferred weight gradient. So torch.compile produces several graphs per block, with these layers
between them. The activation function of a gated feed-forward and the matrix product after it are then in different
graphs, so the result of the activation function is saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost import constants
from meshwright.planner.cost.compute import local_fraction
from meshwright.planner.cost.cost_context import BLOCK, HEAD, CostContext, LayerRun
from meshwright.planner.cost.cp_ep_comm import cp_backward_elements
from meshwright.planner.cost.pipeline import any_split_backward
from meshwright.planner.cost.plan_grid import Array, PlanGrid
from meshwright.spec.enums import PER_BLOCK_RECOMPUTE, Recompute
from meshwright.spec.model import LayerSpec


class ActivationBytes(NamedTuple):
    """The activation bytes of one layer for one micro-batch, over axes (b, s) of GRID_AXES.

    `whole` is saved for backward without recompute, `entering` with full recompute. `core` is the part of `whole` that
    belongs to the attention core. `derived` is the part of `whole` that selective recompute does not save; `at_once` is
    the peak of this part during its recompute. `passing` is the additional transient memory of backward. `gates` is
    saved in addition if weight gradients are deferred. `put_off` is stored from the backward of inputs (B) until the
    weight gradient (W).
    """

    whole: Array
    entering: Array
    core: Array
    derived: Array
    at_once: Array
    passing: Array
    gates: Array
    put_off: Array

    def until_w(self, kinds: Sequence[Recompute]) -> Array:
        """Returns the bytes that a layer stores between B (gradients of inputs) and W (gradients of weights), for each
        recompute kind in `kinds` (axis c), over axes (b, s, c) of GRID_AXES. They are the inputs of matrix products and
        the gradients of their outputs."""
        return np.stack(
            [0.0 * self.put_off if kind in PER_BLOCK_RECOMPUTE else self.put_off for kind in kinds], axis=-1
        )

    def when(self, kinds: Sequence[Recompute]) -> tuple[Array, Array]:
        """Returns two arrays over axes (b, s, c) of GRID_AXES, where c are the recompute kinds `kinds`: the saved
        bytes, and the additional transient bytes of backward."""
        none = 0.0 * self.whole
        of = {
            Recompute.none: (self.whole, none),
            Recompute.attn: (self.whole - self.core, self.core),
            Recompute.sac: (self.whole - self.derived, self.at_once),
            Recompute.full: (self.entering, self.whole),
        }
        saved, alive = (np.stack([of[kind][which] for kind in kinds], axis=-1) for which in (0, 1))
        return saved, self.passing[..., None] + alive


def activation_bytes(setting: CostContext, entry: LayerRun, box: PlanGrid, tokens: Array) -> ActivationBytes:
    """Returns the activation bytes of one layer of the run `entry` for one micro-batch. `tokens`: the tokens of a
    micro-batch."""
    layer, size = entry.layer, setting.recipe.size
    shape = (len(tokens), len(box.sequence_parallel))
    if entry.copy:
        return ActivationBytes(*(np.zeros(shape) for _ in ActivationBytes._fields))
    cut, sequence = box.cut, setting.job.workload.sequence
    sequence_parallel = np.array(box.sequence_parallel)
    divided = np.where(sequence_parallel & (layer.name == BLOCK), box.tp, 1)
    routed = layer.routed_saved * (setting.imbalance - 1.0) if box.layout.ep > 1 else 0.0
    split = ((layer.saved_split + routed) * size + layer.fixed_split + layer.core_context * sequence) / box.tp
    split += layer.key_value_width * size * replicated_kv_fraction(layer, box.tp)
    # Recomputed bytes of the feed-forward, the part of a block with which backward begins.
    at_once = tokens[:, None] * ((layer.derived_split * size + layer.derived_fixed_split) / box.tp)
    derived = at_once + tokens[:, None] * ((layer.derived_whole * size + layer.derived_fixed_whole) / divided)
    fused = box.compile * tokens[:, None] * _fused_activation_bytes(layer, size, box.tp, divided)
    pieces = box.tp > 1 or layer.routed > 0
    if box.compile and pieces:  # layers that torch.compile does not trace save their inputs
        derived, at_once = fused, 0.0 * at_once
    elif box.compile:  # one kernel fuses the element-wise operations of a function
        at_once = at_once - tokens[:, None] * ((layer.fused_split - layer.fused_gates) * size)
    # The outputs of attention exist twice: before and after the all-to-all.
    copied = (tokens * (box.ulysses_ranks > 1) * (layer.query_width * size / box.tp))[:, None]
    core = (tokens * ((layer.core_fixed + layer.core_context * sequence) / box.tp))[:, None] + copied
    whole = (layer.saved_whole * size + layer.fixed_whole) / divided
    alive = layer.transient
    if box.compile and layer.fused_split and not (pieces and (layer.fused_gates or layer.routed)):
        # A kernel writes one of the two gradients with the inner width over the other.
        alive = (layer.transient + layer.output) / 2.0
    own = alive * size * local_fraction(layer, size, box.tp, sequence_parallel)
    across = (cp_backward_elements(setting, box, layer) * size / box.tp)[:, None]
    # The activations of the feed-forward (`2.0 * own`) are already freed.
    passing = tokens[:, None] * np.maximum(own, across - 2.0 * own)
    if layer.name == HEAD and box.loss_chunks > 1:
        return _chunked_loss_bytes(setting, entry, box, tokens, whole)
    if layer.name == HEAD:
        passing = passing + cpu_logits_bytes(setting, layer, box.tp, tokens)
    gradient = (
        (entry.largest(cut) if box.compile else setting.recomputed_uncompiled(entry, cut, box.pp > 1)) * size
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
        np.broadcast_to(tokens[:, None] * (layer.fused_gates * size * (box.compile and not pieces)), shape),
        tokens[:, None] * (split + whole)
        + copied
        - (fused if layer.routed else tokens[:, None] * _unread_bytes(layer, size, box.tp, divided)),
    )


def _unread_bytes(layer: LayerSpec, size: int, tp: int, divided: Array) -> Array:
    """Returns the saved bytes per token that no matrix product reads, so that they are freed before W. Outputs of
    matrix products are not included, since gradients of equal size replace them."""
    return (layer.fused_split * size + layer.fused_fixed_split) / tp + (
        layer.fused_whole * size + layer.fused_fixed_whole
    ) / divided


def _fused_activation_bytes(layer: LayerSpec, size: int, tp: int, divided: Array) -> Array:
    """Returns the bytes per token that a compiled block does not save; see [Note: in pieces]."""
    split = 0.0 if layer.routed else layer.fused_split - layer.fused_gates * (tp > 1)
    fixed = 0.0 if layer.routed or tp > 1 else layer.fused_fixed_split
    return (split * size + fixed) / tp + (layer.fused_whole * size + layer.fused_fixed_whole) / divided


def deferred_wgrad_bytes(
    box: PlanGrid, layers: Sequence[ActivationBytes], table: Array, put_off: Array, each: int
) -> Array | float:
    """Returns the additional bytes at each moment (possible peak) if the schedule defers weight gradients. `table` (b,
    o, r, moments, columns) has the layers that are stored until W.

    Only columns that `put_off` marks count. The result is over (b, o, r, moments, s x c), where `each` is the length of
    c.
    """
    split_backward = np.array([any_split_backward([order]) for order in box.orders]).reshape(1, -1, 1, 1, 1)
    if not (box.compile and split_backward.any() and put_off.any()):
        return 0.0
    columns = len(put_off) // len(layers)
    more = np.stack([layer.gates for layer in layers for _ in range(columns)], axis=1) * put_off[:, None]
    weights = np.concatenate([more, more, 0.0 * more], axis=1)[:, : table.shape[4]].repeat(each, axis=2)
    return split_backward * (table.reshape(len(table), -1, table.shape[4]) @ weights).reshape(*table.shape[:4], -1)


def replicated_kv_fraction(layer: LayerSpec, tp: int) -> float:
    """Returns the fraction of keys and values that a tensor rank stores beyond an even shard. It is above 0 if there
    are fewer key-value heads than tensor ranks."""
    heads = layer.key_value_heads
    return 1.0 / heads - 1.0 / tp if 0 < heads < tp else 0.0


def _chunked_loss_bytes(
    setting: CostContext, entry: LayerRun, box: PlanGrid, tokens: Array, whole: float | Array
) -> ActivationBytes:
    """Returns the bytes of a head with a chunked loss.

    The head saves the gradient of its input instead of the input, and the gradient of its weight. The logits and
    probabilities of one chunk are transient. Source: runtime/loss/cross_entropy.py, [Note: gradients at once].
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
    """Returns the bytes of the float32 copy of low-precision logits that torch makes on a CPU, over axes (b, s) of
    GRID_AXES."""
    copied = setting.on_host and setting.recipe.size < constants.LOSS_ELEMENT_BYTES
    return (tokens * (layer.fixed_split / tp if copied else 0.0))[:, None]
