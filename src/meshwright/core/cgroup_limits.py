"""Reads the memory limit and the number of OOM kills of this process's control group, and raises the limit of open
files. The planner, the supervisors and the in-memory checkpoints use it.

Both versions of control groups are supported. Memory limits of parent groups also apply. Without control groups there
is no memory limit.
"""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Iterator
from pathlib import Path

from meshwright.core.errors import InputError
from meshwright.core.messages import Message

BASE_OPEN_FILES, OPEN_FILES_PER_RANK = 64, 4
"""Numbers of open files that the supervisor and the fork server need: a base number, and a number for each rank. For
each rank, the supervisor opens two files, for in-memory checkpoints under two plans. The fork server opens two pipes
for each rank."""

MAX_OPEN_FILES = 2**16
"""Largest limit of open files that is requested, unless the ranks need more."""

CGROUP_ROOT, PROCESS_CGROUP_FILE = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cgroup_folders(root: Path = CGROUP_ROOT, own: Path = PROCESS_CGROUP_FILE) -> Iterator[Path]:
    """Yields the memory control-group folders of this process, from its own group to the root."""
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
    """Returns the lowest memory limit of this group and its parents in bytes, or infinity if there is no limit."""
    least = float("inf")
    for folder in cgroup_folders(root, own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):
                least = min(least, float((folder / name).read_text()))
    return least if least < 2**62 else float("inf")


def cgroup_memory_available(root: Path = CGROUP_ROOT, own: Path = PROCESS_CGROUP_FILE) -> float:
    """Returns the number of bytes that can be allocated before a memory limit is reached, or infinity if there is no
    limit. Inactive pages of the file cache do not count as used, because the kernel reclaims them when memory is
    short."""
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
    """Returns the number of OOM kills in this group, 0 if it cannot be read. Kills in parent groups do not count."""
    folder = next(cgroup_folders(root, own), None)
    if folder is None:
        return 0
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError, ValueError):
            counts = dict(line.split() for line in (folder / name).read_text().splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


def raise_soft_file_limit(wanted: int) -> float:
    """Raises the soft limit of open files to `wanted`, or to the hard limit if that is lower. Returns the soft limit
    afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return math.inf
    allowed = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return max(soft, allowed)


def raise_open_file_limit(ranks: int, nodes: int = 0) -> None:
    """Raises the limit of open files for this process and its children as far as the system allows.

    Raises: InputError if the system's limit is too low for `ranks` ranks and a connection to each of `nodes` other
    nodes.
    """
    needed = BASE_OPEN_FILES + OPEN_FILES_PER_RANK * ranks + nodes
    soft = raise_soft_file_limit(max(MAX_OPEN_FILES, needed))
    if soft < needed:
        more = Message(" and {nodes:,} other nodes", nodes=nodes) if nodes else ""
        raise InputError(
            Message(
                "a process may open {soft:,} files here, but {ranks} ranks{more} need {needed:,}: raise the limit "
                "(`ulimit -n {needed}`, or LimitNOFILE or limits.conf if one of these sets it), then start again",
                soft=soft,
                ranks=ranks,
                more=more,
                needed=needed,
            )
        )
