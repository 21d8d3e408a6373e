"""The accepted differences between a recording and one device.

One device computes twice: in float64, and in the precision of the recording. The difference of the two is the rounding
of one device. A recorded value may differ from float64 by ROUNDING_FACTOR times this rounding, plus a floor. The
rounding of a tensor is raised to the median of all tensors of its kind, because a single measurement may be small by
chance. In float64 recordings, the second run begins from weights that differ by one rounding.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from meshwright.interop.recording.digest import Digest, distance

ROUNDING_FACTOR = 8.0


class Floors(NamedTuple):
    """Accepted relative differences in addition to the measured rounding. `noise` is relative to the norm of all
    gradients, `stored` to the norm of a weight. `flips` is the fraction of elements of a gradient whose sign may be
    rounding: Adam turns each of them into a full step. `step`: the relative difference of the size of all updates."""

    output: float
    loss: float
    gradient: float
    update: float
    noise: float
    stored: float
    flips: float
    step: float


FLOORS = {
    "float64": Floors(1e-9, 1e-10, 1e-8, 1e-6, 1e-13, 1e-14, 0.0, 1e-4),
    "float32": Floors(1e-5, 1e-6, 2e-5, 1e-2, 1e-7, 4e-6, 1e-6, 5e-2),
    "bfloat16": Floors(2e-2, 1e-2, 2e-2, 5e-2, 1e-3, 4e-6, 2e-2, 0.25),
    "tf32": Floors(3e-3, 2e-3, 3e-3, 2e-2, 2e-4, 4e-6, 2e-3, 0.1),
    "float16": Floors(3e-3, 2e-3, 3e-3, 2e-2, 2e-4, 4e-6, 2e-3, 0.1),
}
"""By the precision in which modules compute."""


class Rounding:
    """The measured rounding of all tensors of one kind: pairs of a norm and the norm of a rounding error."""

    def __init__(self, pairs: Iterable[tuple[Digest, Digest]]) -> None:
        found = [distance(one, two) / float(one[-1]) for one, two in pairs if float(one[-1]) > 0]
        self.usual = statistics.median(found) if found else 0.0

    def limit(self, truth: Digest, other: Digest | None, floor: float, extra: float = 0.0) -> float:
        """Returns the largest accepted norm of a difference from `truth`. `other` is the value in the precision of the
        recording, `extra` a norm that is accepted in any case."""
        norm = float(truth[-1])
        noise = distance(truth, other) if other is not None else 0.0
        return floor * norm + ROUNDING_FACTOR * max(noise, self.usual * norm) + extra


def flipped(elements: int, fraction: float) -> float:
    """Returns the relative difference of an update in which the signs of at least three elements are rounding.

    >>> round(flipped(10000, 1e-6), 3), flipped(10, 0.0)
    (0.035, 0.0)
    """
    return 2 * math.sqrt(3 / max(elements, 1) + ROUNDING_FACTOR * fraction) if fraction else 0.0
