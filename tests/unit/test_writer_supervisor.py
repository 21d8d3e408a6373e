"""The process that writes checkpoints, as its supervisor sees it; what RUN/ranks asks for; the log of a rank on a full
disk."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import pytest

from meshwright.core.errors import NothingFits
from meshwright.core.ipc import HeartbeatField, RankPhase
from meshwright.elastic.event_log import EventLog
from meshwright.elastic.proc_stats import ProcStats
from meshwright.elastic.replan import PLANNING_SECONDS, RankCountRequest, lower_memory_plan, plan_for_devices
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.writer_supervisor import (
    BLOCKED_SECONDS,
    KILL_SECONDS,
    NO_PROGRESS_SECONDS,
    WRITER_RANK,
    WriterSupervisor,
)
from meshwright.planner.inputs.job import read_job, resolve_job
from meshwright.planner.inputs.plans import parse_plan
from meshwright.report.faults import read_events
from meshwright.spec.record import EVENTS_FILE_NAME, RunEvent
from meshwright.spec.workload import Workload
from meshwright.train.console import RunConsole
from meshwright.train.rank_main import RankLog


class Stage:
    """A writer with a clock that the test moves, and what comes of it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.now, self.signs = folder, 0.0, ProcStats("S")
        self.notes: list[str] = []
        self.heard: list[str] = []
        self.started: list[int] = []
        self.killed: list[tuple[Any, ...]] = []
        self.holdings = SharedFileStore(2)
        journal = EventLog(folder, self.notes.append)
        hear = lambda rank, message: self.heard.append(message["kind"])
        kill = lambda *words, **_: self.killed.append(words)
        self.writer = WriterSupervisor(
            journal, hear, self.notes.append, kill, 60.0, lambda: self.now, lambda process: self.signs
        )

    def ask(self, step: int, waited: float = 0.0) -> None:
        self.holdings.pulse(0).write(HeartbeatField.busy, 1)
        self.writer.begin(lambda asked: self.started.append(asked["step"]), {"step": step, "waited": waited})

    def event(self, kind: str, **more: Any) -> None:
        self.writer.heed({"event": kind, "rank": WRITER_RANK, "generation": 0, **more}, 0, self.holdings)

    def say(self, kind: str, **more: Any) -> None:
        self.event("said", message={"kind": kind, **more})

    def pass_by(self, seconds: float) -> None:
        self.now += seconds
        self.writer.look(0, self.holdings)

    @property
    def is_free(self) -> bool:
        return self.holdings.pulse(0).read(HeartbeatField.busy) == 0

    @property
    def events(self) -> list[RunEvent]:
        return list(read_events(self.folder / EVENTS_FILE_NAME))


@pytest.fixture
def stage(tmp_path: Path):
    made = Stage(tmp_path)
    yield made
    made.holdings.close()


def test_a_writer_exception_is_an_event_and_a_line_and_ranks_are_informed(
    stage: Stage,
) -> None:
    for step in (1, 2):
        stage.ask(step, waited=1.5)
        stage.event("started", pid=7)
        stage.say("failed", error="OSError", message="Directory not empty", place="", code=1, known=False)
        assert not stage.is_free
        stage.event("ended", status=1)
        assert stage.is_free
    assert [(event.kind, event.step, event.seconds) for event in stage.events] == [
        ("unsaved", 1, 1.5),
        ("unsaved", 2, 1.5),
    ]
    assert stage.notes[0] == "no checkpoint at step 1: OSError: Directory not empty; training goes on"
    assert stage.notes[1].endswith(
        "; 2 saves in a row have failed, and no checkpoint since the start of this command is on disk"
    )
    assert stage.heard == [], "nobody else is to know of it"


def test_a_process_that_ends_in_silence_or_after_it_had_saved_is_told_apart(stage: Stage) -> None:
    for status, saves in ((0, False), (-9, False), (-9, True)):
        stage.ask(4)
        stage.event("started", pid=7)
        if saves:
            stage.say("saved", step=4, path="step-4", seconds=2.0)
        stage.event("ended", status=status)
    assert [event.kind for event in stage.events] == ["unsaved", "unsaved", "save"]
    assert stage.holdings.pulse(1).read(HeartbeatField.saved) == 2_000_000


