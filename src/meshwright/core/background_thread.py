"""Starts background threads. Supervisors and ranks run their listeners, snapshot replication, keepalives and inboxes in
such threads.

Guarantees: an exception never ends one of these threads silently. The callback `failed` reports the exception to the
supervisor in one line, and by default the thread repeats its work.

`BackgroundCall` runs operations that may never return, such as those on a network file system. So a process that must
not stop can limit its wait for them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar, cast

from meshwright.core.messages import Message

ResultT = TypeVar("ResultT")

RESTART_SECONDS = 1.0
"""Seconds between a failure of the work and the next attempt."""

REPEAT_LINE_SECONDS = 60.0
"""Minimum number of seconds between two reports about one thread."""

PATIENCE_SECONDS = 0.3
"""A caller of `BackgroundCall` waits for this time, which is shorter than any limit for hangs. A disk that works is
faster, so that the operation is complete when the call returns."""


def start_background_thread(
    name: str, work: Callable[[], None], failed: Callable[[str], None], restarts: bool = True
) -> threading.Thread:
    """Runs `work` in a daemon thread until it returns. After an exception, `failed` receives one line, at most once in
    REPEAT_LINE_SECONDS. Then `work` is called again, unless `restarts` is False.

    Raises: OSError if the system cannot start a thread.
    """

    def run() -> None:
        reported = float("-inf")
        while True:
            try:
                work()
            except BaseException as error:
                if (now := time.monotonic()) >= reported + REPEAT_LINE_SECONDS:
                    reported = now
                    with contextlib.suppress(Exception):  # `failed` raises if the supervisor has ended
                        failed(describe_exception(name, error))
            else:
                return
            if not restarts:
                return
            time.sleep(RESTART_SECONDS)

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        raise OSError(errno.EAGAIN, "the system starts no more threads") from None
    return thread


def describe_exception(name: str, error: BaseException) -> Message:
    """Returns one line with the name of the thread, the error, and the file and line where it was raised.

    >>> describe_exception("mirror", KeyError("size"))
    "the background thread 'mirror' failed: KeyError: 'size'"
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if frames else ""
    text = " ".join(str(error).split())
    cause = f"{type(error).__name__}{': ' if text else ''}{text}{place}"
    return Message("the background thread {name!r} failed: {cause}", name=name, cause=cause)


class CallPending(Exception):
    """Reports that a call has not returned yet. `seconds`: the time since its start."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


class BackgroundCall(Generic[ResultT]):
    """Runs calls in a background thread, one at a time, and limits how long the caller waits. Only one thread may use
    an instance.

    The thread starts with the first call and ends after the instance was deleted. A process must not fork between its
    first call and its last.
    """

    def __init__(self, name: str) -> None:
        """`name`: the name of the thread."""
        self.name = name
        self.is_pending = False
        """Whether a call has started whose result `call` has not returned yet."""
        self._began = 0.0
        self._has_thread = False
        self._calls: SimpleQueue[Callable[[], ResultT] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[tuple[ResultT | None, BaseException | None]] = SimpleQueue()

    @property
    def began(self) -> float:
        """Returns the time (`time.monotonic`) when the pending call began, or now if no call is pending."""
        return self._began if self.is_pending else time.monotonic()

    def call(self, work: Callable[[], ResultT], end: float | None = None) -> ResultT:
        """Returns the result of the pending call, or raises its exception. If no call is pending, starts `work`.
        `end`: the time until which the caller waits; None: PATIENCE_SECONDS after the start of the call.

        Raises: CallPending if the call has not returned by then. The next `call` waits for it again.
        """
        if not self.is_pending:
            self._began, self.is_pending = time.monotonic(), True
            self._start(work)
        end = self._began + PATIENCE_SECONDS if end is None else end
        try:
            result, error = self._outcomes.get(timeout=max(0.0, end - time.monotonic()))
        except Empty:
            raise CallPending(time.monotonic() - self._began) from None
        self.is_pending = False
        if error is not None:
            raise error
        return cast(ResultT, result)

    def attempt(self, work: Callable[[], ResultT], end: float | None = None) -> bool:
        """Runs `work`, unless an earlier call is still pending. Returns whether it has returned by the time `end` (as
        for `call`) without an OSError. For output that may be lost."""
        with contextlib.suppress(OSError, CallPending):
            if self.is_pending:
                self.call(work, end)  # the result of the earlier call
            self.call(work, end)
            return True
        return False

    def _start(self, work: Callable[[], ResultT]) -> None:
        if not self._has_thread:
            loop = partial(_run_calls, self._calls, self._outcomes)
            try:
                start_background_thread(self.name, loop, lambda _: None, restarts=False)
            except OSError:
                self._outcomes.put(_outcome(work))  # the system starts no thread, so the caller must wait
                return
            self._has_thread = True
            weakref.finalize(self, self._calls.put, None).atexit = False
        self._calls.put(work)


def _run_calls(calls: SimpleQueue[Any], outcomes: SimpleQueue[Any]) -> None:
    while (work := calls.get()) is not None:
        outcomes.put(_outcome(work))
        del work  # the thread must not keep the owner of the call alive


def _outcome(work: Callable[[], ResultT]) -> tuple[ResultT | None, BaseException | None]:
    try:
        return work(), None
    except BaseException as error:
        return None, error
