"""Constant parameters hold noise for a check or a proof, and their constant again afterwards, bit for bit.

A gradient that is zero because a head, a gate or a bias is zero hides every fault behind it, as does what such a weight multiplies, and a gain of one hides
that it was applied twice. So a parameter whose elements are all equal is changed by a number that depends on its name and the index of the element
alone, on every rank that stores it, and filled with its constant afterwards: nothing is copied.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from meshwright.parallel import state
from meshwright.parallel.exchange.exchange import all_reduce
from meshwright.parallel.gather import places
from meshwright.parallel.state import Held

if TYPE_CHECKING:
    from meshwright.parallel.engine import Parallel

NOISE, RELATIVE = 0.05, 0.1
"""Largest change of a constant: this much, and this part of its absolute value."""
LEAST = 0.2
"""Smallest part of that change of a vector or a number, which grows: a gain or a variance may have to be above zero."""
PROBED = 64
"""Elements that are compared before all are."""
AT_ONCE = 1 << 20
"""Elements whose indices are computed at a time."""


@contextmanager
def perturbed(engine: Parallel) -> Iterator[list[str]]:
    """Parameters that are constant have noise inside, and are as before afterwards, bit for bit. Gives their names; all ranks call it."""
    engine.zero.settle()
    engine.zero.close_all()
    constants = _constants(engine)
    _write(engine, constants, noisy=True)
    engine.open_ungated()
    try:
        yield list(constants)
    finally:
        engine.zero.settle()
        engine.zero.close_all()
        _write(engine, constants, noisy=False)
        engine.open_ungated()


def _constants(engine: Parallel) -> dict[str, float]:
    """Floating-point parameters whose elements are all equal on all ranks, by name with their value; the same on every rank."""
    names = {name: at for at, name in enumerate(engine.shapes)}
    bounds = torch.full((2, len(names)), -torch.inf, dtype=torch.float64, device=engine.mesh.device)
    for held in state.weight_pieces(engine, saving=False):
        if held.data.is_floating_point() and held.data.numel():
            low, high = _bounds(held.data.detach().view(-1))
            at = names[state.of_first(held).piece.name.partition("/")[2]]
            bounds[0, at], bounds[1, at] = max(float(bounds[0, at]), -low), max(float(bounds[1, at]), high)
    all_reduce(bounds, engine.mesh.world, largest=True).wait()
    lows, highs = bounds.tolist()
    return {name: highs[at] for name, at in names.items() if -lows[at] == highs[at] and abs(highs[at]) != torch.inf}


def _bounds(flat: torch.Tensor) -> tuple[float, float]:
    """Smallest and largest element; infinite ones where some differ, also in the sign of a zero.

    >>> _bounds(torch.ones(3)), _bounds(torch.tensor([0.0, -0.0])), _bounds(torch.tensor([1.0, 2.0]))
    ((1.0, 1.0), (-inf, inf), (-inf, inf))
    """
    if bool((flat[:PROBED] != flat[0]).any()):
        return -torch.inf, torch.inf
    low, high = (float(value) for value in flat.aminmax())
    return (low, high) if low or high or not bool(flat.signbit().any()) else (-torch.inf, torch.inf)


@torch.no_grad()
def _write(engine: Parallel, constants: Mapping[str, float], noisy: bool) -> None:
    if not constants:
        return
    for held in state.weight_pieces(engine, saving=False):
        name = state.of_first(held).piece.name.partition("/")[2]
        if name in constants:
            _lay(held, name, constants[name], noisy)
    for unit in engine.zero.units:
        if not constants.keys().isdisjoint(unit.unit.offsets):
            unit.write_back()
    for unit in engine.zero.units:
        if not constants.keys().isdisjoint(unit.unit.offsets):
            unit.share().wait()
    engine.zero.settle()


def _lay(held: Held, name: str, constant: float, noisy: bool) -> None:
    piece, flat = held.piece, held.data.view(-1)
    if not noisy:
        flat.fill_(constant)
        return
    seed, size = zlib.crc32(name.encode()), NOISE + RELATIVE * abs(constant)
    for first in range(0, flat.numel(), AT_ONCE):
        part = flat[first : first + AT_ONCE]
        index = torch.arange(piece.start + first, piece.start + first + part.numel(), device=flat.device)
        random = _noise(places(index, piece), seed)
        part.copy_(constant + size * (random if len(piece.shape) > 1 else LEAST + (1 - LEAST) * random.abs()))


def _noise(index: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers in -1 .. 1 by index: the integer hash of Wang, 2007, in 32 bits of 64."""
    bits = (index + seed * 2654435761) & 0xFFFFFFFF
    for shift, multiplier in ((16, 0x45D9F3B), (16, 0x45D9F3B)):
        bits = (((bits >> shift) ^ bits) * multiplier) & 0xFFFFFFFF
    bits = (bits >> 16) ^ bits
    return bits.double() / 0x7FFFFFFF - 1.0
