"""Defines the layout of a file of in-memory checkpoints of one rank. Ranks write the file, and supervisors and ranks
read it. The file has a header of 64-bit fields, an index of tensors, and slots with one checkpoint each.

Guarantees: a slot with a step number contains a complete checkpoint at any time. A checkpoint is intact if its digest
matches.

The header has these fields: magic number; size and digest of the index; bytes of a checkpoint; number of slots; and two
pinned steps, whose checkpoints other nodes read. From field 16 on, each slot has five fields: step, digest, bytes of
the run state, pinned, history.

[Note: history] Two checkpoints of one step may differ: ranks may have repeated the step after a fault, or on other
batches after a rollback. The history is the number of the execution that wrote a checkpoint. The history rises with
each generation (start of all ranks) and with each rollback, and all ranks write equal values. So checkpoints of all
ranks with equal step and history are of one execution, wherever they are stored. Only such checkpoints are combined.

The module also has the client for in-memory checkpoints on another node. The server is elastic/snapshot_replication.py.
A request is one line, {"key", "rank", "begin", "size"}. The reply is one line, {"size", "whole"}, followed by `size`
bytes. `whole` is the size of the file in bytes. At the end of the file the reply has fewer bytes than requested. If the
file does not exist, the reply has no bytes.
"""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from meshwright.core.connection_listener import MAX_UNAUTHENTICATED_BYTES
from meshwright.core.ipc import parse_message
from meshwright.core.secure_channel import AuthenticationError, open_channel

SNAPSHOT_SLOTS = 3
"""Number of slots of a rank if the job runs on one node. Two slots alternate ([Note: two slots] in
checkpoint/memory_checkpoint.py). One slot may be pinned while it is written to disk."""

SNAPSHOT_SLOTS_MULTI_NODE = SNAPSHOT_SLOTS + 1
"""Number of slots of a rank if the job runs on several nodes. Two slots alternate. The checkpoint of the third has a
replica on another node, and the checkpoint of the fourth is being replicated."""

MIN_STATE_BYTES = 1 << 16
"""Number of bytes that each slot reserves for the run state, the JSON state of the trainer."""

HEADER_BYTES, _PAGE_BYTES = 4096, 4096

ROW_BYTES, ROW_SUMS_KEY = _PAGE_BYTES, "row_sums"
"""Bytes of a row, and the entry of the index that says whether digests are computed from the sums of rows and columns
([Note: row sums] in checkpoint/memory_checkpoint.py)."""

PINNED_STEPS_FIELD = 5
"""Index of the first of two fields with steps that must not be overwritten."""

_MAGIC = 0x3253_5552_454D
_MAGIC_FIELD, _INDEX_SIZE_FIELD, _INDEX_DIGEST_FIELD, _DATA_SIZE_FIELD, _NUM_SLOTS_FIELD = range(5)
_FIRST_SLOT_FIELD, _STEP_FIELD, _DIGEST_FIELD, _LENGTH_FIELD, _PINNED_FIELD, _HISTORY_FIELD = 16, 0, 1, 2, 3, 4
_FIELDS_PER_SLOT = 5

HISTORIES_PER_GENERATION = 1 << 16
"""The histories of generation g begin at g times this number. Each rollback increments the history by 1."""

SnapshotVersion = tuple[int, int]
"""(history, step) of a checkpoint. The largest version is the newest one."""


