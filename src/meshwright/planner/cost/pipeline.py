"""Idle time of pipeline orders and time of their messages.

m micro-batches, p ranks of v virtual stages, t_r seconds of rank r for one micro-batch (all of its stages, forward and
backward):

    step = m max t + bubble + messages,  bubble = the g of all ranks but the longest
    g = t / v;  where W is apart, with f, b, w seconds of forward, of the gradients of inputs and of weights:
    g = max(f + b - w, f, b) of zbh1;  max(f / 2, b / 2, b - w) of zbv;  max(f + b - w, f, b) / 2 of dualpipev, and with all b - w / 2 less f / 2

exact for gpipe; for 1f1b exact with equal stages and never too short with unequal ones; for interleaved exact with
equal stages
((p - 1) t / v, arXiv 2104.04473, section 2.2), and with unequal ones, plus `stall`, within some percent; for the others
exact with equal
stages and w <= f, else within some percent (arXiv 2401.10241; 2412.19437). Messages on the longest path of a step,
which the order
cannot hide (tests play the orders of `schedules` against all of it):

    gpipe        2 (p - 1)
    1f1b         2 (p - 1) + 2 (n - floor(n / p)),  n = max(m - 2, 0): with as few micro-batches in flight as can be, each waits for its own
    interleaved  2 (p v - 1) while a message takes less than one stage's forward
    zbh1          2 (p - 1) + 2 min(max(m - 2, 0), p - 1)
    zbv          4 (p - 1) + max(p - 3, 0) at most; dualpipev 4 (p - 1) or less
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from meshwright.planner.cost.plan_grid import Array, ScheduleChoice
from meshwright.spec.constraints import count_action_micro_batches
from meshwright.spec.enums import ScheduleName
from meshwright.spec.schedules.action import ActionKind as Action
from meshwright.spec.schedules.schedule_registry import schedule_orders as orders_of
from meshwright.spec.schedules.simulate import simulate_orders

SPLIT_BACKWARD_SCHEDULES = (ScheduleName.zbh1, ScheduleName.zbv, ScheduleName.dualpipev, ScheduleName.actions)
"""Schedules whose backward is two actions, or may be."""


def critical_path_messages(order: ScheduleChoice, pp: int, micro_batches: Array) -> Array:
    """Messages one after the other on the longest path of a step, for each number of micro-batches.

    >>> from meshwright.planner.cost.plan_grid import ScheduleChoice
    >>> critical_path_messages(ScheduleChoice(ScheduleName.one_f_one_b, 1, (1, 1, 1, 1)), 4, np.array([1, 4, 16]))
    array([ 6, 10, 28])
    """
    if order.schedule == ScheduleName.one_f_one_b and pp > 1:
        later = np.maximum(micro_batches - 2, 0)
        return 2 * (pp - 1) + 2 * (later - later // pp)
    if order.schedule == ScheduleName.zbh1:
        return 2 * (pp - 1) + 2 * np.minimum(np.maximum(micro_batches - 2, 0), pp - 1)
    if order.as_v:
        return np.full_like(micro_batches, 4 * (pp - 1) + (max(pp - 3, 0) if order.schedule == ScheduleName.zbv else 0))
    return np.full_like(micro_batches, 2 * (pp * order.virtual_stages - 1))


def slowest_rank_and_bubble(seconds: Array, counts: Array, virtual_stages: Array) -> tuple[Array, Array]:
    """(longest, bubble) of ranks that take `seconds` a micro-batch: kinds of ranks along the first axis, `counts` of
    each.

    >>> slowest_rank_and_bubble(np.array([2.0, 3.0]), np.array([1, 3]), np.array(1))        # 1F1B of four ranks: 2 + 3 + 3 of the others
    (np.float64(3.0), np.float64(8.0))
    """
    longest = seconds.max(axis=0, keepdims=seconds.ndim > 1)
    total = (seconds * counts).sum(axis=0, keepdims=seconds.ndim > 1)
    return longest, (total - longest) / virtual_stages


class PassSplit(NamedTuple):
    """Seconds of one micro-batch on each kind of rank: forward, gradients of inputs and all else of backward, gradients
    of weights."""

    forward: Array
    backward: Array
    weights: Array


def ramp_seconds(orders: Sequence[ScheduleChoice], seconds: PassSplit) -> Array:
    """g: what each rank adds to the filling and emptying of a pipeline that another rank paces. Orders along the second
    axis."""
    f, b, w = seconds
    whole = f + b + w
    turns = _along_schedules([order.virtual_stages for order in orders], whole)
    g = whole / turns
    if any(order.schedule in SPLIT_BACKWARD_SCHEDULES for order in orders):
        plain = np.maximum(np.maximum(f + b - w, f), b)
        zero = np.maximum(np.maximum(f, b) / 2, b - w)
        g = np.where(_along_schedules([order.schedule == ScheduleName.zbh1 for order in orders], whole), plain, g)
        g = np.where(
            _along_schedules([order.schedule == ScheduleName.dualpipev for order in orders], whole), plain / 2, g
        )
        g = np.where(_along_schedules([order.schedule == ScheduleName.zbv for order in orders], whole), zero, g)
        g = np.where(_along_schedules([order.schedule == ScheduleName.actions for order in orders], whole), 0.0, g)
    return g


def bubble_seconds(orders: Sequence[ScheduleChoice], seconds: PassSplit, counts: Array) -> Array:
    """Idle seconds of the longest rank, over axes without that of ranks; `counts` ranks of each kind, orders along the
    second axis.

    >>> four = ScheduleChoice(ScheduleName.zbh1, 1, (1, 1, 1, 1))
    >>> bubble_seconds([four], PassSplit(*np.ones((3, 1, 1))), np.array([[4]])).item()
    3.0
    """
    whole = seconds.forward + seconds.backward + seconds.weights
    at = np.expand_dims(np.where(counts > 0, whole, -1.0).argmax(axis=0), 0)
    found = _sum_except_slowest(ramp_seconds(orders, seconds), counts, at)
    both_ways = [order.schedule == ScheduleName.dualpipev for order in orders]
    if any(both_ways):
        more = (
            _sum_except_slowest(seconds.backward - seconds.weights / 2, counts, at)
            - _value_of_slowest(seconds.forward, at) / 2
        )
        found = np.where(_along_schedules(both_ways, whole), np.maximum(found, more), found)
    given = [custom_schedule_idle(order) for order in orders]
    return found + _along_schedules(given, whole) * _value_of_slowest(whole, at) if any(given) else found


def custom_schedule_idle(order: ScheduleChoice) -> float:
    """Idle time of a plan's own list, in seconds of a rank's micro-batch: as played with equal stages, forward and both
    halves of backward alike.

    >>> custom_schedule_idle(ScheduleChoice(ScheduleName.actions, 1, (1, 1), True, ("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1")))
    1.0
    """
    if order.schedule != ScheduleName.actions:
        return 0.0
    micro_batches, pp = count_action_micro_batches(order.actions), len(order.actions)
    table = orders_of(order.schedule, pp, order.virtual_stages, micro_batches, order.actions)
    apart = {action.stage for row in table for action in row if action.kind is Action.W}
    thirds = [1.0 / (3 * order.virtual_stages)] * len(order.stage_layers)
    backward = [third if stage in apart else 2 * third for stage, third in enumerate(thirds)]
    return round(simulate_orders(table, thirds, backward, 0.0, thirds).makespan, 9) - micro_batches


def min_bubble_seconds(orders: Sequence[ScheduleChoice], seconds: PassSplit, counts: Array) -> Array:
    """Seconds below which the bubble does not go when backward takes longer, whichever rank is the longest then."""
    g = ramp_seconds(orders, seconds)
    return np.asarray((g * counts).sum(axis=0, keepdims=True) - np.where(counts > 0, g, 0.0).max(axis=0, keepdims=True))


def any_split_backward(orders: Sequence[ScheduleChoice]) -> bool:
    """Whether one of them has a backward in two actions."""
    return any(order.schedule in SPLIT_BACKWARD_SCHEDULES for order in orders)


def _sum_except_slowest(each: Array, counts: Array, at: Array) -> Array:
    return np.asarray((each * counts).sum(axis=0, keepdims=True) - _value_of_slowest(each, at))


def _value_of_slowest(each: Array, at: Array) -> Array:
    return np.take_along_axis(np.broadcast_to(each, (len(each), *at.shape[1:])), at, 0)


def _along_schedules(values: Sequence[Any], like: Array) -> Array:
    """`values` along the second axis."""
    return np.array(values).reshape(1, -1, *[1] * (like.ndim - 2))


def interleaving_imbalance(order: ScheduleChoice, pp: int) -> float:
    """Backward passes of a block that unequal interleaved stages cost in each micro-batch, unless the ranks have slack
    to hide them in.

    Each round of p micro-batches meets the longer stages on p - 1 ranks that wait for the first.
    """
    if order.virtual_stages == 1 or order.as_v:
        return 0.0
    return (max(order.stage_layers) - min(order.stage_layers)) * (pp - 1) / pp
