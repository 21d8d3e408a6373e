"""Copies of a rank of another node, read over a link by those that go on from them: only the bytes that a layout needs travel.

A place is a path of this machine, `at:HOST:PORT/KEY/RANK` at the node that lends them (elastic/lending.py), or `nowhere:` when they were
lost with their node. Whoever reads proves that it knows the job's token (base/link.py).
"""

from __future__ import annotations

import os

import torch
import xxhash

from meshwright.base.lent import AT, NOWHERE, Lent
from meshwright.base.link import TOKEN
from meshwright.base.slots import HEAD, Head
from meshwright.checkpoint.memory import CHUNK, Memory


def memory_at(place: str) -> Memory:
    """The copies at `place`. Raises OSError when nobody lends them there."""
    if place.startswith(AT):
        return Distant(place.removeprefix(AT))
    if place.startswith(NOWHERE):
        raise OSError("these copies were lost with their node")
    return Memory(place)


class Distant(Memory):
    """Read as `Memory` is; nothing can be written."""

    def __init__(self, place: str) -> None:
        address, key, rank = place.split("/")
        self._lent = Lent(address, os.environ.get(TOKEN, ""), key, int(rank))
        self.fetch = self._lent.fetch
        self._open()

    def _open(self) -> None:
        self.head = Head(memoryview(self.fetch(0, HEAD).ljust(HEAD, b"\0")).cast("Q"))
        self._index = self.fetch(HEAD, self.head.index_size) if self.head.is_laid else b""

    def is_good(self, step: int) -> bool:
        digest, place = xxhash.xxh3_64(), self.head.place_of_data(step)
        for begin in range(0, self.head.size, CHUNK):
            digest.update(self.fetch(place + begin, min(CHUNK, self.head.size - begin)))
        digest.update(self.state(step))
        return self.head.is_digest(step, digest.intdigest(), self._index)

    def state(self, step: int) -> bytes:
        return self.fetch(*self.head.place_of_state(step))

    def data(self, step: int) -> Bytes:  # type: ignore[override]
        return Bytes(self, self.head.place_of_data(step))


class Bytes:
    """Bytes that are fetched when they are sliced, as a tensor of bytes is."""

    def __init__(self, memory: Distant, begin: int) -> None:
        self._memory, self._begin = memory, begin

    def __getitem__(self, part: slice) -> torch.Tensor:
        found = self._memory.fetch(self._begin + part.start, part.stop - part.start)
        if len(found) < part.stop - part.start:
            raise ConnectionResetError("the node that lends these copies no longer has them")
        return torch.frombuffer(bytearray(found), dtype=torch.uint8) if found else torch.empty(0, dtype=torch.uint8)
