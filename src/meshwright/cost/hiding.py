"""What runs beside something else: Galvatron's two-stream form. Communication C beside compute K adds max(C - K, 0) and slows what runs together."""

from __future__ import annotations

import numpy as np

from meshwright.cost import constants
from meshwright.cost.box import Array


def beside(communication: Array, compute: Array) -> Array:
    """Seconds that `communication` adds to `compute` that runs at the same time.

    >>> float(beside(np.array(3.0), np.array(2.0)))
    1.26
    """
    return np.maximum(communication - compute, 0.0) + constants.OVERLAP_SLOWDOWN * np.minimum(communication, compute)
