"""What the control group of this process may take of memory, how often the system has ended one of its processes for
want of it, and how many files it may open.

Both versions of control groups; a limit of a group above counts too. Where there are no groups there is no limit.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

from meshwright.core.errors import InputError

BASE_OPEN_FILES, OPEN_FILES_PER_RANK = 64, 4
"""Files that the process that supervises ranks has open, and the one that forks them: in any case, and for each rank. A
rank's copies under two plans are two
files of the former, its pipes two of the latter."""

MAX_OPEN_FILES = 2**16
"""Files that are requested at most, where the system would allow any number."""

CGROUP_ROOT, PROCESS_CGROUP_FILE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroup_folders(root: Path = CGROUP_ROOT, own: Path = PROCESS_CGROUP_FILE) -> Iterator[Path]:
    """The folders of this process's group of memory, its own first."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return
    for _, kinds, name in (line.split(":", 2) for line in lines):
        base = root if not kinds else root / "memory" if "memory" in kinds.split(",") else None
        if base is None:
            continue
        folder = base / name.strip("/")
        while folder != base:
            yield folder
            folder = folder.parent
        yield base


def cgroup_memory_limit(root: Path = CGROUP_ROOT, own: Path = PROCESS_CGROUP_FILE) -> float:
    """Bytes, the least of all groups; infinite where none has a limit."""
    least = float("inf")
    for folder in cgroup_folders(root, own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                least = min(least, float((folder / name).read_text()))
    return least if least < 2**62 else float("inf")


def cgroup_memory_available(root: Path = CGROUP_ROOT, own: Path = PROCESS_CGROUP_FILE) -> float:
    """Bytes until the first of the limits; what files have cached does not count, as it goes when memory is short."""
    least = float("inf")
    for folder in cgroup_folders(root, own):
        for limit, used, cached in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError):
                most, taken = float((folder / limit).read_text()), float((folder / used).read_text())
                counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                least = min(least, max(most - taken + float(counts.get(cached, 0)), 0.0))
    return least


def oom_kill_count(root: Path = CGROUP_ROOT, own: Path = PROCESS_CGROUP_FILE) -> int:
    """Processes of this group, not of those above, that the system has ended for want of memory."""
    folder = next(cgroup_folders(root, own), None)
    if folder is None:
        return 0
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in (folder / name).read_text().splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


def raise_open_file_limit(ranks: int) -> None:
    """Raises the number of files that this process and its children may open as far as the system allows.

    Raises: InputError where that is too few for so many ranks.
    """
    needed = BASE_OPEN_FILES + OPEN_FILES_PER_RANK * ranks
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, max(MAX_OPEN_FILES, needed))
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    if soft != resource.RLIM_INFINITY and soft < needed:
        raise InputError(
            f"a process may open {soft:,} files here, and {ranks} ranks need {needed:,}: raise the limit (`ulimit -n {needed}`, or LimitNOFILE "
            "and limits.conf where it is set), then start again"
        )
