"""What a proof run changes on both sides for its time: constant parameters get noise, and dropout becomes a factor.

A gradient that is zero because a head, a gate or a bias is zero hides every fault behind it, and a gain of one hides that it was applied twice. So a
parameter whose elements are all equal is changed by a number that depends on its name and the index of the element alone, on every rank that
stores it, and filled with its constant afterwards: nothing is copied. A dropout that is lost under a plan shows because both sides multiply instead of drawing.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from meshwright.parallel import state
from meshwright.parallel.engine import Parallel
from meshwright.parallel.exchange.exchange import all_reduce
from meshwright.parallel.gather import places
from meshwright.parallel.state import Held

KEPT = 0.75
"""Factor in the place of a dropout of rate p: not 1 - p, so that another rate on one side shows by its own factor."""
NOISE, RELATIVE = 0.05, 0.1
"""Largest change of a constant: this much, and this part of its absolute value."""
AT_ONCE = 1 << 20
"""Elements whose indices are computed at a time."""


class Scaled(TorchFunctionMode):
    """Dropout of rate p that would draw multiplies by KEPT + p / 8 instead; so does that of attention weights, with its output."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(function, "__name__", "")
        if name == "scaled_dot_product_attention":
            rate = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
            if rate > 0.0:
                args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
                kwargs = {**kwargs, "dropout_p": 0.0} if "dropout_p" in kwargs else kwargs
                return function(*args, **kwargs) * factor(rate)
        elif name.strip("_").endswith("dropout") or name in ("dropout1d", "dropout2d", "dropout3d"):
            given = dict(zip(("input", "p", "training"), args, strict=False)) | kwargs
            rate = given.get("p", 0.0 if name.startswith("_") else 0.5)
            draws = given.get("training", given.get("train", True))
            return given["input"] * factor(rate) if draws and rate > 0.0 else given["input"]
        return function(*args, **kwargs)


def factor(rate: float) -> float:
    return KEPT + rate / 8


@contextmanager
def perturbed(engine: Parallel) -> Iterator[list[str]]:
    """Parameters that are constant have noise inside, and are as before afterwards, bit for bit. Gives their names; all ranks call it."""
    constants = _constants(engine)
    _write(engine, constants, noisy=True)
    try:
        yield list(constants)
    finally:
        _write(engine, constants, noisy=False)


def _constants(engine: Parallel) -> dict[str, float]:
    """Floating-point parameters whose elements are all equal on all ranks, by name with their value; the same on every rank."""
    names = {name: at for at, name in enumerate(engine.shapes)}
    bounds = torch.full((2, len(names)), -torch.inf, dtype=torch.float64, device=engine.mesh.device)
    for held in state.weight_pieces(engine, saving=False):
        if held.data.is_floating_point() and held.data.numel():
            low, high = (float(value) for value in held.data.detach().aminmax())
            at = names[state.of_first(held).piece.name.partition("/")[2]]
            bounds[0, at], bounds[1, at] = max(float(bounds[0, at]), -low), max(float(bounds[1, at]), high)
    all_reduce(bounds, engine.mesh.world, largest=True).wait()
    lows, highs = bounds.tolist()
    return {name: highs[at] for name, at in names.items() if -lows[at] == highs[at] and abs(highs[at]) != torch.inf}


@torch.no_grad()
def _write(engine: Parallel, constants: Mapping[str, float], noisy: bool) -> None:
    if not constants:
        return
    engine.zero.settle()
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
        part.copy_(constant + size * _noise(places(index, piece), seed))


def _noise(index: torch.Tensor, seed: int) -> torch.Tensor:
    """Numbers in -1 .. 1 by index: the integer hash of Wang, 2007, in 32 bits of 64."""
    bits = (index + seed * 2654435761) & 0xFFFFFFFF
    for shift, multiplier in ((16, 0x45D9F3B), (16, 0x45D9F3B)):
        bits = (((bits >> shift) ^ bits) * multiplier) & 0xFFFFFFFF
    bits = (bits >> 16) ^ bits
    return bits.double() / 0x7FFFFFFF - 1.0
