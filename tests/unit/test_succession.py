"""Who leads after whom: as the files of a run folder say, in one process; runs that lose their first node are in tests/ranks/test_nodes.py."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.base.errors import InputError, Interrupted, MeshwrightError
from meshwright.base.link import TOKEN, Door, Link
from meshwright.cli.nodes import ARRIVE, Place, _arrive, leading, serve
from meshwright.cli.succession import LEADER, TURN, Leader, announced, is_heir, is_led_by_another, is_overtaken, leader_of
from meshwright.elastic.node import GONE
from meshwright.elastic.refusals import EVERY, Refusals
from meshwright.intake.job import JobFile, read_job
from meshwright.report.faults import read_events
from meshwright.spec.event import EVENTS
from meshwright.train.lease import Held, Lease, holder_of, is_held

FIRST = Leader(0, "10.0.0.1", 29400)


def node(number: int, after: int | None = None) -> Place:
    return Place(number, 4, (2, 2, 2, 2), f"10.0.0.{number + 1}", 29400, after)


def test_the_others_follow_in_order_of_number_once_the_lease_is_free(tmp_path: Path) -> None:
    with Lease(tmp_path):
        assert not any(is_heir(node(number), FIRST, tmp_path, 100.0) for number in (1, 2, 3))
    waits = {number: min(at for at in range(9) if is_heir(node(number), FIRST, tmp_path, at * TURN / 2)) for number in (1, 2, 3)}
    assert waits == {1: 0, 2: 2, 3: 4}
    after_the_second = Leader(1, "10.0.0.2", 29400)
    assert is_heir(node(0), after_the_second, tmp_path, 0.0) and not is_heir(node(2), after_the_second, tmp_path, 0.0)


def test_a_node_is_found_by_the_others_only_while_it_leads(tmp_path: Path) -> None:
    with Lease(tmp_path), announced(tmp_path, node(2, after=0), lambda _: None):
        assert leader_of(tmp_path) == Leader(2, "10.0.0.3", 29400)
        assert os.stat(tmp_path / LEADER).st_mode & 0o777 == 0o600
        assert is_led_by_another(node(0), tmp_path) and not is_led_by_another(node(2), tmp_path)
        with pytest.raises(Held, match="is being trained by process"), Lease(tmp_path):
            pass
    assert leader_of(tmp_path) is None and not is_held(tmp_path)
    [event] = read_events(tmp_path / EVENTS)
    assert (event.kind, event.node, event.decision) == ("lost", "0", "node 2 leads from here on")


def test_what_a_killed_leader_left_or_anything_else_in_its_file_holds_nobody_up(tmp_path: Path) -> None:
    for text in ("", "{}", "[1]", '{"number": 1, "host": "10.0.0.2"}', '{"number": "x", "host": 1, "port": 2}'):
        (tmp_path / LEADER).write_text(text)
        assert leader_of(tmp_path) is None
    (tmp_path / LEADER).write_text('{"number": 1, "host": "10.0.0.2", "port": 29400}')
    assert leader_of(tmp_path) == Leader(1, "10.0.0.2", 29400) and not is_led_by_another(node(0), tmp_path)


def test_a_first_node_that_is_refused_the_lease_follows_whoever_has_it_and_not_another_launch_of_itself(tmp_path: Path) -> None:
    """By the lease alone: whoever took it may write RUN/leader much later."""
    (tmp_path / LEADER).write_text(json.dumps(FIRST._asdict()))  # it was killed
    with Lease(tmp_path, 1):
        assert is_overtaken(node(0), tmp_path) and not is_overtaken(node(1), tmp_path)
    assert is_overtaken(node(0), tmp_path), "who held it is gone: it is joined, or this node leads"


def test_a_node_that_is_refused_the_lease_by_a_run_on_one_machine_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.cli.succession.TURN", 0.05)
    with Lease(tmp_path):
        assert holder_of(tmp_path) is None and not is_overtaken(node(0), tmp_path)
    with Lease(tmp_path, 3):
        assert holder_of(tmp_path) == 3
    assert holder_of(tmp_path) is None


def test_whoever_looks_whether_the_lease_is_held_keeps_nobody_from_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.train.lease.LOOK", 60.0)
    with Lease(tmp_path):
        pass
    look = os.open(tmp_path / "lease", os.O_RDWR)
    fcntl.flock(look, fcntl.LOCK_SH)  # as `is_held` of another process does for a moment
    assert not is_held(tmp_path)
    over = threading.Timer(0.1, os.close, (look,))
    over.start()
    with Lease(tmp_path):
        assert is_held(tmp_path)
    over.join()


def test_a_node_that_waits_in_vain_goes_on_with_the_same_command_where_it_has_had_a_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("meshwright.cli.nodes.ARRIVE", 0.05)
    monkeypatch.setattr("meshwright.cli.nodes.AGAIN", 0.01)
    with Lease(tmp_path), socket.socket() as silent:  # who leads lives and was cut off: nobody else is to lead
        silent.bind(("127.0.0.1", 0))
        lost = Leader(0, *silent.getsockname())
        (tmp_path / LEADER).write_text(json.dumps(lost._asdict()))
        place = node(1)._replace(host=lost.host, port=lost.port)
        codes = []
        for before in (lost, None):
            with pytest.raises(MeshwrightError, match="node 1 found no node that leads") as error:
                _arrive(place, tmp_path, before, "secret")
            codes.append(error.value.exit_code)
    assert codes == [Interrupted.exit_code, MeshwrightError.exit_code] == [75, 1]


class Once:
    """In the place of a node that is led: its leader is gone when `codes` says so."""

    codes: list[tuple[int, str]] = []  # noqa: RUF012

    def __init__(self, link: Link, host: str, token: str, number: int, environment: dict[str, str], warm: object = None) -> None:
        self.link, self.leaving = link, ""
        self.nursery = SimpleNamespace(ended=True)

    def run(self) -> tuple[int, str]:
        self.link.close()
        return self.codes.pop(0)


def job_of(folder: Path) -> JobFile:
    return read_job(None, (), {"model.name": "gpt2-tiny", "run.folder": str(folder)})


def test_a_node_that_was_led_and_lost_the_race_for_the_lease_takes_the_token_of_the_new_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It went on with the token of the leader that was killed, and both nodes waited for 300 s in silence."""
    monkeypatch.delenv(TOKEN, raising=False)
    monkeypatch.setattr("meshwright.elastic.node.Node", Once)
    monkeypatch.setattr("meshwright.cli.nodes.ARRIVE", 20.0)
    Once.codes = [GONE, (0, "")]
    came: list[str] = []

    def door(token: str) -> Door:
        found = Door("127.0.0.1", 0, token, {}, lambda end, hello: (came.append(token), end.close())[0])
        (tmp_path / LEADER).write_text(json.dumps(Leader(0, found.host, found.port)._asdict()))
        (tmp_path / "token").write_text(token)
        return found

    first = door("first")
    place = node(1)._replace(host="127.0.0.1", port=first.port)
    heir = serve(place, job_of(tmp_path), lambda line: None)
    first.close()
    assert isinstance(heir, Place) and (heir.after, heir.token) == (0, "first") and TOKEN not in os.environ
    with Lease(tmp_path, 0):  # the first node was started again, and was faster
        second = door("second")
        assert serve(heir, job_of(tmp_path), lambda line: None, leader_of(tmp_path)) == 0
    second.close()
    assert came == ["first", "second"]


