"""Writes and reads in-memory checkpoints: snapshots of the last steps in host memory that outlives the ranks. The
trainer writes them (train/memory_checkpointer.py) and restores from them after a fault.

Each rank has one file of anonymous memory. The supervisor of the rank keeps the file open, so the memory survives the
death of the rank. A rank copies the shards that it would write to an on-disk checkpoint into the oldest slot of the
file (core/snapshots.py). So all ranks together copy every element once. A rank writes the step number last, so a slot
without a step number is incomplete. The digest of a slot is checked before the slot is read. A CPU computes it while
the copied bytes are in its cache, an accelerator from its own memory ([Note: row sums]). The snapshots of all ranks at
one step form a checkpoint that can be loaded under any layout.

[Note: two slots] The snapshot of step n + 2 overwrites that of step n, after the gradient reduction of step n + 2. A
rank enters this reduction only when its own snapshot of step n + 1 is complete. So at any time there is a step of which
all ranks have a snapshot, whichever ranks die. Source of the idea: Wang et al., GEMINI: Fast Failure Recovery in
Distributed Training with In-Memory Checkpoints, SOSP 2023.

[Note: row sums] The digest of a slot that an accelerator has written is computed by kernels of the accelerator, so that
the CPU does not read the copied bytes. The bytes of a slot are 64-bit integers in rows of ROW_BYTES. The digest is xxh3
of the sum of each row, the sum of each column, both modulo 2^64, and the run state. Integers are added exactly, so the
order does not matter, and a CPU computes the same digest. Any change of up to three integers changes the digest, since
the differences would have to sum to zero in each row and in each column, for which at least four are needed.

A `RemoteSnapshot` reads the snapshot of a rank of another node over the network. A `MemoryCheckpoint` opens the
snapshot of another rank only if its rank needs elements from it, keeps at most MAX_OPEN_SNAPSHOTS open, and transfers
only these elements. The location of a snapshot on this machine is a path. The location of a snapshot on another node is
`at:HOST:PORT/KEY/RANK`, the address at which that node serves the snapshot (elastic/snapshot_replication.py). If a
snapshot was lost with its node, the location is `nowhere:`. A client must prove that it knows the token of the job
(core/secure_channel.py).
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import xxhash

from meshwright.checkpoint.manifest import (
    CheckpointManifest,
    CorruptCheckpoint,
    SavedShard,
    TensorEntry,
    first_contradiction,
)
from meshwright.checkpoint.reshard import normalize_shard
from meshwright.checkpoint.safetensors_writer import DTYPE_BY_NAME, dtype_name
from meshwright.core.messages import Message
from meshwright.core.retry import ResultT, retry_os_error
from meshwright.core.secure_channel import TOKEN_VARIABLE
from meshwright.core.snapshots import (
    HEADER_BYTES,
    MIN_STATE_BYTES,
    REMOTE_PREFIX,
    ROW_BYTES,
    ROW_SUMS_KEY,
    SNAPSHOT_SLOTS,
    SnapshotClient,
    SnapshotHeader,
    SnapshotVersion,
    is_index,
    is_lost,
    round_up_to_page,
    versions_of,
)
from meshwright.spec.layout import ShardMetadata
from meshwright.spec.plan import Plan

COPY_CHUNK_BYTES = 1 << 20
"""Number of bytes that are copied and digested at a time. They fit in a CPU cache."""

MAX_GAP_BYTES = 1 << 12
"""Two shards of a buffer are copied together, including the gap between them, if the gap has at most this many
bytes."""


class RowSums:
    """The sums of the rows and of the columns of a slot with `size` bytes ([Note: row sums]), on `device`."""

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(-(-size // ROW_BYTES) + ROW_BYTES // 8, dtype=torch.int64, device=device)
        self.rows, self.columns = self.sums[: -ROW_BYTES // 8], self.sums[-ROW_BYTES // 8 :]

    def add(self, at: int, data: torch.Tensor) -> None:
        """Adds the byte vector `data`, whose offset `at` in the slot is the beginning of a row. The rest of its last
        row counts as zeros."""
        first, rest = at // ROW_BYTES, len(data) % ROW_BYTES
        whole = data[: len(data) - rest]
        parts = [whole.clone() if whole.storage_offset() % 8 else whole] if len(whole) else []
        if rest:
            parts.append(torch.cat([data[len(whole) :], data.new_zeros(ROW_BYTES - rest)]))
        for part in parts:
            words = part.view(torch.int64).view(-1, ROW_BYTES // 8)
            self.rows[first : first + len(words)] += words.sum(1)
            self.columns += words.sum(0)
            first += len(words)

    def digest(self, state: bytes) -> int:
        """Returns the digest of the slot with the run state `state`. The sums must be on the CPU."""
        digest = xxhash.xxh3_64(self.sums.numpy().data)
        digest.update(state)
        return digest.intdigest()


class DeviceCopies(Protocol):
    """Copies the memory of an accelerator to slots (train/memory_checkpointer.py)."""

    def start(self, slot: torch.Tensor) -> None:
        """Begins a copy to the byte vector `slot`."""

    def copy(self, source: torch.Tensor, to: int) -> None:
        """Starts to copy the byte vector `source` to offset `to` of the slot."""

    def finish(self) -> RowSums:
        """Waits for all copies. Returns the sums of what was copied, on the CPU."""


class BufferRun(NamedTuple):
    """Contiguous bytes of one buffer, and their offset `to` in a slot."""

    source: torch.Tensor
    to: int


class SnapshotLayout(NamedTuple):
    """Describes what a rank copies into a slot of `size` bytes.

    `runs` are contiguous ranges of the buffers of the rank, in order of their offset in the slot. `local` are the
    offsets of tensors that only this rank has. `text` is the index as JSON (`MemorySnapshot.index`).
    """

    text: bytes
    runs: list[BufferRun]
    local: list[int]
    size: int


def plan_snapshot_layout(
    pieces: Iterable[tuple[ShardMetadata, torch.Tensor]],
    local: Mapping[str, torch.Tensor],
    plan: Plan,
    rank: int,
    row_sums: bool = False,
) -> SnapshotLayout:
    """Returns the layout of a slot: the shards `pieces`, then tensors with the sizes of `local`. Every snapshot copies
    the memory of the same `pieces`, but `MemorySnapshot.write` gets new `local` tensors for each snapshot. `row_sums`:
    whether `DeviceCopies` write the slots ([Note: row sums])."""
    align = ROW_BYTES if row_sums else 64
    shards = [
        (normalize_shard(piece), tensor.detach())
        for piece, tensor in pieces
        if piece.start < piece.stop or not all(piece.shape)
    ]
    storages: dict[int, int] = {}
    for _, tensor in shards:
        storages.setdefault(tensor.untyped_storage().data_ptr(), len(storages))
    # Sorting by address within each storage gives the same order after every restart.
    shards.sort(key=lambda item: (storages[item[1].untyped_storage().data_ptr()], item[1].data_ptr()))
    runs: list[BufferRun] = []
    listed: list[list[Any]] = []
    begin = end = owner = size = 0
    for piece, tensor in shards:
        storage = tensor.untyped_storage()
        first = tensor.data_ptr()
        if storage.data_ptr() != owner or not end <= first <= end + MAX_GAP_BYTES:
            size += -size % align
            begin, owner = first, storage.data_ptr()
            runs.append(BufferRun(tensor, size))
        end, to = first + tensor.numel() * tensor.element_size(), runs[-1].to
        listed.append([*piece, to + first - begin])
        size = to + end - begin
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        runs[-1] = BufferRun(whole.set_(storage, begin - owner, (end - begin,)), to)  # type: ignore[call-overload]
    places = []
    for name, tensor in local.items():
        size += -size % align
        piece = ShardMetadata(
            f"rank/{rank}/{name}", tuple(tensor.shape), dtype_name(tensor.dtype), None, (), 0, tensor.numel()
        )
        listed.append([*piece, size])
        places.append(size)
        size += tensor.numel() * tensor.element_size()
    index = {"plan": plan.name, "digest": plan.digest, "world": plan.world, "pieces": listed, ROW_SUMS_KEY: row_sums}
    return SnapshotLayout(json.dumps(index, separators=(",", ":")).encode(), runs, places, size)


class MemorySnapshot:
    """Writes and reads the snapshots of one rank, in the file of anonymous memory at `path`."""

    def __init__(self, path: str) -> None:
        self.handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._open()

    def _open(self) -> None:
        size = os.fstat(self.handle).st_size
        self.head = SnapshotHeader(memoryview(bytearray(HEADER_BYTES)).cast("Q"))
        self._index = b""
        if size < HEADER_BYTES:
            return
        self._map = mmap.mmap(self.handle, size)
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self.head = SnapshotHeader(memoryview(self._map)[:HEADER_BYTES].cast("Q"))
        if self.head.is_laid and self.head.whole <= size:
            self._index = self._map[HEADER_BYTES : HEADER_BYTES + self.head.index_size]

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            os.close(self.handle)

    # --- writing
    def allocation_bytes(self, layout: SnapshotLayout, slots: int = SNAPSHOT_SLOTS) -> int:
        """Returns the number of bytes of `slots` snapshots, for which `allocate` requests memory. Returns 0 if the file
        already has `layout`."""
        return 0 if layout.text == self._index else slots * layout.size

    def allocate(self, layout: SnapshotLayout, slots: int = SNAPSHOT_SLOTS) -> None:
        """Allocates memory for `slots` snapshots of `layout`. If the file already has this layout and number of slots,
        its snapshots remain. Otherwise they are lost."""
        if layout.text == self._index and (self.head.size, len(self.head.slots)) == (layout.size, slots):
            return
        os.ftruncate(self.handle, 0)
        os.ftruncate(
            self.handle,
            HEADER_BYTES
            + round_up_to_page(len(layout.text))
            + slots * (round_up_to_page(layout.size) + MIN_STATE_BYTES),
        )
        self._open()
        self._map[HEADER_BYTES : HEADER_BYTES + len(layout.text)] = layout.text
        self.head.lay(layout.text, layout.size, slots)
        self._index = layout.text

    def write(
        self,
        step: int,
        layout: SnapshotLayout,
        local: Sequence[torch.Tensor],
        state: bytes,
        device: DeviceCopies | None = None,
        history: int = 0,
    ) -> None:
        """Writes a snapshot of `step` into the slot with the oldest step that is not pinned.

        `local` are tensors that only this rank has. `state` is the JSON state of the trainer. `device` copies tensors
        of an accelerator; the layout must then be one for row sums. `history` is explained in [Note: history] of
        core/snapshots.py.
        """
        assert len(state) <= MIN_STATE_BYTES, (
            f"the state of the run has {len(state)} bytes, but only {MIN_STATE_BYTES} are reserved for it"
        )
        slot = self.head.take()
        begin = self.head.begin(slot)
        flat = [
            BufferRun(tensor.reshape(-1).view(torch.uint8), to) for tensor, to in zip(local, layout.local, strict=True)
        ]
        runs = [*layout.runs, *flat]
        place = begin + round_up_to_page(layout.size)
        self._map[place : place + len(state)] = state
        if device is None:
            digest = self._copy(runs, begin, state)
        else:
            device.start(self.bytes[begin : begin + layout.size])
            for source, to in runs:
                device.copy(source, to)
            digest = device.finish().digest(state)
        self.head.name(slot, step, digest, len(state), history)

    def _copy(self, runs: Sequence[BufferRun], begin: int, state: bytes) -> int:
        """Copies `runs` in chunks to the slot at byte `begin` of the file, and digests each chunk while it is in the
        CPU cache. Returns the digest.

        ctypes releases the GIL, so other threads run during the copy.
        """
        view, digest, end = memoryview(self._map), xxhash.xxh3_64(), 0
        for source, to in runs:
            digest.update(view[begin + end : begin + to])
            end, part = to + source.numel(), source.cpu()
            for at in range(0, len(part), COPY_CHUNK_BYTES):
                first, length = begin + to + at, min(COPY_CHUNK_BYTES, len(part) - at)
                ctypes.memmove(self.bytes.data_ptr() + first, part.data_ptr() + at, length)
                digest.update(view[first : first + length])
        digest.update(state)
        return digest.intdigest()

    # --- reading
    @property
    def steps(self) -> set[int]:
        """Returns the steps that have a complete snapshot."""
        return self.head.steps if self._index else set()

    @property
    def versions(self) -> set[SnapshotVersion]:
        """Returns the versions that have a complete snapshot."""
        return versions_of(self.head) if self._index else set()

    def is_intact(self, step: int) -> bool:
        """Returns whether the snapshot of `step` and its index still have the digests that were recorded with them."""
        if not is_index(self.head, self._index):
            return False
        digest, place, size = xxhash.xxh3_64(), self.head.place_of_data(step), self.head.size
        sums = RowSums(size) if self.index.get(ROW_SUMS_KEY) else None
        for at in range(0, size, COPY_CHUNK_BYTES):
            part = self.bytes_at(place + at, min(COPY_CHUNK_BYTES, size - at))
            if sums is None:
                digest.update(part.numpy().data)
            else:
                sums.add(at, part)
        digest.update(self.state(step))
        return self.head.digest(step) == (digest.intdigest() if sums is None else sums.digest(self.state(step)))

    @property
    def index(self) -> dict[str, Any]:
        """Returns the index: name, digest and world size of the plan, and each shard with its offset in a slot."""
        found: dict[str, Any] = json.loads(self._index)
        return found

    def state(self, step: int) -> bytes:
        """Returns the JSON state of the trainer at `step`."""
        begin, size = self.head.place_of_state(step)
        return self._map[begin : begin + size]

    def data(self, step: int) -> torch.Tensor:
        """Returns the bytes of the snapshot of `step` as a view of the file."""
        return self.bytes_at(self.head.place_of_data(step), self.head.size)

    def bytes_at(self, begin: int, size: int) -> torch.Tensor:
        """Returns `size` bytes from offset `begin` of the file.

        Raises: OSError if they cannot be read.
        """
        return self.bytes[begin : begin + size]

    def describe(self, step: int) -> dict[str, Any]:
        """Returns what other ranks must know to read the snapshot of `step`, as JSON values: the index, the state of
        the trainer, and the offset of the tensors in the file."""
        return {
            "index": self.index,
            "state": json.loads(self.state(step)),
            "begin": self.head.place_of_data(step),
        }


MAX_OPEN_SNAPSHOTS = 32
"""A rank has the snapshots of at most this number of ranks open. On other nodes, each one is a connection."""

RETRY_PAUSES = (0.1, 0.5)
"""Seconds before the second and the third try to read a snapshot."""


def retry_read(read: Callable[[], ResultT]) -> ResultT:
    """Returns the result of `read`, a read of a snapshot. An OSError is retried twice; raises the last one."""
    return retry_os_error(read, RETRY_PAUSES)


class MemoryCheckpoint:
    """The snapshots of all ranks at one step, as a checkpoint that `load_checkpoint` reads.

    `places`: the location of the snapshots of each rank. `described`: for each rank the result of
    `MemorySnapshot.describe` for `step`. `opened`: snapshots that are open already, by rank. The caller must have
    checked that all snapshots are intact.

    Raises:
        CorruptCheckpoint: the snapshots do not form complete tensors, or ranks disagree about a tensor.
    """

    def __init__(
        self,
        places: Sequence[str],
        step: int,
        described: Sequence[Mapping[str, Any]],
        opened: Mapping[int, MemorySnapshot],
    ) -> None:
        self.path, self.step = Path(f"memory of step {step}"), step
        self._places, self._opened = places, dict(opened)
        self._begins = [each["begin"] for each in described]
        indices = [each["index"] for each in described]
        parts: dict[tuple[str, tuple[int, ...], str, int | None], list[SavedShard]] = defaultdict(list)
        for rank, index in enumerate(indices):
            for name, shape, dtype, split, intervals, start, stop, offset in index["pieces"]:
                part = SavedShard(
                    intervals=intervals, start=start, stop=stop, file=str(rank), key="", offset=offset, xxh3="0" * 16
                )
                parts[name, tuple(shape), dtype, split].append(part)
        tensors = {
            key[0]: TensorEntry(shape=key[1], dtype=key[2], split=key[3], pieces=tuple(listed))
            for key, listed in parts.items()
        }
        problem = first_contradiction(tensors)
        if problem or len(tensors) < len(parts):
            raise CorruptCheckpoint(
                Message(
                    "{path}: {problem}", path=self.path, problem=problem or Message("ranks disagree about a tensor")
                )
            )
        self.states = [each["state"] for each in described]
        """The parsed trainer state of each rank."""
        first = indices[0]
        self.manifest = CheckpointManifest(
            version=1, step=step, serial=0, id="0" * 8, world=first["world"], plan=first["plan"],
            plan_digest=first["digest"], files={}, tensors=tensors, state=self.states[0],
        )  # fmt: skip

    def read(self, name: str, part: SavedShard, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the elements of the shard `part` of tensor `name`, written to the flat tensor `out` if given."""
        entry = self.manifest.tensors[name]
        rank, size = int(part.file), entry.bytes_of(part)
        found = retry_read(lambda: self._read(rank, self._begins[rank] + part.offset, size))
        typed = found.view(DTYPE_BY_NAME[entry.dtype])
        return typed if out is None else out.copy_(typed)

    def _read(self, rank: int, begin: int, size: int) -> torch.Tensor:
        """Returns bytes of the file of `rank`. It opens the file if it is not open, and closes the one that was not
        read for the longest time."""
        source = self._opened.pop(rank, None) or open_snapshot(self._places[rank])
        found = source.bytes_at(begin, size)
        self._opened[rank] = source  # the last one in the order of the dict was read last
        while len(self._opened) > MAX_OPEN_SNAPSHOTS:
            del self._opened[next(iter(self._opened))]
        return found


