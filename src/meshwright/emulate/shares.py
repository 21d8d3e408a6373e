"""Ranks on shares of a core: a control group each, with a quota of processor time in short periods.

Groups are removed at the end; those of a run that was killed are empty by then, as its ranks die with it, and the next run removes them.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from meshwright.base.errors import InputError
from meshwright.emulate.network import INSTEAD

ROOT = Path("/sys/fs/cgroup")
PERIOD = 10_000
"""Microseconds over which a quota counts: a step of training is many of them."""

FULL = 0.999
_NAME = re.compile(r"meshwright-(\d+)-\d+")


class Shares:
    """`shares` of a core by rank. A context manager."""

    def __init__(self, shares: Sequence[float]) -> None:
        self.shares, self._owner = tuple(shares), os.getpid()
        self.root = ROOT / "cpu" if (ROOT / "cpu" / "cpu.cfs_quota_us").exists() else ROOT

    def __enter__(self) -> Shares:
        self._sweep()
        for rank, share in enumerate(self.shares):
            if share < FULL:
                self._make(self._folder(rank), share)
        return self

    def __exit__(self, *_: object) -> None:
        for rank in range(len(self.shares)):
            with contextlib.suppress(OSError):
                self._folder(rank).rmdir()

    def enter(self, rank: int, pid: int = 0) -> None:
        """Moves process `pid`, or the calling one, onto the share of `rank`."""
        if self.shares[rank] < FULL:
            (self._folder(rank) / "cgroup.procs").write_text(str(pid or os.getpid()))

    def change(self, rank: int, share: float) -> None:
        """From now on `rank` has another share: a straggler, or one that recovers."""
        _limit(self._folder(rank), share)

    def _folder(self, rank: int) -> Path:
        return self.root / f"meshwright-{self._owner}-{rank}"

    def _make(self, folder: Path, share: float) -> None:
        try:
            folder.mkdir(exist_ok=True)
            if self.root == ROOT and not (folder / "cpu.max").exists():
                (ROOT / "cgroup.subtree_control").write_text("+cpu")
            _limit(folder, share)
        except OSError as error:
            raise InputError(f"emulate: no quota of processor time in {folder.parent} ({error.strerror}; root may); {INSTEAD}") from None

    def _sweep(self) -> None:
        for folder in self._left():
            with contextlib.suppress(OSError):
                folder.rmdir()

    def _left(self) -> Iterator[Path]:
        """Groups whose emulator is gone."""
        for folder in self.root.glob("meshwright-*") if self.root.is_dir() else ():
            match = _NAME.fullmatch(folder.name)
            if match and not Path(f"/proc/{match[1]}").exists():
                yield folder


def _limit(folder: Path, share: float) -> None:
    quota = max(int(share * PERIOD), 1000)
    period = max(PERIOD, int(1000 / share))
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text(f"{quota} {period}")
        return
    (folder / "cpu.cfs_period_us").write_text(str(period))
    (folder / "cpu.cfs_quota_us").write_text(str(quota))
