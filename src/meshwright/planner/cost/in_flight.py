"""What a pipeline rank keeps at its fullest: micro-batches in flight, by the order that runs, and how far the running
backward has come.

A rank is fullest just before a backward pass, or inside of it: while the pass walks back through its layers, what they
kept is freed and
each needs some room of its own. Micro-batches alive, p ranks, v virtual stages, m micro-batches, rank r (equal to
`schedules.in_flight`):

    gpipe        m
    1f1b         min(m, p - r)
    interleaved  what min(m v, 2 (p - r - 1) + (v - 1) p + k) forwards made, less what k - 1 backwards freed
    zbh1          min(m, p - r); of blocks, but for those that recompute, min(m, p) - min(m, p - r) more wait for W
    zbv          down and up stage: min(m, 2p - r - 1) and min(m, r + 1) when the up one runs backward, min(m, 2p - r)
    and r when the down one does
    dualpipev    2p - r and r + 1
    actions      what the plan's own list holds

Where W is apart, the inputs of a layer's products and the gradients of their outputs are held until W. On ranks laid as
a V they are taken as what
the layer kept: there W follows B at once wherever a rank is fullest.

[Note: moments] Interleaved backwards go through the stages of a rank p at a time, last stage first. Alive numbers
change evenly within such
a phase, and only the stage whose backwards come next has gained since the phase began: it is enough to look where a
phase begins. With
m = p there is one such moment, with more micro-batches there are v, the same in every round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.planner.cost.plan_grid import Array, ScheduleChoice
from meshwright.planner.cost.rank_classes import RankClass
from meshwright.spec.enums import ScheduleName
from meshwright.spec.schedules.action import ActionKind as Action
from meshwright.spec.schedules.action import parse_action

BackwardMoments = tuple[Array, Array, Array]
"""Entries whose layer runs backward (..., moments), layers of each entry that keep a share then, and that wait for W
(..., moments, entries)."""


def peak_moments(
    order: ScheduleChoice, pp: int, kind: RankClass, micro_batches: Array, blocks: Sequence[bool] = ()
) -> BackwardMoments:
    """Where this kind of rank can be fullest, over (b, moments). `blocks`: which columns wait for W where the order has
    it; none said: all."""
    if order.schedule == ScheduleName.interleaved:
        return select_rounds(interleaved_moments(order, pp, kind), pp, micro_batches)
    if order.schedule in (ScheduleName.gpipe, ScheduleName.one_f_one_b):
        return _gpipe_or_1f1b_moments(order, pp, kind, micro_batches)
    waits = np.array(blocks or [True] * kind.layers.shape[1])
    until_b = np.minimum(micro_batches, pp - kind.rank) if order.schedule == ScheduleName.zbh1 else None
    return _split_backward_moments(_in_flight_counts(order, pp, kind.rank, micro_batches), kind, waits, until_b)


InFlightCounts = list[tuple[int, list[Array]]]
"""Which of a rank's stages runs backward, and how many micro-batches each of them then holds (b)."""


def _in_flight_counts(order: ScheduleChoice, pp: int, rank: int, count: Array) -> InFlightCounts:
    """Schedules whose backward is two actions, and those that the plan lists."""
    if order.schedule == ScheduleName.zbh1:
        return [(0, [np.minimum(count, pp)])]
    down, up = np.minimum(count, 2 * pp - rank), np.minimum(count, rank + 1)
    if order.schedule == ScheduleName.dualpipev:
        return [(0, [down, up]), (1, [down, up])]
    if order.schedule == ScheduleName.zbv:
        late = np.clip(count - pp + rank, 0, rank)
        return [(0, [down, late]), (1, [np.minimum(count, 2 * pp - 1 - rank), up])]
    return [
        (turn, [np.full_like(count, number) for number in held])
        for turn, held in in_flight_of_actions(order.actions[rank])
    ]


def in_flight_of_actions(line: str) -> list[tuple[int, tuple[int, ...]]]:
    """At each backward of a rank's own list: the turn of its stage, and the micro-batches that each of its stages
    holds; the fullest of each turn.

    >>> in_flight_of_actions("0F0 0F1 0B0 0W0 0B1 0W1")
    [(0, (2,))]
    """
    order = [parse_action(word) for word in line.split()]
    stages = sorted({action.stage for action in order})
    apart = {action.stage for action in order if action.kind is Action.W}
    held = dict.fromkeys(stages, 0)
    found: set[tuple[int, tuple[int, ...]]] = set()
    for kind, stage, _ in order:
        held[stage] += kind is Action.F
        if kind is Action.B:
            found.add((stages.index(stage), tuple(held.values())))
        held[stage] -= kind is (Action.W if stage in apart else Action.B)
    return [each for each in sorted(found) if not any(_dominates(other, each) for other in found)]


