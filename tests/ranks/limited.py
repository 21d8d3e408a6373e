"""One process under a real limit of memory: a control group of its own, version 1 or 2, gone when it ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
SOURCE = Path(__file__).parents[2] / "src"


def place() -> Path | None:
    """Where a group with a limit can be made; None where this process may not."""
    one = ROOT / "memory"
    if (one / "memory.limit_in_bytes").is_file():
        return one if os.access(one, os.W_OK) else None
    kinds = (ROOT / "cgroup.subtree_control").read_text() if (ROOT / "cgroup.subtree_control").is_file() else ""
    return ROOT if "memory" in kinds and os.access(ROOT, os.W_OK) else None


def run(script: str, limit: int, timeout: float = 900.0) -> subprocess.CompletedProcess[str]:
    """`script` in a Python of its own, of whose memory (page cache included) there are `limit` bytes; no limit at 0."""
    found = place() if limit else None
    folder = None if found is None else found / f"meshwright-{os.getpid()}-{time.monotonic_ns()}"
    if folder is not None:
        folder.mkdir()
        for name in ("memory.limit_in_bytes", "memory.max"):
            if (folder / name).exists():
                (folder / name).write_text(str(limit))
        if (folder / "memory.swap.max").exists():
            (folder / "memory.swap.max").write_text("0")

    def enter() -> None:
        if folder is not None:
            (folder / "cgroup.procs").write_text(str(os.getpid()))

    try:
        return subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=timeout, preexec_fn=enter,
            env={**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    finally:
        if folder is not None:
            _remove(folder)


def _remove(folder: Path) -> None:
    for _ in range(50):
        try:
            folder.rmdir()
        except OSError:
            time.sleep(0.1)
        else:
            return
