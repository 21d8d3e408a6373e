"""Starts background threads. Supervisors and ranks run their listeners, snapshot replication, keepalives and inboxes in
such threads.

Guarantees: an exception never ends one of these threads silently. The callback `failed` reports the exception to the
supervisor in one line, and by default the thread repeats its work.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
import traceback
from collections.abc import Callable

from meshwright.core.messages import Message

RESTART_SECONDS = 1.0
"""Seconds between a failure of the work and the next attempt."""

REPEAT_LINE_SECONDS = 60.0
"""Minimum number of seconds between two reports about one thread."""


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
