"""Who leads after whom: as the files of a run folder say, in one process; runs that lose their first node are in tests/ranks/test_nodes.py."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
from pathlib import Path

import pytest

from meshwright.base.errors import Interrupted, MeshwrightError
from meshwright.base.link import TOKEN
from meshwright.cli.nodes import Place, _arrive
from meshwright.cli.succession import LEADER, TURN, Leader, announced, is_heir, is_led_by_another, is_overtaken, leader_of
from meshwright.report.faults import read_events
from meshwright.spec.event import EVENTS
from meshwright.train.lease import Held, Lease, is_held

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


def test_a_first_node_that_is_refused_the_lease_follows_whoever_has_it_and_not_another_launch_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    says = '{"number": 1, "host": "10.0.0.2", "port": 29400}'
    with Lease(tmp_path), announced(tmp_path, node(0), lambda _: None):
        monkeypatch.setattr("meshwright.cli.succession.TURN", 0.0)
        assert not is_overtaken(node(0), tmp_path)
    (tmp_path / LEADER).write_text(says.replace("1,", "0,", 1))  # it was killed; node 1 has the lease, and says so a moment later
    with Lease(tmp_path):
        monkeypatch.setattr("meshwright.cli.succession.TURN", 60.0)
        later = threading.Timer(0.1, (tmp_path / LEADER).write_text, (says,))
        later.start()
        assert is_overtaken(node(0), tmp_path)
        later.join()


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
                _arrive(place, tmp_path, before, {TOKEN: "secret"})
            codes.append(error.value.exit_code)
    assert codes == [Interrupted.exit_code, MeshwrightError.exit_code] == [75, 1]
