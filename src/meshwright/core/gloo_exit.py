"""Ends processes that used gloo without an abort.

A thread of gloo frees the tensors of a collective operation shortly after the operation has completed. To free a tensor
of Python, it needs the interpreter. If the interpreter has begun to end, CPython terminates the thread, and C++ aborts
the process with "terminate called without an active exception" (https://github.com/pytorch/pytorch/pull/179291).
"""

from __future__ import annotations

import atexit
import time

SECONDS = 0.1
"""How long an ending process waits for gloo's threads. They need well under a millisecond of processor time."""


def wait_for_gloo_at_exit() -> None:
    """Registers the wait, once in a process however often it is called."""
    atexit.unregister(_wait)
    atexit.register(_wait)


def _wait() -> None:
    time.sleep(SECONDS)
