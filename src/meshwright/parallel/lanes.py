"""Collectives of the ranks of one host, through shared memory.

Each rank writes its part where the others can read it, or says where it lies already, and sums or copies out of theirs: nothing is sent.
Sums go in order of rank on every rank, low precision in float32, so that they are the same everywhere and in every run.

    all-reduce, small     every rank sums all parts
    all-reduce            rank r sums slice r of all parts in its own, then everyone copies the slices
    reduce-scatter        rank r sums slice r of all parts
    all-gather            everyone copies all parts
    all-to-all            rank r copies what is for it out of all parts

[Note: lanes] A group has LANES collectives under way at most. Collective n uses lane n % LANES, whose words are: `posted` (n: the part
can be read), `halfway` (n: the own slice is summed), `done` (n: the others' parts are read), and where the part lies. The next collective
of a lane begins when everyone is done with this one. Collectives begin in the same order on every rank; what can be done without waiting is
done whenever another one begins, so that little is left to do, and to wait for, at the end.

[Note: slots] What does not lie in shared memory is copied into a slot, memory that this rank keeps for it; who can fill a slot itself
(`stage`) saves the copy. A slot is free again when everyone is done with its collective. Collectives under way keep UNDER_WAY at most, which
is also what ZeRO 2 and 3 hold of whole gradients: whoever asks for another one then waits for the oldest, which every rank that came as far
as this one has finished, so that nobody waits in a circle.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from meshwright.parallel.shared import PAGE, Host, Segment

LANES = 16
UNDER_WAY = 2
_POSTED, _HALFWAY, _DONE, _NUMBER, _FILE, _OFFSET, _SLOT, _SIZE = range(8)
LANE_WORDS = LANES * _SIZE
"""`_SLOT`: 1 + the number of the slot that the part lies in, whose memory another one follows when it grows; 0 for other memory."""

SMALL = 1 << 16
"""Bytes up to which every rank sums everything: reading is cheaper than meeting twice."""

TILE = 1 << 16
"""Elements that are summed at a time, so that the sum stays in the cache."""

_LOW = (torch.bfloat16, torch.float16)


@dataclass
class _Slot:
    """`number` of the collective that reads it, None while it is being filled."""

    segment: Segment
    number: int | None = None


@dataclass
class _Open:
    """A collective under way: what it still does, each once every other rank has said the word."""

    number: int
    steps: deque[tuple[int, Callable[[], None]]] = field(default_factory=deque)


class Lanes:
    """The collectives of the ranks `ranks` (this one among them), who speak through their words from `first` on."""

    def __init__(self, host: Host, ranks: Sequence[int], first: int) -> None:
        self.host, self.ranks, self.first = host, tuple(ranks), first
        self.index = self.ranks.index(host.rank)
        self.others = [rank for rank in self.ranks if rank != host.rank]
        self._slots: list[_Slot] = []
        self._read_slots: dict[tuple[int, int], int] = {}
        self._number = 0
        self._finished = [0]
        self._open: deque[_Open] = deque()
        self.close = weakref.finalize(self, _part, host, self.others, first, self._finished)

    # --- collectives: each returns what finishes it -----------------------------------------------------------------------------

    def all_reduce(self, flat: torch.Tensor, largest: bool = False) -> Callable[[], None]:
        small = flat.numel() * flat.element_size() <= SMALL
        number, memory = self._begin(flat, copy=small)
        slices = [_slice(flat, rank, len(self.ranks)) for rank in range(len(self.ranks))]

        def sum_all() -> None:
            _reduce(self._parts(number, memory), slice(None), flat, largest)
            self._done(number)

        def sum_own() -> None:
            own = slices[self.index]
            _reduce(self._parts(number, memory), own, memory[own], largest)
            self.host.say(self._at(number, _HALFWAY), number)

        def copy() -> None:
            for rank, (part, taken) in enumerate(zip(self._parts(number, memory), slices, strict=True)):
                if rank != self.index or memory.data_ptr() != flat.data_ptr():
                    flat[taken].copy_(part[taken])
            self._done(number)

        return self._started(number, (_POSTED, sum_all)) if small else self._started(number, (_POSTED, sum_own), (_HALFWAY, copy))

    def reduce_scatter(self, full: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        number, memory = self._begin(full)

        def scatter() -> None:
            _reduce(self._parts(number, memory), _slice(memory, self.index, len(self.ranks)), out)
            self._done(number)

        return self._started(number, (_POSTED, scatter))

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Callable[[], None]:
        number, memory = self._begin(shard)

        def gather() -> None:
            for into, part in zip(full.view(len(self.ranks), -1), self._parts(number, memory), strict=True):
                if into.data_ptr() != part.data_ptr():
                    into.copy_(part)
            self._done(number)

        return self._started(number, (_POSTED, gather))

    def all_to_all_rows(self, out: torch.Tensor, sent: torch.Tensor, rows: Sequence[Sequence[int]]) -> Callable[[], None]:
        """Uneven: rank i sends `rows[i][j]` rows to rank j."""
        number, memory = self._begin(sent)
        width, numels = sent.shape[1], [sum(row) * sent.shape[1] for row in rows]

        def exchange() -> None:
            at = 0
            for row, part in zip(rows, self._parts(number, memory, numels), strict=True):
                start, numel = sum(row[: self.index]) * width, row[self.index] * width
                out.view(-1)[at : at + numel].copy_(part[start : start + numel])
                at += numel
            self._done(number)

        return self._started(number, (_POSTED, exchange))

    def stage(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory that the others can read, to be filled with anything and given to a collective once. What was in it is still there."""
        slot = self._slot(numel * dtype.itemsize)
        slot.number = None
        return slot.segment.bytes[: numel * dtype.itemsize].view(dtype)

    def settle(self) -> None:
        """Wait until nobody reads this rank's memory any more; nothing may be under way."""
        assert not self._open, "collectives are under way"
        for number in range(max(self._number - LANES, 0) + 1, self._number + 1):
            self._everyone(number, _DONE)

    # --- one collective ---------------------------------------------------------------------------------------------------------

    def _begin(self, part: torch.Tensor, copy: bool = False) -> tuple[int, torch.Tensor]:
        """Its number, and this rank's part where the others read it: where it is, or in a slot."""
        self._progress()
        if len(self._open) == LANES:
            self._finish_until(self._open[0].number)
        number = self._number + 1
        if number > LANES:
            self._everyone(number - LANES, _DONE)
        place = None if copy else self.host.place(part)
        memory = part
        if place is None:
            memory = self.stage(part.numel(), part.dtype)
            memory.copy_(part.reshape(-1))
            place = self.host.place(memory)
            assert place is not None
        self._number = number
        segment, offset = place
        words, at = self.host.words[self.host.rank], self._at(number, 0)
        words[at + _NUMBER], words[at + _FILE], words[at + _OFFSET] = segment.number, segment.file, offset
        words[at + _SLOT] = self._filled(segment, number)
        self.host.say(at + _POSTED, number)
        return number, memory

    def _filled(self, segment: Segment, number: int) -> int:
        """1 + the slot that `segment` is, which collective `number` reads from now on; 0 if it is none."""
        for index, slot in enumerate(self._slots):
            if slot.segment is segment:
                slot.number = number
                return index + 1
        return 0

    def _slot(self, size: int) -> _Slot:
        """One that nobody reads: the tightest that is free, else a new one, else a free one made larger."""
        size = -(-size // PAGE) * PAGE
        free = sorted((slot for slot in self._slots if self._is_free(slot)), key=lambda slot: slot.segment.size)
        for slot in free:
            if slot.segment.size >= size:
                return slot
        if not free:
            busy = [slot for slot in self._slots if slot.number is not None]
            if len(busy) <= UNDER_WAY:
                self._slots.append(_Slot(self.host.segment(size)))
                return self._slots[-1]
            free = [min(busy, key=lambda slot: slot.number or 0)]
            self._free(free[0])
        if free[-1].segment.size < size:
            self.host.drop(free[-1].segment)
            free[-1].segment = self.host.segment(size)
        return free[-1]

    def _free(self, slot: _Slot) -> None:
        assert slot.number is not None
        self._finish_until(slot.number)
        self._everyone(slot.number, _DONE)

    def _is_free(self, slot: _Slot) -> bool:
        return slot.number is not None and slot.number <= self._finished[0] and self._is_there(slot.number, _DONE)

    def _parts(self, number: int, own: torch.Tensor, numels: Sequence[int] = ()) -> list[torch.Tensor]:
        """Every rank's part, this one's among them, once they are there; of `numels` elements where they differ."""
        own = own.view(-1)
        parts = []
        for rank, numel in zip(self.ranks, numels or [own.numel()] * len(self.ranks), strict=True):
            if rank == self.host.rank:
                parts.append(own)
                continue
            at = self._at(number, 0)
            segment, file, start, slot = self.host.words[rank][at + _NUMBER : at + _SIZE]
            if slot:
                before = self._read_slots.get((rank, slot))
                if before != segment:
                    self._read_slots[rank, slot] = segment
                    self.host.forget(rank, before)
            parts.append(self.host.read(rank, segment, file)[start : start + numel * own.element_size()].view(own.dtype))
        return parts

    def _everyone(self, number: int, word: int) -> None:
        for rank in self.others:
            self.host.hear(rank, self._at(number, word), number)

    def _is_there(self, number: int, word: int) -> bool:
        """Whether everyone has said it, of this collective or a later one of its lane."""
        at = self._at(number, word)
        return all(self.host.words[rank][at] >= number for rank in self.others)

    def _done(self, number: int) -> None:
        self._finished[0] = max(number, self._finished[0])
        self.host.say(self._at(number, _DONE), number)

    def _at(self, number: int, word: int) -> int:
        return _word(self.first, number, word)

    # --- what is under way ------------------------------------------------------------------------------------------------------

    def _started(self, number: int, *steps: tuple[int, Callable[[], None]]) -> Callable[[], None]:
        self._open.append(_Open(number, deque(steps)))
        return lambda: self._finish_until(number)

    def _progress(self) -> None:
        """Do what need not be waited for."""
        for each in self._open:
            while each.steps and self._is_there(each.number, each.steps[0][0]):
                each.steps.popleft()[1]()
        while self._open and not self._open[0].steps:
            self._open.popleft()

    def _finish_until(self, number: int) -> None:
        while self._open and self._open[0].number <= number:
            first = self._open[0]
            self._progress()
            if first.steps:
                self._everyone(first.number, first.steps[0][0])


def _word(first: int, number: int, word: int) -> int:
    return first + number % LANES * _SIZE + word


def _slice(flat: torch.Tensor, rank: int, ranks: int) -> slice:
    length = flat.numel()
    return slice(length * rank // ranks, length * (rank + 1) // ranks)


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
