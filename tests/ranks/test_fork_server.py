"""The process that forks ranks is killed at every start, or finds no file: each counts as a failure of the run. That it
is killed again while it loads: test_train_run.py."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest
from fork_server import fork_server, kill
from test_train_run import JOB, furnished, let_go, losses, start, train, wait_for_step, weights
from test_train_supervisor import gone

from meshwright.report.faults import read_events
from meshwright.spec.record import EVENTS_FILE_NAME

RETRIES = 5


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    return furnished(tmp_path_factory.mktemp("fork"), text, JOB)


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    code, _, err = train(place, "whole")
    assert code == 0, err
    return place


@pytest.mark.soak
def test_a_fork_server_killed_at_every_start_ends_a_resumable_run_after_the_retries(
    whole: Path,
) -> None:
    run = "hopeless"
    process = start(whole, run, until=20)
    wait_for_step(whole, run, 10, process)
    assert len(kill(process, RETRIES + 1)) == RETRIES + 1
    _, err = process.communicate(timeout=900)
    assert process.returncode == 1, err
    assert f"gave up after {RETRIES + 1} failures without a step between them" in err
    assert gone(whole)
    code, _, err = train(whole, run)
    assert code == 0, err
    assert weights(whole, run, 40) == weights(whole, "whole", 40)


@pytest.mark.soak
def test_the_store_killed_twice_in_one_step_counts_as_two_failures(whole: Path) -> None:
    """Its death ends the fork server, since no rank could join any more."""
    run = "store"
    process = start(whole, run, until=20)
    wait_for_step(whole, run, 10, process)
    killed: set[int] = set()
    for _ in range(2):
        server = fork_server(process, killed)
        assert server is not None
        while not (stores := [child for child in server.children() if child.name() == "mesh-store"]):
            time.sleep(0.01)
        killed.add(server.pid)
        stores[0].kill()
    let_go(whole, run)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    assert weights(whole, run, 40) == weights(whole, "whole", 40)


@pytest.mark.parametrize("whose", ["fork server", "supervisor"])
@pytest.mark.soak
def test_a_limit_of_open_files_that_is_met_later_costs_no_step(whole: Path, whose: str) -> None:
    """While the limit holds no rank can be started: each try counts as a failure, and one after it succeeds."""
    run = f"files-{whose[:4]}"
    process = start(whole, run, until=20)
    wait_for_step(whole, run, 10, process)
    server = fork_server(process, set())
    assert server is not None
    limited = server.pid if whose == "fork server" else process.pid
    before = resource.prlimit(limited, resource.RLIMIT_NOFILE)
    files = set(map(int, os.listdir(f"/proc/{limited}/fd")))
    resource.prlimit(limited, resource.RLIMIT_NOFILE, (min(set(range(1000)) - files), before[1]))
    [rank, *_] = [child for child in server.children() if child.name().startswith("mesh-rank")]
    rank.kill()
    end = time.monotonic() + 60
    log = whole / "runs" / run / EVENTS_FILE_NAME
    while time.monotonic() < end and len([event for event in read_events(log) if event.kind == "fault"]) < 2:
        time.sleep(0.02)
    resource.prlimit(limited, resource.RLIMIT_NOFILE, before)
    let_go(whole, run)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    assert losses(whole, run) == losses(whole, "whole") and weights(whole, run, 40) == weights(whole, "whole", 40) != {}
    faults = [event for event in read_events(log) if event.kind == "fault"]
    assert "Too many open files" in " ".join(event.cause for event in faults[1:]) or whose == "supervisor", err
    assert {event.lost for event in read_events(log) if event.kind == "recovery"} == {0}
    assert gone(whole)
