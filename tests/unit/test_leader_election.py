"""Who leads after whom: as the files of a run folder say, in one process; runs that lose their first node are in
tests/ranks/test_nodes.py."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.cli.leader_file import LEADER_FILE, LeaderAddress, read_leader, read_run_id, retry_storage
from meshwright.cli.leader_role import lead_nodes
from meshwright.cli.node_role import (
    JOIN_SECONDS,
    TOKEN_FILE,
    TURN_SECONDS,
    NodeRole,
    _join_leader,
    announce_leader,
    has_lost_election,
    has_other_leader,
    is_next_leader,
    serve_leader,
)
from meshwright.core import storage
from meshwright.core.errors import InputError, Interrupted, MeshwrightError
from meshwright.core.secure_channel import TOKEN_VARIABLE, SecureChannel, SecureListener
from meshwright.elastic.cluster_agent import REFUSAL_LOG_SECONDS, RefusalLog
from meshwright.elastic.node import LEADER_LOST_EXIT
from meshwright.elastic.snapshot_inventory import RetainedSnapshots
from meshwright.planner.inputs.job import JobFile, read_job
from meshwright.report.faults import read_events
from meshwright.spec.record import EVENTS_FILE_NAME
from meshwright.train.run_lock import LOCK_FILE, RunLock, RunLocked, is_locked, locking_node

FIRST = LeaderAddress(0, "10.0.0.1", 29400)


def node(number: int, after: int | None = None) -> NodeRole:
    return NodeRole(number, 4, (2, 2, 2, 2), f"10.0.0.{number + 1}", 29400, after)


def test_the_others_follow_in_order_of_number_once_the_lease_is_free(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        assert not any(is_next_leader(node(number), FIRST, tmp_path, 100.0) for number in (1, 2, 3))
    waits = {
        number: min(at for at in range(9) if is_next_leader(node(number), FIRST, tmp_path, at * TURN_SECONDS / 2))
        for number in (1, 2, 3)
    }
    assert waits == {1: 0, 2: 2, 3: 4}
    after_the_second = LeaderAddress(1, "10.0.0.2", 29400)
    assert is_next_leader(node(0), after_the_second, tmp_path, 0.0) and not is_next_leader(
        node(2), after_the_second, tmp_path, 0.0
    )


def test_a_node_is_found_by_the_others_only_while_it_leads(tmp_path: Path) -> None:
    with RunLock(tmp_path), announce_leader(tmp_path, node(2, after=0), lambda _: None):
        assert read_leader(tmp_path) == LeaderAddress(2, "10.0.0.3", 29400)
        assert os.stat(tmp_path / LEADER_FILE).st_mode & 0o777 == 0o600
        assert has_other_leader(node(0), tmp_path) and not has_other_leader(node(2), tmp_path)
        with pytest.raises(RunLocked, match="is being trained by process"), RunLock(tmp_path):
            pass
    assert read_leader(tmp_path) is None and not is_locked(tmp_path)
    [event] = read_events(tmp_path / EVENTS_FILE_NAME)
    assert (event.kind, event.node, event.decision) == ("node_lost", "0", "node 2 leads from here on")


def test_leaders_of_one_run_pass_its_id_on_and_a_run_that_ended_has_none(tmp_path: Path) -> None:
    """So a node never adopts snapshots of another run in the same folder."""
    killed = [announce_leader(tmp_path, node(number, after=number or None), lambda _: None) for number in (0, 1)]
    ids = [each.__enter__() for each in killed]  # a leader that is killed removes nothing
    text = (tmp_path / LEADER_FILE).read_text()
    with announce_leader(tmp_path, node(2, after=1), lambda _: None) as third:
        assert [*ids, third] == [third] * 3 and len(third) == 16
    (tmp_path / LEADER_FILE).write_text(text.replace(third, "../" + third))
    assert read_run_id(tmp_path) == ""
    (tmp_path / LEADER_FILE).unlink()
    with announce_leader(tmp_path, node(0), lambda _: None) as fresh:
        assert fresh != third
    with announce_leader(tmp_path, None, lambda _: None) as alone:
        assert alone == ""


def test_what_a_killed_leader_left_or_anything_else_in_its_file_holds_nobody_up(tmp_path: Path) -> None:
    for text in ("", "{}", "[1]", '{"number": 1, "host": "10.0.0.2"}', '{"number": "x", "host": 1, "port": 2}'):
        (tmp_path / LEADER_FILE).write_text(text)
        assert read_leader(tmp_path) is None
    (tmp_path / LEADER_FILE).write_text('{"number": 1, "host": "10.0.0.2", "port": 29400}')
    assert read_leader(tmp_path) == LeaderAddress(1, "10.0.0.2", 29400) and not has_other_leader(node(0), tmp_path)


def test_a_first_node_without_the_lease_follows_the_holder_not_its_own_relaunch(
    tmp_path: Path,
) -> None:
    """By the lease alone: whoever took it may write RUN/leader much later."""
    (tmp_path / LEADER_FILE).write_text(json.dumps(FIRST._asdict()))  # it was killed
    with RunLock(tmp_path, 1):
        assert has_lost_election(node(0), tmp_path) and not has_lost_election(node(1), tmp_path)
    assert has_lost_election(node(0), tmp_path), "who held it is gone: it is joined, or this node leads"


def test_a_node_that_is_refused_the_lease_by_a_run_on_one_machine_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.cli.node_role.TURN_SECONDS", 0.05)
    with RunLock(tmp_path):
        assert locking_node(tmp_path) is None and not has_lost_election(node(0), tmp_path)
    with RunLock(tmp_path, 3):
        assert locking_node(tmp_path) == 3
    assert locking_node(tmp_path) is None


def test_whoever_looks_whether_the_lease_is_held_keeps_nobody_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.train.run_lock.LOCK_TIMEOUT_SECONDS", 60.0)
    with RunLock(tmp_path):
        pass
    look = os.open(tmp_path / "lease", os.O_RDWR)
    fcntl.flock(look, fcntl.LOCK_SH)  # as `is_locked` of another process does for a moment
    assert not is_locked(tmp_path)
    over = threading.Timer(0.1, os.close, (look,))
    over.start()
    with RunLock(tmp_path):
        assert is_locked(tmp_path)
    over.join()


def test_a_node_without_a_leader_continues_with_the_same_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.cli.node_role.JOIN_SECONDS", 0.05)
    monkeypatch.setattr("meshwright.cli.node_role.RETRY_SECONDS", 0.01)
    with RunLock(tmp_path), socket.socket() as silent:  # who leads lives and was cut off: nobody else is to lead
        silent.bind(("127.0.0.1", 0))
        lost = LeaderAddress(0, *silent.getsockname())
        (tmp_path / LEADER_FILE).write_text(json.dumps(lost._asdict()))
        place = node(1)._replace(host=lost.host, port=lost.port)
        codes = []
        for before in (lost, None):
            with pytest.raises(MeshwrightError, match="node 1 found no leader") as error:
                _join_leader(place, tmp_path, before, "secret")
            codes.append(error.value.exit_code)
    assert codes == [Interrupted.exit_code, MeshwrightError.exit_code] == [75, 1]


class Once:
    """In the place of a node that is led: its leader is gone when `codes` says so."""

    codes: list[tuple[int, str]] = []  # noqa: RUF012

    def __init__(
        self, link: SecureChannel, host: str, token: str, number: int, environment: dict[str, str], warm: object = None
    ) -> None:
        self.link, self.leaving = link, ""
        self.agent = SimpleNamespace(ended=True)
        self.retained: Any = None
        """Passed on from one leader to the next, and to this node when it leads."""

    def run(self) -> tuple[int, str]:
        self.link.close()
        self.retained = self.retained or RetainedSnapshots({}, "job", 0.0)
        return self.codes.pop(0)


def job_of(folder: Path) -> JobFile:
    return read_job(None, (), {"model.name": "gpt2-tiny", "run.folder": str(folder)})


def test_a_node_that_lost_the_election_takes_the_token_of_the_new_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on with the token of the leader that was killed, and both nodes waited for 300 s in silence."""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setattr("meshwright.elastic.node.NodeAgent", Once)
    monkeypatch.setattr("meshwright.cli.node_role.JOIN_SECONDS", 20.0)
    Once.codes = [LEADER_LOST_EXIT, (0, "")]
    came: list[str] = []

    def door(token: str) -> SecureListener:
        found = SecureListener("127.0.0.1", 0, token, {}, lambda end, hello: (came.append(token), end.close())[0])
        (tmp_path / LEADER_FILE).write_text(json.dumps(LeaderAddress(0, found.host, found.port)._asdict()))
        (tmp_path / "token").write_text(token)
        return found

    first = door("first")
    place = node(1)._replace(host="127.0.0.1", port=first.port)
    heir = serve_leader(place, job_of(tmp_path), lambda line: None)
    first.close()
    assert isinstance(heir, NodeRole) and (heir.after, heir.token) == (0, "first") and TOKEN_VARIABLE not in os.environ
    assert heir.retained is not None and heir.retained.job == "job"
    with RunLock(tmp_path, 0):  # the first node was started again, and was faster
        second = door("second")
        assert serve_leader(heir, job_of(tmp_path), lambda line: None, read_leader(tmp_path)) == 0
    second.close()
    assert came == ["first", "second"]


