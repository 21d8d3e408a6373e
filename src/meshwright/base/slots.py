"""What lies where in a file of copies of a rank's steps: words at its beginning, the list of pieces, then slots of one copy each.

Promise: a slot that has no step was being written, whoever reads it and whenever; a copy is what was written when its digest says so.
Words, in order of `Head`: kind, bytes and digest of the list of pieces, bytes of a copy, slots, two steps that are kept for nodes that
read them; from the sixteenth four for each slot: step, digest, bytes of the state of the run, held.
"""

from __future__ import annotations

import xxhash

SLOTS = 3
"""Two that alternate ([Note: two slots] in checkpoint/memory.py) and one that may be held while it is written to disk."""

SEVERAL = SLOTS + 1
"""On several nodes: two that alternate, the one that another node holds too, and the one that it reads meanwhile."""

STATE = 1 << 16
"""Least bytes kept for the state of the run."""

HEAD, _PAGE = 4096, 4096
KEPT = 5
"""The first of the two words of steps that are not written over."""

_MAGIC = 0x3253_5552_454D
_KIND, _INDEX, _INDEX_DIGEST, _DATA, _SLOTS = range(5)
_SLOT, _STEP, _DIGEST, _LENGTH, _HELD, _EACH = 16, 0, 1, 2, 3, 4


class Head:
    """The words at the beginning of a file of copies."""

    def __init__(self, words: memoryview) -> None:
        self.words = words

    # --- reading --------------------------------------------------------------------------------------------------------------

    @property
    def is_laid(self) -> bool:
        return self.words[_KIND] == _MAGIC

    @property
    def layout(self) -> tuple[int, ...]:
        """Files with the same one have the same list of pieces and the same places."""
        return tuple(self.words[: _SLOTS + 1])

    @property
    def index_size(self) -> int:
        return self.words[_INDEX]

    @property
    def size(self) -> int:
        """Bytes of a copy."""
        return self.words[_DATA]

    @property
    def slots(self) -> range:
        return range(self.words[_SLOTS])

    @property
    def whole(self) -> int:
        """Bytes of the file."""
        return self.begin(len(self.slots))

    @property
    def steps(self) -> set[int]:
        """Steps with a whole copy."""
        return {self._slot(slot)[_STEP] for slot in self.slots} - {0}

    def begin(self, slot: int) -> int:
        return HEAD + up(self.index_size) + slot * (up(self.size) + STATE)

    def place_of_data(self, step: int) -> int:
        return self.begin(self._at(step))

    def place_of_state(self, step: int) -> tuple[int, int]:
        """Where it begins, and its size."""
        return self.place_of_data(step) + up(self.size), self._slot(self._at(step))[_LENGTH]

    def digest(self, step: int) -> int:
        return self._slot(self._at(step))[_DIGEST]

    def is_digest(self, step: int, digest: int, index: bytes) -> bool:
        """Whether `digest` is that of the copy of `step` and its state, and the list of pieces has its own."""
        return digest == self._slot(self._at(step))[_DIGEST] and xxhash.xxh3_64_intdigest(index) == self.words[_INDEX_DIGEST]

    def _slot(self, slot: int) -> memoryview:
        return self.words[_SLOT + _EACH * slot : _SLOT + _EACH * (slot + 1)]

    def _at(self, step: int) -> int:
        return next(slot for slot in self.slots if self._slot(slot)[_STEP] == step)

    # --- writing --------------------------------------------------------------------------------------------------------------

    def lay(self, index: bytes, size: int, slots: int) -> None:
        self.words[_INDEX], self.words[_DATA], self.words[_SLOTS] = len(index), size, slots
        self.words[_INDEX_DIGEST] = xxhash.xxh3_64_intdigest(index)
        self.words[_KIND] = _MAGIC

    def take(self, most: int | None = None) -> int:
        """The slot to write next, the first `most` alone: the oldest of those that nobody holds. It has no step until it is named."""
        kept = set(self.words[KEPT : KEPT + 2]) - {0}
        free = [slot for slot in self.slots[:most] if not self._slot(slot)[_HELD] and self._slot(slot)[_STEP] not in kept]
        slot = min(free, key=lambda slot: self._slot(slot)[_STEP])
        self._slot(slot)[_STEP] = 0
        return slot

    def name(self, slot: int, step: int, digest: int, length: int) -> None:
        """The copy in `slot` is whole."""
        words = self._slot(slot)
        words[_DIGEST], words[_LENGTH] = digest, length
        words[_STEP] = step

    def hold(self, step: int) -> None:
        """The copy of `step` stays until another one, or none (0), is held."""
        for slot in self.slots:
            words = self._slot(slot)
            words[_HELD] = int(words[_STEP] == step != 0)

    def forget(self, after: int = 0) -> None:
        """There is no copy of a later step any more."""
        for slot in self.slots:
            if self._slot(slot)[_STEP] > after:
                self._slot(slot)[_STEP] = 0


def up(size: int) -> int:
    return -(-size // _PAGE) * _PAGE
