"""`meshwright` whose runs do not end before a test has done with them: while there is a file where PACED says, each
step from the one in it on begins LATER seconds late. `python -m paced_steps` stands in the place of the command, and of
the process that it forks ranks from."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from fork_server import run_command

from meshwright.core.ipc import Heartbeat, HeartbeatField, RankPhase

PACED = "MESHWRIGHT_TEST_PACED"
LATER = 10.0
AT = Heartbeat.at


def at(pulse: Heartbeat, phase: RankPhase, step: int | None = None) -> None:
    """With signs of life all the while: a rank that waits here does not hang."""
    AT(pulse, phase, step)
    end = time.monotonic() + LATER
    while phase is RankPhase.data and time.monotonic() < end and is_held(pulse.read(HeartbeatField.step)):
        time.sleep(0.02)
        AT(pulse, phase)


def is_held(step: int) -> bool:
    with suppress(FileNotFoundError):
        return step >= int(Path(os.environ[PACED]).read_text())
    return False


def patch() -> None:
    Heartbeat.at = at  # type: ignore[method-assign]


if __name__ == "__main__":
    run_command("paced_steps", patch)