def test_a_leader_overwrites_the_token_of_a_killed_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    made: list[str] = []

    def fleet(
        logs: Path, warm: object, host: str, port: int, token: str, devices: int, before: object, nodes: int
    ) -> SimpleNamespace:
        made.append(token)
        return SimpleNamespace(end=lambda code, line: None, dissolve=lambda: None)

    monkeypatch.setattr("meshwright.elastic.cluster_agent.ClusterAgent", fleet)
    monkeypatch.setattr("meshwright.cli.leader_role.await_nodes", lambda *_: None)
    (tmp_path / "token").write_text("of a leader that nobody ever reached")
    for place in (node(1)._replace(token="known"), node(0)):
        place = place._replace(host="127.0.0.1")
        with lead_nodes(
            place, SimpleNamespace(folder=tmp_path, logs=tmp_path / "logs", warm=()), lambda line: None, None
        ):  # type: ignore[arg-type]
            assert (tmp_path / "token").read_text() == made[-1]
            assert os.stat(tmp_path / "token").st_mode & 0o777 == 0o600
    assert made[0] == "known" and len(made[1]) == 64


def test_a_node_with_a_wrong_token_ends_with_one_line_on_both_sides(tmp_path: Path) -> None:
    said: list[str] = []
    refused = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        refused.set()

    door = SecureListener("127.0.0.1", 0, "right", {}, lambda end, hello: None, RefusalLog(say))
    place = node(1)._replace(host=door.host, port=door.port)
    began = time.monotonic()
    for _ in range(5):
        with pytest.raises(
            InputError,
            match=r"node 1: 127.0.0.1:\d+ has another token: give all nodes of a run the same MESHWRIGHT_TOKEN",
        ):
            _join_leader(place, tmp_path, None, "wrong")
    assert time.monotonic() - began < JOIN_SECONDS / 2 and refused.wait(60)
    door.close()
    [line] = said
    assert line.startswith(
        "a node at 127.0.0.1 was refused, because its token differs (1 since the last such line): start that node with"
    )