class SnapshotHeader:
    """Reads and writes the header of a file of in-memory checkpoints. `words` are its 64-bit fields.

    Methods that read the checkpoint of a `step` require that a slot has a complete checkpoint of this step.
    """

    def __init__(self, words: memoryview) -> None:
        self.words = words

    # --- reading

    @property
    def is_laid(self) -> bool:
        """Returns whether the file has an initialized header."""
        return self.words[_MAGIC_FIELD] == _MAGIC

    @property
    def layout(self) -> tuple[int, ...]:
        """Returns the fields that determine the layout. Files with equal fields have equal indices and offsets."""
        return tuple(self.words[: _NUM_SLOTS_FIELD + 1])

    @property
    def index_size(self) -> int:
        """Returns the number of bytes of the index."""
        return self.words[_INDEX_SIZE_FIELD]

    @property
    def size(self) -> int:
        """Returns the number of bytes of a checkpoint, without its run state."""
        return self.words[_DATA_SIZE_FIELD]

    @property
    def slots(self) -> range:
        """Returns the indices of the slots."""
        return range(self.words[_NUM_SLOTS_FIELD])

    @property
    def whole(self) -> int:
        """Returns the number of bytes of the file."""
        return self.begin(len(self.slots))

    @property
    def steps(self) -> set[int]:
        """Returns the steps with a complete checkpoint."""
        return {self._slot(slot)[_STEP_FIELD] for slot in self.slots} - {0}

    def begin(self, slot: int) -> int:
        """Returns the offset of `slot` in the file."""
        return HEADER_BYTES + round_up_to_page(self.index_size) + slot * (round_up_to_page(self.size) + MIN_STATE_BYTES)

    def place_of_data(self, step: int) -> int:
        """Returns the offset of the tensors of `step` in the file."""
        return self.begin(self._at(step))

    def place_of_state(self, step: int) -> tuple[int, int]:
        """Returns the offset and the size of the run state of `step` in bytes."""
        return self.place_of_data(step) + round_up_to_page(self.size), self._slot(self._at(step))[_LENGTH_FIELD]

    def digest(self, step: int) -> int:
        """Returns the digest of the checkpoint of `step`."""
        return self._slot(self._at(step))[_DIGEST_FIELD]

    def is_digest(self, step: int, digest: int, index: bytes) -> bool:
        """Returns whether `digest` equals the recorded digest of the checkpoint of `step` (including its run state),
        and the digest of `index` equals the recorded digest of the index."""
        return digest == self.digest(step) and is_index(self, index)

    def _slot(self, slot: int) -> memoryview:
        return self.words[
            _FIRST_SLOT_FIELD + _FIELDS_PER_SLOT * slot : _FIRST_SLOT_FIELD + _FIELDS_PER_SLOT * (slot + 1)
        ]

    def _at(self, step: int) -> int:
        return next(slot for slot in self.slots if self._slot(slot)[_STEP_FIELD] == step)

    # --- writing

    def lay(self, index: bytes, size: int, slots: int) -> None:
        """Initializes the header for `index` and `slots` empty slots with checkpoints of `size` bytes."""
        self.words[_INDEX_SIZE_FIELD], self.words[_DATA_SIZE_FIELD], self.words[_NUM_SLOTS_FIELD] = (
            len(index),
            size,
            slots,
        )
        self.words[_INDEX_DIGEST_FIELD] = xxhash.xxh3_64_intdigest(index)
        self.words[_MAGIC_FIELD] = _MAGIC

    def take(self, most: int | None = None) -> int:
        """Returns the slot to write next: among the first `most` slots (None: all), the one with the oldest checkpoint
        that is not pinned. Sets its step to 0, until `name` sets the new step."""
        saved = set(self.words[PINNED_STEPS_FIELD : PINNED_STEPS_FIELD + 2]) - {0}
        free = [
            slot
            for slot in self.slots[:most]
            if not self._slot(slot)[_PINNED_FIELD] and self._slot(slot)[_STEP_FIELD] not in saved
        ]
        slot = min(free, key=lambda slot: self._slot(slot)[_STEP_FIELD])
        self._slot(slot)[_STEP_FIELD] = 0
        return slot

    def name(self, slot: int, step: int, digest: int, length: int, history: int = 0) -> None:
        """Marks the checkpoint in `slot` as complete. `length` is the number of bytes of its run state."""
        words = self._slot(slot)
        words[_DIGEST_FIELD], words[_LENGTH_FIELD], words[_HISTORY_FIELD] = digest, length, history
        words[_STEP_FIELD] = step

    def hold(self, step: int) -> None:
        """Pins the checkpoint of `step` and unpins all others. Step 0 pins none."""
        for slot in self.slots:
            words = self._slot(slot)
            words[_PINNED_FIELD] = int(words[_STEP_FIELD] == step != 0)

    def forget(self, after: int = 0) -> None:
        """Invalidates all checkpoints of steps later than `after`."""
        for slot in self.slots:
            if self._slot(slot)[_STEP_FIELD] > after:
                self._slot(slot)[_STEP_FIELD] = 0


