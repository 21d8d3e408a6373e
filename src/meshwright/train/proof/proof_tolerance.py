"""The tolerances of a proof: the allowed differences of the loss and of each gradient between the plan and one device.

[Note: tolerance] In float64, losses and gradients agree to 1e-10; in float32, losses agree to 1e-6 and gradients to
1e-5. Where they differ by more, and always in precisions below float32, rounding is measured instead of assumed. Three
gradients are used: g of the plan, h of one device in the next higher precision, and l of one device in the plan's own
precision. Then |g - h| <= K |l - h| + floor |h| must hold, where floor is one of LOW_PRECISION_FLOORS. g and l round
the same number with errors of similar size, so the ratio |g - h| / |l - h| is typically 1. K = 4 (ROUNDING_FACTOR)
allows for other orders of sums. Sketches of l and h estimate |l - h| (`sketch_gradient`).
"""

from __future__ import annotations

import functools
import math
import statistics
import zlib
from dataclasses import dataclass, field

import torch

STRICT_TOLERANCES = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-6, 1e-5)}
"""The largest relative differences of the loss and of a gradient, by the dtype of computation."""
LOW_PRECISION_FLOORS = {torch.bfloat16: (4e-3, 4e-3), torch.float16: (5e-4, 5e-4)}
"""The limits added to the measured rounding for dtypes below float32: the relative error of one rounding to the dtype.
"""
ROUNDING_FACTOR = 4.0
SMALL_GRADIENT_ELEMENTS = 16
"""The measured rounding of a gradient with few elements may be small by chance. So it is multiplied by
1 + SMALL_GRADIENT_ELEMENTS / elements."""
SKETCH_ELEMENTS = 4096
"""The elements of a sketch. The norm of a sketch estimates the norm of a difference within 1 / sqrt(SKETCH_ELEMENTS /
2) = 2 %. If parts of the difference are identical, the error of the estimate is up to 4 %."""

COMPARE_CHUNK_ELEMENTS = 1 << 18
"""The number of elements of a gradient that are compared at a time, a multiple of SKETCH_ELEMENTS."""


@dataclass
class GradientGap:
    """Compares one gradient of the plan with that of the single-device run. `off` is the norm of their difference,
    `norm` that of the single-device gradient, `planned` that of the plan's gradient. `noise` is the norm of the
    rounding error of the single-device gradient."""

    elements: int
    off: float = 0.0
    norm: float = 0.0
    planned: float = 0.0
    noise: float = 0.0

    def add(self, one: torch.Tensor, planned: torch.Tensor, scale: float) -> None:
        """Adds some elements of the single-device gradient (`one`) and the same elements of the plan's gradient
        (`planned`, which has the factor `scale`). Computes in float64."""
        for mine, theirs in zip(one.split(COMPARE_CHUNK_ELEMENTS), planned.split(COMPARE_CHUNK_ELEMENTS), strict=True):
            mine, theirs = mine.double(), theirs.double().div(scale)
            self.norm, self.planned = (
                math.hypot(self.norm, _float64_norm(mine)),
                math.hypot(self.planned, _float64_norm(theirs)),
            )
            self.off = (
                math.hypot(self.off, _float64_norm(theirs.sub_(mine))) if math.isfinite(self.planned) else math.inf
            )


@dataclass
class ProofComparison:
    """The values of one batch on both sides, stored on rank 0."""

    losses: tuple[float, float]
    labels: tuple[int, int]
    gaps: dict[str, GradientGap] = field(default_factory=dict)
    reached: list[str] = field(default_factory=list)
    """The parameters that one device's loss reaches, nearest to the loss first."""
    planned: set[str] = field(default_factory=set)
    rounded: float = 0.0
    """The rounding error of the loss."""


@dataclass
class ProofLimits:
    """The allowed relative differences, in addition to ROUNDING_FACTOR times the measured rounding. `eps`: the machine
    epsilon of the dtype that both sides use."""

    loss: float
    gradient: float
    eps: float


@dataclass
class ProofOutcome:
    """The result of a comparison with its limits."""

    loss: float
    loss_limit: float
    where: str
    gradient: float
    gradient_limit: float
    rounding: int
    beyond: list[str]
    """Parameters whose gradients exceed their limits, nearest to the loss first."""

    @property
    def good(self) -> bool:
        """Returns whether the loss and all gradients are within their limits."""
        return self.loss <= self.loss_limit and not self.beyond


