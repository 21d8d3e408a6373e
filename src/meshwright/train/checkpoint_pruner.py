"""Removes old checkpoints on rank 0 after the ranks have saved one (recovery.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from meshwright.checkpoint.retention import prune_checkpoints
from meshwright.core import storage
from meshwright.core.background_thread import start_background_thread
from meshwright.core.messages import Message

MAX_REMOVAL_WAIT_SECONDS = 10.0
"""Training waits at most this long for the removal of old checkpoints."""


class CheckpointPruner:
    """Removes old checkpoints and leftovers from `folder` in a background thread. If the disk does not answer, training
    continues after MAX_REMOVAL_WAIT_SECONDS, and nothing more is removed until the thread has ended. `say` sends a
    message to the supervisor."""

    def __init__(self, folder: Path, say: Callable[..., None]) -> None:
        self.folder, self.say = folder, say
        self._thread: Thread | None = None
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
        if self._thread is not None and self._thread.is_alive():
            if not self._is_degraded:
                line = Message("old checkpoints are not removed: the removal after the last save has not ended")
                self.say("degraded", line=line)
            self._is_degraded = True
        else:
            self._is_degraded = False
            try:
                self._thread = start_background_thread("prune", work, self._lines.append, restarts=False)
                self._thread.join(MAX_REMOVAL_WAIT_SECONDS)
            except OSError as error:  # the system cannot start a thread
                self._lines.append(Message("old checkpoints are not removed: {error}", error=error))
        while self._lines:
            self.say("note", line=self._lines.pop(0))
