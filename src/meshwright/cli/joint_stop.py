"""Stops all ranks of a probe or of trials together on a stop signal, if another launcher (torchrun, Slurm) started
them. `meshwright probe` and the trials of `plan` and `train` use it."""

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
"""Seconds that a rank with a lost peer waits for its own stop signal. A launcher signals the ranks one after another,
and may have to wait for a CPU core."""


@contextmanager
def stop_together(rank: int, early: str) -> Iterator[None]:
    """Ends the block on this rank after a stop signal. Rank 0 raises Interrupted; `early` says in its message when the
    signal came. Other ranks exit with the same code and without a message.

    Ranks receive the signal one after another, so a rank may lose a peer before its own signal arrives. An error in the
    block is therefore raised only if no signal arrives within SETTLE_SECONDS.
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
    """Exits without cleanup. After an aborted collective, threads of the communication library still wait, and cleanup
    would end the process with an error."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Interrupted.exit_code)
