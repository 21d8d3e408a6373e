"""Handles stop requests: SIGINT, SIGTERM, and SIGHUP, which a closed terminal sends."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def raise_keyboard_interrupt(number: int, _: Any) -> None:
    """Raises KeyboardInterrupt for any stop request, so that the running code cleans up. A second request ends the
    process at once."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


@contextmanager
def stop_signal_handler(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Routes stop requests to `handler` while the block runs. Outside the main thread this does nothing, because only
    the main thread receives signals."""
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
    """Routes stop requests to `handler` from now on. Returns the previous handlers.

    An ignored SIGHUP (nohup) stays ignored. Output to a closed terminal is discarded, so that it does not raise errors.
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
    """Blocks stop signals for processes that start inside the block. The parent receives the signals and ends these
    processes once all of them exist."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopRequest:
    """The names of the stop signals that a training run has received. After the first signal, the run completes the
    step and saves everything. A second signal ends the run at once. `deadline` is the time at which the run ends in any
    case, or None before a signal. `is_forced`: whether the run ends at once."""

    def __init__(self) -> None:
        self.signals: list[str] = []
        self.deadline: float | None = None
        self.is_forced = False
        self._handled = 0

    def on_signal(self, number: int, _: Any) -> None:
        """Records a signal."""
        self.signals.append(signal.Signals(number).name)

    def is_news(self) -> bool:
        """Returns whether a signal has arrived since the last call."""
        handled, self._handled = self._handled, len(self.signals)
        return self._handled > handled

    def expire(self, now: float) -> None:
        """Ends the run at once when the deadline has passed."""
        if self.deadline is not None and now > self.deadline:
            self.is_forced = True