def test_a_node_that_finds_nobody_says_so_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.cli.node_role.JOIN_SECONDS", 1.0)
    monkeypatch.setattr("meshwright.cli.node_role.STATUS_SECONDS", 0.2)
    said: list[str] = []
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(MeshwrightError):
            _join_leader(
                node(1)._replace(host="127.0.0.1", port=silent.getsockname()[1]), tmp_path, None, "secret", said.append
            )
    assert said and all(line.startswith("node 1 has found no leader for ") and "refused" in line for line in said)


def test_refused_connections_are_reported_once_a_minute_by_reason_and_count() -> None:
    now, said = [0.0], list[str]()
    refusals = RefusalLog(said.append, lambda: now[0])
    for at in range(2 * round(REFUSAL_LOG_SECONDS)):
        now[0] = float(at)
        refusals("too many connections", "10.0.0.9")
        refusals("another token", "10.0.0.3")
    assert len(said) == 4
    assert said[2] == "connections refused at the port for nodes: 60, the last one from 10.0.0.9: too many connections"
    assert said[3].startswith(
        "a node at 10.0.0.3 was refused, because its token differs (60 since the last such line): start that node"
    )


def failing_reads(monkeypatch: pytest.MonkeyPatch, name: str, number: int, times: int) -> list[int]:
    """Lets the next `times` operations on the file `name` fail; returns the failures so far."""
    failed: list[int] = []

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *arguments: Any, **options: Any) -> Any:
            if path.name == name and len(failed) < times:
                failed.append(number)
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *arguments, **options)

        return call

    for operation in ("read_file", "open_for_update"):
        monkeypatch.setattr(storage, operation, failing(getattr(storage, operation)))
    return failed


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE], ids=errno.errorcode.get)
@pytest.mark.parametrize("name", [LEADER_FILE, LOCK_FILE])
def test_a_file_of_the_election_that_cannot_be_read_for_a_while_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """One ESTALE while the leader's file was replaced ended the node with exit 75, or made it lead beside another."""
    monkeypatch.setattr("meshwright.cli.node_role.RETRY_SECONDS", 0.01)
    with RunLock(tmp_path, 0), socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        lost = LeaderAddress(0, *silent.getsockname())
        (tmp_path / LEADER_FILE).write_text(json.dumps(lost._asdict()))
        came: list[str] = []
        door = SecureListener(
            "127.0.0.1", 0, "secret", {}, lambda end, hello: (came.append(hello["name"]), end.close())[0]
        )
        failed = failing_reads(monkeypatch, name, number, 5)
        heir = json.dumps(LeaderAddress(2, door.host, door.port)._asdict())
        later = threading.Timer(0.3, storage.replace_file, (tmp_path / LEADER_FILE, heir))
        later.start()
        found = _join_leader(node(1)._replace(host="127.0.0.1"), tmp_path, lost, "secret")
        assert found is not None and found[3] == (door.host, door.port) and len(failed) == 5
        found[0].close()
        later.join()
        door.close()


