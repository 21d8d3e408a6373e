"""Copies of a rank of another node, read over a link by those that go on from them: only the bytes that a layout needs travel.

A place is a path of this machine, `at:HOST:PORT/KEY/RANK` at the node that lends them (elastic/lending.py), or `nowhere:` when they were
lost with their node. Whoever reads proves that it knows the job's token (base/link.py).
"""

from __future__ import annotations

import json
import os

import torch
import xxhash

from meshwright.base.link import TOKEN, NotAdmitted, enter
from meshwright.checkpoint.memory import CHUNK, HEAD, Head, Memory

AT, NOWHERE = "at:", "nowhere:"


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
        address, self._key, rank = place.split("/")
        host, port = address.rsplit(":", 1)
        self._rank = int(rank)
        try:
            self._end, _ = enter(host, int(port), os.environ.get(TOKEN, ""), {})
        except NotAdmitted as error:
            raise OSError(str(error)) from None
        self._end.settimeout(None)
        self._lines = self._end.makefile("rb")
        self._open()

    def _open(self) -> None:
        self.head = Head(memoryview(self.fetch(0, HEAD).ljust(HEAD, b"\0")).cast("Q"))
        self._index = self.fetch(HEAD, self.head.index_size) if self.head.is_laid else b""

    def __del__(self) -> None:
        if hasattr(self, "_end"):
            self._end.close()

    def fetch(self, begin: int, size: int) -> bytes:
        """Bytes of the memory from `begin`, fewer than `size` at its end. Raises OSError when the node is gone."""
        asked = {"key": self._key, "rank": self._rank, "begin": begin, "size": size}
        self._end.sendall(json.dumps(asked).encode() + b"\n")
        answer = self._lines.readline()
        if not answer:
            raise ConnectionResetError("the node that lends these copies is gone")
        found = bytearray(int(json.loads(answer)["size"]))
        got = 0
        while got < len(found):
            read = self._lines.readinto(memoryview(found)[got:])  # type: ignore[attr-defined]
            if not read:
                raise ConnectionResetError("the node that lends these copies is gone")
            got += read
        return bytes(found)

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