def test_one_that_makes_no_progress_is_said_then_killed_then_left_alone(stage: Stage) -> None:
    stage.ask(8)
    stage.event("started", pid=7)
    stage.ask(12)
    for moved in range(1, 6):  # a slow disk is not a dead one
        stage.signs = ProcStats("D", moved=float(moved))
        stage.pass_by(50.0)
    assert stage.notes == [] and stage.killed == []
    stage.pass_by(NO_PROGRESS_SECONDS + 1.0)
    assert "has made no progress for 11.0 s: its disk does not answer" in stage.notes[0]
    stage.pass_by(50.0)
    assert stage.killed == [("signal", WRITER_RANK)] and not stage.is_free
    stage.pass_by(KILL_SECONDS + 1.0)  # not even that ended it
    assert stage.events[-1].step == 8 and stage.started == [8, 12], "what was asked for meanwhile begins"
    stage.event("ended", status=-9)  # of the first one, late
    stage.event("refused", pid=7)
    assert (
        stage.is_free
        and "process 7, which wrote an earlier checkpoint, still waits for its disk" in stage.events[-1].cause
    )


def test_one_that_saved_and_then_hangs_while_it_removes_is_an_event_and_its_checkpoint_counts(stage: Stage) -> None:
    """The line said that the checkpoint made no progress, and no event was written."""
    stage.ask(8)
    stage.event("started", pid=7)
    stage.say("saved", step=8, path="step-8", seconds=2.0)
    stage.signs = ProcStats("D")
    stage.pass_by(NO_PROGRESS_SECONDS + 1.0)
    assert stage.notes == [
        "the checkpoint of step 8 is saved; removing older checkpoints has made no progress for 11.0 s: its disk does "
        "not answer; given up after 60 s"
    ]
    stage.pass_by(50.0)
    assert stage.killed == [("signal", WRITER_RANK)]
    stage.event("ended", status=-9)
    saved, degraded = stage.events
    assert (saved.kind, saved.step, degraded.kind) == ("save", 8, "degraded") and stage.is_free
    assert (
        degraded.cause == "the checkpoint of step 8 is saved; removing older checkpoints made no progress for 1 min 1 s"
    )
    assert stage.notes[1:] == [f"{degraded.cause}; tried again after the next checkpoint"]


def test_an_exception_after_the_checkpoint_was_saved_is_no_lost_checkpoint(stage: Stage) -> None:
    stage.ask(8)
    stage.event("started", pid=7)
    stage.say("saved", step=8, path="step-8", seconds=2.0)
    stage.say("failed", error="KeyError", message="'a'", place="", code=1, known=False)
    stage.event("ended", status=1)
    assert [event.kind for event in stage.events] == ["save", "degraded"]
    assert stage.events[1].cause.endswith("is saved; removing older checkpoints failed: KeyError: 'a'")


def test_one_that_failed_and_then_hangs_says_why_it_failed(stage: Stage) -> None:
    stage.ask(8)
    stage.event("started", pid=7)
    stage.say("unsaved", step=8, why="no space left")
    stage.pass_by(NO_PROGRESS_SECONDS + 1.0)
    assert "step 8 is not saved; removing what it left has made no progress" in stage.notes[0]
    stage.pass_by(50.0)
    stage.event("ended", status=-9)
    assert [(event.kind, event.cause) for event in stage.events] == [("unsaved", "no space left")]


def test_one_that_stands_in_line_for_a_core_is_not_stuck(stage: Stage) -> None:
    stage.ask(8)
    stage.event("started", pid=7)
    stage.signs = ProcStats("R", moved=1.0)
    stage.pass_by(1.0)
    stage.signs = ProcStats("R", in_line=500.0, moved=1.0)
    stage.pass_by(500.0)
    assert stage.killed == [] and stage.notes == []


