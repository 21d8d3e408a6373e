"""What a killed supervisor held stays for a stated time in a process of its own, and one replacement adopts it: all of
it, or nothing with one line."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import psutil
import pytest

from meshwright.core.ipc import HeartbeatField
from meshwright.elastic import snapshot_adoption
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.event_log import EventLog
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.snapshot_adoption import SOCKET_NAME_FILE, SnapshotAdoption
from meshwright.elastic.snapshot_inventory import AdoptedSnapshots, AdoptionPolicy
from meshwright.spec.record import EVENTS_FILE_NAME, parse_events

SUPERVISOR = """
import os, signal, subprocess, sys
from pathlib import Path
from meshwright.core.ipc import HeartbeatField
from meshwright.elastic.snapshot_adoption import SnapshotAdoption
from meshwright.elastic.snapshot_inventory import AdoptionPolicy
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.shared_files import SharedFileStore
def is_memory(path):
    try:
        return os.readlink(path).startswith("/memfd:meshwright")
    except OSError:
        return False
folder, seconds, kept, leaves = Path(sys.argv[1]), float(sys.argv[2]), [int(word) for word in sys.argv[3].split(",")], \
sys.argv[4] == "leaves"
sets = [SharedFileStore(2) for _ in kept]
for held, step in zip(sets, kept):
    for rank in range(2):
        held.pulse(rank).write(HeartbeatField.snapshot_step, step)
        with open(held.all_files()[rank], "wb") as file:
            file.write(b"step %d of rank %d" % (step, rank))
own = SnapshotAdoption(folder, AdoptionPolicy(seconds, "job"), print)
own.hold(6, RankJob("a:b", 2, {"plan": "dp2"}, folder), None, sets[0])
if len(sets) > 1:
    own.hold(7, RankJob("a:b", 2, {"plan": "dp2"}, folder), *sets)
if leaves:
    print(subprocess.Popen(["sleep", "1000"], pass_fds=(own.lifeline,), stdout=subprocess.DEVNULL, \
stderr=subprocess.DEVNULL).pid)
place = f"/proc/{own._process.pid}/fd"
while sum(is_memory(f"{place}/{file}") for file in os.listdir(place)) < 3 * len(sets) or not own._is_named:
    own.look()
os.kill(os.getpid(), signal.SIGKILL)
"""


def killed(folder: Path, seconds: float = 60.0, kept: str = "4", leaves: str = "") -> psutil.Process:
    """A supervisor that held snapshots of these steps was killed; the process that holds them now."""
    done = subprocess.run(
        [sys.executable, "-c", SUPERVISOR, str(folder), str(seconds), kept, leaves], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    name = (folder / SOCKET_NAME_FILE).read_text().strip()
    [holder] = [process for process in psutil.process_iter() if name in _words(process)]
    return holder


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


class Replacement:
    """Another supervisor for `folder`, and what it says."""

    all: ClassVar[list[Replacement]] = []

    def __init__(self, folder: Path, job: str = "job", adopts: bool = True, plan: str = "dp2") -> None:
        self.said: list[str] = []
        self.folder, self.work = folder, RankJob("a:b", 2, {"plan": plan}, folder)
        self.own = SnapshotAdoption(folder, AdoptionPolicy(60.0, job, adopts), self.said.append)
        self.all.append(self)

    def adopt(self) -> AdoptedSnapshots | None:
        return self.own.adopt(self.work, EventLog(self.folder, self.said.append))


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Every replacement ends with its test."""
    yield
    while Replacement.all:
        Replacement.all.pop().own.close()


def texts(found: AdoptedSnapshots) -> list[bytes]:
    return [Path(found.holdings.source(rank)).read_bytes() for rank in range(2)]


