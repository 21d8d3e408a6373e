"""Simulates an order with given times. Computes the start and end of each action, and the idle time and memory of each
rank.

An action starts when its rank is free and its inputs are present. A result from another rank arrives `transfer` seconds
after its action ends; sending takes no time on the sender. A micro-batch is in flight on a stage from the start of its
F to the end of its B. If the order has W, the micro-batch is in flight until the end of its W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from meshwright.spec.schedules.action import Action, ActionKind, action_dependencies
from meshwright.spec.schedules.check import RankOrders, stage_ranks, topological_walk


class ActionSpan(NamedTuple):
    """An action, with its start and end in seconds from the start of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class ScheduleTimeline:
    """The result of a simulation. `spans` lists the actions of each pipeline rank. `idle` is the fraction of the
    makespan in which each rank is idle. `in_flight` is the result of `max_in_flight`."""

    spans: tuple[tuple[ActionSpan, ...], ...]
    makespan: float
    idle: tuple[float, ...]
    in_flight: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The mean idle fraction of all ranks."""
        return sum(self.idle) / len(self.idle)


def simulate_orders(
    orders: RankOrders,
    forward: Sequence[float],
    backward: Sequence[float],
    transfer: float = 0.0,
    weight: Sequence[float] | None = None,
) -> ScheduleTimeline:
    """Simulates `orders`. `forward`, `backward` and `weight` are the seconds of F, B and, if a stage has it, W of each
    stage.

    Raises: InputError if the order deadlocks.

    >>> from meshwright.spec.schedules.schedule_registry import schedule_orders
    >>> simulate_orders(schedule_orders("1f1b", 2, 1, 3), [1.0, 1.0], [2.0, 2.0]).makespan
    12.0
    """
    seconds = {
        ActionKind.F: forward,
        ActionKind.B: backward,
        ActionKind.W: weight if weight is not None else [0.0] * len(backward),
    }
    owner = stage_ranks(orders)
    ends: dict[Action, float] = {}
    free = [0.0] * len(orders)
    spans: list[list[ActionSpan]] = [[] for _ in orders]
    for rank, action in topological_walk(orders):
        arrivals = (
            ends[need] + (transfer if owner[need.stage] != rank else 0.0)
            for need in action_dependencies(action, len(owner))
        )
        start = max(free[rank], *arrivals, 0.0)
        free[rank] = ends[action] = start + seconds[action.kind][action.stage]
        spans[rank].append(ActionSpan(action, start, free[rank]))
    makespan = max(free, default=0.0)
    busy = [sum(span.end - span.start for span in line) for line in spans]
    return ScheduleTimeline(
        spans=tuple(tuple(line) for line in spans),
        makespan=makespan,
        idle=tuple(1.0 - worked / makespan if makespan else 0.0 for worked in busy),
        in_flight=tuple(max_in_flight(order) for order in orders),
    )


def max_in_flight(order: Sequence[Action], sizes: Sequence[float] | None = None) -> float:
    """Returns the peak of the activations that a rank stores for backward.

    `sizes` is the size of the activations of one micro-batch on each stage, for example in bytes. Without `sizes` the
    result is a number of micro-batches: each stage counts 1 / (stages of the rank). W frees the activations if the
    stage has W, otherwise B frees them.

    >>> from meshwright.spec.schedules.schedule_registry import schedule_orders
    >>> [max_in_flight(order) for order in schedule_orders("1f1b", 4, 1, 16)]
    [4.0, 3.0, 2.0, 1.0]
    >>> [max_in_flight(order) for order in schedule_orders("interleaved", 4, 2, 16)]
    [5.5, 4.5, 3.5, 2.5]
    """
    stages = {action.stage for action in order}
    split = {action.stage for action in order if action.kind is ActionKind.W}
    counts = dict.fromkeys(stages, 0)
    peak = 0.0
    for kind, stage, _ in order:
        if kind is ActionKind.F:
            counts[stage] += 1
            now = (
                sum(counts.values()) / len(stages)
                if sizes is None
                else sum(count * sizes[at] for at, count in counts.items())
            )
            peak = max(peak, now)
        elif kind is (ActionKind.W if stage in split else ActionKind.B):
            counts[stage] -= 1
    return peak
