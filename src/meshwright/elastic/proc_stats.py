"""Reads the statistics of a local process from /proc, without its cooperation. The hang detector and the supervision of
the checkpoint writer use them to see whether a process makes progress."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class ProcStats(NamedTuple):
    """The statistics of a process. `state`: the state letter of /proc/PID/stat. `in_line`: the seconds that its main
    thread has waited in the run queue. `computed`: its CPU seconds. `moved`: the bytes that it has read and written,
    page faults included."""

    state: str = ""
    in_line: float = 0.0
    computed: float = 0.0
    moved: float = 0.0

    def rounded(self) -> tuple[str, float, float, float]:
        """Returns the values in the precision in which nodes send them: milliseconds and whole bytes."""
        return self.state, round(self.in_line, 3), round(self.computed, 3), round(self.moved)


def read_proc_stats(process: int) -> ProcStats:
    """Returns the statistics of the process with the id `process`, or default values if it does not exist."""
    fields = _stat_fields(process)
    if not fields:
        return ProcStats()
    computed = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    pages = (int(fields[7]) + int(fields[9])) * os.sysconf("SC_PAGE_SIZE")
    return ProcStats(fields[0], run_queue_seconds(process), computed, pages + _io_bytes(process))


def _stat_fields(process: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state letter on, or an empty list if there is no such process."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def run_queue_seconds(process: int) -> float:
    """Returns the seconds that the main thread of a process has waited in the run queue, or 0 if the system does not
    report them."""
    try:
        return int(Path(f"/proc/{process}/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


def _io_bytes(process: int) -> int:
    """Returns the bytes that a process has read and written by system calls. Accesses to mapped files are not among
    them: they appear as page faults."""
    try:
        lines = Path(f"/proc/{process}/io").read_text().splitlines()[:2]
        return sum(int(line.partition(":")[2]) for line in lines)
    except (OSError, ValueError):
        return 0
