"""What the system says of a process of this machine, without asking the process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class ProcStats(NamedTuple):
    """Of a process: the letter of its state; seconds that its main thread has been ready to run and had no core;
    seconds that it has computed;
    bytes that it has moved."""

    state: str = ""
    in_line: float = 0.0
    computed: float = 0.0
    moved: float = 0.0

    def rounded(self) -> tuple[str, float, float, float]:
        """As they travel: milliseconds and whole bytes."""
        return self.state, round(self.in_line, 3), round(self.computed, 3), round(self.moved)


def read_proc_stats(process: int) -> ProcStats:
    fields = _stat_fields(process)
    if not fields:
        return ProcStats()
    computed = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    pages = (int(fields[7]) + int(fields[9])) * os.sysconf("SC_PAGE_SIZE")
    return ProcStats(fields[0], run_queue_seconds(process), computed, pages + _io_bytes(process))


def _stat_fields(process: int) -> list[str]:
    """What the system counts of a process, from its state on; nothing where there is none."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def run_queue_seconds(process: int) -> float:
    """Seconds that the main thread of a process has been ready to run and had no core; 0 where the system does not
    say."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _io_bytes(process: int) -> int:
    """Bytes that a process has had read and written by calls. Those of mapped files are pages that it met for the first
    time."""
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()[:2]
        return sum(int(line.partition(":")[2]) for line in lines)
    except (OSError, ValueError):
        return 0
