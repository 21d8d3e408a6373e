"""Collectives under way, oldest first: what each still does, once every other rank has said a word or once something
has crossed between hosts.

Whatever need not be waited for is done whenever somebody looks (`progress`); a step is done in its turn within its
collective, and of equal
steps that of the older collective first.

Memory of a rank that the others of its host read while a collective is under way: [Note: slots] of lanes.py.

    taken     any that nobody reads is as good as another: what is copied in is copied out soon
    in turn   what is filled slowly, a unit's gradients while backward runs: which slot that is follows from what was
    asked for before, and not
              from how far other ranks are, so that memory is the same in every run

[Note: in turn] As long as three in a row fit into the three slots, one for each, nothing grows. The next one is the
tightest but for the last
one used, of equal ones the oldest; whoever still reads it is waited for. So all ranks wait for the same collective at
the same place, which
every rank that came as far has finished, and no ranks wait in a circle. Before, each of the three became as long as the
longest unit: a tied vocabulary
beside one bucket took three buckets where two and the vocabulary's own do.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from meshwright.runtime.comm.error_propagation import CURRENT_PROPAGATOR
from meshwright.runtime.comm.shm.memory import PAGE_BYTES, SharedMemory, ShmSegment

AWAIT_TRANSFER = -1
"""Instead of a word: what the step before has begun between hosts."""

TRANSFER_POLL_SECONDS = 2e-4
"""Seconds between two looks at it."""


class InterHostTransfer(Protocol):
    """Something under way between hosts."""

    @property
    def is_done(self) -> bool: ...

    def wait(self) -> None: ...


CollectiveStep = tuple[int, Callable[[], InterHostTransfer | None]]
"""What is awaited, a word of the others or CROSSED, and what is done then."""


@dataclass
class _PendingCollective:
    """A collective and the steps that it has left."""

    number: int
    steps: deque[CollectiveStep] = field(default_factory=deque)
    transfer: InterHostTransfer | None = None

    def run_step(self) -> None:
        """The next step, whose time has come."""
        word, act = self.steps.popleft()
        if word == AWAIT_TRANSFER and self.transfer is not None:
            self.transfer.wait()
        self.transfer = act()


class ProgressQueue:
    """`path_exists(number, word)`: whether all others have said it; `everyone(number, word)` waits until they have.
    `finished`: the number of the
    last collective that is over, with all before it."""

    def __init__(self, is_there: Callable[[int, int], bool], everyone: Callable[[int, int], None]) -> None:
        self._all_reached, self._wait_for_all = is_there, everyone
        self.finished = [0]
        self.pending: deque[_PendingCollective] = deque()

    def add(self, number: int, *steps: CollectiveStep, crossing: InterHostTransfer | None = None) -> Callable[[], None]:
        """What finishes it."""
        self.pending.append(_PendingCollective(number, deque(steps), crossing))
        return lambda: self.finish(number)

    def progress(self) -> None:
        """Do what need not be waited for."""
        for each in self.pending:
            while each.steps and self._is_ready(each):
                each.run_step()
        while self.pending and not self.pending[0].steps:
            self.finished[0] = self.pending.popleft().number

    def _is_ready(self, each: _PendingCollective) -> bool:
        word = each.steps[0][0]
        if word == AWAIT_TRANSFER:
            return each.transfer is None or each.transfer.is_done
        return self._all_reached(each.number, word)

    def finish(self, number: int) -> None:
        """Wait until collective `number` and all before it are over."""
        began, calls = time.monotonic(), CURRENT_PROPAGATOR.get()
        while self.pending and self.pending[0].number <= number:
            self.progress()
            if not self.pending or self.pending[0].number > number:
                return
            first = self.pending[0]
            if first.steps[0][0] == AWAIT_TRANSFER:
                time.sleep(TRANSFER_POLL_SECONDS)  # later ones may have something to send meanwhile
                if calls is not None:
                    calls.poll(time.monotonic() - began)
            else:
                self._wait_for_all(first.number, first.steps[0][0])


MAX_INFLIGHT_BUFFERS = 2
"""Slots that others read while one more is filled."""


@dataclass(eq=False)
class StagingBuffer:
    """`number` of the collective that reads it, None while it is being filled."""

    segment: ShmSegment
    number: int | None = None
    ordered: bool = False


class StagingBufferPool:
    """`is_read(number)`: whether everyone is done with that collective; `read_out(number)` waits until they are."""

    def __init__(
        self,
        host: SharedMemory,
        under_way: ProgressQueue,
        is_read: Callable[[int], bool],
        read_out: Callable[[int], None],
    ) -> None:
        self.host, self.progress_queue = host, under_way
        self._is_read, self._wait_until_read = is_read, read_out
        self._all: list[StagingBuffer] = []
        self._ordered: list[StagingBuffer] = []
        """Those in turn, the last one used at the end."""
        self._idle: list[StagingBuffer] = []
        """Those not used since turns began."""
        self._requested_sizes: list[int] = []
        """Bytes of the last that were asked for in turn."""

    def acquire(self, size: int) -> ShmSegment:
        """One that nobody reads: the tightest that is free, else a new one, else a free one made larger."""
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
        held = [slot for slot in self._all if not slot.ordered]
        free = sorted((slot for slot in held if self._is_free(slot)), key=lambda slot: slot.segment.size)
        for slot in free:
            if slot.segment.size >= size:
                return self._fill(slot, size)
        if not free:
            busy = [slot for slot in held if slot.number is not None]
            if len(busy) <= MAX_INFLIGHT_BUFFERS:
                return self._new(size).segment
            free = [min(busy, key=lambda slot: slot.number or 0)]
        return self._fill(free[-1], size)

    def acquire_ordered(self, size: int) -> ShmSegment:
        """The next one in turn."""
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
        self._requested_sizes = [*self._requested_sizes[-MAX_INFLIGHT_BUFFERS:], size]
        ready = self._idle or [slot for slot in self._ordered[:-1] if slot.number is not None]
        if not ready or (not self._idle and len(self._ordered) <= MAX_INFLIGHT_BUFFERS):
            slot = self._new(size)
            slot.ordered = True
        else:
            sizes = sorted((slot.segment.size for slot in (*self._ordered, *self._idle)), reverse=True)
            is_short = any(
                have < want for have, want in zip(sizes, sorted(self._requested_sizes, reverse=True), strict=False)
            )
            fitting = [] if is_short else [slot for slot in ready if slot.segment.size >= size]
            slot = min(fitting or ready, key=lambda slot: slot.segment.size)
            (self._idle if slot in self._idle else self._ordered).remove(slot)
        self._ordered.append(slot)
        return self._fill(slot, size)

    def shrink(self) -> None:
        """Free the memory of slots outside of turns; the next collective gets what it needs."""
        for slot in self._all:
            if not slot.ordered and slot.segment.size > PAGE_BYTES:
                self._fill(slot, PAGE_BYTES)
                self.host.drop(slot.segment)
                slot.segment = self.host.segment(PAGE_BYTES)

    def reset_order(self) -> None:
        """Nobody reads any: turns begin again."""
        self._idle, self._ordered, self._requested_sizes = [*self._ordered, *self._idle], [], []

    def mark_filled(self, segment: ShmSegment, number: int) -> int:
        """1 + the slot that `segment` is, which collective `number` reads from now on; 0 if it is none."""
        for index, slot in enumerate(self._all):
            if slot.segment is segment:
                slot.number = number
                return index + 1
        return 0

    def _new(self, size: int) -> StagingBuffer:
        self._all.append(StagingBuffer(self.host.segment(size)))
        return self._all[-1]

    def _fill(self, slot: StagingBuffer, size: int) -> ShmSegment:
        """`slot`, once nobody reads it, for `size` bytes."""
        if slot.number is not None:
            self.progress_queue.finish(slot.number)
            self._wait_until_read(slot.number)
            slot.number = None
        if slot.segment.size < size:
            self.host.drop(slot.segment)
            slot.segment = self.host.segment(size)
        return slot.segment

    def _is_free(self, slot: StagingBuffer) -> bool:
        return slot.number is not None and slot.number <= self.progress_queue.finished[0] and self._is_read(slot.number)
