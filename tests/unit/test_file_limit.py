"""The limit of open files is raised where the system allows it, and else said in one line with the number that is
needed."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.core.cgroup_limits import raise_soft_file_limit
from meshwright.core.connection_listener import ConnectionListener, InboundConnection
from meshwright.core.ipc import HeartbeatField, wait_readable, wait_writable
from meshwright.elastic.attempt import Attempt, RankJob
from meshwright.elastic.local_agent import LocalAgent, ReadinessPoller
from meshwright.elastic.shared_files import SharedFileStore, SnapshotLocations
from meshwright.elastic.snapshot_replication import ReplicationCoordinator, ReplicationRequest

CHECK = """
import resource, sys
from meshwright.core.cgroup_limits import raise_open_file_limit
soft, hard, ranks, *nodes = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
try:
    raise_open_file_limit(ranks, *nodes)
except ValueError as error:
    print(error)
else:
    print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "found"), [(64, 1024, 4, "1024"), (64, 80, 4, "80"), (500, 500, 100, "500")]
)
def test_the_limit_is_raised_as_far_as_it_may_be(soft: int, hard: int, ranks: int, found: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(soft), str(hard), str(ranks)], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{found}\n"


@pytest.mark.parametrize(
    ("before", "wanted", "after"),
    [
        ((1024, resource.RLIM_INFINITY), 1 << 20, (1 << 20, resource.RLIM_INFINITY)),
        ((1024, 4096), 1 << 20, (4096, 4096)),
    ],
)
def test_an_unlimited_hard_limit_lets_the_soft_one_rise_to_what_is_wanted(
    monkeypatch: pytest.MonkeyPatch, before: tuple[int, int], wanted: int, after: tuple[int, int]
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: before)
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: made.append(limits))
    assert raise_soft_file_limit(wanted) == after[0]
    assert made == [after]


def test_a_limit_below_what_ranks_need_is_one_line_with_both_numbers() -> None:
    done = subprocess.run([sys.executable, "-c", CHECK, "64", "200", "64"], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert "may open 200 files here, but 64 ranks need 320: raise the limit (`ulimit -n 320`" in done.stdout


def test_training_under_a_limit_that_is_too_low_ends_before_any_rank_is_started(tmp_path: Path) -> None:
    command = (
        f"ulimit -n 60; exec {sys.executable} -m meshwright train --model llama-tiny --cluster local:2 --steps 1 "
        f"--folder {tmp_path}/run"
    )
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "meshwright: a process may open 60 files here, but 2 ranks need 72: raise the limit"
    )


def test_the_connection_to_each_node_counts_and_each_of_them_is_admitted(tmp_path: Path) -> None:
    """With 1,024 files the listener refused nodes above 512, and nothing said so at the start."""
    for nodes, words in ((900, "1024"), (1000, "2 ranks and 1,000 other nodes need 1,072")):
        command = [sys.executable, "-c", CHECK, "1024", "1024", "2", str(nodes)]
        assert words in subprocess.run(command, capture_output=True, text=True, check=True).stdout
    with socket.create_server(("127.0.0.1", 0)) as end:
        listener = ConnectionListener(end, InboundConnection, expected=900)
        assert listener.most >= 900
        listener.close()