def is_index(head: SnapshotHeader, index: bytes) -> bool:
    """Returns whether the digest of `index` equals the recorded digest of the index."""
    return xxhash.xxh3_64_intdigest(index) == head.words[_INDEX_DIGEST_FIELD]


def history_of(head: SnapshotHeader, step: int) -> int:
    """Returns the history of the checkpoint of `step`."""
    return head._slot(head._at(step))[_HISTORY_FIELD]


def rewrite_history(head: SnapshotHeader, step: int, history: int) -> None:
    """Sets the history of the checkpoint of `step` to `history`. Its bytes must equal those of the checkpoint that has
    this history and step."""
    head._slot(head._at(step))[_HISTORY_FIELD] = history


def versions_of(head: SnapshotHeader) -> set[SnapshotVersion]:
    """Returns the versions of all complete checkpoints."""
    return {(history_of(head, step), step) for step in head.steps}


def round_up_to_page(size: int) -> int:
    """Returns `size`, in bytes, rounded up to whole pages."""
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


REMOTE_PREFIX, LOST_LOCATION = "at:", "nowhere:"
"""The prefix of a location on another node, and the location of a checkpoint that was lost with its node."""


def is_lost(place: str) -> bool:
    """Returns whether the checkpoints at location `place` were lost with their node."""
    return place.startswith(LOST_LOCATION)


def read_snapshot_locations(table: str) -> tuple[str, ...]:
    """Returns the locations of the in-memory checkpoints of all ranks from the file `table`, in order of rank. Returns
    () if `table` is ''."""
    return tuple(Path(table).read_text().splitlines()) if table else ()


SNAPSHOT_TIMEOUT_SECONDS = 15.0
"""Seconds without a byte after which a node counts as silent, because it has no power or its link is broken."""


class SnapshotClient:
    """Reads the in-memory checkpoints of `rank` from the node at `address` (HOST:PORT). `key` identifies them there.

    Raises: OSError if the node does not answer for SNAPSHOT_TIMEOUT_SECONDS or rejects the token.
    """

    def __init__(self, address: str, token: str, key: str, rank: int) -> None:
        self.key, self.rank = key, rank
        host, port = address.rsplit(":", 1)
        try:
            self._end, _ = open_channel(host, int(port), token, {})
        except AuthenticationError as error:
            raise OSError(str(error)) from None
        self._end.settimeout(SNAPSHOT_TIMEOUT_SECONDS)
        self._lines = self._end.makefile("rb")

    def __del__(self) -> None:
        for part in (getattr(self, "_lines", None), getattr(self, "_end", None)):
            if part is not None:
                part.close()

    def fetch(self, begin: int, size: int) -> bytes:
        """Returns `size` bytes of the file from offset `begin`: fewer at the end of the file, and none if it does not
        exist.

        Raises: OSError if the node does not answer.
        """
        found = bytearray(self._ask(begin, size))
        self._read(memoryview(found))
        return bytes(found)

    def fill(self, begin: int, out: memoryview) -> None:
        """Fills `out` with the bytes of the file from offset `begin`.

        Raises: OSError if the file ends before `out` is full, or the node does not answer.
        """
        if self._ask(begin, len(out)) != len(out):
            raise ConnectionResetError("the node with this in-memory checkpoint no longer has it")
        self._read(out)

    def _ask(self, begin: int, size: int) -> int:
        requested = {"key": self.key, "rank": self.rank, "begin": begin, "size": size}
        self._end.sendall(json.dumps(requested).encode() + b"\n")
        answer = self._lines.readline(MAX_UNAUTHENTICATED_BYTES)
        if not answer:
            raise ConnectionResetError("the node with this in-memory checkpoint closed the connection")
        return int(parse_message(answer)["size"])

    def _read(self, out: memoryview) -> None:
        got = 0
        while got < len(out):
            read = self._lines.readinto(out[got:])  # type: ignore[attr-defined]
            if not read:
                raise ConnectionResetError("the node with this in-memory checkpoint closed the connection")
            got += read
