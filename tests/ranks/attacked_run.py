"""`meshwright` whose disk, checkpoint writer and ranks fail once each, at given steps. `python -m attacked_run` stands
in the place of the command, and of the process that it forks ranks from.

The file that FAILS names is JSON: {"eio": 8, "stopped": 16, "killed": 30}: the write of the checkpoint of step 8 meets
EIO, the process that writes the one of step 16 is stopped until somebody continues it, and rank 1 is killed in the
backward of step 30. What has happened has left a file beside it, with the process id.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import paced_steps

from meshwright.core import storage
from meshwright.core.ipc import Heartbeat, HeartbeatField, RankPhase

FAILS = "MESHWRIGHT_TEST_FAILS"
WRITE_FILE = storage.write_file


def is_due(kind: str, step: int) -> bool:
    """Whether this is the first time that anybody comes to `step`, where `kind` is to happen."""
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


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        from meshwright.train import forkserver

        Heartbeat.at, storage.write_file = at, write_file  # type: ignore[method-assign]
        forkserver.main()
    from meshwright.cli.main import main
    from meshwright.elastic import local_agent

    local_agent.FORK_SERVER_MODULE = "attacked_run"
    sys.exit(main())
