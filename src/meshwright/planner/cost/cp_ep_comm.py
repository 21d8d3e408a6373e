"""Context parallelism: c ranks hold a sequence in pieces and attend over all of it. Seconds that are not hidden, and
bytes on the way.

    ring      c - 1 times the next piece of keys and values, beside the attention over the last one; backward twice the
    bytes, for their gradients
    ulysses   queries, keys and values exchanged for whole heads, outputs back: an all-to-all each, not hidden; backward
    the same
    both      u neighbours exchange heads, then c / u - 1 turns of rings over ranks u apart, in which as many bytes
    travel as in a ring of all

Each rank holds a piece of the front and one of the back of a sequence, so that a causal mask leaves all of them the
same work.
Sources: Liu et al., Ring Attention, arXiv 2310.01889, section 3; Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509,
section 3.2; the two pieces: Llama 3,
arXiv 2407.21783, section 3.3.2; both: Fang and Zhao, Unified Sequence Parallelism, arXiv 2405.07719.

Expert parallelism: ep ranks share the experts of a layer; each token goes to its top_k experts and back, in an
all-to-all each way.

    forward    tokens out (dispatch) and back (combine)          backward    the same, for gradients

Nothing hides them: what runs next reads them. The busiest rank gets `imbalance` times the mean. Tensor ranks send a
part of their tokens each.
Source: Lepikhin et al., GShard, arXiv 2006.16668, section 2.2; Fedus et al., Switch Transformer, arXiv 2101.03961.
"""

from __future__ import annotations

import numpy as np

from meshwright.planner.cost import constants
from meshwright.planner.cost.compute import LayerTimes
from meshwright.planner.cost.cost_context import CostContext
from meshwright.planner.cost.links import all_to_all_seconds, p2p_seconds
from meshwright.planner.cost.overlap import overlapped
from meshwright.planner.cost.plan_grid import Array, PlanGrid
from meshwright.spec.model import LayerSpec


def cp_comm_seconds(setting: CostContext, box: PlanGrid, tokens: Array, one: LayerTimes) -> tuple[Array, Array]:
    """Seconds that each entry's layer waits, forward and backward, over (entry, b, s); `tokens` of one rank."""
    forward, backward = np.zeros_like(one.forward), np.zeros_like(one.forward)
    cut = np.flatnonzero(box.contexts > 1)
    for at, entry in enumerate(setting.entries if cut.size else ()):
        if entry.layer.key_value_width:
            forward[at, cut], backward[at, cut] = _cp_wait_seconds(
                setting, box, entry.layer, tokens[cut], cut, one.attention[at, cut]
            )
    return forward, backward


def _cp_wait_seconds(
    setting: CostContext, box: PlanGrid, layer: LayerSpec, tokens: Array, cut: Array, attention: Array
) -> tuple[Array, Array]:
    """Of the micro-batches `cut`, over (cut, s)."""
    size, stride, heads = setting.recipe.size / box.tp, box.strides["dp"], box.ulysses_ranks[cut]
    rings = box.contexts[cut] // heads
    turns = rings - 1
    passed = (turns * p2p_seconds(setting.fabric, tokens * (layer.key_value_width * size), rings * heads, stride))[
        :, None
    ]
    room = attention * (0.0 if setting.on_host else (turns / rings)[:, None])
    ring = overlapped(passed, room), overlapped(2.0 * passed, constants.ATTENTION_BACKWARD_RATIO * room)
    if (heads == 1).all():
        return ring
    exchanged = all_to_all_seconds(
        setting.fabric, heads, stride, tokens * ((2.0 * layer.query_width + layer.key_value_width) * size), calls=4.0
    )
    exchanged = np.where(heads > 1, exchanged, 0.0)[:, None]
    return ring[0] + exchanged, ring[1] + exchanged


def cp_backward_elements(setting: CostContext, box: PlanGrid, layer: LayerSpec) -> Array:
    """Elements per token of a rank that backward through attention across ranks holds beside what was kept, divided by
    tp (b). On a host, where ranks
    read each other's memory, all pieces and all of their gradients are there at once."""
    rings = box.contexts // box.ulysses_ranks
    blocks = constants.RING_KV_BLOCKS_IN_FLIGHT * (rings if setting.on_host else 1) + constants.RING_KV_BLOCKS_LOCAL
    ring = blocks * layer.key_value_width + constants.RING_QUERY_TENSORS * layer.query_width
    whole = constants.ULYSSES_QUERY_TENSORS * layer.query_width + layer.key_value_width
    return np.where(rings > 1, ring, 0.0) + np.where(box.ulysses_ranks > 1, whole, 0.0)


def cp_shared_buffer_bytes(setting: CostContext, box: PlanGrid, tokens: Array) -> Array:
    """Bytes that stay with a rank of what it lets others of its host read (b): the shares of the gradients of all
    pieces, of two layers; two messages of
    heads."""
    rings, blocks = box.contexts // box.ulysses_ranks, [entry.layer for entry in setting.entries if entry.is_block]
    width = max((layer.key_value_width for layer in blocks), default=0.0)
    heads = max((layer.query_width for layer in blocks), default=0.0)
    elements = np.where(rings > 1, rings * width, 0.0) + np.where(box.ulysses_ranks > 1, heads, 0.0)
    return constants.CP_SHARED_BUFFERS * tokens * elements * (setting.recipe.size / box.tp) * setting.shares_memory


def ep_comm_seconds(setting: CostContext, box: PlanGrid, tokens: Array) -> Array:
    """Seconds of one layer of each entry in one direction, over (entry, b)."""
    found = np.zeros((len(setting.entries), len(tokens)))
    if box.layout.ep == 1:
        return found
    size = setting.recipe.size * setting.imbalance / box.tp
    for at, entry in enumerate(setting.entries):
        if entry.layer.routed and not entry.copy:
            found[at] = 2.0 * all_to_all_seconds(
                setting.fabric, box.layout.ep, expert_stride(box), tokens * (entry.layer.routed * size)
            )
    return found


def expert_stride(box: PlanGrid) -> int:
    """How far apart expert ranks are: data ranks, or tensor ranks where those join."""
    joined = box.layout.expert_tp < box.tp
    return min(box.strides["dp"], box.strides["tp"]) if joined else box.strides["dp"]
