"""Context parallelism: c ranks hold a sequence in pieces and attend over all of it. Seconds that are not hidden, and bytes on the way.

    ring      c - 1 times the next piece of keys and values, beside the attention over the last one; backward twice the bytes, for their gradients
    ulysses   queries, keys and values exchanged for whole heads, outputs back: an all-to-all each, not hidden; backward the same

Each rank holds a piece of the front and one of the back of a sequence, so that a causal mask leaves all of them the same work.
Sources: Liu et al., Ring Attention, arXiv 2310.01889, section 3; Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, section 3.2; the two pieces: Llama 3,
arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost import constants
from meshwright.cost.box import Array, Box
from meshwright.cost.collectives import exchange, send
from meshwright.cost.compute import Work
from meshwright.cost.hiding import beside
from meshwright.cost.setting import Setting
from meshwright.spec.model import Layer
from meshwright.spec.plan import Context


def traffic(setting: Setting, box: Box, tokens: Array, one: Work) -> tuple[Array, Array]:
    """Seconds that each entry's layer waits, forward and backward, over (entry, b, s); `tokens` of one rank."""
    none = np.zeros_like(one.forward)
    if box.cp == 1:
        return none, none
    waits = [_waits(setting, box, entry.layer, tokens[:, None], one.attention[at]) for at, entry in enumerate(setting.entries)]
    forward, backward = (np.stack(each) for each in zip(*waits, strict=True))
    return forward, backward


def _waits(setting: Setting, box: Box, layer: Layer, tokens: Array, attention: Array) -> tuple[Array, Array]:
    if not layer.key_value_width:
        return attention * 0.0, attention * 0.0
    size, stride = setting.recipe.size / box.tp, box.strides["dp"]
    if box.layout.context == Context.ulysses:
        exchanged = tokens * ((2.0 * layer.query_width + layer.key_value_width) * size)
        seconds = exchange(setting.fabric, box.cp, stride, exchanged, calls=4.0) + 0.0 * attention
        return seconds, seconds
    turns = box.cp - 1
    passed = turns * send(setting.fabric, tokens * (layer.key_value_width * size), box.cp, stride)
    room = attention * (0.0 if setting.on_host else turns / box.cp)
    return beside(passed, room), beside(2.0 * passed, constants.ATTENTION_BACKWARD * room)


def on_the_way(box: Box, layer: Layer) -> float:
    """Elements per token of a rank that attention across ranks holds besides, divided by tp."""
    if box.cp == 1:
        return 0.0
    if box.layout.context == Context.ulysses:
        return layer.query_width + layer.key_value_width
    return constants.CONTEXT_BLOCKS * layer.key_value_width
