"""The queue of shared-memory collectives in flight (oldest first), and the staging buffers that ranks read in them.
collectives.py uses both.

A collective is a list of steps, which run in order. A step is ready once every other rank has set a field, or once a
transfer between hosts is complete. `progress` runs all steps that are ready, those of older collectives first.

Staging buffers are memory of this rank that the other ranks of its host read ([Note: staging buffers] in
collectives.py):

    acquire          for data that are copied in and out immediately: returns any buffer that no rank reads
    acquire_ordered  for data that arrive slowly, such as gradients during backward: chooses the buffer by the previous
                     requests, not by the progress of other ranks, so that every run uses the same amount of memory

[Note: in turn] `acquire_ordered` uses three buffers, and never chooses the buffer of the previous request. If the last
three requests fit into the three buffers, it chooses the smallest of the remaining two that is large enough, and no
buffer grows. Otherwise it chooses the smaller of the remaining two, and enlarges it if necessary. Of two buffers of
equal size it chooses the one used longer ago. Without this rule, each of the three buffers would become as long as the
longest parameter group.

If a rank still reads the chosen buffer, the requesting rank waits. All ranks choose in the same way, so all wait for
the same collective at the same request. Each rank first finishes its own steps of this collective, so ranks cannot
deadlock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from meshwright.runtime.comm.shm.memory import PAGE_BYTES, SharedMemory, ShmSegment
from meshwright.runtime.error_propagation import CURRENT_PROPAGATOR

AWAIT_TRANSFER = -1
"""Used instead of a field as the condition of a step: the step is ready once the transfer between hosts that the
previous step started is complete."""

TRANSFER_POLL_SECONDS = 2e-4
"""Seconds between two checks whether a transfer is complete."""


class InterHostTransfer(Protocol):
    """A transfer between hosts that is in flight."""

    @property
    def is_done(self) -> bool:
        """Returns whether the transfer is complete, so that `wait` returns immediately."""

    def wait(self) -> None:
        """Waits until the transfer is complete."""


CollectiveStep = tuple[int, Callable[[], InterHostTransfer | None]]
"""The condition of a step (a field that all other ranks must set, or AWAIT_TRANSFER), and the function that the step
runs."""


@dataclass
class _PendingCollective:
    """A collective and its remaining steps."""

    number: int
    steps: deque[CollectiveStep] = field(default_factory=deque)
    transfer: InterHostTransfer | None = None

    def run_step(self) -> None:
        """Runs the next step, which must be ready."""
        awaited, act = self.steps.popleft()
        if awaited == AWAIT_TRANSFER and self.transfer is not None:
            self.transfer.wait()
        self.transfer = act()


class ProgressQueue:
    """The collectives in flight of a group.

    `all_reached(number, field)` returns whether all other ranks have set the field for collective `number`.
    `wait_for_all(number, field)` waits until they have. `finished[0]` is the largest n for which collectives 1 to n are
    complete on this rank.
    """

    def __init__(self, all_reached: Callable[[int, int], bool], wait_for_all: Callable[[int, int], None]) -> None:
        self._all_reached, self._wait_for_all = all_reached, wait_for_all
        self.finished = [0]
        self.pending: deque[_PendingCollective] = deque()

    def add(self, number: int, *steps: CollectiveStep, transfer: InterHostTransfer | None = None) -> Callable[[], None]:
        """Adds collective `number` with its steps. Returns the function that finishes the collective. `transfer`: a
        transfer that has already started, for which the first step waits."""
        self.pending.append(_PendingCollective(number, deque(steps), transfer))
        return lambda: self.finish(number)

    def progress(self) -> None:
        """Runs all steps that are ready."""
        for each in self.pending:
            while each.steps and self._is_ready(each):
                each.run_step()
        while self.pending and not self.pending[0].steps:
            self.finished[0] = self.pending.popleft().number

    def _is_ready(self, collective: _PendingCollective) -> bool:
        field = collective.steps[0][0]
        if field == AWAIT_TRANSFER:
            return collective.transfer is None or collective.transfer.is_done
        return self._all_reached(collective.number, field)

    def finish(self, number: int) -> None:
        """Waits until collective `number` and all earlier ones are complete."""
        began, calls = time.monotonic(), CURRENT_PROPAGATOR.get()
        while self.pending and self.pending[0].number <= number:
            self.progress()
            if not self.pending or self.pending[0].number > number:
                return
            first = self.pending[0]
            if first.steps[0][0] == AWAIT_TRANSFER:
                time.sleep(TRANSFER_POLL_SECONDS)  # no wait on the transfer: `progress` may start other transfers
                if calls is not None:
                    calls.poll(time.monotonic() - began)
            else:
                self._wait_for_all(first.number, first.steps[0][0])


MAX_INFLIGHT_BUFFERS = 2
"""Maximum number of buffers that other ranks read while this rank fills one more buffer."""


@dataclass(eq=False)
class StagingBuffer:
    """A staging buffer. `number`: the collective in which ranks read the buffer, None while this rank fills it.
    `ordered`: whether the buffer belongs to `acquire_ordered`."""

    segment: ShmSegment
    number: int | None = None
    ordered: bool = False


class StagingBufferPool:
    """The staging buffers of this rank. `is_read(number)` returns whether all ranks have read the inputs of collective
    `number`. `wait_until_read(number)` waits until they have read them."""

    def __init__(
        self,
        host: SharedMemory,
        progress_queue: ProgressQueue,
        is_read: Callable[[int], bool],
        wait_until_read: Callable[[int], None],
    ) -> None:
        self.host, self.progress_queue = host, progress_queue
        self._is_read, self._wait_until_read = is_read, wait_until_read
        self._all: list[StagingBuffer] = []
        self._ordered: list[StagingBuffer] = []
        """Buffers of `acquire_ordered`, in order of their last use."""
        self._idle: list[StagingBuffer] = []
        """Buffers of `acquire_ordered` that have not been used since the order was reset."""
        self._requested_sizes: list[int] = []
        """Sizes in bytes of the last MAX_INFLIGHT_BUFFERS + 1 requests to `acquire_ordered`."""

    def acquire(self, size: int) -> ShmSegment:
        """Returns a buffer of at least `size` bytes that no rank reads.

        Prefers the smallest free buffer that is large enough, then enlarges the largest free buffer. If no buffer is
        free and other ranks read at most MAX_INFLIGHT_BUFFERS buffers, makes a new buffer. Otherwise waits for the
        buffer of the oldest collective.
        """
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
        unordered = [buffer for buffer in self._all if not buffer.ordered]
        free = sorted((buffer for buffer in unordered if self._is_free(buffer)), key=lambda buffer: buffer.segment.size)
        for buffer in free:
            if buffer.segment.size >= size:
                return self._fill(buffer, size)
        if not free:
            busy = [buffer for buffer in unordered if buffer.number is not None]
            if len(busy) <= MAX_INFLIGHT_BUFFERS:
                return self._new(size).segment
            free = [min(busy, key=lambda buffer: buffer.number or 0)]
        return self._fill(free[-1], size)

    def acquire_ordered(self, size: int) -> ShmSegment:
        """Returns a buffer of at least `size` bytes. Waits if a rank still reads the buffer. Every run chooses the same
        buffers ([Note: in turn])."""
        size = -(-size // PAGE_BYTES) * PAGE_BYTES
        self._requested_sizes = [*self._requested_sizes[-MAX_INFLIGHT_BUFFERS:], size]
        ready = self._idle or [buffer for buffer in self._ordered[:-1] if buffer.number is not None]
        if not ready or (not self._idle and len(self._ordered) <= MAX_INFLIGHT_BUFFERS):
            buffer = self._new(size)
            buffer.ordered = True
        else:
            sizes = sorted((buffer.segment.size for buffer in (*self._ordered, *self._idle)), reverse=True)
            is_short = any(
                size_now < size_needed
                for size_now, size_needed in zip(sizes, sorted(self._requested_sizes, reverse=True), strict=False)
            )
            fitting = [] if is_short else [buffer for buffer in ready if buffer.segment.size >= size]
            buffer = min(fitting or ready, key=lambda buffer: buffer.segment.size)
            (self._idle if buffer in self._idle else self._ordered).remove(buffer)
        self._ordered.append(buffer)
        return self._fill(buffer, size)

    def shrink(self) -> None:
        """Shrinks all buffers of `acquire` to one page. Later collectives enlarge the buffers that they use."""
        for buffer in self._all:
            if not buffer.ordered and buffer.segment.size > PAGE_BYTES:
                self._fill(buffer, PAGE_BYTES)
                self.host.drop(buffer.segment)
                buffer.segment = self.host.segment(PAGE_BYTES)

    def reset_order(self) -> None:
        """Forgets the previous requests to `acquire_ordered`. Called while no rank reads a buffer."""
        self._idle, self._ordered, self._requested_sizes = [*self._ordered, *self._idle], [], []

    def mark_filled(self, segment: ShmSegment, number: int) -> int:
        """Records that collective `number` reads `segment` from now on. Returns 1 + the index of the buffer with this
        segment, or 0 if the segment is not a buffer."""
        for index, buffer in enumerate(self._all):
            if buffer.segment is segment:
                buffer.number = number
                return index + 1
        return 0

    def _new(self, size: int) -> StagingBuffer:
        self._all.append(StagingBuffer(self.host.segment(size)))
        return self._all[-1]

    def _fill(self, buffer: StagingBuffer, size: int) -> ShmSegment:
        """Waits until no rank reads `buffer`. Returns its memory, enlarged to `size` bytes if it is smaller."""
        if buffer.number is not None:
            self.progress_queue.finish(buffer.number)
            self._wait_until_read(buffer.number)
            buffer.number = None
        if buffer.segment.size < size:
            self.host.drop(buffer.segment)
            buffer.segment = self.host.segment(size)
        return buffer.segment

    def _is_free(self, buffer: StagingBuffer) -> bool:
        return (
            buffer.number is not None
            and buffer.number <= self.progress_queue.finished[0]
            and self._is_read(buffer.number)
        )
