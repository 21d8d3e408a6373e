"""Lays out a file of in-memory snapshots, for tests that write snapshots without ranks."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager

from meshwright.core.snapshots import HEADER_BYTES, SnapshotHeader


@contextmanager
def snapshot_file(file: int, index: bytes, size: int, slots: int) -> Iterator[tuple[SnapshotHeader, memoryview]]:
    """Gives `file` the header and the index of `slots` snapshots of `size` bytes. Yields the header and all bytes."""
    first = SnapshotHeader(memoryview(bytearray(HEADER_BYTES)).cast("Q"))
    first.lay(index, size, slots)
    os.ftruncate(file, first.whole)
    with (
        mmap.mmap(file, first.whole) as memory,
        memoryview(memory) as view,
        view[:HEADER_BYTES] as words,
        words.cast("Q") as cast,
    ):
        head = SnapshotHeader(cast)
        head.lay(index, size, slots)
        view[HEADER_BYTES : HEADER_BYTES + len(index)] = index
        yield head, view
