"""What a pipeline rank keeps at its fullest: micro-batches in flight, by the order that runs, and how far the running backward has come.

A rank is fullest just before a backward pass, or inside of it: while the pass walks back through its layers, what they kept is freed and
each needs some room of its own. Micro-batches alive, p ranks, v virtual stages, m micro-batches, rank r (equal to `schedules.in_flight`):

    gpipe        m
    1f1b         min(m, p - r)
    interleaved  what min(m v, 2 (p - r - 1) + (v - 1) p + k) forwards made, less what k - 1 backwards freed

[Note: moments] Interleaved backwards go through the stages of a rank p at a time, last stage first. Alive numbers change evenly within such
a phase, and only the stage whose backwards come next has gained since the phase began: it is enough to look where a phase begins. With
m = p there is one such moment, with more micro-batches there are v, the same in every round.
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.box import Array, Order
from meshwright.cost.stages import Kind
from meshwright.spec.plan import Schedule

Moments = tuple[Array, Array]
"""Entries whose layer runs backward (..., moments), layers of each entry that keep a share then (..., moments, entries)."""


def moments(order: Order, pp: int, kind: Kind, micro_batches: Array) -> Moments:
    """Where this kind of rank can be fullest, over (b, moments)."""
    if order.schedule != Schedule.interleaved:
        return _plain(order, pp, kind, micro_batches)
    return in_rounds(turns(order, pp, kind), pp, micro_batches)


def in_rounds(found: Moments, pp: int, micro_batches: Array) -> Moments:
    """Those of interleaving, which are the same from two rounds of pp micro-batches on."""
    rounds = np.minimum(np.maximum(micro_batches // pp, 1), 2) - 1
    return found[0][rounds], found[1][rounds]


def _plain(order: Order, pp: int, kind: Kind, micro_batches: Array) -> Moments:
    """GPipe and 1F1B: the first backward after the last forward that fits."""
    content = kind.layers[0]
    present = np.flatnonzero(content)
    freed = np.where(np.arange(len(content)) > present[:, None], content, 0)
    count = micro_batches if order.schedule == Schedule.gpipe else np.minimum(micro_batches, pp - kind.rank)
    return np.broadcast_to(present, (len(count), len(present))), count[:, None, None] * content - freed


def interleaved_alive(pp: int, virtual_stages: int, rank: int) -> Array:
    """Micro-batches alive (moment, stage): with m = p before the first backward; then, with more, before each stage's phase."""
    turn = pp * virtual_stages
    done = np.concatenate([[0], np.arange(virtual_stages) * pp])
    forwards = 2 * (pp - rank - 1) + (virtual_stages - 1) * pp + done + 1
    forwards[0] = min(forwards[0], turn)
    stages = np.arange(virtual_stages) * pp
    begun = np.minimum(np.maximum((forwards % turn)[:, None] - stages, 0), pp)
    return (forwards // turn * pp)[:, None] + begun - np.minimum(np.maximum(done[:, None] - stages[::-1], 0), pp)


def turns(order: Order, pp: int, kind: Kind) -> Moments:
    """Interleaving with one round of micro-batches, and with more, over (rounds, moments)."""
    loads = interleaved_alive(pp, order.virtual_stages, kind.rank) @ kind.layers
    one = _walk(loads[0], kind.layers[-1])
    fullest = {0, *loads[1:].argmax(axis=0).tolist()}
    more = [walked for at in sorted(fullest) for walked in _walk(loads[1 + at], kind.layers[-1 - at])]
    cases = ((one * len(more))[: len(more)], more)
    return np.array([[entry for entry, _ in case] for case in cases]), np.array([[row for _, row in case] for case in cases])


def _walk(load: Array, content: Array) -> list[tuple[int, Array]]:
    """The layers that keep a share while each entry of `content` runs backward, from `load` before the first of them."""
    found = []
    load = load.copy()
    for entry in np.flatnonzero(content)[::-1].tolist():
        found.append((entry, load.copy()))
        load[entry] -= content[entry]
    return found
