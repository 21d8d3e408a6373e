"""Context parallelism: c ranks hold a sequence in pieces and attend over all of it. Seconds that are not hidden, and bytes on the way.

    ring      c - 1 times the next piece of keys and values, beside the attention over the last one; backward twice the bytes, for their gradients
    ulysses   queries, keys and values exchanged for whole heads, outputs back: an all-to-all each, not hidden; backward the same
    both      u neighbours exchange heads, then c / u - 1 turns of rings over ranks u apart, in which as many bytes travel as in a ring of all

Each rank holds a piece of the front and one of the back of a sequence, so that a causal mask leaves all of them the same work.
Sources: Liu et al., Ring Attention, arXiv 2310.01889, section 3; Jacobs et al., DeepSpeed Ulysses, arXiv 2309.14509, section 3.2; the two pieces: Llama 3,
arXiv 2407.21783, section 3.3.2; both: Fang and Zhao, Unified Sequence Parallelism, arXiv 2405.07719.
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


def traffic(setting: Setting, box: Box, tokens: Array, one: Work) -> tuple[Array, Array]:
    """Seconds that each entry's layer waits, forward and backward, over (entry, b, s); `tokens` of one rank."""
    forward, backward = np.zeros_like(one.forward), np.zeros_like(one.forward)
    cut = np.flatnonzero(box.contexts > 1)
    for at, entry in enumerate(setting.entries if cut.size else ()):
        if entry.layer.key_value_width:
            forward[at, cut], backward[at, cut] = _waits(setting, box, entry.layer, tokens[cut], cut, one.attention[at, cut])
    return forward, backward


def _waits(setting: Setting, box: Box, layer: Layer, tokens: Array, cut: Array, attention: Array) -> tuple[Array, Array]:
    """Of the micro-batches `cut`, over (cut, s)."""
    size, stride, heads = setting.recipe.size / box.tp, box.strides["dp"], box.head_ranks[cut]
    rings = box.contexts[cut] // heads
    turns = rings - 1
    passed = (turns * send(setting.fabric, tokens * (layer.key_value_width * size), rings * heads, stride))[:, None]
    room = attention * (0.0 if setting.on_host else (turns / rings)[:, None])
    ring = beside(passed, room), beside(2.0 * passed, constants.ATTENTION_BACKWARD * room)
    if (heads == 1).all():
        return ring
    exchanged = exchange(setting.fabric, heads, stride, tokens * ((2.0 * layer.query_width + layer.key_value_width) * size), calls=4.0)
    exchanged = np.where(heads > 1, exchanged, 0.0)[:, None]
    return ring[0] + exchanged, ring[1] + exchanged


def on_the_way(setting: Setting, box: Box, layer: Layer) -> Array:
    """Elements per token of a rank that backward through attention across ranks holds beside what was kept, divided by tp (b). On a host, where ranks
    read each other's memory, all pieces and all of their gradients are there at once."""
    rings = box.contexts // box.head_ranks
    blocks = constants.CONTEXT_BLOCKS * (rings if setting.on_host else 1) + constants.CONTEXT_OWN
    ring = blocks * layer.key_value_width + constants.CONTEXT_QUERIES * layer.query_width
    whole = constants.EXCHANGED_QUERIES * layer.query_width + layer.key_value_width
    return np.where(rings > 1, ring, 0.0) + np.where(box.head_ranks > 1, whole, 0.0)


def slots(setting: Setting, box: Box, tokens: Array) -> Array:
    """Bytes that stay with a rank of what it lets others of its host read (b): the shares of the gradients of all pieces, of two layers; two messages of
    heads."""
    rings, blocks = box.contexts // box.head_ranks, [entry.layer for entry in setting.entries if entry.is_block]
    width = max((layer.key_value_width for layer in blocks), default=0.0)
    heads = max((layer.query_width for layer in blocks), default=0.0)
    elements = np.where(rings > 1, rings * width, 0.0) + np.where(box.head_ranks > 1, heads, 0.0)
    return constants.CONTEXT_SLOTS * tokens * elements * (setting.recipe.size / box.tp) * setting.shares_memory
