"""A file without a name, in a folder that the run is given: what a rank cannot hold in memory waits there.

Promise: nothing is left behind, whatever dies, since the file has no name; room is taken before it is written, so that
a full disk is one
line at the first step and never a lost update; reads and writes go around the page cache (O_DIRECT) where the file
system lets them, so
that they cost no memory. Offsets and lengths are multiples of PAGE. What reads or writes all of it (checkpoints) sees
it mapped.

Threads and not io_uring: its Python package takes memory that begins at no page (docs/log/offload.md), and two threads
already fill the disk.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

import torch

from meshwright.core.errors import InputError, MeshwrightError
from meshwright.core.units import show_bytes

PAGE_BYTES = 1 << 12
"""Bytes that direct reads and writes come in."""


class OffloadFailed(MeshwrightError):
    """What waits in files cannot be read or written any more: the run ends, its last checkpoint is good."""


def round_up_to_pages(size: int) -> int:
    """`size` in whole pages.

    >>> round_up_to_pages(1), round_up_to_pages(8192)
    (4096, 8192)
    """
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def page_aligned_buffer(size: int) -> torch.Tensor:
    """Bytes of fresh memory that begin at a page. Pages that are never touched take no memory."""
    return torch.frombuffer(mmap.mmap(-1, round_up_to_pages(max(size, 1))), dtype=torch.uint8)


class SwapFile:
    """Grows by `extend`; `size` is what it holds."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.size = folder, 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.handle = _open_unlinked(folder)
        except OSError as error:
            raise InputError(
                f"offload folder {str(folder)!r}: {error.strerror}; give a folder on a local disk that can be written (--offload-to)"
            ) from None
        self._direct = _open_direct(self.handle)

    @property
    def is_direct(self) -> bool:
        """Whether reads and writes go around the page cache."""
        return self._direct != self.handle

    def extend(self, size: int) -> int:
        """Room for `size` bytes of zeros more, taken from the disk now; where it begins. Raises InputError where there
        is none."""
        start, self.size = self.size, self.size + round_up_to_pages(size)
        try:
            os.posix_fallocate(self.handle, start, max(self.size - start, 1))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._failed(error, "extended") from None
            found = os.statvfs(self.handle)
            raise InputError(
                f"offload folder {str(self.folder)!r} is full: {show_bytes(self.size)} are needed for this rank so far, "
                f"{show_bytes(start + found.f_bavail * found.f_frsize)} are there; make room, or give another folder (--offload-to)"
            ) from None
        return start

    def read(self, start: int, into: torch.Tensor) -> None:
        """Fill the bytes `into` (whole pages of `aligned` memory) from `start` on."""
        self._move(os.preadv, start, into, "read")

    def write(self, start: int, data: torch.Tensor) -> None:
        """The bytes `data` (whole pages of `aligned` memory) to `start`."""
        self._move(os.pwritev, start, data, "written")

    def _move(self, call: object, start: int, data: torch.Tensor, word: str) -> None:
        view, done = data.numpy().data, 0
        while done < len(view):
            try:
                moved = call(self._direct, [view[done:]], start + done)  # type: ignore[operator]
            except OSError as error:
                raise self._failed(error, word) from None
            if not moved:
                raise self._failed(OSError(errno.EIO, "it is shorter than it was"), word)
            done += moved

    def map(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The same bytes as a tensor: what is written to it is in the file. Pages come as they are touched, and go when
        memory is short."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(mmap.mmap(self.handle, numel * dtype.itemsize, offset=start), dtype=dtype)

    def _failed(self, error: OSError, word: str) -> OffloadFailed:
        return OffloadFailed(
            f"offload folder {str(self.folder)!r} cannot be {word} any more: {error.strerror}; "
            "mend the disk or give another folder (--offload-to) and start again: the run goes on from its last checkpoint"
        )

    def __del__(self) -> None:
        for handle in {getattr(self, name, -1) for name in ("handle", "_direct")} - {-1}:
            os.close(handle)


def _open_unlinked(folder: Path) -> int:
    try:
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except (OSError, AttributeError):  # a file system, or a system, without files that have no name
        handle, path = tempfile.mkstemp(prefix=".offload-", dir=folder)
        os.unlink(path)
        return handle


def _open_direct(handle: int) -> int:
    """The same file around the page cache, where that is possible."""
    try:
        found = os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except (OSError, AttributeError):
        return handle
    return found
