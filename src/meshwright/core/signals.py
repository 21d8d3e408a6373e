"""Requests to stop: SIGINT, SIGTERM, and SIGHUP, with which a terminal says that it is gone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def raise_keyboard_interrupt(number: int, _: Any) -> None:
    """Any request as Python has it of Ctrl-C: what runs is left in order. The next one ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


@contextmanager
def stop_signal_handler(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Requests go to `handler` as long as the block runs. Outside the main thread nothing can be heard and nothing
    changes."""
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
    """From here on requests go to `handler`; what was done with each before. A SIGHUP that is ignored (nohup) stays so.
    What is said to a terminal that
    is gone goes nowhere, so that saying it is no error."""
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
    """Processes that are started inside do not hear requests: these reach whoever started them, who ends them, once all
    of them are there."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
