"""How long this rank stands still for what is on its way, by the clock of whoever stands still.

A CPU waits itself, and the host's clock says how long. An accelerator is told to wait, and the host goes on at once:
there an event before the
wait and one behind it, in the stream that computes, say how long that stream stood still; where the host does wait, how
long it had nothing to do.

[Note: nobody waits for a clock] Events are read when both are over. Those of the passes are once the sums of a step
have come to the host; what is
not over by then, the sharing of weights behind the update, counts in the next step, in whose seconds it falls too.
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
    """As torch.cuda.Event."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class WaitTimer:
    """Sums up the time that is spent inside of it; a block within another counts once. `event` makes events, where a
    stream waits and not the host."""

    def __init__(self, event: Callable[[], TimerEvent] | None = None) -> None:
        self._event, self._depth, self._began = event, 0, 0.0
        self._seconds = self._previous_seconds = 0.0
        """Of waits since the last reading; of those before it that were not over then."""
        self._first: TimerEvent | None = None
        self._pending: deque[tuple[TimerEvent, TimerEvent, bool]] = deque()
        """Begin and end of each, and whether it came before the last reading."""
        self._free_events: list[TimerEvent] = []

    @classmethod
    def of(cls, device: torch.device) -> WaitTimer:
        """That of what waits on `device`."""
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
        elif raised is None:  # a device that fails would fail at the event too, and that is not what went wrong
            self._pending.append((first, self._record_event(), False))

    def _record_event(self) -> TimerEvent:
        """An event where the stream stands now."""
        assert self._event is not None
        event = self._free_events.pop() if self._free_events else self._event()
        event.record()
        return event

    def _collect(self) -> None:
        """What is over, in order: no event is waited for."""
        while self._pending and self._pending[0][1].query():
            first, last, is_late = self._pending.popleft()
            if is_late:
                self._previous_seconds += first.elapsed_time(last) / 1e3
            else:
                self._seconds += first.elapsed_time(last) / 1e3
            self._free_events += (first, last)

    def read(self) -> float:
        """Seconds since it was last read, as far as they are known."""
        self._collect()
        found, self._seconds, self._previous_seconds = self._seconds + self._previous_seconds, 0.0, 0.0
        self._pending = deque((first, last, True) for first, last, _ in self._pending)
        return found

    def discard(self) -> None:
        """What came since it was last read."""
        self._collect()
        self._seconds = 0.0
        self._pending = deque(each for each in self._pending if each[2])