def test_snapshots_of_a_killed_supervisor_are_adopted_and_nothing_is_left_of_it(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_text('{"step":3}\n{"step":4}\n{"ste')
    holder = killed(tmp_path)
    other = Replacement(tmp_path)
    found = other.adopt()
    assert found is not None and (found.generation, found.same) == (6, True)
    assert texts(found) == [b"step 4 of rank 0", b"step 4 of rank 1"]
    assert found.holdings.pulse(1).read(HeartbeatField.snapshot_step) == 4
    assert other.said == ["the supervisor was killed while it was in start: a new supervisor adopts its snapshots"]
    [fault] = parse_events((tmp_path / EVENTS_FILE_NAME).read_text())
    assert (fault.generation, fault.rank) == (6, None) and fault.detection > 0
    assert holder.is_running()  # until the replacement itself holds them
    other.own.hold(7, other.work, *found.sets(SharedFileStore(2)))
    holder.wait(300)
    assert (tmp_path / SOCKET_NAME_FILE).stat().st_mode & 0o777 == 0o600
    other.own.close()
    assert not (tmp_path / SOCKET_NAME_FILE).exists() and Replacement(tmp_path).adopt() is None
    found.holdings.close()


def test_snapshots_that_nobody_adopts_are_freed_after_the_stated_time(tmp_path: Path) -> None:
    began = time.monotonic()
    holder = killed(tmp_path, seconds=0.5)
    holder.wait(300)
    assert time.monotonic() > began + 0.5
    other = Replacement(tmp_path)
    assert other.adopt() is None and not other.said


def test_an_ordinary_end_leaves_no_process(tmp_path: Path) -> None:
    holdings, own = SharedFileStore(2), Replacement(tmp_path)
    own.own.hold(0, own.work, None, holdings)
    process = own.own._process
    assert process is not None and psutil.pid_exists(process.pid)
    own.own.close()
    assert not psutil.pid_exists(process.pid) and not (tmp_path / SOCKET_NAME_FILE).exists()
    holdings.close()


@pytest.mark.parametrize(
    ("job", "adopts", "version", "why"),
    [
        ("other", True, snapshot_adoption.__version__, "belong to another job"),
        ("job", False, snapshot_adoption.__version__, "are not used, because of run.restart"),
        ("job", True, "0.0.1", "are of version {}, but this is version 0.0.1"),
    ],
)
def test_snapshots_of_another_job_or_version_are_refused_in_one_line_and_freed(
    tmp_path: Path, job: str, adopts: bool, version: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = why.format(snapshot_adoption.__version__)
    holder = killed(tmp_path)
    monkeypatch.setattr(snapshot_adoption, "__version__", version)
    other = Replacement(tmp_path, job, adopts)
    assert other.adopt() is None
    assert other.said == [f"the snapshots of the killed supervisor {why}: not adopted"]
    holder.wait(300)
    assert not (tmp_path / EVENTS_FILE_NAME).exists()


def test_another_plan_adopts_snapshots_as_those_of_other_work(tmp_path: Path) -> None:
    holder, other = killed(tmp_path), Replacement(tmp_path, plan="tp2")
    found, fresh = other.adopt(), SharedFileStore(2)
    assert found is not None and not found.same
    assert found.sets(fresh) == (found.holdings, fresh)
    other.own.hold(7, other.work, found.holdings, fresh)
    holder.wait(300)
    for holdings in (found.holdings, fresh):
        holdings.close()


@pytest.mark.parametrize(("kept", "step"), [("4,0", 4), ("4,5", 5)])
def test_newer_snapshots_count_once_every_rank_has_one(tmp_path: Path, kept: str, step: int) -> None:
    killed(tmp_path, kept=kept)
    other = Replacement(tmp_path)
    found = other.adopt()
    assert found is not None and found.generation == 7
    assert texts(found) == [b"step %d of rank %d" % (step, rank) for rank in range(2)]
    other.own.hold(8, other.work, None, found.holdings)
    found.holdings.close()


def test_a_replacement_that_ends_before_it_holds_them_leaves_them_to_the_next_one(tmp_path: Path) -> None:
    holder = killed(tmp_path)
    first = Replacement(tmp_path)
    found = first.adopt()
    assert found is not None
    found.holdings.close()
    first.own.close()
    second = Replacement(tmp_path)
    found = second.adopt()
    assert found is not None and texts(found)[0] == b"step 4 of rank 0"
    second.own.hold(7, second.work, None, found.holdings)
    holder.wait(300)
    found.holdings.close()


def test_of_two_replacements_at_once_one_adopts(tmp_path: Path) -> None:
    holder = killed(tmp_path)
    first, second = Replacement(tmp_path), Replacement(tmp_path)
    late = second.own._reached()
    assert late is not None
    late.close()
    found = first.adopt()
    late = second.own._reached()
    assert found is not None and late is not None
    first.own.hold(7, first.work, None, found.holdings)
    holder.wait(300)
    assert second.own._hold is not None
    assert second.own._read(late, second.work, second.own._hold) == (None, "were adopted by another process")
    late.close()
    first.own.close()
    found.holdings.close()


def test_nothing_is_adopted_while_a_process_that_could_write_still_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder = killed(tmp_path, leaves="leaves")
    [writer] = [
        process
        for process in psutil.process_iter()
        if _words(process) == ["sleep", "1000"] and _inherits(process, holder)
    ]
    try:
        monkeypatch.setattr(snapshot_adoption, "TERMINATION_SECONDS", 0.3)
        other = Replacement(tmp_path)
        assert other.adopt() is None
        why = "may still be written: not all of its processes have ended within 0 s"
        assert other.said == [f"the snapshots of the killed supervisor {why}: not adopted"]
        other.own.close()
    finally:
        writer.kill()
    holder.wait(300)


def _inherits(process: psutil.Process, holder: psutil.Process) -> bool:
    """Whether `process` has the write end of the pipe that `holder` reads."""
    pipe = os.readlink(f"/proc/{holder.pid}/fd/{_words(holder)[-1]}")
    return any(os.readlink(f"/proc/{process.pid}/fd/{file}") == pipe for file in os.listdir(f"/proc/{process.pid}/fd"))


def test_a_holder_that_dies_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot_adoption, "STARTUP_SECONDS", 0.0)
    holdings, own = SharedFileStore(2), Replacement(tmp_path)
    own.own.hold(0, own.work, None, holdings)
    process, name = own.own._process, (tmp_path / SOCKET_NAME_FILE).read_text()
    assert process is not None
    process.kill()
    process.wait()
    own.own.look()
    assert own.own._process is not process and (tmp_path / SOCKET_NAME_FILE).read_text() != name
    holdings.close()


def test_a_disk_that_is_full_costs_the_adoption_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(snapshot_adoption.storage, "replace_file", refuse)
    holdings, own = SharedFileStore(2), Replacement(tmp_path)
    own.own.hold(0, own.work, None, holdings)
    own.own.hold(1, own.work, None, holdings)
    assert len(own.said) == 1 and own.said[0].startswith("if this process is killed, the snapshots are lost")
    holdings.close()
