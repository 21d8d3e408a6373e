"""Handles the stop signals SIGINT, SIGTERM, and SIGHUP, which a closed terminal sends. The command line, supervisors
and ranks install handlers with it."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def raise_keyboard_interrupt(number: int, _: Any) -> None:
    """Raises KeyboardInterrupt for any stop signal, so that the running code cleans up. A second signal of the same
    number ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


@contextmanager
def stop_signal_handler(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Routes stop signals to `handler` inside the context, and restores the previous handlers on exit. Does nothing
    outside of the main thread, because only the main thread receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = install_stop_handler(handler)
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def install_stop_handler(handler: Callable[[int, Any], None]) -> dict[signal.Signals, Any]:
    """Routes stop signals to `handler` from now on. Returns the previous handlers.

    An ignored SIGHUP (nohup) stays ignored. After SIGHUP, output to the closed terminal is discarded, so that it does
    not raise errors.
    """
    screens = [handle for handle in range(3) if os.isatty(handle)]

    def heard(number: int, frame: Any) -> None:
        if number == signal.SIGHUP:
            nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
            for handle in screens:
                os.dup2(nothing, handle)
            os.close(nothing)
        handler(number, frame)

    numbers = [
        number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
    ]
    return {number: signal.signal(number, heard) for number in numbers}


@contextmanager
def blocked_stop_signals() -> Iterator[None]:
    """Blocks stop signals for this thread, and for processes that start inside the context. A signal reaches this
    process on exit, when all child processes exist and can be ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequest:
    """Records the stop signals that a training run has received, by name in `signals`. After the first signal, the run
    completes the step and saves everything. A second signal ends the run at once. `deadline` is the time when the run
    ends in any case, or None before the first signal. `is_forced`: whether the run must end at once. `is_own`: whether
    the supervisor itself has requested the stop.

    [Note: saves of new ranks] If the ranks do not save before the deadline, new ranks save the last in-memory
    checkpoint. Their start takes as long as it takes. Then they have a deadline of their own, which is the last one."""

    def __init__(self) -> None:
        self.signals: list[str] = []
        self.deadline: float | None = None
        self.is_forced = self.is_own = self._is_restarted = False
        self._handled = 0

    def on_signal(self, number: int, _: Any) -> None:
        """Records a signal."""
        self.signals.append(signal.Signals(number).name)

    def request(self, reason: str, deadline: float) -> None:
        """Requests the stop for `reason`, which takes the place of a signal's name. The request counts as handled."""
        self.signals.append(reason)
        self.is_own, self.deadline, self._handled = True, deadline, len(self.signals)

    def is_news(self) -> bool:
        """Returns whether a signal has arrived since the last call of this method."""
        handled, self._handled = self._handled, len(self.signals)
        return self._handled > handled

    def expire(self, now: float, has_snapshot: bool) -> bool:
        """Handles a deadline before `now`: sets `is_forced`, or returns True if new ranks must save the last in-memory
        checkpoint ([Note: saves of new ranks]). `has_snapshot`: whether the ranks have one."""
        if self.deadline is None or now <= self.deadline:
            return False
        self.is_forced = self.is_own or self._is_restarted or not has_snapshot
        return not self.is_forced

    def restart(self) -> bool:
        """Suspends the deadline, once, because new ranks start. Returns whether the run is to stop."""
        if self.deadline is not None and not (self.is_own or self._is_restarted):
            self.deadline, self._is_restarted = math.inf, True
        return self.deadline is not None

    def resume(self, deadline: float) -> None:
        """Ends the suspension of the deadline, when new ranks have begun to train."""
        if self.deadline == math.inf:
            self.deadline = deadline
