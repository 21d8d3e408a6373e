"""What lies where in a file of copies of a rank's steps: words at its beginning, the list of pieces, then slots of one
copy each.

Promise: a slot that has no step was being written, whoever reads it and whenever; a copy is what was written when its
digest says so.
Words, in order of `SnapshotHeader`: kind, bytes and digest of the list of pieces, bytes of a copy, slots, two steps
that are kept for nodes that
read them; from the sixteenth four for each slot: step, digest, bytes of the state of the run, held.

Copies that another node lends, on the side of whoever reads them (the lender's: elastic/snapshot_replication.py).

One line asks, {"key", "rank", "begin", "size"}; one line answers, {"size", "whole"}, and that many bytes follow: fewer
than asked for at the
end of the memory, none where there is no such memory.
"""

from __future__ import annotations

import json
from pathlib import Path

import xxhash

from meshwright.core.connection_listener import MAX_UNAUTHENTICATED_BYTES
from meshwright.core.ipc import parse_message
from meshwright.core.secure_channel import AuthenticationError, open_channel

SNAPSHOT_SLOTS = 3
"""Two that alternate ([Note: two slots] in checkpoint/memory_checkpoint.py) and one that may be held while it is
written to disk."""

SNAPSHOT_SLOTS_MULTI_NODE = SNAPSHOT_SLOTS + 1
"""On several nodes: two that alternate, the one that another node holds too, and the one that it reads meanwhile."""

MIN_STATE_BYTES = 1 << 16
"""Least bytes kept for the state of the run."""

HEADER_BYTES, _PAGE_BYTES = 4096, 4096
PINNED_STEPS_FIELD = 5
"""The first of the two words of steps that are not written over."""

_MAGIC = 0x3253_5552_454D
_MAGIC_FIELD, _INDEX_SIZE_FIELD, _INDEX_DIGEST_FIELD, _DATA_SIZE_FIELD, _NUM_SLOTS_FIELD = range(5)
_FIRST_SLOT_FIELD, _STEP_FIELD, _DIGEST_FIELD, _LENGTH_FIELD, _PINNED_FIELD, _FIELDS_PER_SLOT = 16, 0, 1, 2, 3, 4


class SnapshotHeader:
    """The words at the beginning of a file of copies."""

    def __init__(self, words: memoryview) -> None:
        self.words = words

    # --- reading
    # --------------------------------------------------------------------------------------------------------------

    @property
    def is_laid(self) -> bool:
        return self.words[_MAGIC_FIELD] == _MAGIC

    @property
    def layout(self) -> tuple[int, ...]:
        """Files with the same one have the same list of pieces and the same places."""
        return tuple(self.words[: _NUM_SLOTS_FIELD + 1])

    @property
    def index_size(self) -> int:
        return self.words[_INDEX_SIZE_FIELD]

    @property
    def size(self) -> int:
        """Bytes of a copy."""
        return self.words[_DATA_SIZE_FIELD]

    @property
    def slots(self) -> range:
        return range(self.words[_NUM_SLOTS_FIELD])

    @property
    def whole(self) -> int:
        """Bytes of the file."""
        return self.begin(len(self.slots))

    @property
    def steps(self) -> set[int]:
        """Steps with a whole copy."""
        return {self._slot(slot)[_STEP_FIELD] for slot in self.slots} - {0}

    def begin(self, slot: int) -> int:
        return HEADER_BYTES + round_up_to_page(self.index_size) + slot * (round_up_to_page(self.size) + MIN_STATE_BYTES)

    def place_of_data(self, step: int) -> int:
        return self.begin(self._at(step))

    def place_of_state(self, step: int) -> tuple[int, int]:
        """Where it begins, and its size."""
        return self.place_of_data(step) + round_up_to_page(self.size), self._slot(self._at(step))[_LENGTH_FIELD]

    def digest(self, step: int) -> int:
        return self._slot(self._at(step))[_DIGEST_FIELD]

    def is_digest(self, step: int, digest: int, index: bytes) -> bool:
        """Whether `digest` is that of the copy of `step` and its state, and the list of pieces has its own."""
        return (
            digest == self._slot(self._at(step))[_DIGEST_FIELD]
            and xxhash.xxh3_64_intdigest(index) == self.words[_INDEX_DIGEST_FIELD]
        )

    def _slot(self, slot: int) -> memoryview:
        return self.words[
            _FIRST_SLOT_FIELD + _FIELDS_PER_SLOT * slot : _FIRST_SLOT_FIELD + _FIELDS_PER_SLOT * (slot + 1)
        ]

    def _at(self, step: int) -> int:
        return next(slot for slot in self.slots if self._slot(slot)[_STEP_FIELD] == step)

    # --- writing
    # --------------------------------------------------------------------------------------------------------------

    def lay(self, index: bytes, size: int, slots: int) -> None:
        self.words[_INDEX_SIZE_FIELD], self.words[_DATA_SIZE_FIELD], self.words[_NUM_SLOTS_FIELD] = (
            len(index),
            size,
            slots,
        )
        self.words[_INDEX_DIGEST_FIELD] = xxhash.xxh3_64_intdigest(index)
        self.words[_MAGIC_FIELD] = _MAGIC

    def take(self, most: int | None = None) -> int:
        """The slot to write next, the first `most` alone: the oldest of those that nobody holds. It has no step until
        it is named."""
        kept = set(self.words[PINNED_STEPS_FIELD : PINNED_STEPS_FIELD + 2]) - {0}
        free = [
            slot
            for slot in self.slots[:most]
            if not self._slot(slot)[_PINNED_FIELD] and self._slot(slot)[_STEP_FIELD] not in kept
        ]
        slot = min(free, key=lambda slot: self._slot(slot)[_STEP_FIELD])
        self._slot(slot)[_STEP_FIELD] = 0
        return slot

    def name(self, slot: int, step: int, digest: int, length: int) -> None:
        """The copy in `slot` is whole."""
        words = self._slot(slot)
        words[_DIGEST_FIELD], words[_LENGTH_FIELD] = digest, length
        words[_STEP_FIELD] = step

    def hold(self, step: int) -> None:
        """The copy of `step` stays until another one, or none (0), is held."""
        for slot in self.slots:
            words = self._slot(slot)
            words[_PINNED_FIELD] = int(words[_STEP_FIELD] == step != 0)

    def forget(self, after: int = 0) -> None:
        """There is no copy of a later step any more."""
        for slot in self.slots:
            if self._slot(slot)[_STEP_FIELD] > after:
                self._slot(slot)[_STEP_FIELD] = 0


