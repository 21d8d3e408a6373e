"""ZeRO 3's shards of weights that wait outside of the device's memory, and come up before their layer runs.

[Note: one layer ahead] While a layer runs the shard of the next one is on its way into a buffer; when that layer is opened its ranks gather from
there. A shard in a file is read whole by a thread, around the page cache; from the host's pinned memory it is copied beside what the device
computes (ferry.py). What the update writes is in place before the next step begins (offload/update.py settles), so a shard is never read while it is written.
Source: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, sections 5.1.2 and 6.2 (the prefetcher).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import torch

from meshwright.parallel.offload.away import Away
from meshwright.parallel.offload.ferry import LANDED, Landing
from meshwright.spec.plan import Offload, Plan


class Shard(Protocol):
    """Weights of one rank and unit, elsewhere."""

    dtype: torch.dtype

    def fetch(self) -> None:
        """Begin to bring it up; more than once is once."""

    def take(self) -> torch.Tensor:
        """It, on the device, once it is there; whoever is through with it calls `give_back`."""

    def give_back(self) -> None:
        """What `take` gave is not read any more."""

    def write(self, parts: Sequence[torch.Tensor]) -> None:
        """New ones, one part behind the other."""

    def whole(self) -> torch.Tensor:
        """All of it where it waits: what is written to it is there."""

    def bytes(self) -> int:
        """That it takes where it waits."""


class FileShard:
    """In the scratch file from `start` on."""

    def __init__(self, away: Away, values: torch.Tensor) -> None:
        assert away.scratch is not None
        self.away, self.scratch, self.dtype, self.numel = away, away.scratch, values.dtype, values.numel()
        self.start = self.scratch.extend(self.bytes())
        self._reading: tuple[torch.Tensor, Future[Landing]] | None = None
        self._coming: torch.Tensor | None = None
        self.write([values])

    def write(self, parts: Sequence[torch.Tensor]) -> None:
        pages = self.away.lend(self.bytes())
        _fill(self._values(pages), parts)
        self.scratch.write(self.start, pages)
        self.away.give(pages)

    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def fetch(self) -> None:
        if self._reading is None:
            pages = self.away.lend(self.bytes())
            if self.away.beyond:
                self._coming = torch.empty(self.numel, dtype=self.dtype, device=self.away.device)
                self.away.ferry.follow()
            self._reading = pages, self.away.submit(lambda: self._read(pages))

    def _read(self, pages: torch.Tensor) -> Landing:
        """In a thread of its own."""
        self.scratch.read(self.start, pages)
        return LANDED if self._coming is None else self.away.ferry.copy(self._coming, self._values(pages))

    def _values(self, pages: torch.Tensor) -> torch.Tensor:
        return pages[: self.bytes()].view(self.dtype)

    def take(self) -> torch.Tensor:
        self.fetch()
        assert self._reading is not None
        pages, reading = self._reading
        self.away.wait(lambda: reading.result().before_computing())
        return self._values(pages) if self._coming is None else self._coming

    def give_back(self) -> None:
        if self._reading is not None:
            pages, reading = self._reading
            landing = reading.result()
            landing.before_computing()  # the memory on the device goes back to what computes
            self._reading = self._coming = None
            self.away.give(pages, landing)

    def whole(self) -> torch.Tensor:
        self.away.settle()
        return self.scratch.mapped(self.start, self.numel, self.dtype)


class HostShard:
    """In the pinned memory of an accelerator's host."""

    def __init__(self, away: Away, values: torch.Tensor) -> None:
        self.away, self.dtype = away, values.dtype
        self._held = torch.empty(values.shape, dtype=self.dtype, pin_memory=away.pinned).copy_(values)
        self._coming: torch.Tensor | None = None
        self._landing = LANDED

    def bytes(self) -> int:
        return self._held.numel() * self._held.element_size()

    def fetch(self) -> None:
        if self._coming is None:
            self._coming = torch.empty_like(self._held, device=self.away.device)
            self.away.ferry.follow()
            self._landing = self.away.ferry.copy(self._coming, self._held)

    def take(self) -> torch.Tensor:
        self.fetch()
        assert self._coming is not None
        self.away.wait(self._landing.before_computing)
        return self._coming

    def give_back(self) -> None:
        if self._coming is not None:
            self._landing.before_computing()
            self._coming = None

    def write(self, parts: Sequence[torch.Tensor]) -> None:
        _fill(self._held, parts)

    def whole(self) -> torch.Tensor:
        return self._held


def _fill(whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    for mine, part in zip(whole.split([len(part) for part in parts]), parts, strict=True):
        mine.copy_(part.to(whole.dtype))


def shard_away(away: Away, plan: Plan, values: torch.Tensor) -> Shard | None:
    """`values`, which wait, where `plan` lets them; None where that is where they are: the memory of ranks on CPUs is their host's."""
    if Offload.parameters_files in plan.offload:
        return FileShard(away, values)
    return HostShard(away, values) if away.beyond else None