@contextmanager
def no_files_left() -> Iterator[None]:
    """This process can open no file while the block runs."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    os.close(lowest := os.open(os.devnull, os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))  # not 0: poll refuses more descriptors than the limit
    try:
        with pytest.raises(OSError, match="Too many open files"):
            os.open(os.devnull, os.O_RDONLY)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_supervisor_waits_and_speaks_without_another_file() -> None:
    """Each wait of a leader and of a node opened a selector, so that a limit ended all ranks."""
    ours, theirs = socket.socketpair()
    poller = ReadinessPoller()
    poller.add(ours.fileno(), "peer")
    with no_files_left():
        assert poller.wait(0.01, 0.0) == [] and not wait_readable(0.01, ours.fileno())
        assert wait_writable(0.01, ours.fileno())
        theirs.send(b"x")
        assert poller.wait(10.0, 0.0) == ["peer"] and wait_readable(10.0, ours.fileno())
    poller.close()
    for end in (ours, theirs):
        end.close()


def test_a_round_of_mirrors_without_files_is_one_line_and_the_next_round_goes_on() -> None:
    said: list[int] = []
    holdings = SharedFileStore(2)
    now = [0.0]

    def order(order: ReplicationRequest) -> None:
        said.append(order.step)
        for file in order.files.values():
            os.close(file)

    mirror = SimpleNamespace(order=order)
    node = SimpleNamespace(name="b", lender="10.0.0.2:1", ranks={1: 0})
    rounds = ReplicationCoordinator("here", SnapshotLocations(), mirror, lambda *_, **__: None, lambda: now[0])  # type: ignore[arg-type]
    rounds.begin(holdings)
    for rank in range(2):
        holdings.pulse(rank).write(HeartbeatField.snapshot_step, 3)
    with no_files_left():
        rounds.look([node], 1)
    [report] = rounds.take_reports()
    assert report["event"] == "degraded" and "Too many open files" in report["line"] and not said
    now[0] += 10.0
    rounds.look([node], 1)
    assert said == [3]
    holdings.close()


def test_a_start_without_files_is_refused_alone_and_the_next_one_succeeds(tmp_path: Path) -> None:
    """It ended the process that forks ranks, and every rank with it."""
    with LocalAgent(tmp_path / "fork-server.log") as agent:
        server, heard = agent.pid, list[dict[str, Any]]()

        def wait_for(kind: str, rank: int) -> dict[str, Any]:
            end = time.monotonic() + 300
            while time.monotonic() < end and not agent.ended:
                heard.extend(agent.events(0.1))
                for event in heard:
                    if event["event"] == kind and event.get("rank", rank) == rank:
                        heard.remove(event)
                        return event
            raise AssertionError(f"no {kind}: {(tmp_path / 'fork-server.log').read_text()}")

        def start(rank: int) -> None:
            payload: dict[str, Any] = {}
            agent.command(
                "start",
                rank,
                target="time:sleep",
                payload=payload,
                world=2,
                generation=0,
                log=str(tmp_path / f"{rank}.log"),
            )

        wait_for("ready", 0)
        soft, hard = resource.prlimit(server, resource.RLIMIT_NOFILE)
        for most in range(3):  # neither pipe, one pipe, or both of them but no file for the rank
            used = len(files := set(map(int, os.listdir(f"/proc/{server}/fd"))))
            free = [number for number in range(1000) if number not in files]
            resource.prlimit(server, resource.RLIMIT_NOFILE, (free[most], hard))
            start(0)
            assert wait_for("refused", 0)["why"] == "Too many open files (EMFILE)"
            assert wait_for("ended", 0)["status"] == 1
            assert len(os.listdir(f"/proc/{server}/fd")) == used, "the half of a start is left"
        resource.prlimit(server, resource.RLIMIT_NOFILE, (soft, hard))
        start(1)
        wait_for("started", 1)
        wait_for("ended", 1)
        assert not agent.ended and agent.pid == server


def test_a_rank_that_was_not_started_is_a_failure_with_its_reason_and_counts_once(tmp_path: Path) -> None:
    attempt = Attempt(RankJob("a:b", 2, {}, tmp_path), 0, lambda rank, message: None)
    attempt.living = {0: 11, 1: 0}
    attempt.heed({"event": "refused", "rank": 1, "generation": 0, "why": "Too many open files (EMFILE)"})
    attempt.heed({"event": "ended", "rank": 1, "generation": 0, "status": 1})
    assert attempt.living == {0: 11} and attempt.failures[1].words == "was not started: Too many open files (EMFILE)"
