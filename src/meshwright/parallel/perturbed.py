"""Weights that hold one number throughout, perturbed for a check and restored to the bit: zero-initialised heads, gates of 0, gains of 1.

What such a weight multiplies, or hides, has no effect on the loss or on other gradients yet and has one from the second step on, so that a check with the
weights as they are would see nothing of it. The noise depends on the name and the place of an element alone: all ranks that hold it add the same.
Only weights that are trained are perturbed; what is offloaded under ZeRO 3 is not.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from meshwright.parallel.zero.flat import FlatUnit, own_run

if TYPE_CHECKING:
    from meshwright.parallel.engine import Parallel

TILE = 65521
"""Numbers of noise, a prime, that a large weight repeats."""

PROBED = 64
"""Elements that are compared before all are."""

BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@contextmanager
def perturbed(engine: Parallel) -> Iterator[None]:
    """Constant weights hold noise inside. Every rank enters it."""
    engine.zero.settle()
    engine.zero.close_all()
    changed: list[tuple[torch.Tensor, torch.Tensor]] = []
    with torch.no_grad():
        for unit in engine.zero.trained:
            for name, parameter in unit.parameters.items():
                first, piece = _piece(unit, name)
                if parameter.requires_grad and is_constant(piece):
                    changed.append((piece, piece[:1].clone()))
                    piece.add_(noise(name, parameter.shape, first, piece))
    engine.zero.settle()
    engine.open_ungated()
    try:
        yield
    finally:
        engine.zero.settle()
        engine.zero.close_all()
        with torch.no_grad():
            for piece, value in changed:
                piece.view(BITS[piece.element_size()]).copy_(value.view(BITS[piece.element_size()]).expand(piece.shape))
        engine.zero.settle()
        engine.open_ungated()


def _piece(unit: FlatUnit, name: str) -> tuple[int, torch.Tensor]:
    """Elements of `name` that this rank may write, flat, and which the first of them is."""
    if unit.zero < 3:
        return 0, unit.view(unit.weights, name).reshape(-1)
    if unit.elsewhere is not None:
        return 0, unit.weights.new_empty(0)
    run = own_run(unit, name)
    return max(unit.own.start - unit.unit.offsets[name], 0), unit._shard[run]


def is_constant(piece: torch.Tensor) -> bool:
    """Whether all elements are equal to the bit.

    >>> is_constant(torch.zeros(3)), is_constant(torch.arange(3.0)), is_constant(torch.zeros(0))
    (True, False, False)
    """
    if not piece.numel() or not piece.is_floating_point():
        return False
    bits = piece.view(BITS[piece.element_size()])
    return bool((bits[:PROBED] == bits[0]).all()) and bool((bits == bits[0]).all())


def noise(name: str, shape: torch.Size, first: int, like: torch.Tensor) -> torch.Tensor:
    """For the elements from `first` on of the weight `name`: of both signs for matrices, so that products keep their size, else above zero, where any gain may be."""
    random = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    tile = torch.rand(TILE, generator=random, dtype=torch.float64)
    tile = (2 * tile - 1) * shape[-1] ** -0.5 if len(shape) > 1 else 0.02 + 0.08 * tile
    places = torch.arange(first, first + like.numel()).remainder(TILE)
    return tile[places].to(like)
