"""The digest of in-memory checkpoints that an accelerator computes ([Note: row sums] in
checkpoint/memory_checkpoint.py), on the device that recording_backend.py plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recording_backend import RecordingBackend, recording_device

from meshwright.checkpoint.memory_checkpoint import BufferRun, MemorySnapshot, RowSums, SnapshotLayout
from meshwright.core.snapshots import ROW_BYTES
from meshwright.elastic.snapshot_replication import StreamDigest
from meshwright.train import device_copies
from meshwright.train.device_copies import D2HStaging

SIZE = 5 * ROW_BYTES + 77


def some_bytes(size: int = SIZE, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def digest(data: torch.Tensor, state: bytes = b"state") -> int:
    sums = RowSums(len(data))
    sums.add(0, data)
    return sums.digest(state)


def test_every_flipped_bit_changes_the_digest() -> None:
    data = some_bytes(2 * ROW_BYTES + 9)
    seen = {digest(data)}
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        seen.add(digest(data))
        data[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 1 + 8 * len(data)
    assert digest(data, b"other") not in seen


def test_every_change_of_two_or_three_integers_changes_the_digest() -> None:
    """Among them those that cancel in a plain sum: equal and opposite differences, and two flipped highest bits."""
    rows, columns = 4, ROW_BYTES // 8
    words = some_bytes(rows * ROW_BYTES).view(torch.int64)
    whole, places = digest(words.view(torch.uint8)), torch.Generator().manual_seed(1)
    for trial in range(3000):
        row = torch.randint(0, rows, (3,), generator=places) if trial % 3 else torch.full((3,), trial % rows)
        column = torch.randint(0, columns, (3,), generator=places) if trial % 2 else torch.full((3,), trial % columns)
        place = (row * columns + column).unique()[: 2 + trial % 2]
        if len(place) < 2:
            continue
        step = -(2**63) if trial % 5 == 0 else 1 << (trial % 60)
        changed = words.clone()
        changed[place[0]] += step
        changed[place[1]] -= step
        if len(place) > 2:
            changed[place[2]] += step
        assert digest(changed.view(torch.uint8)) != whole


def test_the_order_and_the_size_of_parts_do_not_matter() -> None:
    data = some_bytes()
    whole = digest(data)
    rows = list(range(0, SIZE, ROW_BYTES))
    for order in (rows, rows[::-1], rows[1::2] + rows[::2]):
        sums = RowSums(SIZE)
        for at in order:
            sums.add(at, data[at : at + ROW_BYTES])
        assert sums.digest(b"state") == whole
    shifted = torch.cat([data[:3], data])[3:]
    assert shifted.storage_offset() % 8 and digest(shifted) == whole


def test_a_node_that_reads_the_bytes_in_order_computes_the_same_digest() -> None:
    data = some_bytes()
    read = memoryview(data.numpy())
    for size in (ROW_BYTES, 2 * ROW_BYTES, 8 * ROW_BYTES):
        stream = StreamDigest(row_sums=True)
        for at in range(0, SIZE, size):
            stream.update(read[at : at + size])
        assert stream.finish(memoryview(b"state")) == digest(data)


@pytest.mark.parametrize("pins", [True, False], ids=["pinned", "through chunks"])
def test_a_slot_that_a_device_writes_is_whole_and_each_changed_byte_is_found(
    pins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copies, "PINNED_CHUNK_BYTES", 700)
    monkeypatch.setattr(RecordingBackend, "pin", lambda *_: pins)
    (tmp_path / "own").touch()
    first, second, local = some_bytes(5000), some_bytes(300, 1)[1:], some_bytes(40, 2)
    runs = [BufferRun(first, 0), BufferRun(second, 2 * ROW_BYTES)]
    layout = SnapshotLayout(b'{"row_sums":true}', runs, [3 * ROW_BYTES], 3 * ROW_BYTES + 40)
    with recording_device():
        memory = MemorySnapshot(str(tmp_path / "own"))
        staging = D2HStaging(torch.device("cpu"))
        memory.allocate(layout)
        for step in range(1, 6):
            first += 1
            staging.begin()
            memory.write(step, layout, [local], b"state", staging)
            assert memory.is_intact(step)
        assert bool(staging.chunks) != pins
        data = memory.data(5)
        for run in (*runs, BufferRun(local, layout.local[0])):
            assert torch.equal(data[run.to : run.to + len(run.source)], run.source)
        for place in (0, 4999, 2 * ROW_BYTES + 298, len(data) - 1):
            data[place] ^= 64
            assert not memory.is_intact(5) and memory.is_intact(4)
            data[place] ^= 64
        assert memory.is_intact(5)


def test_slots_are_unpinned_before_their_file_is_laid_out_again(tmp_path: Path) -> None:
    (tmp_path / "own").touch()
    pinned: dict[int, int] = {}

    class Pinning(RecordingBackend):
        def pin(self, memory: torch.Tensor, device: torch.device) -> bool:
            pinned[memory.data_ptr()] = len(memory)
            return True

        def unpin(self, memory: torch.Tensor) -> None:
            assert pinned.pop(memory.data_ptr()) == len(memory)

    from meshwright.runtime.backend import Backend, CpuBackend  # the class above has registered itself

    try:
        staging, memory = D2HStaging(torch.device("cpu")), MemorySnapshot(str(tmp_path / "own"))
        layout: Any = SnapshotLayout(b'{"row_sums":true}', [BufferRun(some_bytes(), 0)], [], SIZE)
        memory.allocate(layout, slots=3)
        for step in range(1, 6):
            memory.write(step, layout, [], b"", staging)
        assert len(pinned) == 3
        staging.unpin()
        assert not pinned
    finally:
        Backend.by_type["cpu"] = CpuBackend()