def test_training_that_waits_for_a_checkpoint_says_so_less_and_less_often(stage: Stage) -> None:
    pulse = stage.holdings.pulse(0)
    pulse.at(RankPhase.save, 20)
    for _ in range(100):
        stage.pass_by(1.0)
    assert [" ".join(note.split()[5:-8]) for note in stage.notes] == [
        "6.00 s",
        "11.0 s",
        "21.0 s",
        "41.0 s",
        "1 min 21 s",
    ] and BLOCKED_SECONDS == 5.0
    assert stage.notes[0] == "step 20: training has waited 6.00 s so far for a checkpoint to be written"


def test_a_kind_of_message_that_nobody_knows_is_shown_and_passed_over(capsys: pytest.CaptureFixture[str]) -> None:
    screen = RunConsole()
    for kind in ("gossip", "failed", "unsaved", "hear", "close", "_note"):
        screen.hear({"kind": kind})
    assert capsys.readouterr().err.count(", which is ignored") == 4


@pytest.mark.parametrize(
    "content", [b"99999", b"\xff", b"-1", b"0", b"three", b"2 3", b"9" * 5000, "٣".encode(), b"\x9b31m"]
)
def test_ranks_that_cannot_be_are_one_line_and_the_run_goes_on(tmp_path: Path, content: bytes) -> None:
    notes: list[str] = []
    asked = RankCountRequest(tmp_path, notes.append, 4)
    (tmp_path / "ranks").write_bytes(content)
    assert [asked(4), asked(4)] == [None, None]
    assert (
        len(notes) == 1
        and "the number must be from 1 to 4; the run goes on as before" in notes[0]
        and len(notes[0]) < 300
    )
    (tmp_path / "ranks").write_bytes(b"3\n")
    assert [asked(4), asked(4)] == [3, None]


def test_what_is_no_file_in_place_of_the_ranks_is_one_line_and_stays(tmp_path: Path) -> None:
    for make in (Path.mkdir, os.mkfifo):
        notes: list[str] = []
        (folder := tmp_path / make.__name__).mkdir()
        make(folder / "ranks")
        asked = RankCountRequest(folder, notes.append, 4)
        assert [asked(4) for _ in range(9)] == [None] * 9
        assert len(notes) == 1 and (folder / "ranks").exists()


def test_planning_for_another_number_of_ranks_has_a_deadline() -> None:
    now = iter(range(0, 10**6, 7))
    with pytest.raises(NothingFits, match=r"no plan for \d+ to 99999 ranks was found in 60 s: request fewer ranks"):
        plan_for_devices(None, Workload(batch=7, sequence=8), 99999, lambda: float(next(now)))
    assert PLANNING_SECONDS == 60.0


@pytest.fixture
def endless_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def search(*_: object, **__: object) -> None:
        while True:
            with contextlib.suppress(Exception):
                time.sleep(0.001)

    monkeypatch.setattr("meshwright.elastic.replan.search_plans", search)
    monkeypatch.setattr("meshwright.elastic.replan.PLANNING_SECONDS", 0.2)


@pytest.mark.usefixtures("endless_search")
def test_the_deadline_of_planning_binds_within_one_search() -> None:
    """It was looked at between numbers of ranks only, and never for a plan that takes less memory."""
    job = resolve_job(read_job(None, (), {"model.name": "gpt2-tiny", "cluster.name": "4:cpu"}))
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(NothingFits, match="no plan for 4 ranks was found in 0 s: request fewer ranks"):
        plan_for_devices(job, job.workload, 4)
    with pytest.raises(NothingFits, match="no plan that takes less memory than dp4 was found in 0 s"):
        lower_memory_plan(job, parse_plan("dp4"))
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_log_on_a_full_disk_costs_lines_and_nothing_else() -> None:
    with TextIOWrapper(RankLog(os.open("/dev/full", os.O_WRONLY)), write_through=True) as log:
        print("a line", file=log, flush=True)
