"""Sums of gradients that wait on the host: what backward makes of a unit leaves the device as soon as it is reduced, and the update takes it there.

[Note: added on the host] The first micro-batch's gradients are copied into the sum; those of later ones come down through a pinned buffer and a
thread adds them, in the type that gradients are held in: one rounding for each addition, as on the device, so the sum is the same to the bit.
[Note: what stays] Of each rank IN_FLIGHT units' gradients are on their way at most (zero.py); the device lets go of them when they have landed.
Source: Ren et al., ZeRO-Offload, arXiv 2101.06840, section 4.1.
"""

from __future__ import annotations

from concurrent.futures import Future

import torch

from meshwright.parallel.exchange.exchange import all_reduce
from meshwright.parallel.exchange.group import Group
from meshwright.parallel.exchange.lanes import Across
from meshwright.parallel.offload.away import Away
from meshwright.parallel.offload.ferry import Landing


class HostSum:
    """Of one rank's run of a unit. `values` are whole once it has landed."""

    def __init__(self, away: Away, numel: int, dtype: torch.dtype) -> None:
        self.away = away
        self.values = torch.zeros(numel, dtype=dtype, pin_memory=away.pinned)
        self._coming: tuple[Future[None], torch.Tensor | None] | None = None

    def take(self, gradients: torch.Tensor, first: bool) -> None:
        """Begin to bring down those of one micro-batch; of the `first` the sum is made."""
        self.land()
        pages = None if first else self.away.lend(self.values.nbytes)
        into = self.values if pages is None else pages[: self.values.nbytes].view(self.values.dtype)
        self.away.ferry.follow()
        landing = self.away.ferry.copy(into, gradients)
        self._coming = self.away.submit(lambda: self._add(landing, gradients, into)), pages

    def _add(self, landing: Landing, gradients: torch.Tensor, into: torch.Tensor) -> None:
        """In a thread, which holds the `gradients` until they have landed."""
        landing.wait()
        if into is not self.values:
            self.values.add_(into)

    def land(self) -> None:
        """What came last is in the sum."""
        if self._coming is not None:
            (adding, pages), self._coming = self._coming, None
            self.away.wait(adding.result)
            if pages is not None:
                self.away.give(pages)

    def over(self, group: Group | None, across: Across | None) -> None:
        """Summed over the ranks of `group`, on the device for as long as that takes."""
        if group is None:
            return
        self.land()
        there = self.values.to(self.away.device)
        all_reduce(there, group, across=across).wait()
        self.values.copy_(there)
