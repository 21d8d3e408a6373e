"""Ends the short joint work of ranks that another launcher started, a probe or trials, on a stop request."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.core.errors import Interrupted, MeshwrightError
from meshwright.core.messages import Message
from meshwright.core.signals import stop_signal_handler

SETTLE_SECONDS = 5.0
"""Seconds for a launcher's request to reach all ranks one after another, even if the launcher has to wait for a CPU
core."""


@contextmanager
def stop_together(rank: int, early: str) -> Iterator[None]:
    """Ends the joint work of all ranks on a stop request. Rank 0 reports it once; `early` says when the request came.

    Ranks receive the request one after another, so that some ranks lose a peer before they receive it.
    """
    requested: list[str] = []
    left = False

    def heard(number: int, _: Any) -> None:
        requested.append(signal.Signals(number).name)
        if len(requested) == 1 and not left:
            raise KeyboardInterrupt

    with stop_signal_handler(heard):
        try:
            yield
        except (KeyboardInterrupt, RuntimeError, TimeoutError, MeshwrightError):
            left = True
            if not requested:
                time.sleep(SETTLE_SECONDS)
            if not requested:
                raise
            atexit.register(_exit_process)
            if rank:
                raise SystemExit(Interrupted.exit_code) from None
            raise Interrupted(
                Message("stopped by {reason} {early}; the same command starts again", reason=requested[0], early=early)
            ) from None


def _exit_process() -> None:
    """Exits without cleanup: after an aborted collective the communication library would end the process with an
    error while its threads still wait."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Interrupted.exit_code)
