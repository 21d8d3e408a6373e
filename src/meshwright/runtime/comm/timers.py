"""Measures how long this rank waits for communication and copies. Each `CommGroup` has a `WaitTimer`.

A CPU rank blocks, so the clock of the host measures the wait. With an accelerator the wait is queued in the compute
stream while the host continues. One event before and one event after the wait measure how long this stream was idle. If
the host waits too, the events measure how long the stream had no work.

[Note: reading never blocks] The two events of a wait are read only once both are complete. Events of the forward and
backward are complete when the host has received the sums of a step over all ranks (loss, gradient norm, counters).
Events that complete later, such as those of the all-gather after the update, count in the next step. The device waits
for this all-gather during the next step too.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

from meshwright.runtime.backend import backend_of


class TimerEvent(Protocol):
    """The interface of torch.cuda.Event."""

    def record(self) -> None:
        """Records the event in the current stream."""

    def query(self) -> bool:
        """Returns whether the event is complete."""

    def elapsed_time(self, end_event: Any) -> float:
        """Returns the milliseconds from this event to `end_event`."""


class WaitTimer:
    """Sums the seconds spent inside the context. Nested contexts count once. `event` creates timing events of a device
    with streams. If `event` is None, the host's clock measures the time."""

    def __init__(self, event: Callable[[], TimerEvent] | None = None) -> None:
        self._event, self._depth, self._began = event, 0, 0.0
        self._seconds = self._previous_seconds = 0.0
        """`_seconds`: waits that began after the last reading. `_previous_seconds`: waits that began before the last
        reading and were incomplete then."""
        self._first: TimerEvent | None = None
        self._pending: deque[tuple[TimerEvent, TimerEvent, bool]] = deque()
        """For each incomplete wait: its first event, its last event, and whether it began before the last reading."""
        self._free_events: list[TimerEvent] = []

    @classmethod
    def of(cls, device: torch.device) -> WaitTimer:
        """Returns a timer for waits on `device`."""
        backend = backend_of(device)
        return cls(partial(backend.event, timing=True)) if backend.has_streams else cls()

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        if self._event is None:
            self._began = time.perf_counter()
        else:
            self._collect()
            self._first = self._record_event()

    def __exit__(self, raised: type[BaseException] | None, *why: object) -> None:
        self._depth -= 1
        if self._depth:
            return
        first, self._first = self._first, None
        if first is None:
            self._seconds += time.perf_counter() - self._began
        elif raised is None:  # after a device error, recording an event would raise a second error
            self._pending.append((first, self._record_event(), False))

    def _record_event(self) -> TimerEvent:
        """Returns an event recorded at the current point of the stream."""
        assert self._event is not None
        event = self._free_events.pop() if self._free_events else self._event()
        event.record()
        return event

    def _collect(self) -> None:
        """Adds the completed waits to the sums, in order, up to the first incomplete wait. Never blocks."""
        while self._pending and self._pending[0][1].query():
            first, last, is_previous = self._pending.popleft()
            if is_previous:
                self._previous_seconds += first.elapsed_time(last) / 1e3
            else:
                self._seconds += first.elapsed_time(last) / 1e3
            self._free_events += (first, last)

    def read(self) -> float:
        """Returns the seconds of waits that have completed since the last reading. Never blocks."""
        self._collect()
        found, self._seconds, self._previous_seconds = self._seconds + self._previous_seconds, 0.0, 0.0
        self._pending = deque((first, last, True) for first, last, _ in self._pending)
        return found

    def discard(self) -> None:
        """Discards the seconds of waits that began after the last reading. Waits that began earlier still count."""
        self._collect()
        self._seconds = 0.0
        self._pending = deque(each for each in self._pending if each[2])
