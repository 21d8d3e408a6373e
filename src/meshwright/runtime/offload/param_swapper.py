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
        assert away.swap_file is not None
        self.swapper, self.swap_file, self.dtype, self.numel = away, away.swap_file, values.dtype, values.numel()
        self.start = self.swap_file.extend(self.bytes())
        self._reading: tuple[torch.Tensor, Future[CopyEvent]] | None = None
        self._on_device: torch.Tensor | None = None
        self.write(values)

    def write(self, values: torch.Tensor) -> None:
        pages = self.swapper.acquire(self.bytes())
        self._values(pages).copy_(values)
        self.swap_file.write(self.start, pages)
        self.swapper.release(pages)

    def bytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def prefetch(self) -> None:
        if self._reading is None:
            pages = self.swapper.acquire(self.bytes())
            if self.swapper.has_device_memory:
                self._on_device = torch.empty(self.numel, dtype=self.dtype, device=self.swapper.device)
                self.swapper.copy_streams.wait_for_compute()
            self._reading = pages, self.swapper.submit(lambda: self._read(pages))

    def _read(self, pages: torch.Tensor) -> CopyEvent:
        """In a thread of its own."""
        self.swap_file.read(self.start, pages)
        return (
            COPY_DONE
            if self._on_device is None
            else self.swapper.copy_streams.copy(self._on_device, self._values(pages))
        )

    def _values(self, pages: torch.Tensor) -> torch.Tensor:
        return pages[: self.bytes()].view(self.dtype)

    def acquire(self) -> torch.Tensor:
        self.prefetch()
        assert self._reading is not None
        pages, reading = self._reading
        self.swapper.timed_wait(lambda: reading.result().make_compute_wait())
        return self._values(pages) if self._on_device is None else self._on_device

    def release(self) -> None:
        if self._reading is not None:
            pages, reading = self._reading
            landing = reading.result()
            landing.make_compute_wait()  # the memory on the device goes back to what computes
            self._reading = self._on_device = None
            self.swapper.release(pages, landing)

    def full(self) -> torch.Tensor:
        self.swapper.quiesce()
        return self.swap_file.map(self.start, self.numel, self.dtype)


class CpuShard:
    """In the pinned memory of an accelerator's host."""

    def __init__(self, away: StateSwapper, values: torch.Tensor) -> None:
        self.swapper, self.dtype = away, values.dtype
        self._values = torch.empty(values.shape, dtype=self.dtype, pin_memory=away.pinned).copy_(values)
        self._on_device: torch.Tensor | None = None
        self._copy = COPY_DONE

    def bytes(self) -> int:
        return self._values.numel() * self._values.element_size()

    def prefetch(self) -> None:
        if self._on_device is None:
            self._on_device = torch.empty_like(self._values, device=self.swapper.device)
            self.swapper.copy_streams.wait_for_compute()
            self._copy = self.swapper.copy_streams.copy(self._on_device, self._values)

    def acquire(self) -> torch.Tensor:
        self.prefetch()
        assert self._on_device is not None
        self.swapper.timed_wait(self._copy.make_compute_wait)
        return self._on_device

    def release(self) -> None:
        if self._on_device is not None:
            self._copy.make_compute_wait()
            self._on_device = None

    def write(self, values: torch.Tensor) -> None:
        self._values.copy_(values)

    def full(self) -> torch.Tensor:
        return self._values


class SplitShard:
    """The weights of a rank's run of a unit, of which some wait: the first part is `near`, of each other one there is a
    shard."""

    def __init__(self, near: torch.Tensor, shards: Sequence[NvmeShard | CpuShard]) -> None:
        self.resident, self.shards = near, shards

    def prefetch(self) -> None:
        for shard in self.shards:
            shard.prefetch()

    def storages(self, parts: Sequence[OffloadSplit]) -> list[torch.Tensor | NvmeShard]:
        """Each of `parts` where it is."""
        near = [self.resident[part.start : part.stop] for part in parts if not part.weights_wait]
        return near + [shard.full() if isinstance(shard, CpuShard) else shard for shard in self.shards]

    def acquire(self) -> list[torch.Tensor]:
        """All of it on the device, one part behind the other; whoever is through with it calls `malloc_trim`."""
        return [part for part in (self.resident, *(shard.acquire() for shard in self.shards)) if len(part)]

    def release(self) -> None:
        for shard in self.shards:
            shard.release()

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
        self.swapper = away
        self.values = torch.zeros(numel, dtype=dtype, pin_memory=away.pinned)
        self._adding: tuple[Future[None], torch.Tensor | None] | None = None

    def accumulate(self, gradients: torch.Tensor, first: bool) -> None:
        """Begin to bring down those of one micro-batch; of the `first` the sum is made."""
        self.wait()
        pages = None if first else self.swapper.acquire(self.values.nbytes)
        into = self.values if pages is None else pages[: self.values.nbytes].view(self.values.dtype)
        self.swapper.copy_streams.wait_for_compute()
        landing = self.swapper.copy_streams.copy(into, gradients)
        self._adding = self.swapper.submit(lambda: self._add(landing, gradients, into)), pages

    def _add(self, landing: CopyEvent, gradients: torch.Tensor, into: torch.Tensor) -> None:
        """In a thread, which holds the `gradients` until they have landed."""
        landing.wait()
        if into is not self.values:
            self.values.add_(into)

    def wait(self) -> None:
        """What came last is in the sum."""
        if self._adding is not None:
            (adding, pages), self._adding = self._adding, None
            self.swapper.timed_wait(adding.result)
            if pages is not None:
                self.swapper.release(pages)

    def all_reduce(self, group: CommGroup | None, across: InterHostReducer | None) -> None:
        """Summed over the ranks of `group`, on the device for as long as that takes."""
        if group is None:
            return
        self.wait()
        there = self.values.to(self.swapper.device)
        all_reduce(there, group, inter_host=across).wait()
        self.values.copy_(there)
