"""Models context and expert parallelism: exposed seconds, and bytes in transit.

With context parallelism, each of c ranks has a part of a sequence and computes attention over the whole sequence.

    - Ring: c - 1 transfers of a block of keys and values, each overlapped with the attention over the previous block.
      Backward moves twice the bytes, because of the gradients.
- Ulysses: exposed all-to-alls of queries, keys and values (from parts of the sequence to parts of the heads) and of
  outputs (back). Backward has the same all-to-alls for gradients.
- Both: u neighbouring ranks exchange heads. Then rings over ranks at distance u run c / u - 1 steps, and move as many
  bytes as one ring over all ranks.

Each rank has one chunk from the first half and one from the second half of a sequence, so that a causal mask gives all
ranks equal work. Sources: Liu et al., Ring Attention, arXiv 2310.01889, section 3; Jacobs et al., DeepSpeed Ulysses,
arXiv 2309.14509, section 3.2; the two chunks: Llama 3, arXiv 2407.21783, section 3.3.2; both methods together: Fang and
Zhao, Unified Sequence Parallelism, arXiv 2405.07719.

With expert parallelism, ep ranks divide the experts of a layer. One all-to-all sends each token to its top_k experts,
and a second one sends the results back.

    - Forward: tokens to the experts (dispatch) and results back (combine).
- Backward: the gradients of both.

These collectives do not overlap with compute, because the next operation reads their results. The expert rank with the
most tokens gets `imbalance` times the mean. Each tensor rank sends a part of the tokens. Source: Lepikhin et al.,
GShard, arXiv 2006.16668, section 2.2; Fedus et al., Switch Transformer, arXiv 2101.03961.
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
    """Returns the exposed seconds of context parallelism for one layer of each layer run, in forward and in backward,
    over (layer run, b, s). `tokens` is the tokens of one rank."""
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
    """Returns the exposed seconds in forward and in backward, over (cut, s). `cut`: the indices along b of the
    micro-batch choices with context parallelism."""
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
    """Returns the additional elements per token that the backward of context-parallel attention stores, over axes (b)
    of GRID_AXES. They are before division by tp.

    The saved activations are not included. On a CPU, ranks read each other's memory, so all blocks and their gradients
    exist at the same time.
    """
    rings = box.contexts // box.ulysses_ranks
    blocks = constants.RING_KV_BLOCKS_IN_FLIGHT * (rings if setting.on_host else 1) + constants.RING_KV_BLOCKS_LOCAL
    ring = blocks * layer.key_value_width + constants.RING_QUERY_TENSORS * layer.query_width
    whole = constants.ULYSSES_QUERY_TENSORS * layer.query_width + layer.key_value_width
    return np.where(rings > 1, ring, 0.0) + np.where(box.ulysses_ranks > 1, whole, 0.0)


def cp_shared_buffer_bytes(setting: CostContext, box: PlanGrid, tokens: Array) -> Array:
    """Returns the bytes of a rank's shared-memory buffers for attention over axes (b) of GRID_AXES: the partial
    gradients of all chunks for two layers, or two messages of heads."""
    rings, blocks = box.contexts // box.ulysses_ranks, [entry.layer for entry in setting.entries if entry.is_block]
    width = max((layer.key_value_width for layer in blocks), default=0.0)
    heads = max((layer.query_width for layer in blocks), default=0.0)
    elements = np.where(rings > 1, rings * width, 0.0) + np.where(box.ulysses_ranks > 1, heads, 0.0)
    return constants.CP_SHARED_BUFFERS * tokens * elements * (setting.recipe.size / box.tp) * setting.shares_memory


def ep_comm_seconds(setting: CostContext, box: PlanGrid, tokens: Array) -> Array:
    """Returns the seconds of expert communication for one layer of each layer run in one direction, over (layer run,
    b)."""
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
    """Returns the distance between expert ranks. It is the distance between data ranks, or that between tensor ranks if
    tensor ranks are part of the expert group."""
    joined = box.layout.expert_tp < box.tp
    return min(box.strides["dp"], box.strides["tp"]) if joined else box.strides["dp"]
