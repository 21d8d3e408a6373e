"""Models the communication of context and expert parallelism: exposed seconds for cost_model.py, and bytes of buffers
for the memory formulas.

With context parallelism, c context ranks divide each sequence, and each of them computes attention over the whole
sequence.

- Ring: c - 1 transfers of a block of keys and values, each overlapped with the attention over the previous block.
  Backward moves twice as many bytes, because it also moves gradients of keys and values.
- Ulysses: exposed all-to-alls. Before attention, they change the sharding of queries, keys and values from the sequence
  to the heads. After attention, they change the sharding of the outputs back to the sequence. Backward has the same
  all-to-alls for gradients.
- Ulysses and ring together: groups of u neighbouring ranks exchange heads. Rings connect ranks at distance u. A ring
  has c / u - 1 transfers, and moves as many bytes as one ring over all ranks.

Each rank has one chunk of the first half and one chunk of the second half of a sequence. With this assignment, ranks
have equal work under a causal mask. Sources: Liu et al., Ring Attention, arXiv 2310.01889, section 3; Jacobs et al.,
DeepSpeed Ulysses, arXiv 2309.14509, section 3.2; the two chunks: Llama 3, arXiv 2407.21783, section 3.3.2; both methods
together: Fang and Zhao, Unified Sequence Parallelism, arXiv 2405.07719.

With expert parallelism, ep ranks divide the experts of a layer. In forward, one all-to-all sends each token to top_k
experts (dispatch), and another all-to-all returns the results (combine). Backward has the same two all-to-alls for
gradients. The next operation reads their results, so they do not overlap with compute, with one exception: the dispatch
overlaps with shared experts (DeepSeek, Llama 4, Qwen2-MoE). Routing is assumed to be balanced. Each tensor rank sends
1 / tp of the tokens. Some runtimes send one copy of a token to each node instead of one to each expert
(`RuntimeModel.node_copies`). If the top_k experts of a token are on random nodes of n, the token goes to
(n - 1) (1 - (1 - 1 / n)^top_k) other nodes. Sources: Lepikhin et al., GShard, arXiv 2006.16668, section 2.2; Fedus et
al., Switch Transformer, arXiv 2101.03961; DeepSeek-V3, arXiv 2412.19437, section 3.2.2.

Arrays are over the layer runs of the model (cost_context.py) and over axes of GRID_AXES (plan_grid.py).
"""

from __future__ import annotations

import numpy as np

from meshwright.planner.cost import constants
from meshwright.planner.cost.compute import LayerTimes, product_seconds, shares_memory
from meshwright.planner.cost.cost_context import CostContext
from meshwright.planner.cost.links import all_to_all_seconds, dispatch_seconds, p2p_seconds
from meshwright.planner.cost.overlap import overlapped
from meshwright.planner.cost.plan_grid import Array, PlanGrid
from meshwright.spec.model import LayerSpec


def cp_comm_seconds(setting: CostContext, box: PlanGrid, tokens: Array, one: LayerTimes) -> tuple[Array, Array]:
    """Returns the exposed seconds of context parallelism for one layer of each layer run, in forward and in backward,
    over (layer run, b, s). `tokens` is the tokens of a micro-batch on one rank (b). `one` is the seconds of one layer
    of each run."""
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
    """Returns the exposed seconds in forward and in backward, over (cut, s). `cut` is the indices along b of the
    micro-batch choices with context parallelism. `attention` is the seconds of the attention core, which rings overlap
    with."""
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
    of GRID_AXES. The caller divides these elements by the tensor-parallel degree.

    Saved activations are not included. CPU ranks read keys and values in each other's memory, so all blocks and their
    gradients exist at the same time.
    """
    rings = box.contexts // box.ulysses_ranks
    blocks = constants.RING_KV_BLOCKS_IN_FLIGHT * (rings if setting.on_host else 1) + constants.RING_KV_BLOCKS_LOCAL
    ring = blocks * layer.key_value_width + constants.RING_QUERY_TENSORS * layer.query_width
    whole = constants.ULYSSES_QUERY_TENSORS * layer.query_width + layer.key_value_width
    return np.where(rings > 1, ring, 0.0) + np.where(box.ulysses_ranks > 1, whole, 0.0)


def shared_buffer_bytes(setting: CostContext, box: PlanGrid, tokens: Array) -> Array:
    """Returns the bytes of a rank's shared-memory buffers for attention and tensor-parallel sums, over axes (b) of
    GRID_AXES. Rings store the partial gradients of all chunks for two layers. Ulysses stores two messages of heads,
    tensor parallelism two hidden states. The result is 0 if ranks do not share memory."""
    rings, blocks = box.contexts // box.ulysses_ranks, [entry.layer for entry in setting.entries if entry.is_block]
    width = max((layer.key_value_width for layer in blocks), default=0.0)
    heads = max((layer.query_width for layer in blocks), default=0.0)
    elements = np.where(rings > 1, rings * width, 0.0) + np.where(box.ulysses_ranks > 1, heads, 0.0)
    summed = max((layer.output for layer in blocks), default=0.0) * (box.tp > 1)
    return (
        constants.SHARED_BUFFERS * tokens * (elements / box.tp + summed) * setting.recipe.size * setting.shares_memory
    )


def ep_comm_seconds(setting: CostContext, box: PlanGrid, tokens: Array) -> Array:
    """Returns the seconds of dispatch and combine for one layer of each layer run, over (layer run, b). Forward and
    backward each take this time."""
    none = np.zeros(len(tokens))
    if box.layout.ep == 1:
        return np.stack([none] * len(setting.entries))
    size, group = setting.recipe.size / box.tp, (setting.fabric, box.layout.ep, expert_stride(box))
    exposed = 2.0 * (1.0 - (setting.practice.dispatch_hidden or 0.0) * (1.0 - constants.OVERLAP_SLOWDOWN))
    found = []
    for entry in setting.entries:
        sent = tokens * (entry.layer.routed * size)
        if not entry.layer.routed or entry.copy:
            found.append(none)
        elif setting.practice.node_copies:
            found.append(exposed * dispatch_seconds(*group, sent, entry.layer.routed / setting.job.model.hidden))
        elif shared := _overlapping_numel(setting, entry.layer, *group[1:]):
            each = all_to_all_seconds(*group, sent)
            found.append(each + overlapped(each, product_seconds(setting, shared / box.tp, tokens)))
        else:
            found.append(exposed * all_to_all_seconds(*group, sent))
    return np.stack(found)


def _overlapping_numel(setting: CostContext, layer: LayerSpec, ranks: int, stride: int) -> int:
    """Returns the elements of the shared experts that overlap with the dispatch, without their gate (Qwen2-MoE). The
    result is 0 without such experts."""
    if setting.practice.dispatch_hidden is not None or shares_memory(setting, ranks, stride):
        return 0
    return sum(
        weight.numel
        for weight in layer.parameters
        if "shared_expert" in weight.name and "shared_expert_gate" not in weight.name
    )


def expert_stride(box: PlanGrid) -> int:
    """Returns the distance between neighbouring expert ranks. If an expert group spans tensor ranks, this is the
    smaller of the distances of data ranks and of tensor ranks. Otherwise it is the distance of data ranks."""
    joined = box.layout.expert_tp < box.tp
    return min(box.strides["dp"], box.strides["tp"]) if joined else box.strides["dp"]
