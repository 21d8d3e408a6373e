"""Judges the differences between the plan and one device in a proof (proof_run.py): of the loss, and of the gradient of
each parameter.

[Note: tolerance] In float64, losses and gradients must agree to relative differences of 1e-10. In float32, losses must
agree to 1e-6 and gradients to 1e-5. If they differ by more, and always in precisions below float32, rounding is
measured instead of assumed. Let g be a gradient under the plan, l the same gradient on one device in the plan's own
precision, and h the same gradient on one device in the next higher precision. Then |g - h| <= K |l - h| + floor |h|
must hold. Here |.| is the Euclidean norm and floor is the relative tolerance of the precision. Both g and l are
roundings of h with errors of similar size, so |g - h| / |l - h| is typically 1. The factor K = 4 (ROUNDING_FACTOR)
allows for other orders of summation. |l - h| is estimated from sketches of l and h (`sketch_gradient`). An estimate may
be small by chance. It is therefore raised to at least |h| times the median of |l - h| / |h| over all gradients, and
raised further for gradients with few elements (SMALL_GRADIENT_ELEMENTS). One exception is not measured: with `reduce:
bf16` in a float32 run, ranks round each sum of gradients to bfloat16, which neither l nor h does. A gradient is
then rounded several times, and its tolerance is K roundings to bfloat16.
"""

from __future__ import annotations

import functools
import math
import statistics
import zlib
from dataclasses import dataclass, field

import torch

from meshwright.spec.precision import Recipe

STRICT_TOLERANCES = {torch.float64: (1e-10, 1e-10), torch.float32: (1e-6, 1e-5)}
"""The accepted relative differences of the loss and of a gradient, by the dtype of the computation."""
LOW_PRECISION_FLOORS = {torch.bfloat16: (4e-3, 4e-3), torch.float16: (5e-4, 5e-4)}
"""For dtypes below float32: the relative differences of the loss and of a gradient that are accepted in addition to the
measured rounding. Each is the relative error of one rounding to the dtype."""
ROUNDING_FACTOR = 4.0
SMALL_GRADIENT_ELEMENTS = 16
"""The measured rounding of a gradient with few elements may be small by chance. It is therefore multiplied by 1 +
SMALL_GRADIENT_ELEMENTS / (number of elements)."""
SKETCH_ELEMENTS = 4096
"""The number of elements of a sketch. The norm of a sketch estimates the norm of a difference with a relative error of
sqrt(2 / SKETCH_ELEMENTS) = 2 %. If parts of the difference are identical, the error is up to 4 %."""

COMPARE_CHUNK_ELEMENTS = 1 << 18
"""The number of elements of a gradient that are compared at a time. It is a multiple of SKETCH_ELEMENTS."""


@dataclass
class GradientGap:
    """The comparison of one gradient. `off` is the norm of the difference between the plan and one device. `norm` is
    the norm of the gradient on one device, `planned` that under the plan. `noise` is the measured norm of the rounding
    error on one device, |l - h| in [Note: tolerance]."""

    elements: int
    off: float = 0.0
    norm: float = 0.0
    planned: float = 0.0
    noise: float = 0.0

    def add(self, one: torch.Tensor, planned: torch.Tensor, scale: float) -> None:
        """Adds a range of elements to the comparison. `one`: the elements on one device. `planned`: the elements under
        the plan, which are multiplied by `scale`. Computes in float64."""
        first, second = _scratch(one.device)
        chunks = zip(one.split(COMPARE_CHUNK_ELEMENTS), planned.split(COMPARE_CHUNK_ELEMENTS), strict=True)
        for one_part, planned_part in chunks:
            mine = first[: len(one_part)].copy_(one_part)
            theirs = second[: len(planned_part)].copy_(planned_part).div_(scale)
            self.norm, self.planned = (
                math.hypot(self.norm, _float64_norm(mine)),
                math.hypot(self.planned, _float64_norm(theirs)),
            )
            self.off = (
                math.hypot(self.off, _float64_norm(theirs.sub_(mine))) if math.isfinite(self.planned) else math.inf
            )


@dataclass
class ProofComparison:
    """The compared values of one batch, complete on rank 0. `losses` and `labels`: the loss and the number of valid
    labels, on one device and under the plan. `gaps`: the gradient comparisons by parameter name. `planned`: the
    parameters that get a gradient under the plan."""

    losses: tuple[float, float]
    labels: tuple[int, int]
    gaps: dict[str, GradientGap] = field(default_factory=dict)
    reached: list[str] = field(default_factory=list)
    """The parameters that get a gradient on one device, nearest to the loss first."""
    planned: set[str] = field(default_factory=set)
    rounded: float = 0.0
    """The measured rounding error of the loss on one device."""


