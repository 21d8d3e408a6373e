"""Ranks that another launcher started, in what they do together and keep nothing of: a probe, trials."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from meshwright.base.errors import Interrupted, MeshwrightError
from meshwright.base.signals import hearing

SETTLE = 5.0
"""Seconds in which a launcher's request reaches the ranks one after the other, also where the launcher has to wait for a core."""


@contextmanager
def stopped_together(rank: int, early: str) -> Iterator[None]:
    """A request to stop ends what all ranks do inside, and rank 0 says so, once: `early` is when it came. Ranks hear of it one after the other, so that
    some lose a neighbour first."""
    asked: list[str] = []
    left = False

    def heard(number: int, _: Any) -> None:
        asked.append(signal.Signals(number).name)
        if len(asked) == 1 and not left:
            raise KeyboardInterrupt

    with hearing(heard):
        try:
            yield
        except (KeyboardInterrupt, RuntimeError, TimeoutError, MeshwrightError):
            left = True
            if not asked:
                time.sleep(SETTLE)
            if not asked:
                raise
            atexit.register(_leave)
            if rank:
                raise SystemExit(Interrupted.exit_code) from None
            raise Interrupted(f"stopped by {asked[0]} {early}; the same command starts again") from None


def _leave() -> None:
    """The last thing that the process does: the library of an exchange that was cut off ends it with an error where its threads still wait."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(Interrupted.exit_code)
