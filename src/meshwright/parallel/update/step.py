"""The update of this rank's flat units, one after the other where what is kept is not what is computed in.

torch's optimizers pass over parameters without a gradient: so units whose gradients or weights exist in the type of the update for a moment
only are given to the optimizer one at a time, and all others at once.

[Note: first update] An optimizer makes its states when it first updates a run, each by itself, and they are then laid together: all of them at
once would be held twice. So the first update of torch's own optimizers, which count steps for each run, goes a few runs at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from meshwright.parallel.exchange.heap import give_back
from meshwright.parallel.update.lean import Lean
from meshwright.parallel.zero.flat import FlatUnit

FEW, PARTS = 8, 32
"""Runs whose states are made before they are laid together: at least so many, and of a long unit one of so many parts, since an optimizer looks at
all its runs in every step."""


def is_alone(unit: FlatUnit) -> bool:
    """Whether `unit` is updated by itself."""
    return unit.master.tensors is not None or isinstance(unit.master, Lean) or unit.own_gradients.dtype != unit.master.flat.dtype


def update(units: Iterable[FlatUnit], optimizer: torch.optim.Optimizer, scale: float, step: int, first: bool) -> None:
    """Gradients times `scale` through the optimizer; `step` counts those of the run. `first`: no update of this process came before."""
    together: list[FlatUnit] = []
    alone: list[FlatUnit] = []
    for unit in units:
        (alone if is_alone(unit) else together).append(unit)
    if first and not optimizer.state and type(optimizer).__module__.startswith("torch.optim."):
        for unit in together:
            _first(unit, optimizer, scale)
            give_back()
    else:
        _together(together, optimizer, scale)
    for unit in alone:
        _one(unit, optimizer, scale, step)
        unit.write_back()


def _together(units: Sequence[FlatUnit], optimizer: torch.optim.Optimizer, scale: float) -> None:
    for unit in units:
        if scale != 1.0:
            unit.own_gradients.mul_(scale)
        unit.master.give(unit.own_gradients)
    if units:
        optimizer.step()
    for unit in units:
        unit.master.take_back()
        unit.master.adopt(optimizer)
        unit.write_back()


def _first(unit: FlatUnit, optimizer: torch.optim.Optimizer, scale: float) -> None:
    """See [Note: first update]."""
    if scale != 1.0:
        unit.own_gradients.mul_(scale)
    runs, size = unit.master.runs, max(FEW, -(-len(unit.master.runs) // PARTS))
    for some in (slice(start, start + size) for start in range(0, len(runs), size)):
        unit.master.give(unit.own_gradients, some)
        optimizer.step()
        unit.master.take_back()
        unit.master.lay(optimizer, some)
    unit.write_back()


def _one(unit: FlatUnit, optimizer: torch.optim.Optimizer, scale: float, step: int) -> None:
    master = unit.master
    kind = torch.float64 if master.flat.dtype == torch.float64 else torch.float32
    gradients = unit.own_gradients.to(kind).mul_(scale)
    if unit.master.tensors is not None:
        unit.master.tensors.update(optimizer, master.flat, gradients)
        return
    if isinstance(master, Lean):
        master.widen(optimizer, step)
    master.give(gradients)
    optimizer.step()
    master.take_back()
    master.adopt(optimizer)
