"""The update of this rank's flat units: all at once, or a few runs at a time where what is kept is not what is computed in.

torch's optimizers pass over parameters without a gradient: so units whose gradients or weights exist in the type of the update for a moment
only are given to the optimizer window by window (master.py), and all others at once.

[Note: first update] An optimizer makes its states when it first updates a run, each by itself, and they are then laid together: all of them at
once would be held twice. So the first update of torch's own optimizers, which count steps for each run, goes by windows, whatever is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from meshwright.parallel.exchange.heap import give_back
from meshwright.parallel.update.few import Few, few_of
from meshwright.parallel.update.lean import Lean
from meshwright.parallel.zero.flat import FlatUnit
from meshwright.parallel.zero.master import Master

LEFT = 4
"""Windows whose states, as the optimizer made them, are left in the heap before that is given back."""


def is_alone(unit: FlatUnit) -> bool:
    """Whether `unit` is not updated together with others."""
    master = unit.master
    wide = isinstance(master, Lean) or unit.own_gradients.dtype != master.flat.dtype
    return wide or master.tensors is not None or any(run.fresh for run in master.single)


def update(units: Iterable[FlatUnit], optimizer: torch.optim.Optimizer, scale: float, step: int, first: bool) -> None:
    """Gradients times `scale` through the optimizer; `step` counts those of the run. `first`: no update of this process came before."""
    together: list[FlatUnit] = []
    alone: list[FlatUnit] = []
    for unit in units:
        (alone if is_alone(unit) else together).append(unit)
    makes = first and not optimizer.state
    with few_of(optimizer) as few:
        if makes and type(optimizer).__module__.startswith("torch.optim."):
            alone = together + alone
        else:
            _together(together, optimizer, scale)
        for unit in alone:
            if unit.master.tensors is not None:
                _whole(unit, optimizer, few, scale)
            else:
                _by_windows(unit, optimizer, few, scale, step, makes)
            unit.write_back()
            if makes:
                give_back()


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


def _whole(unit: FlatUnit, optimizer: torch.optim.Optimizer, few: Few, scale: float) -> None:
    tensors = unit.master.tensors
    assert tensors is not None
    few(tensors.parameters)
    tensors.update(optimizer, unit.master.flat, _wide(unit.own_gradients, unit.master, scale))


def _by_windows(unit: FlatUnit, optimizer: torch.optim.Optimizer, few: Few, scale: float, step: int, makes: bool) -> None:
    master = unit.master
    for number, window in enumerate(master.few_at_a_time(), 1):
        master.widen(optimizer, step, window)
        master.give(_wide(unit.own_gradients[window.elements], master, scale), window.runs)
        few.step(master.runs[window.runs])
        master.take_back(window.runs)
        master.narrow(optimizer, window)
        if makes and number % LEFT == 0:
            give_back()


def _wide(gradients: torch.Tensor, master: Master, scale: float) -> torch.Tensor:
    """Times `scale`, in the type of the update; in place where they have it."""
    wide = gradients.to(master.computed)
    return wide.mul_(scale) if scale != 1.0 else wide
