"""The file of a mirror, after a run that went back to before the steps that lie in it."""

from __future__ import annotations

import os
import queue
from array import array
from typing import Any

import xxhash
from snapshot_files import snapshot_file

from meshwright.core.snapshots import HEADER_BYTES, PINNED_STEPS_FIELD, SNAPSHOT_SLOTS_MULTI_NODE, SnapshotHeader
from meshwright.elastic.snapshot_replication import ReplicationRequest, SnapshotReplicator

INDEX, SIZE = b"{}", 4096


def written(steps: dict[int, bytes]) -> int:
    """A file of copies with `steps`, each of one byte again and again."""
    file = os.memfd_create("copies")
    with snapshot_file(file, INDEX, SIZE, SNAPSHOT_SLOTS_MULTI_NODE) as (head, view):
        for step, byte in steps.items():
            slot = head.take()
            view[head.begin(slot) : head.begin(slot) + SIZE] = byte * SIZE
            head.name(slot, step, xxhash.xxh3_64_intdigest(byte * SIZE), 0)
    return file


class Here(SnapshotReplicator):
    """Reads a file of this process in the place of one that another node lends."""

    source = -1

    def _reached(self, order: ReplicationRequest, rank: int) -> Any:
        return self

    def fetch(self, begin: int, size: int) -> bytes:
        return os.pread(self.source, size, begin)

    def fill(self, begin: int, out: memoryview) -> None:
        out[:] = os.pread(self.source, len(out), begin)


def test_a_mirror_holds_the_steps_that_were_run_again_and_not_those_of_before() -> None:
    """Both copies of one step stood in its file under the same number, and the older one was read."""
    mirrored, done = written({5: b"a", 6: b"b"}), queue.Queue[bool]()
    os.pwrite(mirrored, array("Q", [0, 5]).tobytes(), PINNED_STEPS_FIELD * 8)
    mirror = Here("secret", lambda number, whole, seconds, why: done.put(whole))
    mirror.source = written({5: b"c"})
    mirror.order(ReplicationRequest(0, "key", 5, "", {1: os.dup(mirrored)}))
    assert done.get(timeout=60)
    mirror.close()
    head = SnapshotHeader(memoryview(bytearray(os.pread(mirrored, HEADER_BYTES, 0))).cast("Q"))
    assert head.steps == {5} and head.digest(5) == xxhash.xxh3_64_intdigest(b"c" * SIZE)
    assert os.pread(mirrored, SIZE, head.place_of_data(5)) == b"c" * SIZE
    os.close(mirror.source)
    os.close(mirrored)