def judge_comparison(compared: ProofComparison, limits: ProofLimits) -> ProofOutcome:
    """Returns the result: each difference compared with its limit, and the largest ratio of the two. If the norm of a
    parameter's gradient is below 10 eps times the norm of all gradients on both sides, it is only rounding and is not
    compared."""
    whole = math.sqrt(sum(gap.norm**2 for gap in compared.gaps.values()))
    small = 10 * limits.eps * whole
    one, plan = compared.losses
    loss = abs(plan - one) / max(abs(one), 1e-300) if plan != one else 0.0
    found = ProofOutcome(
        loss, limits.loss + ROUNDING_FACTOR * compared.rounded / max(abs(one), 1e-300), "", 0.0, limits.gradient, 0, []
    )
    if math.isnan(loss):
        found.loss = math.inf
    usual = statistics.median([gap.noise / gap.norm for gap in compared.gaps.values() if gap.norm] or [0.0])
    worst = -1.0
    for name, gap in compared.gaps.items():
        if max(gap.norm, gap.planned) <= small:
            found.rounding += 1
            continue
        allowed = limits.gradient * gap.norm + ROUNDING_FACTOR * (1 + SMALL_GRADIENT_ELEMENTS / gap.elements) * max(
            gap.noise, usual * gap.norm
        )
        part = gap.off / allowed if allowed else math.inf
        if not part <= 1:
            found.beyond.append(name)
        if not part <= worst:
            worst = math.inf if math.isnan(part) else part
            norm = max(gap.norm, 1e-300)
            off = gap.off if math.isfinite(gap.off) else math.inf
            found.where, found.gradient, found.gradient_limit = name, off / norm, allowed / norm
    return found


def _float64_norm(flat: torch.Tensor) -> float:
    """Returns the norm of a float64 vector. On a CPU this is eight times as fast as torch's norm."""
    return math.sqrt(float(torch.dot(flat, flat)))


def sketch_gradient(name: str, gradient: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Returns a sketch of `gradient`, of shape (SKETCH_ELEMENTS,): sums of its elements with random signs. The norm of
    the sketch estimates the norm of `gradient`. Sketches are linear: the difference of two sketches is the sketch of
    the difference.

    The sketches of all parts of a gradient add up to the sketch of the whole. `first`: the index of the first element
    of a part, a multiple of COMPARE_CHUNK_ELEMENTS. Elements at the same offset of each chunk have the same sign. The
    sums of each chunk have further random signs. Source: Charikar et al., Finding Frequent Items in Data Streams, 2002
    (count sketch).
    """
    flat = gradient.detach().reshape(-1)
    signs = _chunk_signs(flat.device)
    found = torch.zeros(SKETCH_ELEMENTS, dtype=torch.float64, device=flat.device)
    random = torch.Generator()
    for number, part in enumerate(flat.split(COMPARE_CHUNK_ELEMENTS), first // COMPARE_CHUNK_ELEMENTS):
        rows, rest = divmod(len(part), SKETCH_ELEMENTS)
        signed = part.to(torch.float64, copy=True).mul_(signs[: len(part)])
        sums = signed[: rows * SKETCH_ELEMENTS].view(rows, SKETCH_ELEMENTS).sum(0)
        sums[:rest] += signed[rows * SKETCH_ELEMENTS :]
        random.manual_seed(zlib.crc32(f"{name} {number}".encode()))
        found += sums * _draw_signs(random, SKETCH_ELEMENTS).to(flat.device)
    return found


@functools.lru_cache(maxsize=2)
def _chunk_signs(device: torch.device) -> torch.Tensor:
    """Returns random signs, 1 or -1, as a float64 vector of shape (COMPARE_CHUNK_ELEMENTS,): 2 MiB."""
    return _draw_signs(torch.Generator().manual_seed(0), COMPARE_CHUNK_ELEMENTS).to(device)


def _draw_signs(random: torch.Generator, count: int) -> torch.Tensor:
    return torch.randint(0, 2, (count,), generator=random).mul_(2).sub_(1).double()
