"""Collectives of the ranks of one host, through shared memory.

Each rank writes its part where the others can read it, or says where it lies already, and sums or copies out of theirs: nothing is sent.
Sums go in order of rank on every rank, low precision in float32, so that they are the same everywhere and in every run.

    all-reduce, small     every rank sums all parts
    all-reduce            rank r sums slice r of all parts in its own, then everyone copies the slices
    reduce-scatter        rank r sums slice r of all parts
    all-gather            everyone copies all parts

[Note: lanes] A group has LANES collectives under way at most. Collective n uses lane n % LANES, whose words are: `posted` (n: the part
can be read), `halfway` (n: the own slice is summed), `done` (n: the others' parts are read), and where the part lies. The next collective
of a lane begins when everyone is done with this one. Collectives begin in the same order on every rank, and finish in it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch

from meshwright.parallel.shared import Host, Segment

LANES = 4
_POSTED, _HALFWAY, _DONE, _NUMBER, _FILE, _OFFSET, _UPPER, _SIZE = range(8)
LANE_WORDS = LANES * _SIZE
_IS_SLOT = 1 << 31
"""In `_UPPER`: the part lies in the lane's own memory, which another one follows when it grows."""

SMALL = 1 << 16
"""Bytes up to which every rank sums everything: reading is cheaper than meeting twice."""

TILE = 1 << 16
"""Elements that are summed at a time, so that the sum stays in the cache."""

SLOT = 1 << 16
"""Bytes of the smallest memory of a lane."""

_LOW = (torch.bfloat16, torch.float16)


