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

from collections.abc import Sequence

import numpy as np

from meshwright.cost.box import Array, Order
from meshwright.cost.stages import Kind
from meshwright.spec.plan import Schedule

Moments = tuple[Array, Array]
"""Entries whose layer runs backward (..., moments), layers of each entry that keep a share then (..., moments, entries)."""


def moments(order: Order, pp: int, kinds: Sequence[Kind], micro_batches: Array) -> list[Moments]:
    """Where each kind of rank can be fullest, over (b, moments)."""
    if order.schedule != Schedule.interleaved:
        return [_plain(order, pp, kind, micro_batches) for kind in kinds]
    rounds = np.minimum(micro_batches // pp, 2)
    alive = interleaved_alive(pp, order.virtual_stages, np.array([kind.rank for kind in kinds]))
    return [_interleaved(kind, numbers, rounds) for kind, numbers in zip(kinds, alive, strict=True)]


def _plain(order: Order, pp: int, kind: Kind, micro_batches: Array) -> Moments:
    """GPipe and 1F1B: the first backward after the last forward that fits."""
    content = kind.layers[0]
    present = np.flatnonzero(content)
    freed = np.where(np.arange(len(content)) > present[:, None], content, 0)
    count = micro_batches if order.schedule == Schedule.gpipe else np.minimum(micro_batches, pp - kind.rank)
    return np.broadcast_to(present, (len(count), len(present))), count[:, None, None] * content - freed


def interleaved_alive(pp: int, virtual_stages: int, ranks: Array) -> Array:
    """Micro-batches alive (rank, moment, stage): with m = p before the first backward; then, with more, before each stage's phase."""
    turn = pp * virtual_stages
    warmup = 2 * (pp - ranks - 1) + (virtual_stages - 1) * pp
    done = np.concatenate([[0], np.arange(virtual_stages) * pp])
    forwards = warmup[:, None] + done + 1
    forwards[:, 0] = np.minimum(forwards[:, 0], turn)
    stages = np.arange(virtual_stages) * pp
    made = forwards // turn * pp
    begun = np.minimum(np.maximum((forwards % turn)[..., None] - stages, 0), pp)
    return made[..., None] + begun - np.minimum(np.maximum(done[:, None] - stages[::-1], 0), pp)


def _interleaved(kind: Kind, alive: Array, rounds: Array) -> Moments:
    """`alive` (moment, stage) and whether there is more than one round for each number of micro-batches."""
    loads = alive @ kind.layers
    one = _walk(loads[0], kind.layers[-1])
    fullest = {0, *loads[1:].argmax(axis=0).tolist()}
    more = [walked for at in sorted(fullest) for walked in _walk(loads[1 + at], kind.layers[-1 - at])]
    length = len(more)
    running = np.array([[entry for entry, _ in cases] for cases in ((one * length)[:length], more)])
    layers = np.array([[row for _, row in cases] for cases in ((one * length)[:length], more)])
    return running[rounds - 1], layers[rounds - 1]


def _walk(load: Array, content: Array) -> list[tuple[int, Array]]:
    """The layers that keep a share while each entry of `content` runs backward, from `load` before the first of them."""
    found = []
    load = load.copy()
    for entry in np.flatnonzero(content)[::-1].tolist():
        found.append((entry, load.copy()))
        load[entry] -= content[entry]
    return found
