"""`meshwright` whose ranks kill its supervisor with SIGKILL at given moments, each once. `python -m supervisor_killer`
stands in the place of the command, and of the process that it forks ranks from.

The file that KILLS names is a JSON list of moments: {"rank": 1, "step": 7, "phase": "backward", "delay": 0.01}, the
delay in seconds; phase "copy" is when all bytes of a snapshot are written and it has no step yet. A rank does not go on
to the next step before a kill that is due has come.
"""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import psutil
from fork_server import run_command

from meshwright.core.ipc import Heartbeat, HeartbeatField, RankPhase
from meshwright.core.snapshots import SnapshotHeader

KILLS = "MESHWRIGHT_TEST_KILLS"
AT, NAME = Heartbeat.at, SnapshotHeader.name
RANK = [-1]
DUE: list[threading.Timer] = []


def at(pulse: Heartbeat, phase: RankPhase, step: int | None = None) -> None:
    AT(pulse, phase, step)
    RANK[0] = pulse.rank
    if phase in (RankPhase.data, RankPhase.sample):
        for timer in DUE:
            timer.join()
    come(phase.name, pulse.read(HeartbeatField.step))


def name(head: SnapshotHeader, slot: int, step: int, digest: int, length: int, history: int) -> None:
    come("copy", step)
    NAME(head, slot, step, digest, length, history)


def come(phase: str, step: int) -> None:
    """To a moment."""
    file = Path(os.environ[KILLS])
    for number, kill in enumerate(json.loads(file.read_text())):
        if (kill["rank"], kill["step"], kill["phase"]) == (RANK[0], step, phase):
            try:
                os.close(os.open(f"{file}.{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            timer = threading.Timer(kill["delay"], os.kill, (psutil.Process(os.getppid()).ppid(), signal.SIGKILL))
            timer.start()
            DUE.append(timer)
            if phase == "copy":
                signal.pause()


def patch() -> None:
    Heartbeat.at, SnapshotHeader.name = at, name  # type: ignore[method-assign]


if __name__ == "__main__":
    run_command("supervisor_killer", patch)