class Lanes:
    """The collectives of the ranks `ranks` (this one among them), who speak through their words from `first` on."""

    def __init__(self, host: Host, ranks: Sequence[int], first: int) -> None:
        self.host, self.ranks, self.first = host, tuple(ranks), first
        self.index = self.ranks.index(host.rank)
        self.others = [rank for rank in self.ranks if rank != host.rank]
        self._slots: list[Segment | None] = [None] * LANES
        self._read_slots: dict[tuple[int, int], int] = {}
        self._number = 0
        self._finished = [0]
        self._open: deque[tuple[int, Callable[[], None]]] = deque()
        self.close = weakref.finalize(self, _part, host, self.others, first, self._finished)

    # --- collectives: each returns what finishes it -----------------------------------------------------------------------------

    def all_reduce(self, flat: torch.Tensor, largest: bool = False) -> Callable[[], None]:
        small = flat.numel() * flat.element_size() <= SMALL
        number, memory = self._begin(flat, copy=small)

        def finish() -> None:
            parts = self._parts(number, memory)
            if small:
                _reduce(parts, slice(None), flat, largest)
                self._done(number)
                return
            slices = [self._slice(flat, rank) for rank in range(len(self.ranks))]
            own = slices[self.index]
            _reduce(parts, own, memory[own], largest)
            self._meet(number, _HALFWAY)
            for rank, (part, taken) in enumerate(zip(parts, slices, strict=True)):
                if rank != self.index or memory.data_ptr() != flat.data_ptr():
                    flat[taken].copy_(part[taken])
            self._done(number)

        return self._started(number, finish)

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        number, memory = self._begin(full)

        def finish() -> None:
            _reduce(self._parts(number, memory), self._slice(full, self.index), out)
            self._done(number)

        return self._started(number, finish)

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Callable[[], None]:
        number, memory = self._begin(shard)

        def finish() -> None:
            for into, part in zip(full.view(len(self.ranks), -1), self._parts(number, memory), strict=True):
                if into.data_ptr() != part.data_ptr():
                    into.copy_(part)
            self._done(number)

        return self._started(number, finish)

    def settle(self) -> None:
        """Wait until nobody reads this rank's memory any more; nothing may be under way."""
        assert not self._open, "collectives are under way"
        for number in range(max(self._number - LANES, 0) + 1, self._number + 1):
            self._everyone(number, _DONE)

    # --- one collective ---------------------------------------------------------------------------------------------------------

    def _begin(self, part: torch.Tensor, copy: bool = False) -> tuple[int, torch.Tensor]:
        """Its number, and this rank's part where the others read it: where it is, or in the lane's own memory."""
        if len(self._open) == LANES:
            self._finish_until(self._open[0][0])
        self._number += 1
        number = self._number
        if number > LANES:
            self._everyone(number - LANES, _DONE)
        place = None if copy else self.host.place(part)
        memory, kind = part, 0
        if place is None:
            size = part.numel() * part.element_size()
            place, kind = (self._slot(number % LANES, size), 0), _IS_SLOT
            memory = place[0].bytes[:size].view(part.dtype)
            memory.copy_(part.reshape(-1))
        segment, offset = place
        words, at = self.host.words[self.host.rank], self._at(number, 0)
        words[at + _NUMBER], words[at + _FILE] = segment.number, segment.file
        words[at + _OFFSET], words[at + _UPPER] = offset & 0xFFFFFFFF, offset >> 32 | kind
        self.host.say(at + _POSTED, number)
        return number, memory

    def _slot(self, lane: int, size: int) -> Segment:
        held = self._slots[lane]
        if held is None or held.size < size:
            if held is not None:
                self.host.drop(held)
            held = self._slots[lane] = self.host.segment(max(SLOT, 1 << (size - 1).bit_length()))
        return held

    def _parts(self, number: int, own: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's part, this one's among them, once they are there."""
        own = own.view(-1)
        size, parts = own.numel() * own.element_size(), []
        for rank in self.ranks:
            if rank == self.host.rank:
                parts.append(own)
                continue
            at = self._at(number, 0)
            self.host.hear(rank, at + _POSTED, number)
            segment, file, lower, upper = self.host.words[rank][at + _NUMBER : at + _SIZE]
            if upper & _IS_SLOT:
                before = self._read_slots.get((rank, number % LANES))
                if before != segment:
                    self._read_slots[rank, number % LANES] = segment
                    self.host.forget(rank, before)
            start = lower + ((upper & ~_IS_SLOT) << 32)
            parts.append(self.host.read(rank, segment, file)[start : start + size].view(own.dtype))
        return parts

    def _meet(self, number: int, word: int) -> None:
        self.host.say(self._at(number, word), number)
        self._everyone(number, word)

    def _everyone(self, number: int, word: int) -> None:
        for rank in self.others:
            self.host.hear(rank, self._at(number, word), number)

    def _done(self, number: int) -> None:
        self._finished[0] = number
        self.host.say(self._at(number, _DONE), number)

    def _at(self, number: int, word: int) -> int:
        return _word(self.first, number, word)

    def _slice(self, flat: torch.Tensor, rank: int) -> slice:
        length, ranks = flat.numel(), len(self.ranks)
        return slice(length * rank // ranks, length * (rank + 1) // ranks)

    # --- what is under way ------------------------------------------------------------------------------------------------------

    def _started(self, number: int, finish: Callable[[], None]) -> Callable[[], None]:
        self._open.append((number, finish))
        return lambda: self._finish_until(number)

    def _finish_until(self, number: int) -> None:
        while self._open and self._open[0][0] <= number:
            self._open.popleft()[1]()


def _word(first: int, number: int, word: int) -> int:
    return first + number % LANES * _SIZE + word


def _part(host: Host, others: Sequence[int], first: int, finished: list[int]) -> None:
    """Before this rank's memory goes: the others have read all that they need. Who is gone, or late beyond reason, needs it no more."""
    last = range(max(finished[0] - LANES, 0) + 1, finished[0] + 1)
    host.hear_out((rank, _word(first, number, _DONE), number) for number in last for rank in others)


def _reduce(parts: list[torch.Tensor], taken: slice, out: torch.Tensor, largest: bool = False) -> None:
    """`out` becomes the sum of `parts[...][taken]`, or their largest, in order; it may be one of them."""
    rows = [part[taken] for part in parts]
    for start in range(0, out.numel(), TILE):
        tile = slice(start, start + TILE)
        first, *rest = [row[tile] for row in rows]
        if largest:
            total = first.clone()
            for row in rest:
                torch.maximum(total, row, out=total)
        else:
            total = first.float() + rest[0] if first.dtype in _LOW else first + rest[0]
            for row in rest[1:]:
                total += row
        out[tile].copy_(total)
