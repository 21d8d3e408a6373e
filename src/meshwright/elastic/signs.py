"""What the system says of a process of this machine, without asking the process."""

from __future__ import annotations

from pathlib import Path


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
