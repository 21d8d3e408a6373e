"""Reads RUN/leader, the file with the address of the leader of a run on several machines.

Guarantees: only a missing file means that no node leads. If the file system does not answer, StorageFailed is raised,
and `retry_storage` tries again.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from meshwright.core import storage
from meshwright.core.messages import Message

LEADER_FILE = "leader"
MAX_LEADER_BYTES = 10_000
MAX_RUN_ID_LENGTH, RUN_ID_ATTEMPTS = 64, 3
RETRY_SECONDS = 0.2
STATUS_SECONDS = 5.0
"""Seconds between lines about a leader that cannot be found."""
STORAGE_RETRY_SECONDS = 60.0
"""Seconds for which a node reads RUN/leader repeatedly if the file system of the run folder fails. A node that waits
for a leader reads the file for `JOIN_SECONDS`."""

AnswerT = TypeVar("AnswerT")


class LeaderAddress(NamedTuple):
    """A node and the address on which it listens for the others."""

    number: int
    host: str
    port: int


def read_leader(folder: Path) -> LeaderAddress | None:
    """Returns the leader of the run in `folder`, dead or alive; None if there is none.

    Raises: StorageFailed if the file system does not answer. Only a missing file means that no node leads.
    """
    text = _read_leader_file(folder)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        found = json.loads(text)
        return LeaderAddress(int(found["number"]), str(found["host"]), int(found["port"]))
    return None


def read_run_id(folder: Path) -> str:
    """Returns the random id of the run in `folder`, which a killed leader leaves to the next one. Returns an empty text
    if there is none, or if it cannot be read RUN_ID_ATTEMPTS times: the next leader then adopts no snapshots."""
    text = b""
    for _ in range(RUN_ID_ATTEMPTS):
        with contextlib.suppress(storage.StorageFailed):
            text = _read_leader_file(folder)
            break
        time.sleep(RETRY_SECONDS)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        run = json.loads(text)["run"]
        return run if isinstance(run, str) and run.isalnum() and len(run) <= MAX_RUN_ID_LENGTH else ""
    return ""


def _read_leader_file(folder: Path) -> bytes:
    """Returns the bytes of RUN/leader, none if the file is missing."""
    path = folder / LEADER_FILE
    with storage.failures_as_one_line(path):
        try:
            return storage.read_file(path, most=MAX_LEADER_BYTES)
        except FileNotFoundError:
            return b""


def retry_storage(ask: Callable[[], AnswerT], note: Callable[[str], None]) -> AnswerT:
    """Returns `ask()`, repeated while the file system of the run folder fails, with a line every STATUS_SECONDS.

    Raises: StorageFailed after STORAGE_RETRY_SECONDS.
    """
    began = said = time.monotonic()
    while True:
        try:
            return ask()
        except storage.StorageFailed as error:
            now = time.monotonic()
            if now > began + STORAGE_RETRY_SECONDS:
                raise
            if now > said + STATUS_SECONDS or said == began:
                said = now
                note(Message("{error}; tried again for {seconds:.0f} s", error=error, seconds=STORAGE_RETRY_SECONDS))
        time.sleep(RETRY_SECONDS)
