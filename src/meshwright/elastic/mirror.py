"""A mirror: the newest whole copies of another node's ranks, so that they survive that node. Each node has one, read beside everything else.

Promise: a copy is named in the mirror when all of its bytes are there and have the digest that the rank wrote; the one before stays until then.
A mirror lies where a copy of such a rank would lie if it ran here (holdings.py), and is lent like it. It takes two copies of memory.
"""

from __future__ import annotations

import mmap
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import xxhash

from meshwright.base.lent import Lent
from meshwright.base.slots import HEAD, Head

POLL = 0.005
"""Seconds between looks at whether the step that is wanted has a copy."""

PART = 4 << 20
"""Bytes that are asked for at a time."""

SLOTS = 2
"""Of a file, that a mirror uses."""


class Order(NamedTuple):
    """Copies of `step` from the node that lends at `address`, into the open file of each rank, which is closed then."""

    number: int
    key: str
    step: int
    address: str
    files: Mapping[int, int]


class Mirror:
    """`done` gets the number of an order, whether its copies are whole, and the seconds that copying took, from a thread of its own."""

    def __init__(self, token: str, done: Callable[[int, bool, float], None]) -> None:
        self._token, self._done = token, done
        self._orders: queue.SimpleQueue[Order | None] = queue.SimpleQueue()
        self._latest: Order | None = None
        self._ranks: deque[Collection[int]] = deque(maxlen=2)
        self._lent: dict[tuple[str, str, int], Lent] = {}
        self._seconds = 0.0
        threading.Thread(target=self._run, name="mirror", daemon=True).start()

    def order(self, order: Order) -> None:
        """The one before is given up, if it is still under way."""
        self._latest = order
        self._ranks.append(order.files.keys())
        self._orders.put(order)

    @property
    def ranks(self) -> set[int]:
        """Of the last order and of the one before, whose copies are whole while those of the last are not."""
        return {rank for ranks in self._ranks for rank in ranks}

    def close(self) -> None:
        self._latest = None
        self._orders.put(None)

    def _run(self) -> None:
        while (order := self._orders.get()) is not None:
            self._seconds = 0.0
            try:
                whole = all(self._copy(order, rank, file) for rank, file in order.files.items())
            except (OSError, ValueError):
                whole = False  # the node is gone, or what it lends is no copy
                self._lent.clear()
            finally:
                for file in order.files.values():
                    os.close(file)
            if order is self._latest:
                self._done(order.number, whole, self._seconds)

    def _copy(self, order: Order, rank: int, file: int) -> bool:
        lent = self._reached(order, rank)
        there = self._await(order, lent)
        if there is None:
            return False
        began = time.monotonic()
        try:
            return self._fill(order, rank, file, lent, there)
        finally:
            self._seconds += time.monotonic() - began

    def _fill(self, order: Order, rank: int, file: int, lent: Lent, there: Head) -> bool:
        index = lent.fetch(HEAD, there.index_size)
        if os.fstat(file).st_size != there.whole:
            os.ftruncate(file, 0)
            os.ftruncate(file, there.whole)
        with mmap.mmap(file, there.whole) as memory, memoryview(memory) as view, view[:HEAD] as first, first.cast("Q") as words:
            here = Head(words)
            if here.layout != there.layout:
                words[:] = memoryview(bytes(HEAD)).cast("Q")
                here.lay(index, there.size, len(there.slots))
                view[HEAD : HEAD + len(index)] = index
            if order.step in here.steps and there.is_digest(order.step, here.digest(order.step), index):
                return True  # of a round that was given up when a node was lost
            here.forget(order.step - 1)  # copies of this step and later ones are of a past that the run went back from
            slot, digest = here.take(SLOTS), xxhash.xxh3_64()
            (begin, size), to = (there.place_of_data(order.step), there.size), here.begin(slot)
            for at in range(0, size, PART):
                if order is not self._latest:
                    return False
                with view[to + at : to + min(at + PART, size)] as part:
                    lent.fill(begin + at, part)
                    digest.update(part)
            (begin, size), to = there.place_of_state(order.step), to + there.place_of_state(order.step)[0] - begin
            with view[to : to + size] as part:
                lent.fill(begin, part)
                digest.update(part)
            if not there.is_digest(order.step, digest.intdigest(), index):
                return False
            here.name(slot, order.step, digest.intdigest(), size)
        return True

    def _reached(self, order: Order, rank: int) -> Lent:
        place = order.address, order.key, rank
        if place not in self._lent:
            self._lent = {kept: lent for kept, lent in self._lent.items() if kept[:2] == place[:2]}
            self._lent[place] = Lent(order.address, self._token, order.key, rank)
        return self._lent[place]

    def _await(self, order: Order, lent: Lent) -> Head | None:
        """The words of the file that has the step; None when it has been written over, or is not wanted any more."""
        while order is self._latest:
            words = lent.fetch(0, HEAD)
            head = Head(memoryview(words.ljust(HEAD, b"\0")).cast("Q"))
            if head.is_laid and order.step in head.steps:
                return head
            if head.is_laid and max(head.steps, default=0) > order.step:
                return None
            time.sleep(POLL)
        return None
