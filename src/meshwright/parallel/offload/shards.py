"""ZeRO 3's shards of weights that wait outside of the device's memory, and come up before their layer runs.

[Note: one layer ahead] While a layer runs the shard of the next one is on its way into a buffer; when that layer is opened its ranks gather from
there. A shard in a file is read whole by a thread, around the page cache; from the host's pinned memory it is copied beside what the device
computes (ferry.py). What the update writes is in place before the next step begins (offload/update.py settles), so a shard is never read while it is written.
Source: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, sections 5.1.2 and 6.2 (the prefetcher).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from meshwright.parallel.offload.away import Away
from meshwright.parallel.offload.ferry import LANDED, Landing
from meshwright.spec.layout import Part


class FileShard:
    """In the scratch file from `start` on."""

    def __init__(self, away: Away, values: torch.Tensor) -> None:
        assert away.scratch is not None
        self.away, self.scratch, self.dtype, self.numel = away, away.scratch, values.dtype, values.numel()
        self.start = self.scratch.extend(self.bytes())
        self._reading: tuple[torch.Tensor, Future[Landing]] | None = None
        self._coming: torch.Tensor | None = None
        self.write(values)

    def write(self, values: torch.Tensor) -> None:
        pages = self.away.lend(self.bytes())
        self._values(pages).copy_(values)
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

    def write(self, values: torch.Tensor) -> None:
        self._held.copy_(values)

    def whole(self) -> torch.Tensor:
        return self._held


class Divided:
    """The weights of a rank's run of a unit, of which some wait: the first part is `near`, of each other one there is a shard."""

    def __init__(self, near: torch.Tensor, shards: Sequence[FileShard | HostShard]) -> None:
        self.near, self.shards = near, shards

    def fetch(self) -> None:
        for shard in self.shards:
            shard.fetch()

    def lies(self, parts: Sequence[Part]) -> list[torch.Tensor | FileShard]:
        """Each of `parts` where it is."""
        near = [self.near[part.start : part.stop] for part in parts if not part.weights_wait]
        return near + [shard.whole() if isinstance(shard, HostShard) else shard for shard in self.shards]

    def take(self) -> list[torch.Tensor]:
        """All of it on the device, one part behind the other; whoever is through with it calls `give_back`."""
        return [part for part in (self.near, *(shard.take() for shard in self.shards)) if len(part)]

    def give_back(self) -> None:
        for shard in self.shards:
            shard.give_back()

    def bytes(self) -> int:
        """That wait."""
        return sum(shard.bytes() for shard in self.shards)


def divided(away: Away, files: bool, values: torch.Tensor, parts: Sequence[Part]) -> Divided | None:
    """`values`, of which some `parts` wait in files or in the host's memory; None where none does."""
    near = next((part.start for part in parts if part.weights_wait), len(values))
    if near == len(values):
        return None
    kind = FileShard if files else HostShard
    return Divided(values[:near].clone(), [kind(away, values[part.start : part.stop]) for part in parts if part.weights_wait])
