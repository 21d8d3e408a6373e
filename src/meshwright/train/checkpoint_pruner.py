"""Removes old checkpoints on rank 0 after the ranks have saved one (recovery.py)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from meshwright.checkpoint.retention import prune_checkpoints
from meshwright.core import storage
from meshwright.core.background_thread import BackgroundCall, CallPending, describe_exception
from meshwright.core.messages import Message

MAX_REMOVAL_WAIT_SECONDS = 10.0
"""Training waits at most this long for the removal of old checkpoints."""


class CheckpointPruner:
    """Removes old checkpoints and leftovers from `folder` in a background thread. If the disk does not answer, training
    continues after MAX_REMOVAL_WAIT_SECONDS, and nothing more is removed until the thread has ended. `say` sends a
    message to the supervisor."""

    def __init__(self, folder: Path, say: Callable[..., None]) -> None:
        self.folder, self.say = folder, say
        self._disk = BackgroundCall[None]("prune")
        self._lines: list[str] = []
        """Lines of the thread. The main thread sends them, since two threads must not write to one pipe."""
        self._is_degraded = False

    def prune(self, keep: int, verified: Path | None = None) -> list[Path]:
        """Removes all but the `keep` newest checkpoints, then the leftovers of interrupted saves. `verified` as for
        `prune_checkpoints`. Returns the removed checkpoints, [] if the removal takes longer than the limit."""
        removed: list[Path] = []
        self._run(lambda: removed.extend(prune_checkpoints(self.folder, keep, verified, self._lines.append)))
        return list(removed)

    def remove_leftovers(self) -> None:
        """Removes only the leftovers of interrupted saves."""

        def remove() -> None:
            with contextlib.suppress(OSError):
                storage.remove_leftovers(self.folder)

        self._run(remove)

    def _run(self, work: Callable[[], None]) -> None:
        if self._has_ended():
            self._is_degraded = False
            self._attempt(work, time.monotonic() + MAX_REMOVAL_WAIT_SECONDS)
        elif not self._is_degraded:
            self._is_degraded = True
            line = Message("old checkpoints are not removed: the removal after the last save has not ended")
            self.say("degraded", line=line)
        while self._lines:
            self.say("note", line=self._lines.pop(0))

    def _has_ended(self) -> bool:
        """Returns whether no earlier removal is in progress."""
        if self._disk.is_pending:
            self._attempt(lambda: None, 0.0)
        return not self._disk.is_pending

    def _attempt(self, work: Callable[[], None], end: float) -> None:
        """Runs `work`, or continues to wait for an earlier removal, until the time `end`."""
        try:
            self._disk.call(work, end)
        except CallPending:
            pass
        except Exception as error:  # a failure must not end training
            self._lines.append(describe_exception("prune", error))
