"""Expert parallelism: ep ranks share the experts of a layer; each token goes to its top_k experts and back, in an all-to-all each way.

    forward    tokens out (dispatch) and back (combine)          backward    the same, for gradients

Nothing hides them: what runs next reads them. The busiest rank gets `imbalance` times the mean. Tensor ranks send a part of their tokens each.
Source: Lepikhin et al., GShard, arXiv 2006.16668, section 2.2; Fedus et al., Switch Transformer, arXiv 2101.03961.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.box import Array, Box
from meshwright.cost.collectives import exchange
from meshwright.cost.setting import Setting


def traffic(setting: Setting, box: Box, tokens: Array) -> Array:
    """Seconds of one layer of each entry in one direction, over (entry, b)."""
    found = np.zeros((len(setting.entries), len(tokens)))
    if box.layout.ep == 1:
        return found
    size = setting.recipe.size * setting.imbalance / box.tp
    for at, entry in enumerate(setting.entries):
        if entry.layer.routed and not entry.copy:
            found[at] = 2.0 * exchange(setting.fabric, box.layout.ep, stride(box), tokens * (entry.layer.routed * size))
    return found


def stride(box: Box) -> int:
    """How far apart expert ranks are: data ranks, or tensor ranks where those join."""
    joined = box.layout.expert_tensor < box.tp
    return min(box.strides["dp"], box.strides["tp"]) if joined else box.strides["dp"]
