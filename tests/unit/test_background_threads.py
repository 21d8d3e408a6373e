"""No thread that helps a process ends in silence, and none waits for ever: what it meets is a line and an event,
and the work begins again."""

from __future__ import annotations

import ast
import json
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import meshwright
from meshwright.core import background_thread, snapshots
from meshwright.core.background_thread import start_background_thread
from meshwright.core.ipc import HeartbeatField
from meshwright.core.secure_channel import SecureChannel, SecureListener
from meshwright.elastic.event_log import EventLog
from meshwright.elastic.local_agent import run_periodically
from meshwright.elastic.shared_files import SharedFileStore, SnapshotLocations
from meshwright.elastic.snapshot_replication import (
    RETRY_SECONDS,
    ROUND_TIMEOUT_SECONDS,
    ReplicationCoordinator,
    ReplicationRequest,
    SnapshotReplicator,
    SnapshotServer,
)
from meshwright.report.faults import fault_rows, read_events
from meshwright.spec.record import EVENTS_FILE_NAME

ALLOWED = {"core/background_thread.py"}


def test_one_function_that_reports_failures_starts_every_background_thread() -> None:
    root, found = Path(meshwright.__file__).parent, set[str]()
    for package in ("core", "elastic", "train", "checkpoint", "cli", "report"):
        for source in (root / package).rglob("*.py"):
            for node in ast.walk(ast.parse(source.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("threading.Thread", "Thread"):
                    found.add(str(source.relative_to(root)))
    assert found == ALLOWED


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_thread, "RESTART_SECONDS", 0.01)


@pytest.mark.usefixtures("fast")
@pytest.mark.parametrize(
    "error", [KeyError("size"), RuntimeError("two\nlines"), SystemExit(3), MemoryError()], ids=repr
)
def test_whatever_a_background_thread_raises_is_one_line_and_its_work_begins_again(error: BaseException) -> None:
    said, done, calls = list[str](), threading.Event(), [0]

    def work() -> None:
        calls[0] += 1
        if calls[0] < 4:
            raise error
        done.set()

    thread = start_background_thread("mirror", work, said.append)
    assert done.wait(60)
    thread.join(60)
    [line] = said
    assert line.startswith(f"the background thread 'mirror' failed: {type(error).__name__}") and "\n" not in line
    assert "(test_background_threads.py:" in line and not thread.is_alive()


@pytest.mark.usefixtures("fast")
def test_a_report_that_fails_too_ends_no_background_thread() -> None:
    done, calls = threading.Event(), [0]

    def work() -> None:
        calls[0] += 1
        if calls[0] == 1:
            raise ValueError
        done.set()

    def gone(line: str) -> None:
        raise BrokenPipeError(line)

    start_background_thread("alive", work, gone)
    assert done.wait(60)


def test_a_system_without_threads_refuses_them_as_any_other_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(OSError, match="the system starts no more threads"):
        start_background_thread("lender", lambda: None, lambda line: None)


@pytest.mark.usefixtures("fast")
def test_keepalives_go_on_after_one_that_failed() -> None:
    said, over, calls = queue.Queue[str](), threading.Event(), queue.Queue[int]()

    def do() -> None:
        calls.put(1)
        if calls.qsize() == 1:
            raise KeyError("a node that has just left")

    run_periodically(do, 0.01, over, said.put)
    assert "the background thread 'alive' failed: KeyError" in said.get(timeout=60)
    end = time.monotonic() + 60
    while calls.qsize() < 5 and time.monotonic() < end:
        time.sleep(0.01)
    over.set()
    assert calls.qsize() >= 5


def memory() -> int:
    return os.memfd_create("copies")


@pytest.fixture
def doors() -> Iterator[Callable[..., SecureListener]]:
    """Listeners of this test; each serves an admitted connection with `serve`."""
    made: list[SecureListener] = []

    def door(serve: Callable[[socket.socket], None]) -> SecureListener:
        def enter(end: socket.socket, _: Any) -> None:
            threading.Thread(target=serve, args=(end,), daemon=True).start()

        made.append(SecureListener("127.0.0.1", 0, "secret", {}, enter))
        return made[-1]

    yield door
    for end in (*made, *HELD):
        end.close()
    HELD.clear()


def answers(line: bytes) -> Callable[[socket.socket], None]:
    def serve(end: socket.socket) -> None:
        with end:
            end.recv(4096)
            end.sendall(line)

    return serve


HELD: list[socket.socket] = []
FAULTS: dict[str, tuple[Callable[[socket.socket], None], str]] = {
    "silent": (HELD.append, "TimeoutError"),
    "gone": (lambda end: end.close(), ""),
    "another answer": (answers(b'{"whole":1}\n'), "KeyError"),
    "no JSON": (answers(b"[1]\n"), "ValueError"),
    "half an answer": (answers(b'{"size":4096,"whole":4096}\n12345'), ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lender_that_falls_silent_ends_one_round_and_the_next_goes_on(
    doors: Callable[..., SecureListener], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A machine without power blocked the thread for good: no round ever began again, with no line and no event."""
    monkeypatch.setattr(snapshots, "SNAPSHOT_TIMEOUT_SECONDS", 0.3)
    done = queue.Queue[tuple[int, bool, float, str]]()
    serve, words = FAULTS[fault]
    lender = doors(serve)
    mirror = SnapshotReplicator("secret", lambda *how: done.put(how))
    mirror.order(ReplicationRequest(0, "key", 1, f"127.0.0.1:{lender.port}", {0: memory()}))
    number, whole, _, why = done.get(timeout=60)
    assert (number, whole) == (0, False) and why.startswith(f"127.0.0.1:{lender.port}: ") and words in why
    other = SnapshotServer("127.0.0.1", "secret", lambda key, rank: None)
    mirror.order(ReplicationRequest(1, "key", 2, other.address, {0: memory()}))
    mirror.order(ReplicationRequest(2, "key", 2, f"127.0.0.1:{lender.port}", {0: memory()}))
    assert done.get(timeout=60)[:2] == (2, False)
    mirror.close()
    other.close()


class Rounds:
    """One other node whose mirrors are answered by the test, in virtual time."""

    def __init__(self) -> None:
        self.now, self.files, self.orders = 0.0, SharedFileStore(2), list[ReplicationRequest]()
        self.name, self.lender, self.ranks = "b", "10.0.0.2:1", {1: 0}
        self.coordinator = ReplicationCoordinator(
            "10.0.0.1:1", SnapshotLocations(), self, lambda *_, **__: None, lambda: self.now
        )  # type: ignore[arg-type]
        self.coordinator.begin(self.files)

    def order(self, order: ReplicationRequest) -> None:
        for file in order.files.values():
            os.close(file)
        self.orders.append(order)

    def look(self, step: int) -> list[dict[str, Any]]:
        for rank in range(2):
            self.files.pulse(rank).write(HeartbeatField.snapshot_step, step)
        self.coordinator.look([self], 1)
        return self.coordinator.take_reports()

    def answer(self, whole: bool, why: str = "") -> list[dict[str, Any]]:
        self.coordinator.heard({"number": self.orders[-1].number, "whole": whole, "seconds": 0.0, "why": why})
        return self.coordinator.take_reports()


def test_rounds_that_fail_are_said_once_with_what_a_lost_node_costs_and_go_on() -> None:
    rounds = Rounds()
    assert not rounds.look(3) and not rounds.answer(True)
    rounds.look(4)
    [said] = rounds.answer(False, "10.0.0.2:1: TimeoutError: timed out")
    assert said["event"] == "degraded" and said["line"] == (
        "snapshots are not mirrored: a lost node now costs the steps since step 3 (10.0.0.2:1: TimeoutError: timed out)"
    )
    assert said["decision"] == "tried again"
    rounds.look(5)
    assert len(rounds.orders) == 2, "not before a second has passed"
    for step in (6, 7):
        rounds.now += RETRY_SECONDS
        rounds.look(step)
        assert not rounds.answer(False, "10.0.0.2:1: ConnectionRefusedError: refused"), "said before"
    rounds.now += RETRY_SECONDS
    rounds.look(8)
    assert rounds.orders[-1].step == 8, "a lost connection is no reason to order further ahead"
    [said] = rounds.answer(True)
    assert said == {"event": "notice", "line": "snapshots are mirrored again, at step 8"}
    rounds.files.close()


def test_a_round_that_nobody_answers_is_given_up_after_a_time() -> None:
    rounds = Rounds()
    rounds.look(3)
    for _ in range(int(ROUND_TIMEOUT_SECONDS)):
        rounds.now += 1.0
        assert not rounds.look(4) and len(rounds.orders) == 1
    rounds.now += 1.5
    [said] = rounds.look(5)
    assert "not done after 600 s" in said["line"] and "since the last checkpoint" in said["line"]
    rounds.now += RETRY_SECONDS
    rounds.look(6)
    assert rounds.orders[-1].step == 6
    rounds.files.close()


def test_a_helper_that_fails_is_an_event_a_line_and_a_row_of_the_report(tmp_path: Path) -> None:
    said: list[str] = []
    log = EventLog(tmp_path, said.append)
    line = "snapshots are not mirrored: a lost node now costs the steps since step 3 (no route)"
    event = {"event": "degraded", "line": line, "decision": "tried again", "name": "b"}
    assert not log.heed_node(event), "no device has come or gone"
    log.degraded("the background thread 'inbox' failed: KeyError", rank=1)
    assert said == [f"{line}; tried again", "rank 1: the background thread 'inbox' failed: KeyError"]
    events = read_events(tmp_path / EVENTS_FILE_NAME)
    assert [(event.kind, event.rank, event.decision) for event in events] == [
        ("degraded", None, "tried again"),
        ("degraded", 1, ""),
    ]
    causes = ["snapshots are not mirrored", "the background thread 'inbox' failed"]
    assert [row.cause for row in fault_rows(events)] == causes
    assert json.loads((tmp_path / EVENTS_FILE_NAME).read_text().splitlines()[0])["kind"] == "degraded"


def test_a_line_that_was_cut_is_the_last_one_of_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next line was glued to it: the node that read again took both for one that it did not understand."""
    monkeypatch.setattr("meshwright.core.secure_channel.SEND_TIMEOUT_SECONDS", 0.05)
    with socket.create_server(("127.0.0.1", 0)) as door:
        end = socket.create_connection(door.getsockname())
        other, _ = door.accept()
    channel = SecureChannel(end, {})
    with pytest.raises(TimeoutError):
        channel.write(b"x" * 2**26)
    with pytest.raises(OSError, match="pipe"):
        channel.send({"do": "alive"})
    assert channel.read()[1]
    for each in (end, other):
        each.close()
