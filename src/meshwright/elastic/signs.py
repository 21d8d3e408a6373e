"""What the system says of a process of this machine, without asking the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class Signs(NamedTuple):
    """Of a process: the letter of its state; seconds that its main thread has been ready to run and had no core; seconds that it has computed."""

    state: str = ""
    in_line: float = 0.0
    computed: float = 0.0


def signs_of(process: int) -> Signs:
    return Signs(state_of(process), in_line(process), computed(process))


def state_of(process: int) -> str:
    """The letter of a process's state; empty when there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def in_line(process: int) -> float:
    """Seconds that the main thread of a process has been ready to run and had no core; 0 where the system does not say."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def computed(process: int) -> float:
    """Seconds that the threads of a process have had cores."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0
