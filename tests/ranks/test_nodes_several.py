"""More than two nodes: the one that leads is lost, then the one that follows it, and nodes come back to whoever leads
by then."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from test_nodes import Nodes
from test_train_run import JOB, furnished

JOB = (
    JOB.replace("batch: 8, steps: 40", "batch: 12, steps: 100000")
    .replace("local:2", "local:1")
    .replace("dp2.z1", "dp3.z1")
    .replace("checkpoint_every: 4", "checkpoint_every: 10, rejoin_timeout: 1.0")
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    return furnished(tmp_path_factory.mktemp("several"), text, JOB)


@pytest.fixture
def three(place: Path, request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """One rank each."""
    nodes = Nodes(place, request.node.name, count=3)
    yield nodes
    for process in nodes.processes:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
            process.wait()


def lose(nodes: Nodes, number: int) -> None:
    """With all of its processes, as when its machine is."""
    for process in (*nodes.ranks(number), psutil.Process(nodes.processes[number].pid)):
        process.kill()
    nodes.processes[number].wait()


def kinds(nodes: Nodes) -> list[tuple[str, str]]:
    return [
        (event["kind"], event.get("node", "").partition(" ")[0])
        for event in nodes.events()
        if event["kind"] in ("node_lost", "node_joined")
    ]


@pytest.mark.soak
def test_the_third_node_leads_when_two_are_lost_and_one_that_comes_back_trains_again(three: Nodes) -> None:
    """It is asked to end once the node that came back has made steps, however long that takes."""
    three.wait_for(12)
    lose(three, 0)
    three.wait_for_next(three.step() + 4, 1)
    lose(three, 1)
    three.wait_for_next(three.step() + 4, 2)
    three.processes[0] = three.start(0)
    three.wait_for_event(2, "'node_joined'", "'0 (")
    came = next(
        number
        for number, event in enumerate(three.events())
        if event["kind"] == "node_joined" and event["node"].startswith("0 ")
    )
    while not any(event["kind"] == "recovery" for event in three.events()[came:]) and three.processes[2].poll() is None:
        time.sleep(0.05)
    three.wait_for_next(three.step() + 4, 2)
    three.processes[2].send_signal(signal.SIGTERM)
    code, err, _ = three.end()
    assert (code, three.processes[2].returncode) == (75, 75), err
    assert "node 0 of 3 at 127.0.0.1, led by 127.0.0.1" in err
    others = [
        each for each in kinds(three) if each != ("node_joined", "2")
    ]  # on a busy machine it may come later than it is waited for
    assert others[:3] == [("node_lost", "0"), ("node_lost", "1"), ("node_joined", "0")]
    assert {event["cause"] for event in three.events() if event["kind"] == "resize"} == {"1 to 2 ranks"}
    losses = three.losses()
    assert sorted(losses) == list(range(max(losses) + 1))
    assert not {"token", "leader"} & set(os.listdir(three.folder))
