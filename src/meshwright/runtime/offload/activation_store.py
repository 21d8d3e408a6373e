"""What a rank's blocks keep, in a file: rooms that are taken and given back, and the threads that write and read them.

A room is given back when backward has no more need of what is in it, so that the file is as large as the most that
waited at once. Rooms are whole
pages; those that lie beside each other are one again, as sizes may differ from pass to pass (experts).

[Note: who frees] What a thread carries it lets go of before it says that it is through, so that memory is freed by the
thread that asked for it: the
profiler, which counts what a step takes, sees that one alone.
"""

from __future__ import annotations

import tempfile
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.timers import WaitTimer
from meshwright.runtime.offload.copy_streams import COPY_DONE, CopyEvent, CopyStreams
from meshwright.runtime.offload.swap_file import PAGE_BYTES, SwapFile, page_aligned_buffer, round_up_to_pages
from meshwright.spec.enums import Offload
from meshwright.spec.plan import Plan

IO_THREADS = 2
"""They fill a disk (bench/results/offload.md)."""

BOUNCE_BUFFER_BYTES = 1 << 20
"""Bytes that go at a time by way of memory that begins at a page."""


class ExtentAllocator:
    """Which parts of a file of `size` bytes are free.

    >>> rooms = ExtentAllocator()
    >>> rooms.take(8) is None, rooms.give(0, 8), rooms.give(16, 8), rooms.give(8, 8)
    (True, None, None, None)
    >>> list(rooms.free), rooms.take(20), rooms.free
    ([(0, 24)], 0, [(20, 4)])
    """

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []
        """Where each begins, and its bytes; in order, no two side by side."""

    def allocate(self, size: int) -> int | None:
        """Where `size` bytes begin, in the smallest part that has them; None where none has."""
        fits = [(free, start) for start, free in self.free if free >= size]
        if not fits:
            return None
        free, start = min(fits)
        self.free.remove((start, free))
        if free > size:
            insort(self.free, (start + size, free - size))
        return start

    def release(self, start: int, size: int) -> None:
        insort(self.free, (start, size))
        joined: list[tuple[int, int]] = []
        for begin, free in self.free:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = joined[-1][0], joined[-1][1] + free
            else:
                joined.append((begin, free))
        self.free = joined


class ActivationStore:
    """Of one rank."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.swap_file, self.copy_streams, self.wait_timer = SwapFile(folder), CopyStreams(device), WaitTimer.of(device)
        """The clock runs while what is on its way is waited for."""
        self.pinned = backend_of(device).has_streams
        self._allocator = ExtentAllocator()
        self._freed: deque[tuple[int, int]] = deque()
        """Rooms that nobody needs any more, to be joined when the next one is taken: the collector, wherever it runs,
        may end what had them."""
        self._pool = ThreadPoolExecutor(IO_THREADS, "activations")
        self._thread_local = threading.local()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of host memory that all goes by, besides what blocks keep."""
        return 0 if self.pinned or not self.swap_file.size else IO_THREADS * BOUNCE_BUFFER_BYTES

    @property
    def peak_bytes(self) -> int:
        """Bytes that waited at most."""
        return self.swap_file.size

    @property
    def allocator(self) -> ExtentAllocator:
        while self._freed:
            self._allocator.release(*self._freed.popleft())
        return self._allocator

    def allocate(self, size: int) -> int:
        """Room for `size` bytes."""
        found = self.allocator.allocate(round_up_to_pages(size))
        return self.swap_file.extend(size) if found is None else found

    def free(self, start: int, size: int) -> None:
        """In any thread, at any time."""
        self._freed.append((start, round_up_to_pages(size)))

    def new_buffer(self, size: int) -> torch.Tensor:
        """Host memory of `size` bytes, which begins at a page and has all of its last one."""
        if self.pinned:
            return torch.empty(round_up_to_pages(size), dtype=torch.uint8, pin_memory=True)[:size]
        whole = torch.empty(
            round_up_to_pages(size) + PAGE_BYTES, dtype=torch.uint8
        )  # the allocator's own: it is counted, and reused
        first = -whole.data_ptr() % PAGE_BYTES
        found: Any = torch.empty(0, dtype=torch.uint8)
        return found.set_(whole.untyped_storage()[first : first + round_up_to_pages(size)], 0, (size,), (1,))  # type: ignore[no-any-return]

    def write(self, start: int, values: torch.Tensor, landing: CopyEvent) -> Future[None]:
        """Begin to write the bytes `values`, once they have landed."""
        return self._submit(self._write, [start, values, landing])

    def read(self, start: int, values: torch.Tensor, onto: torch.Tensor | None = None) -> Future[CopyEvent]:
        """Begin to fill `values`, which is `fresh`; and to copy it `onto` a device."""
        return self._submit(self._read, [start, values, onto])

    def _submit(self, deed: Callable[..., Any], carried: list[Any]) -> Future[Any]:
        def run() -> Any:
            try:
                return deed(*carried)
            finally:
                carried.clear()  # [Note: who frees]

        return self._pool.submit(run)

    def _write(self, start: int, values: torch.Tensor, landing: CopyEvent) -> None:
        landing.wait()
        if self.pinned:
            self.swap_file.write(start, _pad_to_page(values))
            return
        if not hasattr(self._thread_local, "piece"):
            self._thread_local.piece = page_aligned_buffer(BOUNCE_BUFFER_BYTES)
        for at in range(0, values.numel(), BOUNCE_BUFFER_BYTES):
            part = values[at : at + BOUNCE_BUFFER_BYTES]
            self._thread_local.piece[: part.numel()].copy_(part)
            self.swap_file.write(start + at, self._thread_local.piece[: round_up_to_pages(part.numel())])

    def _read(self, start: int, values: torch.Tensor, onto: torch.Tensor | None) -> CopyEvent:
        self.swap_file.read(start, _pad_to_page(values))
        return COPY_DONE if onto is None else self.copy_streams.copy(onto, values)


def _pad_to_page(values: torch.Tensor) -> torch.Tensor:
    """With all of their last page."""
    return values.as_strided((round_up_to_pages(values.numel()),), (1,))


def make_activation_store(plan: Plan, device: torch.device, folder: str | Path | None) -> ActivationStore | None:
    """What `plan` needs; None where activations wait in no files."""
    return (
        ActivationStore(Path(folder or tempfile.gettempdir()), device)
        if Offload.activations_disk in plan.offload
        else None
    )
