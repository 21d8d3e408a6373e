"""Computes gradient sums that do not depend on the order of addition: the gradient of each micro-batch is converted to
integers, which are added exactly. Parameter groups use this module if the workload sets `exact`.

Rule: each element g of the gradient of one micro-batch is stored as the integer round(g x 2^52). The unit 2^-52 =
2.2e-16 is constant over micro-batches, ranks and steps, because gradients are already divided by the number of labels
of the whole batch. A unit relative to the largest gradient would depend on the ranks in the sum. If an element is not
finite, or so large that the sum could exceed MAX_GRADIENT, the norm becomes infinite and all ranks skip the step. The
squared norm is also a sum of integers: each element is rounded to NORM_BITS bits relative to the largest element, and
then squared exactly. The loss of a micro-batch is rounded so that float64 sums of losses are exact. Each rank uses one
thread, because the order in which a kernel adds depends on the number of threads.

Cost: a gradient element takes 8 bytes instead of 4 or 2, in memory and in messages. Each gradient of each micro-batch
is read two additional times. Source: Demmel, Nguyen, Fast Reproducible Floating-Point Summation, ARITH 2013.

Guarantees: if each micro-batch has `workload.exact` sequences, losses and weights are bit for bit those of one rank
that runs all micro-batches. They do not depend on the number of data-parallel ranks or on the ZeRO stage, which may
even change during the run.
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
"""Limit of the magnitude of a gradient sum (2^62 units). With n micro-batches, each element of the gradient of one
micro-batch must be below MAX_GRADIENT / n."""

NORM_BITS = 30
"""Number of bits to which the squared norm rounds each element, relative to the largest element."""

MAX_MEAN_LOSS = 2.0**8
"""Largest mean loss per label for which sums of losses are exact."""

CPU_TILE_ELEMENTS = 1 << 18
"""Number of elements that a CPU converts at a time, so that intermediate results stay in the cache."""
ACCELERATOR_TILE_ELEMENTS = 1 << 24
"""Number of elements that an accelerator converts at a time. Each tile costs a few kernel launches."""


class FixedPointAccumulator:
    """Converts the gradients of one parameter group to integers and back. `overflow`: whether a gradient of this step
    was not finite or too large."""

    dtype = torch.int64

    def __init__(self, recipe: Recipe, device: torch.device) -> None:
        self.result_dtype = torch.float32 if recipe.master else getattr(torch, recipe.compute)
        self.overflow = torch.zeros((), dtype=torch.bool, device=device)
        self._micro_batches = 1

    def begin_step(self, micro_batches: int) -> None:
        """Starts a step that sums the gradients of `micro_batches` micro-batches, counted over all ranks."""
        self._micro_batches = micro_batches
        self.overflow.zero_()

    def quantize(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns `gradient` as int64, in units of 2^-52. Sets `overflow` if an element is not finite or too large."""
        units, fits = to_fixed_point(gradient, self._micro_batches)
        self.overflow |= ~fits
        return units

    def dequantize(self, units: torch.Tensor) -> torch.Tensor:
        """Returns the integer sums `units` as floating-point numbers (`result_dtype`). The sums must be complete over
        all ranks."""
        result = torch.empty(units.shape, dtype=self.result_dtype, device=units.device)
        for into, part in zip(result.split(_tile_elements(units)), units.split(_tile_elements(units)), strict=True):
            into.copy_(part.double().mul_(FIXED_POINT_UNIT))
        return result


def _tile_elements(flat: torch.Tensor) -> int:
    return CPU_TILE_ELEMENTS if backend_of(flat.device).memory_is_host else ACCELERATOR_TILE_ELEMENTS


def to_fixed_point(gradient: torch.Tensor, micro_batches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `gradient` as int64 in units of 2^-52. Also returns, as a bool scalar tensor, whether `micro_batches`
    gradients of this magnitude can be added without overflow.

    >>> units, fits = to_fixed_point(torch.tensor([0.5, -(2.0**-52)], dtype=torch.float64), 4)
    >>> units.tolist() == [2**51, -1], bool(fits), bool(to_fixed_point(torch.tensor([float("nan")]), 4)[1])
    (True, True, False)
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
    runs: Iterable[torch.Tensor], accumulators: Sequence[FixedPointAccumulator], world: CommGroup | None
) -> torch.Tensor:
    """Returns the sum of squares over the slices of all ranks (float64 scalar) on the first rank of `world`, and 0 on
    all other ranks. `runs` are this rank's slices of gradients. Each element must be in exactly one slice of one rank.
    The sum is infinite if an accumulator of any rank had an overflow."""
    slices = list(runs)
    largest = torch.where(torch.stack([each.overflow for each in accumulators]).any(), torch.inf, 0.0).double()
    for run in slices:
        largest = torch.maximum(largest, run.abs().max().double())
    largest = largest.reshape(1)
    all_reduce(largest, world, use_max=True).wait()
    first = world is None or world.index == 0
    maximum = float(largest)
    if not math.isfinite(maximum) or not maximum:
        return largest.new_tensor(math.inf if maximum and first else 0.0)
    scale = 2.0 ** (NORM_BITS - math.frexp(maximum)[1])  # the scale is a power of two, so only `round_` rounds
    totals = torch.zeros(2, dtype=torch.int64, device=largest.device)
    for run in slices:
        for part in run.split(_tile_elements(run)):
            square = (part.double() * scale).round_().to(torch.int64)
            square *= square
            totals[0] += (square >> NORM_BITS).sum()
            totals[1] += (square & (2**NORM_BITS - 1)).sum()
    all_reduce(totals, world).wait()
    high, low = totals.tolist()
    return largest.new_tensor(((high << NORM_BITS) + low) / scale / scale if first else 0.0)


def round_loss(total: torch.Tensor, labels: int) -> torch.Tensor:
    """Returns the summed loss of a micro-batch (float64), rounded so that it can be added exactly to those of all other
    micro-batches. `labels`: the number of labels of the batch.

    >>> round_loss(torch.tensor(0.1, dtype=torch.float64), 1000).item().hex()
    '0x1.9999999a00000p-4'
    """
    unit = 2.0 ** (math.frexp(MAX_MEAN_LOSS * max(labels, 1))[1] - 53)
    return (total / unit).round() * unit