def _dominates(one: tuple[int, tuple[int, ...]], other: tuple[int, tuple[int, ...]]) -> bool:
    return (
        one != other
        and one[0] == other[0]
        and all(mine >= theirs for mine, theirs in zip(one[1], other[1], strict=True))
    )


def _split_backward_moments(
    alive: InFlightCounts, kind: RankClass, waits: Array, until_b: Array | None
) -> BackwardMoments:
    """What does not wait is freed by B, layer by layer as it walks back, and of what `waits` all but the inputs of
    products, for which gradients of their
    outputs come; on ranks laid as a V, W follows B at once where any such layer of weight lies."""
    running, rows, late = [], [], []
    for turn, counts in alive:
        load = sum(
            (count if until_b is None else until_b)[:, None] * kind.layers[at] for at, count in enumerate(counts)
        )
        behind = 0 if until_b is None else (counts[0] - until_b)[:, None] * kind.layers[turn]
        for entry in np.flatnonzero(kind.layers[turn]).tolist():
            through = np.where(np.arange(len(waits)) > entry, kind.layers[turn], 0)
            running.append(np.full(len(counts[0]), entry))
            rows.append(load - np.where(waits & (until_b is None), 0, through))
            late.append(np.where(waits & (until_b is not None), behind + through, 0 * rows[-1]))
    return np.stack(running, axis=1), np.stack(rows, axis=1), np.stack(late, axis=1)


def select_rounds(found: BackwardMoments, pp: int, micro_batches: Array) -> BackwardMoments:
    """Those of interleaving, which are the same from two rounds of pp micro-batches on."""
    rounds = np.minimum(np.maximum(micro_batches // pp, 1), 2) - 1
    return found[0][rounds], found[1][rounds], found[2][rounds]


def _gpipe_or_1f1b_moments(order: ScheduleChoice, pp: int, kind: RankClass, micro_batches: Array) -> BackwardMoments:
    """GPipe and 1F1B: the first backward after the last forward that fits."""
    content = kind.layers[0]
    present = np.flatnonzero(content)
    freed = np.where(np.arange(len(content)) > present[:, None], content, 0)
    count = micro_batches if order.schedule == ScheduleName.gpipe else np.minimum(micro_batches, pp - kind.rank)
    rows = count[:, None, None] * content - freed
    return np.broadcast_to(present, (len(count), len(present))), rows, 0 * rows


def interleaved_in_flight(pp: int, virtual_stages: int, rank: int) -> Array:
    """Micro-batches alive (moment, stage): with m = p before the first backward; then, with more, before each stage's
    phase."""
    turn = pp * virtual_stages
    done = np.concatenate([[0], np.arange(virtual_stages) * pp])
    forwards = 2 * (pp - rank - 1) + (virtual_stages - 1) * pp + done + 1
    forwards[0] = min(forwards[0], turn)
    stages = np.arange(virtual_stages) * pp
    begun = np.minimum(np.maximum((forwards % turn)[:, None] - stages, 0), pp)
    return (forwards // turn * pp)[:, None] + begun - np.minimum(np.maximum(done[:, None] - stages[::-1], 0), pp)


def interleaved_moments(order: ScheduleChoice, pp: int, kind: RankClass) -> BackwardMoments:
    """Interleaving with one round of micro-batches, and with more, over (rounds, moments)."""
    loads = interleaved_in_flight(pp, order.virtual_stages, kind.rank) @ kind.layers
    one = _walk_backward(loads[0], kind.layers[-1])
    fullest = {0, *loads[1:].argmax(axis=0).tolist()}
    more = [walked for at in sorted(fullest) for walked in _walk_backward(loads[1 + at], kind.layers[-1 - at])]
    cases = ((one * len(more))[: len(more)], more)
    rows = np.array([[row for _, row in case] for case in cases])
    return np.array([[entry for entry, _ in case] for case in cases]), rows, 0 * rows


def _walk_backward(load: Array, content: Array) -> list[tuple[int, Array]]:
    """The layers that keep a share while each entry of `content` runs backward, from `load` before the first of
    them."""
    found = []
    load = load.copy()
    for entry in np.flatnonzero(content)[::-1].tolist():
        found.append((entry, load.copy()))
        load[entry] -= content[entry]
    return found