def test_a_leader_writes_the_token_that_it_uses_over_the_one_of_a_leader_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN, raising=False)
    made: list[str] = []

    def fleet(logs: Path, warm: object, host: str, port: int, token: str, devices: int, before: object) -> SimpleNamespace:
        made.append(token)
        return SimpleNamespace(end=lambda code, line: None, dissolve=lambda: None)

    monkeypatch.setattr("meshwright.elastic.fleet.Fleet", fleet)
    monkeypatch.setattr("meshwright.cli.nodes._await", lambda *_: None)
    (tmp_path / "token").write_text("of a leader that nobody ever reached")
    for place in (node(1)._replace(token="known"), node(0)):
        place = place._replace(host="127.0.0.1")
        with leading(place, SimpleNamespace(folder=tmp_path, logs=tmp_path / "logs", warm=()), lambda line: None, None):  # type: ignore[arg-type]
            assert (tmp_path / "token").read_text() == made[-1]
            assert os.stat(tmp_path / "token").st_mode & 0o777 == 0o600
    assert made[0] == "known" and len(made[1]) == 64


def test_a_node_with_a_wrong_token_ends_at_once_with_one_line_and_the_leader_says_one(tmp_path: Path) -> None:
    said: list[str] = []
    refused = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        refused.set()

    door = Door("127.0.0.1", 0, "right", {}, lambda end, hello: None, Refusals(say))
    place = node(1)._replace(host=door.host, port=door.port)
    began = time.monotonic()
    for _ in range(5):
        with pytest.raises(InputError, match=r"node 1: 127.0.0.1:\d+ has another token: give all nodes of a run the same MESHWRIGHT_TOKEN"):
            _arrive(place, tmp_path, None, "wrong")
    assert time.monotonic() - began < ARRIVE / 2 and refused.wait(60)
    door.close()
    [line] = said
    assert line.startswith("a node at 127.0.0.1 has another token and was refused (1 since the last such line): start that node with")


def test_a_node_that_finds_nobody_says_so_every_few_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.cli.nodes.ARRIVE", 1.0)
    monkeypatch.setattr("meshwright.cli.nodes.EVERY", 0.2)
    said: list[str] = []
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        with pytest.raises(MeshwrightError):
            _arrive(node(1)._replace(host="127.0.0.1", port=silent.getsockname()[1]), tmp_path, None, "secret", said.append)
    assert said and all(line.startswith("node 1 has found no node that leads for ") and "refused" in line for line in said)


def test_refused_connections_are_said_once_a_minute_for_each_reason_with_their_number() -> None:
    now, said = [0.0], list[str]()
    refusals = Refusals(said.append, lambda: now[0])
    for at in range(2 * round(EVERY)):
        now[0] = float(at)
        refusals("too many connections", "10.0.0.9")
        refusals("another token", "10.0.0.3")
    assert len(said) == 4
    assert said[2] == "connections refused at the port for nodes: 60, the last one from 10.0.0.9: too many connections"
    assert said[3].startswith("a node at 10.0.0.3 has another token and was refused (60 since the last such line): start that node")
