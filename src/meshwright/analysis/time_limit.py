"""Limits the time of an analysis. A forward that waits for a network or loops forever then ends in a one-line error."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from meshwright.core.errors import InputError
from meshwright.core.messages import Message

TIME_LIMIT_VARIABLE = "MESHWRIGHT_ANALYSIS_SECONDS"
DEFAULT_LIMIT_SECONDS = 600.0
"""Default limit in seconds. The analysis of 1.1 B parameters takes 5 s on one core."""
INTERRUPT_INTERVAL_SECONDS = 5.0
"""Seconds between two interruptions, in case the forward catches the first one."""
POSTPONE_SECONDS = 0.01
"""Seconds until the next attempt, if the exception must be postponed."""


class _AnalysisTimeout(BaseException):
    """Is raised when the time limit is reached. It is not an Exception. Otherwise the analysis would mistake it for a
    failure of the model and try a fallback.
    """


@contextmanager
def limit_analysis_time() -> Iterator[None]:
    """Limits the time of the analysis inside the context. If contexts are nested, only the limit of the outermost
    counts.

    Only the main thread can be interrupted, so other threads have no limit.

    Raises:
        InputError: the analysis took longer, or the environment variable is not a positive number.
    """
    seconds = analysis_time_limit()
    if threading.current_thread() is not threading.main_thread() or any(signal.getitimer(signal.ITIMER_REAL)):
        yield
        return
    where = ""

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal where
        if _must_postpone(frame):
            signal.setitimer(signal.ITIMER_REAL, POSTPONE_SECONDS, INTERRUPT_INTERVAL_SECONDS)
            return
        where = where or _describe_user_line(frame)
        raise _AnalysisTimeout

    before: Any = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, INTERRUPT_INTERVAL_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
    except _AnalysisTimeout:
        raise InputError(
            Message(
                "the analysis of the model was stopped after {seconds:g} s{where}: if its forward waits for a network "
                "or a file, let it not; else give a small batch as example=..., or more seconds as "
                "{time_limit_variable}",
                seconds=seconds,
                where=where,
                time_limit_variable=TIME_LIMIT_VARIABLE,
            )
        ) from None


def analysis_time_limit() -> float:
    """Returns the limit in seconds.

    Raises:
        InputError: the environment variable is not a positive number.
    """
    text = os.environ.get(TIME_LIMIT_VARIABLE, "")
    try:
        seconds = float(text) if text else DEFAULT_LIMIT_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise InputError(
            Message(
                "{time_limit_variable}={text!r} is not a number of seconds above 0",
                time_limit_variable=TIME_LIMIT_VARIABLE,
                text=text,
            )
        )
    return seconds


def _must_postpone(frame: FrameType | None) -> bool:
    """Returns whether an exception that is raised at `frame` would do harm or be lost.

    During an import it would leave a partially initialised module. In a callback of the garbage collector or in a
    `__del__`, Python prints and ignores it.
    """
    callbacks = [getattr(each, "__code__", None) for each in gc.callbacks]
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code in callbacks or code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _describe_user_line(frame: FrameType | None) -> str:
    """Returns a description of the innermost running line outside of torch, this package and the standard library."""
    while frame is not None and not _is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f" in {Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def _is_user_file(name: str) -> bool:
    own = tuple(str(Path(each).parent) for each in (torch.__file__, sys.modules["meshwright"].__file__ or ""))
    library = str(Path(os.__file__).parent)
    return not name.startswith((*own, "<")) and (not name.startswith(library) or "site-packages" in name)


class ExternalFailure(NamedTuple):
    """A forward failed because it could not read a file or the network."""

    where: str
    """The line of the model, such as ' in model.py, line 7', or ''."""
    advice: Message


def external_failure(error: BaseException) -> ExternalFailure | None:
    """Returns the failure of a file or of the network that `error` reports or follows from; None where there is
    none.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    if cause is None:
        return None
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(cause.__traceback__)]
    users = [(name, line) for name, line in reversed(lines) if _is_user_file(name)]
    users.sort(key=lambda one: "site-packages" in one[0])  # an own file before a library such as requests
    return ExternalFailure(
        f" in {Path(users[0][0]).name}, line {users[0][1]}" if users else "",
        Message("let every rank reach what its forward reads, or read it earlier, in __init__ or in the data loader"),
    )
