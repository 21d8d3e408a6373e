"""Computes fingerprints of gradients, and perturbs constant weights during a check. A fingerprint is a few linear
projections of each gradient. The preflight checks use fingerprints to compare the gradients of two passes without
storing the gradients. Proofs, which compare a training step with one device, use them too (train/proof/).

The projections are those of analysis/random_projection.py. They are linear, so the sum of the micro-batches'
projections is the projection of the summed gradient, and the difference of two fingerprints is the projection of the
gradients' difference. If two gradients differ, this projection is zero with probability 0.

Constant parameters (all elements equal) contain noise during a check or a proof, because they could hide errors. A
head, a gate or a bias of zero makes gradients zero, and a gain of one hides that it was applied twice. The noise of an
element depends only on the parameter's name and the element's index, so all ranks and plans use equal noise. Afterwards
the parameter is filled with its constant again, bit for bit. This needs no copy of the parameter.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from meshwright.analysis.random_projection import NUM_DIRECTIONS, column_factors, random_projection
from meshwright.runtime import state_dict
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.engine import Engine
from meshwright.runtime.gather_service import full_indices
from meshwright.runtime.state_dict import LocalPiece

MIN_RELATIVE_NORM = 1e-2
"""The difference of a gradient is divided by the gradient's norm, but at least by this fraction of the norm of all
gradients. Otherwise the rounding of gradients that are almost zero would count as a large difference."""


class GradientDifference(NamedTuple):
    """The difference between two gradients of the parameter `name`. `size`: the norm of the difference divided by the
    norm of the gradient."""

    size: float
    name: str


@dataclass
class GradientFingerprint:
    """Projections of this rank's gradients by parameter name, summed over passes."""

    of: dict[str, torch.Tensor] = field(default_factory=dict)

    def add(self, name: str, gradient: torch.Tensor) -> None:
        """Adds the projection of `gradient` to the sum of the parameter `name`."""
        found = random_projection(name, gradient)
        self.of[name] = found if name not in self.of else self.of[name] + found

    def over(self, times: int) -> GradientFingerprint:
        """Returns the fingerprint of one pass, if this fingerprint is the sum over `times` identical passes."""
        return GradientFingerprint({name: found / times for name, found in self.of.items()})

    def difference(self, other: GradientFingerprint) -> GradientDifference:
        """Returns the largest relative difference from `other` over all parameters (see `MIN_RELATIVE_NORM`). NaN
        counts as no difference."""
        names = sorted(self.of.keys() | other.of.keys())
        if not names:
            return GradientDifference(0.0, "")
        none = torch.zeros(NUM_DIRECTIONS, dtype=torch.float64)
        one, two = (torch.stack([each.of.get(name, none).cpu() for name in names]) for each in (self, other))
        norms = torch.maximum(one.norm(dim=1), two.norm(dim=1))
        sizes = (one - two).norm(dim=1) / norms.clamp(
            min=max(MIN_RELATIVE_NORM * float(norms.norm()), torch.finfo(torch.float64).tiny)
        )
        at = int(sizes.nan_to_num(0.0).argmax())
        return GradientDifference(float(sizes[at].nan_to_num(0.0)), names[at])


