"""Reads RUN/leader, the file with the address of the node that leads a run on several machines (node_role.py).

Guarantees: a file that is missing or has no valid address means that no node leads. If the file system does not answer,
StorageFailed is raised, and `retry_storage` tries again.
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
"""Seconds that a node tries to read RUN/leader again if the file system of the run folder fails. A node that waits for
a leader tries for `JOIN_SECONDS` instead (node_role.py)."""

AnswerT = TypeVar("AnswerT")


class LeaderAddress(NamedTuple):
    """The index of the leading node, and the address on which it listens for the other nodes."""

    number: int
    host: str
    port: int


def read_leader(folder: Path) -> LeaderAddress | None:
    """Returns the leader of the run in `folder`, whether its process is alive or not. Returns None if RUN/leader is
    missing or has no valid address.

    Raises: StorageFailed if the file system does not answer.
    """
    text = _read_leader_file(folder)
    with contextlib.suppress(ValueError, TypeError, KeyError):
        found = json.loads(text)
        return LeaderAddress(int(found["number"]), str(found["host"]), int(found["port"]))
    return None


def read_run_id(folder: Path) -> str:
    """Returns the random id of the run, which RUN/leader of a killed leader contains. Returns an empty string if there
    is no id, or if reading fails RUN_ID_ATTEMPTS times: the next leader then adopts no in-memory snapshots."""
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
    """Returns the bytes of RUN/leader, or no bytes if the file is missing."""
    path = folder / LEADER_FILE
    with storage.failures_as_one_line(path):
        try:
            return storage.read_file(path, most=MAX_LEADER_BYTES)
        except FileNotFoundError:
            return b""


def retry_storage(ask: Callable[[], AnswerT], note: Callable[[str], None]) -> AnswerT:
    """Returns `ask()`, which is repeated while the file system of the run folder fails. `note` receives a line at the
    first failure and then every STATUS_SECONDS.

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
