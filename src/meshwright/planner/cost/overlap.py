"""Models work that overlaps on two streams, like Galvatron, and chooses the bucket size that overlaps best. If
communication of C seconds overlaps with compute of K seconds, it adds max(C - K, 0) seconds. In addition, compute and
communication slow each other down by OVERLAP_SLOWDOWN while they overlap. All formulas of the cost model use this
rule."""

from __future__ import annotations

from math import sqrt

import numpy as np

from meshwright.planner.cost import constants
from meshwright.planner.cost.cost_context import CostContext
from meshwright.planner.cost.links import collective_rates
from meshwright.planner.cost.plan_grid import Array
from meshwright.spec.enums import DEFAULT_BUCKET_BYTES


def choose_bucket(of: CostContext) -> int:
    """Returns the bucket size in bytes with the least exposed time of gradient reductions.

    S bytes of gradients in buckets of b bytes need S / b starts of a seconds each. The last bucket takes b / B seconds
    at B bytes/s, and no compute overlaps with it. The sum S a / b + b / B is minimal at b = sqrt(S a B). The result is
    limited to at least MIN_BUCKET_BYTES and at most the default bucket size, because still larger buckets do not
    overlap better. For ranks that share memory, and for one device, the result is the default.

    >>> from meshwright.planner.cost.constants import MIN_BUCKET_BYTES
    >>> MIN_BUCKET_BYTES <= DEFAULT_BUCKET_BYTES
    True
    """
    links, devices = of.fabric, of.job.cluster.devices
    if of.shares_memory or devices == 1:
        return DEFAULT_BUCKET_BYTES
    whole = collective_rates(links, devices, 1)
    best = sqrt(of.job.model.parameters * of.gradient * float(2 * whole.turn) * float(whole.bandwidth))
    return int(min(max(best, constants.MIN_BUCKET_BYTES), DEFAULT_BUCKET_BYTES))


def overlapped(communication: Array, compute: Array) -> Array:
    """Returns the seconds that overlapped `communication` adds to `compute`.

    >>> float(overlapped(np.array(3.0), np.array(2.0)))
    1.26
    """
    return np.maximum(communication - compute, 0.0) + constants.OVERLAP_SLOWDOWN * np.minimum(communication, compute)


def concurrent_seconds(*seconds: float) -> float:
    """Returns the seconds until all of several concurrent tasks are complete. `seconds`: the duration of each task when
    it runs alone.

    The longest task determines the result. Every further task adds OVERLAP_SLOWDOWN times its own duration (see
    `overlapped`).

    >>> concurrent_seconds(2.0, 1.0, 1.0)
    2.26
    """
    longest = max(seconds)
    return longest + constants.OVERLAP_SLOWDOWN * (sum(seconds) - longest)
