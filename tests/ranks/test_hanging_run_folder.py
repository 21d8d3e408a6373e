"""A file system that does not answer costs neither the supervisor nor a rank a step: lines wait in memory, and that is
said."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from fault_runs import STEPS, USUAL, events, launch, losses, state, train
from hanging_disk import HangingDisk
from sample_accounting import check

from meshwright.cli import main as cli
from meshwright.cli import slow_disk
from meshwright.core import background_thread, storage
from meshwright.core.append_file import AppendOnlyFile
from meshwright.core.background_thread import PATIENCE_SECONDS, BackgroundCall, CallPending
from meshwright.core.messages import Message, translate
from meshwright.elastic import supervisor
from meshwright.elastic.attempt import RankJob
from meshwright.elastic.event_log import EventLog
from meshwright.elastic.failure import log_tail
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.replan import RankCountRequest
from meshwright.elastic.shared_files import SharedFileStore
from meshwright.elastic.snapshot_adoption import SOCKET_NAME_FILE, SnapshotAdoption
from meshwright.elastic.snapshot_inventory import AdoptionPolicy
from meshwright.spec.record import StepRecord
from meshwright.train.metrics import RecordWriter
from meshwright.train.rank_main import RankLog, open_rank_log

SOON = 0.2
"""Seconds after which a disk is overdue here."""
QUICK = PATIENCE_SECONDS + 2.0
"""Seconds that no caller takes, also on a busy machine; who waits for the disk takes `GIVE_UP_SECONDS`."""


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingDisk]:
    made = HangingDisk()
    monkeypatch.setattr(storage, "os", made)
    monkeypatch.setattr(storage, "OVERDUE_SECONDS", SOON)
    yield made
    made.answers.set()
    assert not made.has_stalled, "somebody waited for the disk"


def answered(lines: AppendOnlyFile) -> None:
    """Until all lines are on the disk."""
    end = time.monotonic() + 60.0
    while lines.is_waiting and time.monotonic() < end:
        lines.flush(end)
    assert not lines.is_waiting


def numbers(file: Path) -> list[int]:
    return [json.loads(line)["number"] for line in file.read_text().splitlines()]


def test_appending_to_a_disk_that_hangs_does_not_wait_and_every_line_is_there_in_the_end(
    disk: HangingDisk, tmp_path: Path
) -> None:
    lines, file = AppendOnlyFile(tmp_path / "a.jsonl"), tmp_path / "a.jsonl"
    append = lambda number: lines.append(json.dumps({"number": number}))
    assert append(0) is None and numbers(file) == [0], "there when the call returns"
    disk.answers.clear()
    began = time.monotonic()
    errors = [append(number) for number in range(1, 100)]
    assert time.monotonic() < began + QUICK
    assert isinstance(errors[-1], TimeoutError) and str(file) in str(errors[-1])
    assert storage.describe_failure(errors[-1]).startswith(f"{file}: has not answered for 200.0 ms (ETIMEDOUT); ")
    disk.answers.set()
    answered(lines)
    assert append(100) is None and numbers(file) == [*range(101)] and lines.close() is None


def test_closing_a_file_on_a_disk_that_hangs_ends_and_says_what_is_lost(disk: HangingDisk, tmp_path: Path) -> None:
    lines = AppendOnlyFile(tmp_path / "a.jsonl")
    disk.answers.clear()
    for number in range(3):
        lines.append(json.dumps({"number": number}))
    began = time.monotonic()
    error = lines.close(0.1)
    assert isinstance(error, TimeoutError) and lines.lost == 3 and time.monotonic() < began + QUICK


def test_a_backlog_that_is_too_large_drops_the_oldest_lines_that_are_not_being_written(
    disk: HangingDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.core.append_file.MAX_BACKLOG_BYTES", 60)
    lines = AppendOnlyFile(tmp_path / "a.jsonl")
    disk.answers.clear()
    for number in range(10):
        lines.append(json.dumps({"number": number}))
    disk.answers.set()
    answered(lines)
    assert numbers(tmp_path / "a.jsonl") == [0, 7, 8, 9] and lines.lost == 6


def test_an_event_is_said_before_it_is_written_and_the_hang_is_an_event_too(disk: HangingDisk, tmp_path: Path) -> None:
    said: list[tuple[str, bool]] = []
    note = lambda line: said.append((line, (tmp_path / "events.jsonl").exists()))
    log = EventLog(tmp_path, note)
    disk.answers.clear()
    log.fault(cause=Message("it hangs"), rank=1, decision=Message("ranks start again"))
    log.look()
    assert said[0][0] == "rank 1 it hangs: ranks start again"
    [late] = [line for line, _ in said if line.startswith("events cannot be written: ")]
    assert "has not answered for 200.0 ms" in late and late.endswith("they are kept in memory, and the run goes on")
    assert "没有响应" in translate(late, "zh") and "has not answered" not in translate(late, "zh")
    for _ in range(9):
        log.look()
    assert len(said) == 2 and not any(there for _, there in said)
    disk.answers.set()
    end = time.monotonic() + 60.0
    while len(said) < 3 and time.monotonic() < end:
        log.look()
    assert said[2][0] == "the events are written"
    log.close()
    assert [event.kind for event in events(tmp_path)] == ["fault", "degraded"] and len(said) == 3


def test_a_request_for_ranks_on_a_disk_that_hangs_is_heard_when_it_answers(disk: HangingDisk, tmp_path: Path) -> None:
    notes: list[str] = []
    asked = RankCountRequest(tmp_path, notes.append, 4)
    (tmp_path / "ranks").write_text("3")
    disk.answers.clear()
    began = time.monotonic()
    assert [asked(4) for _ in range(100)] == [None] * 100 and time.monotonic() < began + QUICK
    assert len(notes) == 1 and notes[0].startswith("the requested number of ranks cannot be read: ")
    disk.answers.set()
    end, found = time.monotonic() + 60.0, None
    while found is None and time.monotonic() < end:
        found = asked(4)
    assert found == 3 and asked(4) is None and len(notes) == 1 and not (tmp_path / "ranks").exists()


def test_a_name_that_cannot_be_written_costs_the_adoption_until_the_disk_answers(
    disk: HangingDisk, tmp_path: Path
) -> None:
    said: list[str] = []
    own, holdings = SnapshotAdoption(tmp_path, AdoptionPolicy(60.0, "job"), said.append), SharedFileStore(1)
    disk.answers.clear()
    try:
        own.hold(0, RankJob("a:b", 1, {}, tmp_path), None, holdings)
        process = own._process
        own.look()
        assert len(said) == 1 and said[0].startswith("if this process is killed, the snapshots are lost")
        disk.answers.set()
        end = time.monotonic() + 60.0
        while not own._is_named and time.monotonic() < end:
            own.look()
        assert (tmp_path / SOCKET_NAME_FILE).read_text().strip() == own._name and own._process is process
    finally:
        own.close()
        holdings.close()
    assert not (tmp_path / SOCKET_NAME_FILE).exists()


def test_records_wait_in_memory_and_both_ends_of_that_are_said(disk: HangingDisk, tmp_path: Path) -> None:
    notes: list[str] = []
    records = RecordWriter(tmp_path, (), notes.append)
    write = lambda step: records.write(StepRecord(step=step, loss=1, tokens=1, gradient_norm=0, lr=0, seconds=1))
    write(1)
    disk.answers.clear()
    for step in range(2, 50):
        write(step)
    assert len(notes) == 1 and notes[0].startswith("the records from step 2 on cannot be written and are kept in mem")
    disk.answers.set()
    answered(records._lines)
    write(50)
    assert notes[1:] == ["the records from step 2 on are written"]
    records.close()
    assert sorted(losses(tmp_path)) == [*range(1, 51)] and len(notes) == 2


def test_a_log_that_cannot_be_read_in_time_is_left_out(disk: HangingDisk, tmp_path: Path) -> None:
    (tmp_path / "log").write_text("the reason\n")
    assert log_tail(tmp_path / "log", 1) == ["the reason"]
    disk.answers.clear()
    began = time.monotonic()
    assert log_tail(tmp_path / "log", 1) == [] and time.monotonic() < began + QUICK


def test_a_rank_starts_without_its_log_if_the_disk_hangs(disk: HangingDisk, tmp_path: Path) -> None:
    said: list[tuple[str, str]] = []
    say = lambda kind, line: said.append((kind, line))
    os.close(open_rank_log(tmp_path / "rank-0.log", say))
    assert (tmp_path / "rank-0.log").exists() and said == []
    disk.answers.clear()
    began = time.monotonic()
    handle = open_rank_log(tmp_path / "rank-0.log", say)
    assert time.monotonic() < began + QUICK and os.path.samestat(os.fstat(handle), os.stat(os.devnull))
    os.close(handle)
    [(kind, line)] = said
    assert kind == "degraded" and line.startswith("the output of this rank is lost: ") and "rank-0.log" in line


def test_a_rank_prints_while_its_log_does_not_answer(disk: HangingDisk, tmp_path: Path) -> None:
    handle = os.open(tmp_path / "rank-0.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    log = TextIOWrapper(RankLog(handle), write_through=True)
    print("before", file=log)
    assert (tmp_path / "rank-0.log").read_text() == "before\n", "there when the call returns"
    disk.answers.clear()
    began = time.monotonic()
    printing = [threading.Thread(target=print, args=("lost",), kwargs={"file": log}) for _ in range(20)]
    for thread in printing:
        thread.start()
    for thread in printing:
        thread.join()
    assert time.monotonic() < began + QUICK
    disk.answers.set()
    while not (tmp_path / "rank-0.log").read_text().endswith("lost"):
        time.sleep(0.01)
    print("after", file=log)
    if not (child := os.fork()):
        print("of a forked process", file=log)
        os._exit(0)
    os.waitpid(child, 0)
    lines = (tmp_path / "rank-0.log").read_text().splitlines()
    assert lines == ["before", "lostafter", "of a forked process"], "of the threads only the first one reached the disk"
    os.close(handle)


@pytest.mark.parametrize("command", [["report"], ["checkpoint", "list"], ["train", "--folder"]])
def test_a_command_says_for_which_file_it_waits(
    disk: HangingDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]
) -> None:
    (run := tmp_path / "run").mkdir()
    (run / "launch.json").write_text("{")
    said: list[str] = []
    monkeypatch.setattr(slow_disk, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(cli, "print_note", lambda line: (said.append(line), disk.answers.set()))
    disk.answers.clear()
    assert cli.main([*command, str(run)]) == 2
    assert len(said) == 1 and said[0].startswith("still waiting for ") and str(run) in said[0]
    assert "没有响应" in translate(said[0], "zh")


def test_a_call_runs_once_and_its_result_or_error_is_that_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, go = BackgroundCall[int]("test"), threading.Event()
    assert calls.call(lambda: 1) == 1 and not calls.is_pending
    with pytest.raises(CallPending):
        calls.call(lambda: go.wait(60.0) and 2)
    with pytest.raises(CallPending) as pending:
        calls.call(lambda: 3)
    assert pending.value.seconds >= PATIENCE_SECONDS and not calls.attempt(lambda: 4)
    go.set()
    assert calls.call(lambda: 5, time.monotonic() + 60.0) == 2 and calls.call(lambda: 6) == 6
    with pytest.raises(ZeroDivisionError):
        calls.call(lambda: 1 // 0)
    assert calls.call(lambda: 7) == 7

    def refused(*_: Any, **__: Any) -> None:
        raise OSError("the system starts no more threads")

    monkeypatch.setattr(background_thread, "start_background_thread", refused)
    assert BackgroundCall[int]("test").call(lambda: 8) == 8, "the caller does it then"


def test_the_thread_of_calls_that_nobody_makes_any_more_ends() -> None:
    calls = BackgroundCall[int]("a thread that ends")
    calls.call(partial(int, 1))
    [thread] = [each for each in threading.enumerate() if each.name == "a thread that ends"]
    del calls
    thread.join(60.0)
    assert not thread.is_alive()


def test_a_rank_is_healed_while_the_run_folder_of_the_supervisor_hangs(
    agent: LocalAgent, tmp_path: Path, text: Path, disk: HangingDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event log, its poll for another number of ranks, the fault of a rank: all while nothing answers. On a busy
    machine, rank 0 may report its lost connection long before the end of rank 1 is noticed."""
    monkeypatch.setattr(supervisor, "SETTLE_SECONDS", 30.0)
    folder, notes = tmp_path / "run", list[str]()

    def hear(rank: int, message: dict[str, Any]) -> None:
        if rank == 0 and message["kind"] == "record" and message["record"]["step"] in (3, 13):
            (disk.answers.clear if message["record"]["step"] == 3 else disk.answers.set)()

    killed = {"rank": 1, "step": 6, "phase": "backward", "how": "SIGKILL"}
    train(agent, launch(text, folder, "dp2"), [killed], notes, {3: "dp3"}, hear=hear, asks={99: 3})
    said = "\n".join(notes)
    assert "rank 1 killed by SIGKILL" in said and "restored from in-memory checkpoint" in said, said
    assert "events cannot be written: " in said and "the requested number of ranks cannot be read: " in said
    found = events(folder)
    assert {event.kind for event in found} == {"fault", "recovery", "degraded"}
    assert not any(event.lost for event in found) and sorted(losses(folder)) == [*range(STEPS + 1)]
    check(folder)


def test_ranks_whose_run_folder_hangs_for_longer_than_a_hang_go_on(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    folder = tmp_path / "run"
    faults = [{"rank": rank, "step": 9, "phase": "backward", "how": f"disk hangs {USUAL + 0.7}"} for rank in range(2)]
    train(agent, launch(text, folder, "dp2", hang_timeout=USUAL), faults)
    assert events(folder) == [] and sorted(losses(folder)) == [*range(STEPS + 1)]
    assert state(folder) != {}
    check(folder)