@dataclass
class ProofLimits:
    """The accepted relative differences, in addition to ROUNDING_FACTOR times the measured rounding. `eps`: the machine
    epsilon of the dtype in which one device computes."""

    loss: float
    gradient: float
    eps: float


def limits_of(recipe: Recipe) -> ProofLimits:
    """Returns the tolerances of a proof. With `reduce`, gradients may be stored and summed in fewer bits than the
    computation has. One device does not round its sums, so such gradients get the tolerance of several roundings."""
    compute = getattr(torch, recipe.compute)
    low = compute in LOW_PRECISION_FLOORS
    loss, gradient = (LOW_PRECISION_FLOORS if low else STRICT_TOLERANCES)[compute]
    if not low and recipe.gradient_size < recipe.size:
        gradient = ROUNDING_FACTOR * LOW_PRECISION_FLOORS[torch.bfloat16][1]
    return ProofLimits(loss, gradient, eps=torch.finfo(torch.float32 if low else compute).eps)


@dataclass
class ProofOutcome:
    """The judgement of one batch. `loss` and `gradient` are relative differences. `where`: the parameter whose gradient
    differs most in relation to its limit. `rounding`: the number of gradients that consist only of rounding errors."""

    loss: float
    loss_limit: float
    where: str
    gradient: float
    gradient_limit: float
    rounding: int
    beyond: list[str]
    """The parameters whose gradients differ by more than their limits, nearest to the loss first."""

    @property
    def good(self) -> bool:
        """Returns whether the loss and all gradients are within their limits."""
        return self.loss <= self.loss_limit and not self.beyond


def judge_comparison(compared: ProofComparison, limits: ProofLimits) -> ProofOutcome:
    """Compares each difference with its limit. A gradient is not compared if it is only rounding error. This holds if
    its norm, under the plan and on one device, is at most 10 eps times the norm of all gradients."""
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
    """Returns a sketch of `gradient`, a vector of SKETCH_ELEMENTS sums of its elements with random signs. The norm of
    the sketch estimates the norm of `gradient`. Sketches are linear: the difference of two sketches is the sketch of
    the difference.

    `gradient` may be a range of the gradient of the parameter `name`. `first` is then the index of its first element, a
    multiple of COMPARE_CHUNK_ELEMENTS. The sketches of all ranges add up to the sketch of the full gradient. The sign
    of an element is the product of two signs: one for its offset in its chunk, and one for its chunk and its sum.
    Source: Charikar et al., Finding Frequent Items in Data Streams, 2002 (count sketch).
    """
    flat = gradient.detach().reshape(-1)
    signs, (scratch, _) = _chunk_signs(flat.device), _scratch(flat.device)
    found = torch.zeros(SKETCH_ELEMENTS, dtype=torch.float64, device=flat.device)
    random = torch.Generator()
    for number, part in enumerate(flat.split(COMPARE_CHUNK_ELEMENTS), first // COMPARE_CHUNK_ELEMENTS):
        rows, rest = divmod(len(part), SKETCH_ELEMENTS)
        signed = scratch[: len(part)].copy_(part).mul_(signs[: len(part)])
        sums = signed[: rows * SKETCH_ELEMENTS].view(rows, SKETCH_ELEMENTS).sum(0)
        sums[:rest] += signed[rows * SKETCH_ELEMENTS :]
        random.manual_seed(zlib.crc32(f"{name} {number}".encode()))
        found += sums * _draw_signs(random, SKETCH_ELEMENTS).to(flat.device)
    return found


@functools.lru_cache(maxsize=2)
def _scratch(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns two float64 vectors of COMPARE_CHUNK_ELEMENTS elements (2 MiB each), whose values nobody reads later. On
    a CPU, new memory for each chunk costs up to ten times the time of the comparison: the kernel clears every page."""
    first, second = torch.empty(2, COMPARE_CHUNK_ELEMENTS, dtype=torch.float64, device=device)
    return first, second


@functools.lru_cache(maxsize=2)
def _chunk_signs(device: torch.device) -> torch.Tensor:
    """Returns COMPARE_CHUNK_ELEMENTS random signs, 1 or -1, in float64 (2 MiB)."""
    return _draw_signs(torch.Generator().manual_seed(0), COMPARE_CHUNK_ELEMENTS).to(device)


def _draw_signs(random: torch.Generator, count: int) -> torch.Tensor:
    return torch.randint(0, 2, (count,), generator=random).mul_(2).sub_(1).double()