def weight_fingerprints(model: nn.Module, compute: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns the projections of each parameter by name, after conversion to the compute dtype `compute`. Skips meta
    parameters and empty parameters."""
    return {
        name: random_projection(name, tensor.detach().to(compute))
        for name, tensor in model.named_parameters()
        if not tensor.is_meta and tensor.numel()
    }


@contextmanager
def record_fingerprint(engine: Engine) -> Iterator[GradientFingerprint]:
    """Yields the fingerprint of the gradients of all passes inside the context. These gradients are discarded and not
    reduced, so that a check does not change a training step."""
    found = GradientFingerprint()
    try:
        with engine.pipeline.run_one_by_one(), engine.zero.divert_gradients(found.add):
            yield found
    finally:
        column_factors.cache_clear()


ABSOLUTE_NOISE, RELATIVE_NOISE = 0.05, 0.1
"""The largest noise that is added to a constant c is ABSOLUTE_NOISE + RELATIVE_NOISE * |c|."""
MIN_NOISE_FRACTION = 0.2
"""The smallest noise in a vector or a scalar, as a fraction of the largest noise. This noise is positive, because a
vector or a scalar may be a gain or a variance, which may have to stay positive."""
PREFIX_ELEMENTS = 64
"""Number of leading elements that are compared first. In most tensors they differ, and the rest need not be read."""
CHUNK_ELEMENTS = 1 << 20
"""Number of elements for which noise is computed at a time."""


@contextmanager
def perturb_constants(engine: Engine) -> Iterator[list[str]]:
    """Adds noise to constant parameters inside the context, and restores them bit for bit on exit. Yields the names of
    the constant parameters. All ranks call this function."""
    engine.zero.quiesce()
    engine.zero.reshard_all()
    constants = _constant_parameters(engine)
    _write_constants(engine, constants, noisy=True)
    engine.open_ungated()
    try:
        yield list(constants)
    except BaseException:
        with suppress(Exception):  # the first error says more than that of the restoration without the other ranks
            _restore_constants(engine, constants)
        raise
    _restore_constants(engine, constants)


def _restore_constants(engine: Engine, constants: Mapping[str, float]) -> None:
    engine.zero.quiesce()
    engine.zero.reshard_all()
    _write_constants(engine, constants, noisy=False)
    engine.open_ungated()


def _constant_parameters(engine: Engine) -> dict[str, float]:
    """Returns, by name, the value of each floating-point parameter whose elements are all equal. The result is equal on
    every rank and includes parameters that this rank does not store."""
    names = {name: at for at, name in enumerate(engine.shapes)}
    bounds = torch.full((2, len(names)), -torch.inf, dtype=torch.float64, device=engine.mesh.device)
    for stored in state_dict.weight_pieces(engine, saving=False):
        if stored.data.is_floating_point() and stored.data.numel():
            low, high = _min_max(stored.data.detach().view(-1))
            at = names[state_dict.strip_replica_prefix(stored).piece.name.partition("/")[2]]
            bounds[0, at], bounds[1, at] = max(float(bounds[0, at]), -low), max(float(bounds[1, at]), high)
    all_reduce(bounds, engine.mesh.world, use_max=True).wait()
    lows, highs = bounds.tolist()
    return {name: highs[at] for name, at in names.items() if -lows[at] == highs[at] and abs(highs[at]) != torch.inf}


def _min_max(flat: torch.Tensor) -> tuple[float, float]:
    """Returns the smallest and the largest element, which are equal only if the tensor is constant. Returns -inf and
    inf if the first PREFIX_ELEMENTS elements differ, or if all elements are zeros and at least one is -0.0.

    >>> _min_max(torch.ones(3)), _min_max(torch.tensor([0.0, -0.0])), _min_max(torch.tensor([1.0, 2.0]))
    ((1.0, 1.0), (-inf, inf), (-inf, inf))
    """
    if bool((flat[:PREFIX_ELEMENTS] != flat[0]).any()):
        return -torch.inf, torch.inf
    low, high = (float(value) for value in flat.aminmax())
    return (low, high) if low or high or not bool(flat.signbit().any()) else (-torch.inf, torch.inf)


@torch.no_grad()
def _write_constants(engine: Engine, constants: Mapping[str, float], noisy: bool) -> None:
    if not constants:
        return
    for stored in state_dict.weight_pieces(engine, saving=False):
        name = state_dict.strip_replica_prefix(stored).piece.name.partition("/")[2]
        if name in constants:
            _fill_piece(stored, name, constants[name], noisy)
    for unit in engine.zero.units:
        if not constants.keys().isdisjoint(unit.layout.offsets):
            unit.copy_to_params()
    for unit in engine.zero.units:
        if not constants.keys().isdisjoint(unit.layout.offsets):
            unit.weights.all_gather().wait()
    engine.zero.quiesce()


def _fill_piece(local: LocalPiece, name: str, constant: float, noisy: bool) -> None:
    piece, flat = local.piece, local.data.view(-1)
    if not noisy:
        flat.fill_(constant)
        return
    seed, size = zlib.crc32(name.encode()), ABSOLUTE_NOISE + RELATIVE_NOISE * abs(constant)
    for first in range(0, flat.numel(), CHUNK_ELEMENTS):
        part = flat[first : first + CHUNK_ELEMENTS]
        index = torch.arange(piece.start + first, piece.start + first + part.numel(), device=flat.device)
        random = _hash_noise(full_indices(index, piece), seed)
        part.copy_(
            constant
            + size * (random if len(piece.shape) > 1 else MIN_NOISE_FRACTION + (1 - MIN_NOISE_FRACTION) * random.abs())
        )


def _hash_noise(index: torch.Tensor, seed: int) -> torch.Tensor:
    """Returns a pseudorandom number in [-1, 1] (float64) for each index: the 32-bit integer hash of Wang, 2007,
    computed in int64."""
    bits = (index + seed * 2654435761) & 0xFFFFFFFF
    for shift, multiplier in ((16, 0x45D9F3B), (16, 0x45D9F3B)):
        bits = (((bits >> shift) ^ bits) * multiplier) & 0xFFFFFFFF
    bits = (bits >> 16) ^ bits
    return bits.double() / 0x7FFFFFFF - 1.0
