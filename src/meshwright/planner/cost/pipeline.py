"""Computes the bubble of pipeline schedules, and the number of their exposed messages, for cost_model.py.

Symbols: m micro-batches; p pipeline ranks with v virtual stages each; t seconds of one rank for one micro-batch, in
forward and backward of all its stages. t is the sum of f (forward), b (gradients of inputs) and w (gradients of
weights).

    step = m x (maximum t) + bubble + messages
    bubble = sum of g over all ranks except the slowest

`Schedule.messages` in spec/schedules returns the number of messages, and `Schedule.bubble` returns g of one rank:

    1f1b, gpipe, interleaved    t / v
    zbh1                        max(f + b - w, f, b)
    zbv                         max(f / 2, b / 2, b - w)
    dualpipev                   max(f + b - w, f, b) / 2
    custom                      0

For dualpipev there is a second lower bound: the sum of b - w / 2 over all ranks except the slowest, minus f / 2 of the
slowest rank. The bubble is the larger value. For custom schedules the bubble is `Schedule.idle_micro_batches` times t
of the slowest rank.

Accuracy: the formulas are exact for gpipe. With equal stages they are exact for 1f1b and interleaved ((p - 1) t / v,
arXiv 2104.04473, section 2.2). With unequal stages, the result for 1f1b is never too low. The result for interleaved
plus `interleaving_imbalance` is then accurate within some percent. For the other schedules the formulas are exact with
equal stages and w <= f, and otherwise accurate within some percent (arXiv 2401.10241; 2412.19437). Tests compare bubble
and messages with the simulated orders of spec/schedules.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.planner.cost.plan_grid import Array, ScheduleChoice
from meshwright.spec.schedules.schedule import Schedule


def critical_path_messages(order: ScheduleChoice, pp: int, micro_batches: Array) -> Array:
    """Returns the number of messages on the critical path of a step, for each number in `micro_batches`.

    >>> from meshwright.planner.cost.plan_grid import ScheduleChoice
    >>> critical_path_messages(ScheduleChoice("1f1b", 1, (1, 1, 1, 1)), 4, np.array([1, 4, 16]))
    array([ 6, 10, 28])
    """
    return np.zeros_like(micro_batches) + order.rules.messages(pp, order.virtual_stages, micro_batches)


def slowest_rank_and_bubble(seconds: Array, counts: Array, virtual_stages: Array) -> tuple[Array, Array]:
    """Returns the seconds of the slowest rank per micro-batch, and the seconds of the bubble per step, for g = t / v.
    `seconds` is t; its first axis is the rank classes, with `counts` ranks each.

    >>> # 1f1b on four ranks: one takes 2 s, three take 3 s; the bubble is 2 + 3 + 3, all except one of the slowest
    >>> slowest_rank_and_bubble(np.array([2.0, 3.0]), np.array([1, 3]), np.array(1))
    (np.float64(3.0), np.float64(8.0))
    """
    longest = seconds.max(axis=0, keepdims=seconds.ndim > 1)
    total = (seconds * counts).sum(axis=0, keepdims=seconds.ndim > 1)
    return longest, (total - longest) / virtual_stages


class PassSplit(NamedTuple):
    """The seconds of one micro-batch on each rank class: forward (f), gradients of inputs (b), and gradients of weights
    (w)."""

    forward: Array
    backward: Array
    weights: Array


def ramp_seconds(orders: Sequence[ScheduleChoice], seconds: PassSplit) -> Array:
    """Returns g of each rank class: the seconds that a rank adds to the bubble unless it is the slowest.

    The second axis of the result has one item for each schedule in `orders`.
    """
    f, b, w = seconds
    whole = f + b + w
    turns = _along_schedules([order.virtual_stages for order in orders], whole)
    g = whole / turns
    for rules, which in _distinct_schedules(orders):
        g = np.where(_along_schedules(which, whole), rules.bubble(f, b, w, turns), g)
    return g


def bubble_seconds(orders: Sequence[ScheduleChoice], seconds: PassSplit, counts: Array) -> Array:
    """Returns the bubble, the idle seconds of the slowest rank in a step. The result has length 1 along the axis of
    rank classes.

    `counts` is the number of ranks of each class. The second axis of all arrays has one item for each schedule in
    `orders`.

    >>> four = ScheduleChoice("zbh1", 1, (1, 1, 1, 1))
    >>> bubble_seconds([four], PassSplit(*np.ones((3, 1, 1))), np.array([[4]])).item()
    3.0
    """
    f, b, w = seconds
    whole = f + b + w
    at = np.expand_dims(np.where(counts > 0, whole, -1.0).argmax(axis=0), 0)
    bubble = _sum_except_slowest(ramp_seconds(orders, seconds), counts, at)
    for rules, which in _distinct_schedules(orders):
        if (drain := rules.drain_bubble(f, b, w)) is not None:
            others, slowest = drain
            bound = _sum_except_slowest(others, counts, at) + _value_of_slowest(slowest, at)
            bubble = np.where(_along_schedules(which, whole), np.maximum(bubble, bound), bubble)
    idle = [order.rules.idle_micro_batches(order.virtual_stages) for order in orders]
    return bubble + _along_schedules(idle, whole) * _value_of_slowest(whole, at) if any(idle) else bubble


def _distinct_schedules(orders: Sequence[ScheduleChoice]) -> list[tuple[Schedule, list[bool]]]:
    """Returns the rules of each distinct schedule in `orders`, each with a list that marks the elements of `orders`
    with this schedule."""
    rules = {order.schedule: order.rules for order in orders}
    return [(rules[name], [order.schedule == name for order in orders]) for name in rules]


def min_bubble_seconds(orders: Sequence[ScheduleChoice], seconds: PassSplit, counts: Array) -> Array:
    """Returns a lower bound of the bubble. The bound stays valid if additional work makes backward longer on some
    ranks."""
    g = ramp_seconds(orders, seconds)
    return np.asanyarray(
        (g * counts).sum(axis=0, keepdims=True) - np.where(counts > 0, g, 0.0).max(axis=0, keepdims=True)
    )


def any_split_backward(orders: Sequence[ScheduleChoice]) -> bool:
    """Returns whether any of the schedules may split backward into B and W."""
    return any(order.rules.splits_backward for order in orders)


def _sum_except_slowest(each: Array, counts: Array, at: Array) -> Array:
    return np.asanyarray((each * counts).sum(axis=0, keepdims=True) - _value_of_slowest(each, at))


def _value_of_slowest(each: Array, at: Array) -> Array:
    return np.take_along_axis(np.broadcast_to(each, (len(each), *at.shape[1:])), at, 0)


def _along_schedules(values: Sequence[Any], like: Array) -> Array:
    """Returns `values`, one for each schedule, as an array along the second axis. The result has as many axes as
    `like`."""
    return np.array(values).reshape(1, -1, *[1] * (like.ndim - 2))


def interleaving_imbalance(order: ScheduleChoice, pp: int) -> float:
    """Returns the time that unequal interleaved stages add to each micro-batch. The unit is the backward time of one
    block.

    In each round of p micro-batches, p - 1 ranks run their longer stages while they wait for the first rank. Some of
    this time is hidden if the ranks are idle anyway; the caller subtracts this part.
    """
    if order.virtual_stages == 1 or order.rules.v_shape:
        return 0.0
    return (max(order.stage_layers) - min(order.stage_layers)) * (pp - 1) / pp
