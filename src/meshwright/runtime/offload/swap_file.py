"""Stores offloaded tensors in files: optimizer states and weights (`SwapFile`), and the saved activations of blocks
(`ActivationStore`).

`SwapFile` is an unlinked file in the folder of `--offload-to`. Reads and writes bypass the page cache (O_DIRECT) if the
file system supports this, so they use no host memory. Offsets and lengths are multiples of PAGE_BYTES. To save or load
a checkpoint, `map` maps the file into memory.

Reads and writes use threads instead of io_uring, whose Python package allocates memory that is not page-aligned
(docs/log/offload.md). Two threads saturate the disk.

Guarantees: the file has no name, so no file remains after a crash. Disk space is allocated before it is written. So a
full disk raises an error in the first step, and never interrupts a later update.

`ActivationStore` stores the saved activations of a rank's blocks in a `SwapFile`. It has an extent allocator, and
threads that write and read. An extent is freed when backward no longer needs its contents. So the file is as large as
the peak of stored activations. Extents are whole pages. Adjacent free extents are merged, because with experts the
sizes of activations differ between micro-batches.

[Note: who frees] An I/O thread drops its references before it reports completion. So the thread that allocated the
memory also frees it. This is necessary because the memory profiler of a step records only that thread.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from meshwright.core.errors import InputError, MeshwrightError
from meshwright.core.messages import Message
from meshwright.core.units import show_bytes
from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.timers import WaitTimer
from meshwright.runtime.offload.copy_streams import COPY_DONE, CopyEvent, CopyStreams
from meshwright.spec.enums import Offload
from meshwright.spec.plan import Plan

PAGE_BYTES = 1 << 12
"""Offsets and lengths of direct reads and writes are multiples of this number."""


class OffloadFailed(MeshwrightError):
    """Offloaded data can no longer be read or written. The training run ends; its last checkpoint remains valid."""


def round_up_to_pages(size: int) -> int:
    """Returns `size` rounded up to whole pages.

    >>> round_up_to_pages(1), round_up_to_pages(8192)
    (4096, 8192)
    """
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def page_aligned_buffer(size: int) -> torch.Tensor:
    """Returns new page-aligned memory of `size` bytes, rounded up to whole pages (at least one). Pages that are never
    written use no memory."""
    return torch.frombuffer(mmap.mmap(-1, round_up_to_pages(max(size, 1))), dtype=torch.uint8)


class SwapFile:
    """A swap file in `folder`. `extend` enlarges the file. `size` is its length in bytes.

    Raises:
        InputError: the folder cannot be created or written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.size = folder, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.handle = _open_unlinked(folder)
        except OSError as error:
            raise InputError(
                Message(
                    "offload folder {folder!r}: {reason}; give a folder on a local disk that can be written "
                    "(--offload-to)",
                    folder=str(folder),
                    reason=error.strerror,
                )
            ) from None
        self._direct = _open_direct(self.handle)

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes bypass the page cache."""
        return self._direct != self.handle

    def extend(self, size: int) -> int:
        """Allocates `size` more bytes of zeros on disk, rounded up to whole pages. Returns their offset.

        Raises:
            InputError: the disk is full.
            OffloadFailed: the file cannot be extended for another reason.
        """
        start, self.size = self.size, self.size + round_up_to_pages(size)
        try:
            os.posix_fallocate(self.handle, start, max(self.size - start, 1))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._failed(error, "extended") from None
            found = os.statvfs(self.handle)
            raise InputError(
                Message(
                    "offload folder {folder!r} is full: this rank needs {size} so far, but {start} are available; "
                    "make room, or give another folder (--offload-to)",
                    folder=str(self.folder),
                    size=show_bytes(self.size),
                    start=show_bytes(start + found.f_bavail * found.f_frsize),
                )
            ) from None
        return start

    def read(self, start: int, into: torch.Tensor) -> None:
        """Reads from offset `start` into the bytes `into` (whole pages of `page_aligned_buffer`).

        Raises:
            OffloadFailed: the read fails.
        """
        self._move(os.preadv, start, into, "read")

    def write(self, start: int, data: torch.Tensor) -> None:
        """Writes the bytes `data` (whole pages of `page_aligned_buffer`) at offset `start`.

        Raises:
            OffloadFailed: the write fails.
        """
        self._move(os.pwritev, start, data, "written")

    def _move(self, call: object, start: int, data: torch.Tensor, word: str) -> None:
        view, done = data.numpy().data, 0
        while done < len(view):
            try:
                moved = call(self._direct, [view[done:]], start + done)  # type: ignore[operator]
            except OSError as error:
                raise self._failed(error, word) from None
            if not moved:
                raise self._failed(OSError(errno.EIO, "the file was truncated"), word)
            done += moved

    def map(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns `numel` elements at byte offset `start` as a tensor that maps the file. Writes to the tensor change
        the file. The system loads pages on access, and evicts them when memory is short."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(mmap.mmap(self.handle, numel * dtype.itemsize, offset=start), dtype=dtype)

    def _failed(self, error: OSError, word: str) -> OffloadFailed:
        return OffloadFailed(
            Message(
                "offload folder {folder!r} can no longer be {word}: {reason}; repair the disk or give another folder "
                "(--offload-to) and start again: the run continues from its last checkpoint",
                folder=str(self.folder),
                word=word,
                reason=error.strerror,
            )
        )

    def __del__(self) -> None:
        for handle in {getattr(self, name, -1) for name in ("handle", "_direct")} - {-1}:
            os.close(handle)


def _open_unlinked(folder: Path) -> int:
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except (OSError, AttributeError):  # the system or file system lacks O_TMPFILE
        handle, path = tempfile.mkstemp(prefix=".offload-", dir=folder)
        os.unlink(path)
        return handle


def _open_direct(handle: int) -> int:
    """Opens the file of `handle` again with O_DIRECT. Returns the new file descriptor, or `handle` if the file system
    does not support O_DIRECT."""
    try:
        found = os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except (OSError, AttributeError):
        return handle
    return found


IO_THREADS = 2
"""Number of I/O threads of the activation store. Two threads saturate a disk (bench/results/offload.md)."""

BOUNCE_BUFFER_BYTES = 1 << 20
"""Number of bytes that a thread copies at a time through its page-aligned bounce buffer, if memory is not pinned."""


class ExtentAllocator:
    """Tracks the free extents of a file.

    >>> extents = ExtentAllocator()
    >>> extents.allocate(8) is None, extents.release(0, 8), extents.release(16, 8), extents.release(8, 8)
    (True, None, None, None)
    >>> list(extents.free), extents.allocate(20), extents.free
    ([(0, 24)], 0, [(20, 4)])
    """

    def __init__(self) -> None:
        self.free: list[tuple[int, int]] = []
        """(start, size) of each free extent, in order of start. No two extents are adjacent."""

    def allocate(self, size: int) -> int | None:
        """Returns the start of `size` bytes in the smallest free extent that is large enough. Returns None if no free
        extent is large enough."""
        fits = [(free, start) for start, free in self.free if free >= size]
        if not fits:
            return None
        free, start = min(fits)
        self.free.remove((start, free))
        if free > size:
            insort(self.free, (start + size, free - size))
        return start

    def release(self, start: int, size: int) -> None:
        """Frees the extent of `size` bytes at `start`."""
        insort(self.free, (start, size))
        merged: list[tuple[int, int]] = []
        for begin, free in self.free:
            if merged and sum(merged[-1]) == begin:
                merged[-1] = merged[-1][0], merged[-1][1] + free
            else:
                merged.append((begin, free))
        self.free = merged


class ActivationStore:
    """The activation file of one rank, and the threads that read and write it."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.swap_file, self.copy_streams, self.wait_timer = SwapFile(folder), CopyStreams(device), WaitTimer.of(device)
        """`wait_timer` measures the time for which the rank waits for transfers."""
        self.backend = backend_of(device)
        self.pinned = self.backend.has_streams
        self._allocator = ExtentAllocator()
        self._freed: deque[tuple[int, int]] = deque()
        """Freed extents that are not merged yet. `allocator` merges them, because the garbage collector may call `free`
        in any thread at any time."""
        self._pool = ThreadPoolExecutor(IO_THREADS, "activations", self.backend.select, (device,))
        self._thread_local = threading.local()

    @property
    def buffer_bytes(self) -> int:
        """The number of bytes of host memory in bounce buffers."""
        return 0 if self.pinned or not self.swap_file.size else IO_THREADS * BOUNCE_BUFFER_BYTES

    @property
    def peak_bytes(self) -> int:
        """The peak number of stored bytes."""
        return self.swap_file.size

    @property
    def allocator(self) -> ExtentAllocator:
        """The allocator, with all freed extents merged."""
        while self._freed:
            self._allocator.release(*self._freed.popleft())
        return self._allocator

    def allocate(self, size: int) -> int:
        """Returns the start of an extent of at least `size` bytes. Raises the errors of `SwapFile.extend`."""
        start = self.allocator.allocate(round_up_to_pages(size))
        return self.swap_file.extend(size) if start is None else start

    def free(self, start: int, size: int) -> None:
        """Frees the extent of `size` bytes at `start`. May be called in any thread at any time."""
        self._freed.append((start, round_up_to_pages(size)))

    def new_buffer(self, size: int) -> torch.Tensor:
        """Returns `size` bytes of page-aligned host memory. No other tensor uses the rest of the last page, so callers
        may read and write whole pages."""
        if self.pinned:
            return self.backend.host_buffer(round_up_to_pages(size))[:size]
        # The buffer comes from torch's allocator, which counts and reuses its memory.
        storage = torch.empty(round_up_to_pages(size) + PAGE_BYTES, dtype=torch.uint8)
        first = -storage.data_ptr() % PAGE_BYTES
        buffer: Any = torch.empty(0, dtype=torch.uint8)
        return buffer.set_(storage.untyped_storage()[first : first + round_up_to_pages(size)], 0, (size,), (1,))  # type: ignore[no-any-return]

    def write(self, start: int, values: torch.Tensor, landing: CopyEvent) -> Future[None]:
        """Starts to write the bytes `values` at `start`. The write waits for `landing`, the copy into `values`."""
        return self._submit(self._write, [start, values, landing])

    def read(self, start: int, values: torch.Tensor, onto: torch.Tensor | None = None) -> Future[CopyEvent]:
        """Starts to read from `start` into `values`, which is a `new_buffer`, and then to copy `values` to the device
        tensor `onto`, if given. The future returns the event of this copy."""
        return self._submit(self._read, [start, values, onto])

    def _submit(self, function: Callable[..., Any], arguments: list[Any]) -> Future[Any]:
        def run() -> Any:
            try:
                return function(*arguments)
            finally:
                arguments.clear()  # [Note: who frees]

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
    """Returns a tensor that extends `values` to the end of its last page."""
    return values.as_strided((round_up_to_pages(values.numel()),), (1,))


def make_activation_store(plan: Plan, device: torch.device, folder: str | Path | None) -> ActivationStore | None:
    """Returns the activation store for `plan`. Returns None if the plan does not offload activations to disk. `folder`:
    None means the system's temporary folder."""
    return (
        ActivationStore(Path(folder or tempfile.gettempdir()), device)
        if Offload.activations_disk in plan.offload
        else None
    )
