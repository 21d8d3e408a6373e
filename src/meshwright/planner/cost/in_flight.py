"""The layers whose activations a pipeline rank holds at its memory peak, from what its schedule has in flight.

A rank is at its peak just before a backward pass, or inside it: while the pass walks back through its layers, their
activations are freed, and each layer needs transient memory. `Schedule.in_flight` (spec/schedules) states how many
micro-batches each stage of the rank holds at these moments.

Where backward is split, the inputs of the matrix products of a layer and the gradients of their outputs are held until
W. On the ranks of a V, B frees nothing of them but W follows at once wherever a rank is at its peak.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.planner.cost.plan_grid import Array, ScheduleChoice
from meshwright.planner.cost.rank_classes import RankClass

BackwardMoments = tuple[Array, Array, Array]
"""The entry whose layer runs backward (..., moments). Then, for each entry, the layers with saved activations, and
those that wait for W (..., moments, entries)."""


def peak_moments(
    order: ScheduleChoice, pp: int, kind: RankClass, micro_batches: Array, blocks: Sequence[bool] = ()
) -> BackwardMoments:
    """Returns the moments at which ranks of this class can be at their peak, over (b, moments).

    `blocks` says which columns wait for W where the schedule has it; without it all do.
    """
    if order.rules.in_rounds:
        return select_rounds(_round_moments(order, pp, kind), pp, micro_batches)
    return _backward_moments(order, pp, kind, micro_batches, np.array(blocks or [True] * kind.layers.shape[1]))


def _backward_moments(
    order: ScheduleChoice, pp: int, kind: RankClass, micro_batches: Array, waits: Array
) -> BackwardMoments:
    """Returns the moments of schedules whose activations depend on the number of micro-batches.

    What does not wait for W is freed by B, layer by layer. Of what `waits`, all but the inputs of products is freed,
    and the gradients of their outputs are added.
    """
    rules = order.rules
    waits = waits & rules.splits_backward
    running, rows, until_w = [], [], []
    for turn, alive, deferred in rules.in_flight(kind.rank, pp, order.virtual_stages, micro_batches):
        load = sum(
            np.broadcast_to(count, micro_batches.shape)[:, None] * kind.layers[at] for at, count in enumerate(alive)
        )
        done = np.broadcast_to(deferred, micro_batches.shape)[:, None] * kind.layers[turn]
        for entry in np.flatnonzero(kind.layers[turn]).tolist():
            passed = np.where(np.arange(len(waits)) > entry, kind.layers[turn], 0)
            running.append(np.full(len(micro_batches), entry))
            rows.append(load - np.where(waits & (not rules.defers_weights), 0, passed))
            until_w.append(np.where(waits & rules.defers_weights, done + passed, 0 * rows[-1]))
    return np.stack(running, axis=1), np.stack(rows, axis=1), np.stack(until_w, axis=1)


def select_rounds(found: BackwardMoments, pp: int, micro_batches: Array) -> BackwardMoments:
    """Returns the moments of a schedule in rounds, which are the same from two rounds of pp micro-batches on."""
    rounds = np.minimum(np.maximum(micro_batches // pp, 1), 2) - 1
    return found[0][rounds], found[1][rounds], found[2][rounds]


def _round_moments(order: ScheduleChoice, pp: int, kind: RankClass) -> BackwardMoments:
    """Returns the moments with one round of micro-batches, and with more, over (rounds, moments)."""
    cases = []
    for rounds in (1, 2):
        moments = order.rules.in_flight(kind.rank, pp, order.virtual_stages, rounds * pp)
        loads = np.array([moment.alive for moment in moments]) @ kind.layers
        peaks = sorted({0, *loads.argmax(axis=0).tolist()})
        cases.append([step for at in peaks for step in _walk_backward(loads[at], kind.layers[moments[at].turn])])
    length = len(cases[-1])
    cases = [(case * length)[:length] for case in cases]
    rows = np.array([[row for _, row in case] for case in cases])
    return np.array([[entry for entry, _ in case] for case in cases]), rows, 0 * rows


def _walk_backward(load: Array, content: Array) -> list[tuple[int, Array]]:
    """Returns each entry of `content` in backward order, with the layers that are held while it runs."""
    steps = []
    load = load.copy()
    for entry in np.flatnonzero(content)[::-1].tolist():
        steps.append((entry, load.copy()))
        load[entry] -= content[entry]
    return steps
