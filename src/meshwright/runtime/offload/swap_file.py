"""An unlinked file, in a folder given to the run, for tensors that a rank offloads to disk.

Reads and writes bypass the page cache (O_DIRECT) if the file system supports it. So they use no host memory. Offsets
and lengths are multiples of PAGE_BYTES. Checkpoints read or write the whole file and map it into memory.

The file uses threads, not io_uring. The Python package of io_uring allocates memory that is not page-aligned
(docs/log/offload.md). Two threads saturate the disk.

Guarantees: the file has no name, so no file remains after a crash. Space is allocated before it is written. So a full
disk is an error in the first step and never loses an update.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
from pathlib import Path

import torch

from meshwright.core.errors import InputError, MeshwrightError
from meshwright.core.messages import Message
from meshwright.core.units import show_bytes

PAGE_BYTES = 1 << 12
"""Offsets and lengths of direct reads and writes are multiples of this number."""


class OffloadFailed(MeshwrightError):
    """Offloaded data can no longer be read or written. The run ends, and its last checkpoint is valid."""


def round_up_to_pages(size: int) -> int:
    """Returns `size` rounded up to whole pages.

    >>> round_up_to_pages(1), round_up_to_pages(8192)
    (4096, 8192)
    """
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def page_aligned_buffer(size: int) -> torch.Tensor:
    """Returns `size` bytes of new page-aligned memory. Pages that are never written use no memory."""
    return torch.frombuffer(mmap.mmap(-1, round_up_to_pages(max(size, 1))), dtype=torch.uint8)


class SwapFile:
    """A swap file, which `extend` enlarges. `size` is its length in bytes."""

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
        """Allocates `size` more bytes of zeros on disk. Returns their offset.

        Raises:
            InputError: the disk is full.
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
                    "offload folder {folder!r} is full: {size} are needed for this rank so far, {start} are there; "
                    "make room, or give another folder (--offload-to)",
                    folder=str(self.folder),
                    size=show_bytes(self.size),
                    start=show_bytes(start + found.f_bavail * found.f_frsize),
                )
            ) from None
        return start

    def read(self, start: int, into: torch.Tensor) -> None:
        """Reads from offset `start` into the bytes `into` (whole pages of `page_aligned_buffer`)."""
        self._move(os.preadv, start, into, "read")

    def write(self, start: int, data: torch.Tensor) -> None:
        """Writes the bytes `data` (whole pages of `page_aligned_buffer`) at offset `start`."""
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
        """Returns `numel` elements at offset `start` as a tensor that maps the file, so that writes to it reach the
        file. Pages are loaded on access, and evicted when memory is short."""
        if not numel:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(mmap.mmap(self.handle, numel * dtype.itemsize, offset=start), dtype=dtype)

    def _failed(self, error: OSError, word: str) -> OffloadFailed:
        return OffloadFailed(
            Message(
                "offload folder {folder!r} cannot be {word} any more: {reason}; mend the disk or give another folder "
                "(--offload-to) and start again: the run goes on from its last checkpoint",
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
    """Opens the file of `handle` again with O_DIRECT, if possible. Returns the file descriptor."""
    try:
        found = os.open(f"/proc/self/fd/{handle}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except (OSError, AttributeError):
        return handle
    return found
