"""`meshwright` with a disk, a checkpoint writer and a rank that each fail once, at given steps. `python -m
attacked_run` replaces the command and its fork server.

The environment variable FAILS names a JSON file, for example {"eio": 8, "stopped": 16, "killed": 30}: the write of the
checkpoint of step 8 fails with EIO, the process that writes the checkpoint of step 16 is stopped until a test continues
it, and rank 1 is killed in the backward of step 30. Each failure leaves a file with the process id beside the JSON
file.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import paced_steps
from fork_server import run_command

from meshwright.core import storage
from meshwright.core.ipc import Heartbeat, HeartbeatField, RankPhase

FAILS = "MESHWRIGHT_TEST_FAILS"
WRITE_FILE = storage.write_file


def is_due(kind: str, step: int) -> bool:
    """Returns whether this is the first process that reaches `step`, where the failure `kind` must occur."""
    file = Path(os.environ[FAILS])
    if json.loads(file.read_text()).get(kind) != step:
        return False
    try:
        handle = os.open(f"{file}.{kind}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return False
    os.write(handle, str(os.getpid()).encode())
    os.close(handle)
    return True


def write_file(path: Path, blocks: Any, durable: bool = True, rights: int = 0o600) -> int:
    found = re.search(r"step-(\d+)", str(path))
    if found and is_due("eio", int(found[1])):
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
    if found and is_due("stopped", int(found[1])):
        os.kill(os.getpid(), signal.SIGSTOP)
    return WRITE_FILE(path, blocks, durable, rights)


def at(pulse: Heartbeat, phase: RankPhase, step: int | None = None) -> None:
    paced_steps.at(pulse, phase, step)
    if phase is RankPhase.backward and pulse.rank == 1 and is_due("killed", pulse.read(HeartbeatField.step)):
        os.kill(os.getpid(), signal.SIGKILL)


def patch() -> None:
    Heartbeat.at, storage.write_file = at, write_file  # type: ignore[method-assign]


if __name__ == "__main__":
    run_command("attacked_run", patch)
