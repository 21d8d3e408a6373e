"""The update of units whose states are away: window by window through any elementwise optimizer of torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from meshwright.parallel.exchange.heap import give_back
from meshwright.parallel.offload.away import Away
from meshwright.parallel.offload.windows import AwayMaster, AwayWindow
from meshwright.parallel.update.few import few_of
from meshwright.parallel.zero.flat import FlatUnit

SOME = 16
"""Windows whose fresh states may lie around in the heap before it is given back."""


def update_away(away: Away, units: Sequence[FlatUnit], optimizer: torch.optim.Optimizer, scale: float) -> None:
    """Gradients times `scale` through the optimizer; when this returns all weights are updated, while the last states may still be written."""
    away.ferry.follow()  # gradients come down, and weights go up, behind what reads them
    windows = _windows(units)
    with few_of(optimizer) as few:

        def update(window: AwayWindow) -> None:
            window.give(scale)
            few.step(window.runs)
            if window.take_back(optimizer) and window.number % SOME == 0:
                give_back()

        away.pass_by(windows, update)
    if any(unit.master.copies or unit.master.file for unit in units if isinstance(unit.master, AwayMaster)):
        away.settle()  # the weights are written with the last windows


def fetch_ahead(away: Away, units: Sequence[FlatUnit]) -> None:
    """The first states come while backward runs, from its first gradients on; those of an accelerator are brought down once all are known."""
    if not away.is_ahead and units and isinstance(units[0].master, AwayMaster):
        away.ahead(_windows(units, known=False))


def _windows(units: Sequence[FlatUnit], known: bool = True) -> list[AwayWindow]:
    """All of them. `known`: nothing is added to gradients any more."""
    windows: list[AwayWindow] = []
    for unit in units:
        assert isinstance(unit.master, AwayMaster)
        unit.master.let_go()
        for window in unit.master.windows:
            window.gradients = unit.own_gradients[window.of_unit] if known else None
            window.is_down = unit.on_host is not None
            windows.append(window)
    return windows