def round_up_to_page(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES


REMOTE_PREFIX, LOST_LOCATION = "at:", "nowhere:"
"""How the place of a copy on another node begins, and the place of one that is lost with its node."""


def read_snapshot_locations(table: str) -> tuple[str, ...]:
    """Where the copies of all ranks lie, in order of rank, as the file `table` says; none where there is no such
    file."""
    return tuple(Path(table).read_text().splitlines()) if table else ()


class SnapshotClient:
    """The copies of one rank at `address`. Raises OSError when the node is gone, or the token is not that of the
    job."""

    def __init__(self, address: str, token: str, key: str, rank: int) -> None:
        self.key, self.rank = key, rank
        host, port = address.rsplit(":", 1)
        try:
            self._end, _ = open_channel(host, int(port), token, {})
        except AuthenticationError as error:
            raise OSError(str(error)) from None
        self._end.settimeout(None)
        self._lines = self._end.makefile("rb")

    def __del__(self) -> None:
        for part in (getattr(self, "_lines", None), getattr(self, "_end", None)):
            if part is not None:
                part.close()

    def fetch(self, begin: int, size: int) -> bytes:
        """Bytes of the memory from `begin`, fewer than `size` at its end."""
        found = bytearray(self._ask(begin, size))
        self._read(memoryview(found))
        return bytes(found)

    def fill(self, begin: int, out: memoryview) -> None:
        """As many bytes as `out` has. Raises OSError when there are fewer."""
        if self._ask(begin, len(out)) != len(out):
            raise ConnectionResetError("the node that lends these copies no longer has them")
        self._read(out)

    def _ask(self, begin: int, size: int) -> int:
        asked = {"key": self.key, "rank": self.rank, "begin": begin, "size": size}
        self._end.sendall(json.dumps(asked).encode() + b"\n")
        answer = self._lines.readline(MAX_UNAUTHENTICATED_BYTES)
        if not answer:
            raise ConnectionResetError("the node that lends these copies is gone")
        return int(parse_message(answer)["size"])

    def _read(self, out: memoryview) -> None:
        got = 0
        while got < len(out):
            read = self._lines.readinto(out[got:])  # type: ignore[attr-defined]
            if not read:
                raise ConnectionResetError("the node that lends these copies is gone")
            got += read
