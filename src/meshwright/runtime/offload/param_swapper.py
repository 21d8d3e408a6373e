"""ZeRO 3's shards of weights that wait outside of the device's memory, and come up before their layer runs.

[Note: one layer ahead] While a layer runs the shard of the next one is on its way into a buffer; when that layer is
opened its ranks gather from
there. A shard in a file is read whole by a thread, around the page cache; from the host's pinned memory it is copied
beside what the device
computes (ferry.py). What the update writes is in place before the next step begins (offload/update.py settles), so a
shard is never read while it is written.
Source: Rajbhandari et al., ZeRO-Infinity, arXiv 2104.07857, sections 5.1.2 and 6.2 (the prefetcher).

Sums of gradients that wait on the host: what backward makes of a unit leaves the device as soon as it is reduced, and
the update takes it there.

[Note: added on the host] The first micro-batch's gradients are copied into the sum; those of later ones come down
through a pinned buffer and a
thread adds them, in the type that gradients are held in: one rounding for each addition, as on the device, so the sum
is the same to the bit.
[Note: what stays] Of each rank IN_FLIGHT units' gradients are on their way at most (zero.py); the device lets go of
them when they have landed.
Source: Ren et al., ZeRO-Offload, arXiv 2101.06840, section 4.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.comm.shm.collectives import InterHostReducer
from meshwright.runtime.offload.copy_streams import COPY_DONE, CopyEvent
from meshwright.runtime.offload.swapper import StateSwapper
from meshwright.spec.layout import OffloadSplit


class NvmeShard:
    """In the scratch file from `start` on."""

    def __init__(self, away: StateSwapper, values: torch.Tensor) -> None:
        assert away.scratch is not None
        self.away, self.scratch, self.dtype, self.numel = away, away.scratch, values.dtype, values.numel()
        self.start = self.scratch.extend(self.bytes())
        self._reading: tuple[torch.Tensor, Future[CopyEvent]] | None = None
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

    def _read(self, pages: torch.Tensor) -> CopyEvent:
        """In a thread of its own."""
        self.scratch.read(self.start, pages)
        return COPY_DONE if self._coming is None else self.away.ferry.copy(self._coming, self._values(pages))

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


class CpuShard:
    """In the pinned memory of an accelerator's host."""

    def __init__(self, away: StateSwapper, values: torch.Tensor) -> None:
        self.away, self.dtype = away, values.dtype
        self._held = torch.empty(values.shape, dtype=self.dtype, pin_memory=away.pinned).copy_(values)
        self._coming: torch.Tensor | None = None
        self._landing = COPY_DONE

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


class SplitShard:
    """The weights of a rank's run of a unit, of which some wait: the first part is `near`, of each other one there is a
    shard."""

    def __init__(self, near: torch.Tensor, shards: Sequence[NvmeShard | CpuShard]) -> None:
        self.near, self.shards = near, shards

    def fetch(self) -> None:
        for shard in self.shards:
            shard.fetch()

    def lies(self, parts: Sequence[OffloadSplit]) -> list[torch.Tensor | NvmeShard]:
        """Each of `parts` where it is."""
        near = [self.near[part.start : part.stop] for part in parts if not part.weights_wait]
        return near + [shard.whole() if isinstance(shard, CpuShard) else shard for shard in self.shards]

    def take(self) -> list[torch.Tensor]:
        """All of it on the device, one part behind the other; whoever is through with it calls `malloc_trim`."""
        return [part for part in (self.near, *(shard.take() for shard in self.shards)) if len(part)]

    def give_back(self) -> None:
        for shard in self.shards:
            shard.give_back()

    def bytes(self) -> int:
        """That wait."""
        return sum(shard.bytes() for shard in self.shards)


def split_shard(
    away: StateSwapper, files: bool, values: torch.Tensor, parts: Sequence[OffloadSplit]
) -> SplitShard | None:
    """`values`, of which some `parts` wait in files or in the host's memory; None where none does."""
    near = next((part.start for part in parts if part.weights_wait), len(values))
    if near == len(values):
        return None
    kind = NvmeShard if files else CpuShard
    return SplitShard(
        values[:near].clone(), [kind(away, values[part.start : part.stop]) for part in parts if part.weights_wait]
    )


class CpuGradBuffer:
    """Of one rank's run of a unit. `values` are whole once it has landed."""

    def __init__(self, away: StateSwapper, numel: int, dtype: torch.dtype) -> None:
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

    def _add(self, landing: CopyEvent, gradients: torch.Tensor, into: torch.Tensor) -> None:
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

    def over(self, group: CommGroup | None, across: InterHostReducer | None) -> None:
        """Summed over the ranks of `group`, on the device for as long as that takes."""
        if group is None:
            return
        self.land()
        there = self.values.to(self.away.device)
        all_reduce(there, group, across=across).wait()
        self.values.copy_(there)
