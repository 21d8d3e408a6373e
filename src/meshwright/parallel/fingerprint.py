"""Fingerprints of gradients: a few linear numbers of each, so that two ways to compute the same gradients are compared without holding either.

Each gradient g (n elements) is projected onto `DIRECTIONS` random directions of rank one, a (rows) times b (columns), which are drawn from
the name of its parameter (a is, b is the same for all). The projection is linear: those of micro-batches add up, and the difference of two sums is the projection of the
difference, which is zero only where the gradients are equal. Cost: one product with a narrow matrix for each gradient.
Source: random projections preserve norms, Johnson and Lindenstrauss, 1984.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

if TYPE_CHECKING:
    from meshwright.parallel.engine import Parallel

DIRECTIONS = 4
COLUMNS = 1024
"""Elements that share one row factor."""

SMALLEST = 1e-2
"""Gradients are compared relative to their own norm, but to no less than this part of the norm of all: many are zero but for rounding."""


class Difference(NamedTuple):
    """The largest relative difference of one parameter's gradient."""

    size: float
    name: str


@dataclass
class Fingerprint:
    """Projections of this rank's gradients by parameter, summed over passes."""

    of: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, gradient: torch.Tensor) -> None:
        found = project(name, gradient)
        self.of[name] = found if name not in self.of else self.of[name] + found

    def over(self, times: int) -> Fingerprint:
        """The mean, where the same pass was made so many times."""
        return Fingerprint({name: found / times for name, found in self.of.items()})

    def difference(self, other: Fingerprint) -> Difference:
        """The largest difference, relative as `SMALLEST` says; of NaN nothing can be said, and it counts as none."""
        names = sorted(self.of.keys() | other.of.keys())
        if not names:
            return Difference(0.0, "")
        none = torch.zeros(DIRECTIONS, dtype=torch.float64)
        one, two = (torch.stack([each.of.get(name, none).cpu() for name in names]) for each in (self, other))
        norms = torch.maximum(one.norm(dim=1), two.norm(dim=1))
        sizes = (one - two).norm(dim=1) / norms.clamp(min=max(SMALLEST * float(norms.norm()), torch.finfo(torch.float64).tiny))
        at = int(sizes.nan_to_num(0.0).argmax())
        return Difference(float(sizes[at].nan_to_num(0.0)), names[at])


def project(name: str, gradient: torch.Tensor) -> torch.Tensor:
    """The projections of one gradient, float64 (DIRECTIONS,)."""
    gradient = gradient.detach()
    flat = (gradient.to_dense() if gradient.is_sparse else gradient).reshape(-1)
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    flat = flat if flat.dtype == torch.float64 else flat.float()
    return _projected(flat, _left(name, flat.numel()).to(flat.device))


class Projection:
    """The projections of one tensor of real numbers whose elements come in parts, in order."""

    def __init__(self, name: str, elements: int) -> None:
        self.left = _left(name, elements)
        self.found = torch.zeros(DIRECTIONS, dtype=torch.float64)

    def add(self, first: int, part: torch.Tensor) -> None:
        """`first`: the number of the first element of `part`, a multiple of COLUMNS."""
        flat = part.detach() if part.dtype == torch.float64 else part.detach().float()
        self.found += _projected(flat, self.left[first // COLUMNS :].to(flat.device)).cpu()


def _projected(flat: torch.Tensor, left: torch.Tensor) -> torch.Tensor:
    right = _right().to(flat)
    whole = flat.numel() // COLUMNS if flat.numel() > COLUMNS else 0
    found = (left[:whole] * (flat[: whole * COLUMNS].view(whole, COLUMNS) @ right).double()).sum(0) if whole else left.new_zeros(DIRECTIONS)
    rest = flat[whole * COLUMNS :]
    return found if not rest.numel() else found + left[whole] * (rest @ right[: rest.numel()]).double()


def fingerprints_of(model: nn.Module, compute: torch.dtype) -> dict[str, torch.Tensor]:
    """A few linear numbers of each parameter as the run computes with it; none of those without memory."""
    return {
        name: project(name, tensor.detach().to(compute))
        for name, tensor in model.named_parameters()
        if not tensor.is_meta and tensor.numel()
    }


@lru_cache(maxsize=1)
def _right() -> torch.Tensor:
    """Column factors, float64 (COLUMNS, DIRECTIONS): the same for all gradients, drawn once for the passes of one check."""
    return torch.randn(COLUMNS, DIRECTIONS, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _left(name: str, elements: int) -> torch.Tensor:
    """Row factors of the gradient of the parameter `name`, float64 (rows, DIRECTIONS)."""
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(-(-elements // COLUMNS), DIRECTIONS, generator=random, dtype=torch.float64)


@contextmanager
def fingerprinted(engine: Parallel) -> Iterator[Fingerprint]:
    """Gradients of passes inside are projected, and neither summed nor sent nor counted: no check changes what a step would find."""
    found = Fingerprint()
    pipeline, stages = engine.pipeline, engine.zero.stages.values()
    pipeline.one_by_one = pipeline.own.is_paused = True
    for stage in stages:
        stage.probe = found.add
    try:
        yield found
    finally:
        pipeline.one_by_one = pipeline.own.is_paused = False
        for stage in stages:
            stage.probe = None
        _right.cache_clear()
