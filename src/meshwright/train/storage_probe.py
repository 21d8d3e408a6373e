"""Finds out whether the disk of the checkpoints answers, after a save by the ranks was interrupted (recovery.py)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

from meshwright.checkpoint.save import RankExchange
from meshwright.core import storage
from meshwright.core.background_thread import start_background_thread
from meshwright.core.ipc import Heartbeat, HeartbeatField, RankPhase
from meshwright.core.messages import Message

PROBE_SECONDS = 5.0
"""The first save after the start of the ranks waits at most this long for the probe."""

LAST_SAVE_SECONDS = 600.0
"""A save that must succeed waits at most this long for the probe."""

SILENT_DISK_TEXT = Message("an earlier save was interrupted, and since then the disk has not answered")


class StorageProbe:
    """Writes, syncs and removes a small file in `folder` in a background thread, if the previous process of this rank
    ended during a save. Its heartbeat row `pulse` says so. The disk may not answer, and the next save would hang like
    the previous one."""

    def __init__(self, folder: Path, pulse: Heartbeat) -> None:
        self.folder, self.pulse = folder, pulse
        self._thread: Thread | None = None
        self._limit = PROBE_SECONDS
        if pulse.read(HeartbeatField.saving):
            pulse.write(HeartbeatField.saving, 0)
            with contextlib.suppress(OSError):  # without a thread, the next save is the probe
                self._thread = start_background_thread("probe", self._probe, lambda line: None, restarts=False)

    def _probe(self) -> None:
        path = self.folder / f".step-probe.{os.urandom(8).hex()}.tmp"
        with contextlib.suppress(OSError):  # a disk that reports an error does not hang
            storage.write_file(path, [b"probe"])
            storage.remove(path)

    def is_silent(self, must: bool) -> bool:
        """Returns whether the disk has not answered yet. It waits for an answer: `must` means for LAST_SAVE_SECONDS,
        otherwise at most PROBE_SECONDS in all calls together."""
        end = time.monotonic() + (LAST_SAVE_SECONDS if must else self._limit)
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < end:
            self.pulse.at(RankPhase.save)
            self._thread.join(0.05)
        self._limit = 0.0
        return self._thread is not None and self._thread.is_alive()

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Marks the heartbeat row during a save. The mark remains if the process is killed."""
        self.pulse.write(HeartbeatField.saving, 1)
        try:
            yield
        finally:
            self.pulse.write(HeartbeatField.saving, 0)


def is_disk_silent(probe: StorageProbe, ranks: RankExchange, must: bool) -> bool:
    """Returns whether a save is to be skipped, because the disk of any rank does not answer. A save that must succeed
    is never skipped. All ranks call it."""
    return "True" in ranks.all_gather(str(probe.is_silent(must))) and not must