def test_a_run_folder_that_cannot_be_read_is_asked_again_with_a_line_and_a_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.cli.leader_file.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("meshwright.cli.leader_file.STORAGE_RETRY_SECONDS", 0.2)
    (tmp_path / LEADER_FILE).write_text(json.dumps(FIRST._asdict()))
    said: list[str] = []
    failing_reads(monkeypatch, LEADER_FILE, errno.EIO, 3)
    assert retry_storage(lambda: read_leader(tmp_path), said.append) == FIRST
    assert len(said) == 1 and said[0].startswith(f"{tmp_path / LEADER_FILE}: Input/output error (EIO); ")
    failing_reads(monkeypatch, LEADER_FILE, errno.EIO, 10**6)
    with pytest.raises(storage.StorageFailed, match="Input/output error"):
        retry_storage(lambda: read_leader(tmp_path), said.append)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.ENOLCK], ids=errno.errorcode.get)
def test_a_lock_of_which_the_file_system_says_nothing_is_not_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    with RunLock(tmp_path):

        def refused(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("meshwright.train.run_lock.fcntl.flock", refused)
        with pytest.raises(storage.StorageFailed, match=str(tmp_path / LOCK_FILE)):
            is_locked(tmp_path)
        with pytest.raises(storage.StorageFailed, match=str(tmp_path / LOCK_FILE)), RunLock(tmp_path):
            pass


def test_a_lock_and_an_announcement_that_cannot_be_removed_fail_no_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    with RunLock(tmp_path), announce_leader(tmp_path, node(2), said.append):

        def stale(*_: Any) -> None:
            raise OSError(errno.ESTALE, "Stale file handle")

        for name in ("ftruncate", "close", "unlink", "lstat"):
            monkeypatch.setattr(storage.os, name, stale)
    monkeypatch.undo()
    assert said == [
        f"{tmp_path / LEADER_FILE}: Stale file handle (ESTALE); "
        "the network file system has lost the file: mount it anew"
    ]


def odd_file(path: Path, kind: str) -> None:
    """Puts something else in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "/dev/zero":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes(b"\xff\xfe")


@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/zero", "bytes"])
@pytest.mark.parametrize("name", [LEADER_FILE, TOKEN_FILE, LOCK_FILE])
def test_what_stands_in_place_of_an_election_file_is_one_line_and_hangs_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """A pipe hung the node in silence, and a byte 0xff in the token was a fault of its own."""
    monkeypatch.setattr("meshwright.cli.node_role.JOIN_SECONDS", 0.5)
    monkeypatch.setattr("meshwright.cli.node_role.STATUS_SECONDS", 0.05)
    monkeypatch.setattr("meshwright.cli.node_role.RETRY_SECONDS", 0.01)
    lost = LeaderAddress(0, "127.0.0.1", 1) if name != TOKEN_FILE else None
    (tmp_path / LEADER_FILE).write_text(json.dumps(FIRST._asdict() if lost is None else lost._asdict()))
    odd_file(tmp_path / name, kind)
    said: list[str] = []
    ends: list[MeshwrightError | None] = []

    def joins() -> None:
        try:
            _join_leader(node(1)._replace(host="127.0.0.1", port=1), tmp_path, lost, "", said.append)
            ends.append(None)
        except MeshwrightError as error:
            ends.append(error)

    one = threading.Thread(target=joins, daemon=True)
    one.start()
    one.join(30)
    [end] = ends  # it hung
    if kind == "bytes" and name != TOKEN_FILE:  # a leader that is named by no file, a lock that nobody has
        assert end is None or end.exit_code == Interrupted.exit_code
        return
    assert end is not None and end.exit_code == (MeshwrightError if lost is None else Interrupted).exit_code
    assert str(tmp_path / name) in str(end) and "move it away" in str(end) and "\n" not in str(end) and said
    with pytest.raises(storage.StorageFailed, match=str(tmp_path / name)) if name == LOCK_FILE else nullcontext():
        is_locked(tmp_path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "/dev/zero", "bytes"])
def test_a_leader_writes_its_files_anew_whatever_stands_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    fleet = SimpleNamespace(end=lambda code, line: None, dissolve=lambda: None)
    monkeypatch.setattr("meshwright.elastic.cluster_agent.ClusterAgent", lambda *_: fleet)
    monkeypatch.setattr("meshwright.cli.leader_role.await_nodes", lambda *_: None)
    work = SimpleNamespace(folder=tmp_path, logs=tmp_path / "logs", warm=())
    odd_file(tmp_path / LEADER_FILE, kind)
    odd_file(tmp_path / TOKEN_FILE, kind)
    place = node(0)._replace(host="127.0.0.1")
    blocks = (
        (LEADER_FILE, lambda: announce_leader(tmp_path, place, lambda _: None)),
        (TOKEN_FILE, lambda: lead_nodes(place, work, lambda _: None, None)),  # type: ignore[arg-type]
    )
    for name, block in blocks:
        with pytest.raises(storage.StorageFailed) if kind == "folder" else nullcontext() as refused, block():
            assert stat.S_ISREG(os.lstat(tmp_path / name).st_mode)
        if kind == "folder":
            assert str(refused.value) == f"{tmp_path / name}: Is a directory (EISDIR); move it away, then start again"  # type: ignore[union-attr]
    assert Path("/dev/zero").is_char_device()
