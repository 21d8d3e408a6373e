"""Memory of a rank that the others of its host read while a collective is under way: [Note: slots] of lanes.py.

    taken     any that nobody reads is as good as another: what is copied in is copied out soon
    in turn   what is filled slowly, a unit's gradients while backward runs: which slot that is follows from what was asked for before, and not
              from how far other ranks are, so that memory is the same in every run

[Note: in turn] As long as three in a row fit into the three slots, one for each, nothing grows. The next one is the tightest but for the last
one used, of equal ones the oldest; whoever still reads it is waited for. So all ranks wait for the same collective at the same place, which
every rank that came as far has finished, and no ranks wait in a circle. Before, each of the three became as long as the longest unit: a tied vocabulary
beside one bucket took three buckets where two and the vocabulary's own do.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshwright.parallel.exchange.shared import PAGE, Host, Segment
from meshwright.parallel.exchange.underway import UnderWay

UNDER_WAY = 2
"""Slots that others read while one more is filled."""


@dataclass(eq=False)
class Slot:
    """`number` of the collective that reads it, None while it is being filled."""

    segment: Segment
    number: int | None = None
    in_turn: bool = False


class Slots:
    """`is_read(number)`: whether everyone is done with that collective; `read_out(number)` waits until they are."""

    def __init__(self, host: Host, under_way: UnderWay, is_read: Callable[[int], bool], read_out: Callable[[int], None]) -> None:
        self.host, self.under_way = host, under_way
        self._is_read, self._read_out = is_read, read_out
        self._all: list[Slot] = []
        self._turns: list[Slot] = []
        """Those in turn, the last one used at the end."""
        self._idle: list[Slot] = []
        """Those not used since turns began."""
        self._asked: list[int] = []
        """Bytes of the last that were asked for in turn."""

    def taken(self, size: int) -> Segment:
        """One that nobody reads: the tightest that is free, else a new one, else a free one made larger."""
        size = -(-size // PAGE) * PAGE
        held = [slot for slot in self._all if not slot.in_turn]
        free = sorted((slot for slot in held if self._is_free(slot)), key=lambda slot: slot.segment.size)
        for slot in free:
            if slot.segment.size >= size:
                return self._fill(slot, size)
        if not free:
            busy = [slot for slot in held if slot.number is not None]
            if len(busy) <= UNDER_WAY:
                return self._new(size).segment
            free = [min(busy, key=lambda slot: slot.number or 0)]
        return self._fill(free[-1], size)

    def next(self, size: int) -> Segment:
        """The next one in turn."""
        size = -(-size // PAGE) * PAGE
        self._asked = [*self._asked[-UNDER_WAY:], size]
        ready = self._idle or [slot for slot in self._turns[:-1] if slot.number is not None]
        if not ready or (not self._idle and len(self._turns) <= UNDER_WAY):
            slot = self._new(size)
            slot.in_turn = True
        else:
            sizes = sorted((slot.segment.size for slot in (*self._turns, *self._idle)), reverse=True)
            is_short = any(have < want for have, want in zip(sizes, sorted(self._asked, reverse=True), strict=False))
            fitting = [] if is_short else [slot for slot in ready if slot.segment.size >= size]
            slot = min(fitting or ready, key=lambda slot: slot.segment.size)
            (self._idle if slot in self._idle else self._turns).remove(slot)
        self._turns.append(slot)
        return self._fill(slot, size)

    def shrink(self) -> None:
        """Free the memory of slots outside of turns; the next collective gets what it needs."""
        for slot in self._all:
            if not slot.in_turn and slot.segment.size > PAGE:
                self._fill(slot, PAGE)
                self.host.drop(slot.segment)
                slot.segment = self.host.segment(PAGE)

    def settled(self) -> None:
        """Nobody reads any: turns begin again."""
        self._idle, self._turns, self._asked = [*self._turns, *self._idle], [], []

    def filled(self, segment: Segment, number: int) -> int:
        """1 + the slot that `segment` is, which collective `number` reads from now on; 0 if it is none."""
        for index, slot in enumerate(self._all):
            if slot.segment is segment:
                slot.number = number
                return index + 1
        return 0

    def _new(self, size: int) -> Slot:
        self._all.append(Slot(self.host.segment(size)))
        return self._all[-1]

    def _fill(self, slot: Slot, size: int) -> Segment:
        """`slot`, once nobody reads it, for `size` bytes."""
        if slot.number is not None:
            self.under_way.finish(slot.number)
            self._read_out(slot.number)
            slot.number = None
        if slot.segment.size < size:
            self.host.drop(slot.segment)
            slot.segment = self.host.segment(size)
        return slot.segment

    def _is_free(self, slot: Slot) -> bool:
        return slot.number is not None and slot.number <= self.under_way.finished[0] and self._is_read(slot.number)
