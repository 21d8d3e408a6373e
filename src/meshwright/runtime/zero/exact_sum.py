"""Exact sums: the gradient of each micro-batch becomes integers, which are added, so that no order of adding and no
number of ranks changes a bit.

Promise: with the same micro-batches (`workload.exact` sequences each) losses and weights are bit for bit those of one
rank under any number of
data-parallel ranks at any ZeRO stage, and so they stay when ranks are lost or added while the run goes on.

Rule: a gradient g of one micro-batch, already divided by the labels of the whole batch, is held as round(g 2^52), a
whole number of units of 2.2e-16. The unit is
the same for every micro-batch, rank and step: one that followed the largest gradient of those that meet in a sum would
depend on who meets
whom. A gradient whose mean over the batch would be LARGEST or more, and one that is not finite, makes the norm
infinite: the step is skipped by all
ranks alike, as ever. The squared norm is a sum of integers too, 60 bits of each square relative to the largest; a
micro-batch's loss is rounded
so that float64 holds every sum of such exactly. One thread a rank: kernels that share a sum out among threads add in
another order.

Cost: 8 bytes for each gradient that is held, and as many that are sent, instead of 4 or 2; two more passes over each
gradient of each micro-batch.
Source: Demmel, Nguyen, Fast Reproducible Floating-Point Summation, ARITH 2013, for what makes a sum depend on its
order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.comm.group import CommGroup
from meshwright.spec.precision import Recipe

FIXED_POINT_UNIT = 2.0**-52
MAX_GRADIENT = 2.0**10
"""Gradients of this size or more cannot be summed: 2^62 units."""

NORM_BITS = 30
"""Bits of an element, relative to the largest, that the squared norm is made of."""

MAX_MEAN_LOSS = 2.0**8
"""Mean loss up to which sums of losses are exact."""

CPU_TILE_ELEMENTS = 1 << 18
"""Elements that are converted at a time, so that what lies between stays in the cache."""
ACCELERATOR_TILE_ELEMENTS = 1 << 24
"""The same on an accelerator, where each tile is a few launches."""


class FixedPointAccumulator:
    """Of one flat unit: what becomes of its gradients in a step. `overflow`: one of them was beyond what can be
    added."""

    dtype = torch.int64

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.result_dtype = torch.float32 if recipe.master else getattr(torch, recipe.compute)
        self.overflow = torch.zeros((), dtype=torch.bool, device=device)
        self._micro_batches = 1

    def begin_step(self, micro_batches: int) -> None:
        """A step that adds up so many over all ranks."""
        self._micro_batches = micro_batches
        self.overflow.zero_()

    def quantize(self, gradient: torch.Tensor) -> torch.Tensor:
        units, fits = to_fixed_point(gradient, self._micro_batches)
        self.overflow |= ~fits
        return units

    def dequantize(self, units: torch.Tensor) -> torch.Tensor:
        """The sums of all ranks as floating-point numbers."""
        result = torch.empty(units.shape, dtype=self.result_dtype, device=units.device)
        for into, part in zip(result.split(_tile_elements(units)), units.split(_tile_elements(units)), strict=True):
            into.copy_(part.double().mul_(FIXED_POINT_UNIT))
        return result


def _tile_elements(flat: torch.Tensor) -> int:
    return CPU_TILE_ELEMENTS if backend_of(flat.device).memory_is_host else ACCELERATOR_TILE_ELEMENTS


def to_fixed_point(gradient: torch.Tensor, micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`gradient` in units, and whether each of `micro_batches` like it can be added up without an overflow (a scalar
    tensor).

    >>> units, fits = to_fixed_point(torch.tensor([0.5, -(2.0**-52)], dtype=torch.float64), 4)
    >>> units.tolist(), bool(fits), bool(to_fixed_point(torch.tensor([float("nan")]), 4)[1])
    ([2251799813685248, -1], True, False)
    """
    flat = gradient.detach().contiguous().view(-1)
    units = torch.empty(flat.shape, dtype=torch.int64, device=flat.device)
    for into, part in zip(units.split(_tile_elements(flat)), flat.split(_tile_elements(flat)), strict=True):
        into.copy_((part.double() * (1 / FIXED_POINT_UNIT)).round_())
    fits = (
        flat.abs().max().double() < MAX_GRADIENT / micro_batches
        if flat.numel()
        else torch.ones((), dtype=torch.bool, device=flat.device)
    )
    return units.view(gradient.shape), fits


def square_norm(
    runs: Iterable[torch.Tensor], sums: Sequence[FixedPointAccumulator], world: CommGroup | None
) -> torch.Tensor:
    """The sum of squares over the `runs` of all ranks of `world`, each element in one run of one rank: on the first
    rank, 0 on the others (float64).
    Infinite where any of the `sums` of any rank had an overflow."""
    held = list(runs)
    largest = torch.where(torch.stack([each.overflow for each in sums]).any(), torch.inf, 0.0).double()
    for run in held:
        largest = torch.maximum(largest, run.abs().max().double())
    largest = largest.reshape(1)
    all_reduce(largest, world, use_max=True).wait()
    first = world is None or world.index == 0
    top = float(largest)
    if not math.isfinite(top) or not top:
        return largest.new_tensor(math.inf if top and first else 0.0)
    scale = 2.0 ** (NORM_BITS - math.frexp(top)[1])  # a power of two: only `round_` rounds
    totals = torch.zeros(2, dtype=torch.int64, device=largest.device)
    for run in held:
        for part in run.split(_tile_elements(run)):
            square = (part.double() * scale).round_().to(torch.int64)
            square *= square
            totals[0] += (square >> NORM_BITS).sum()
            totals[1] += (square & (2**NORM_BITS - 1)).sum()
    all_reduce(totals, world).wait()
    high, low = totals.tolist()
    return largest.new_tensor(((high << NORM_BITS) + low) / scale / scale if first else 0.0)


def round_loss(total: torch.Tensor, labels: int) -> torch.Tensor:
    """The summed loss of a micro-batch (float64), rounded so that adding those of a batch of `labels` is exact.

    >>> round_loss(torch.tensor(0.1, dtype=torch.float64), 1000).item().hex()
    '0x1.9999999a00000p-4'
    """
    unit = 2.0 ** (math.frexp(MAX_MEAN_LOSS * max(labels, 1))[1] - 53)
    return (total / unit).round() * unit