def open_snapshot(place: str) -> MemorySnapshot:
    """Opens the snapshots of a rank at the location `place` (see the module docstring).

    Raises:
        OSError: the file does not exist, the node does not answer, or the snapshots were lost.
    """
    if place.startswith(REMOTE_PREFIX):
        return RemoteSnapshot(place.removeprefix(REMOTE_PREFIX))
    if is_lost(place):
        raise OSError("this in-memory checkpoint was lost with its node")
    return MemorySnapshot(place)


class RemoteSnapshot(MemorySnapshot):
    """Reads the snapshots of a rank of another node. `place` is HOST:PORT/KEY/RANK."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._client: SnapshotClient | None = None
        self._open()

    def fetch(self, begin: int, size: int) -> bytes:
        """Returns `size` bytes of the file from offset `begin`: fewer at the end of the file. After an error, the next
        call connects again.

        Raises: OSError if the node does not answer.
        """
        client, self._client = self._client, None
        if client is None:
            address, key, rank = self._place.split("/")
            client = SnapshotClient(address, os.environ.get(TOKEN_VARIABLE, ""), key, int(rank))
        found = client.fetch(begin, size)
        self._client = client
        return found

    def _open(self) -> None:
        self.head = SnapshotHeader(memoryview(self.fetch(0, HEADER_BYTES).ljust(HEADER_BYTES, b"\0")).cast("Q"))
        self._index = self.fetch(HEADER_BYTES, self.head.index_size) if self.head.is_laid else b""

    def state(self, step: int) -> bytes:
        """Returns the JSON state of the trainer at `step`."""
        return self.fetch(*self.head.place_of_state(step))

    def bytes_at(self, begin: int, size: int) -> torch.Tensor:
        """Returns `size` bytes from offset `begin` of the file.

        Raises: OSError if the node does not answer, or no longer has them.
        """
        found = self.fetch(begin, size)
        if len(found) < size:
            raise ConnectionResetError("the node with this in-memory checkpoint no longer has it")
        return torch.frombuffer(bytearray(found), dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)
