"""Idle time of pipeline orders and time of their messages.

m micro-batches, p ranks of v virtual stages, t_r seconds of rank r for one micro-batch (all of its stages, forward and backward):

    step = m max t + bubble + messages,  bubble = (sum of t - max t) / v

exact for gpipe; for 1f1b exact with equal stages and never too short with unequal ones; for interleaved exact with equal stages
((p - 1) t / v, arXiv 2104.04473, section 2.2), and with unequal ones, plus `stall`, within some percent. Messages on the longest path of a step, which the order
cannot hide (tests play the orders of `schedules` against all of it):

    gpipe        2 (p - 1)
    1f1b         2 (p - 1) + 2 (n - floor(n / p)),  n = max(m - 2, 0): with as few micro-batches in flight as can be, each waits for its own
    interleaved  2 (p v - 1) while a message takes less than one stage's forward
"""

from __future__ import annotations

import numpy as np

from meshwright.cost.box import Array, Order
from meshwright.spec.plan import Schedule


def messages(order: Order, pp: int, micro_batches: Array) -> Array:
    """Messages one after the other on the longest path of a step, for each number of micro-batches.

    >>> from meshwright.cost.box import Order
    >>> messages(Order(Schedule.one_f_one_b, 1, (1, 1, 1, 1)), 4, np.array([1, 4, 16]))
    array([ 6, 10, 28])
    """
    if order.schedule == Schedule.one_f_one_b and pp > 1:
        later = np.maximum(micro_batches - 2, 0)
        return 2 * (pp - 1) + 2 * (later - later // pp)
    return np.full_like(micro_batches, 2 * (pp * order.virtual_stages - 1))


def idle(seconds: Array, counts: Array, virtual_stages: Array) -> tuple[Array, Array]:
    """(longest, bubble) of ranks that take `seconds` a micro-batch: kinds of ranks along the first axis, `counts` of each.

    >>> idle(np.array([2.0, 3.0]), np.array([1, 3]), np.array(1))        # 1F1B of four ranks: 2 + 3 + 3 of the others
    (np.float64(3.0), np.float64(8.0))
    """
    longest = seconds.max(axis=0, keepdims=seconds.ndim > 1)
    total = (seconds * counts).sum(axis=0, keepdims=seconds.ndim > 1)
    return longest, (total - longest) / virtual_stages


def stall(order: Order, pp: int) -> float:
    """Backward passes of a block that unequal interleaved stages cost in each micro-batch, unless the ranks have slack to hide them in.

    Each round of p micro-batches meets the longer stages on p - 1 ranks that wait for the first.
    """
    if order.virtual_stages == 1:
        return 0.0
    return (max(order.stage_layers) - min(order.stage_layers)) * (pp - 1) / pp
