"""Two nodes in network namespaces of their own, joined by a link that is taken down: for a while, and for good."""

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from network_namespace import FIRST, SECOND, ip
from test_nodes import JOB, Nodes
from test_train_run import furnished

PORT = 29471
DOWN = (1.0, 5.0)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    return furnished(
        tmp_path_factory.mktemp("links"), text, JOB.replace("batch: 8, steps: 60", "batch: 64, steps: 200")
    )


class Apart(Nodes):
    """The second node behind a link of its own."""

    def __init__(self, place: Path, run: str, space: str, **more: Any) -> None:
        self.space = space
        super().__init__(place, run, PORT, **more)

    def start(self, number: int, **more: str) -> subprocess.Popen:
        behind = ["ip", "netns", "exec", self.space] if number else []
        return super().start(number, behind=behind, MASTER_ADDR=FIRST, **more)

    def link(self, state: str) -> None:
        assert ip("link", "set", f"{self.space}a", state)


@pytest.mark.soak
def test_a_link_that_is_down_for_a_while_costs_nothing_but_the_wait(place: Path, space: str) -> None:
    """Row 9."""
    nodes = Apart(place, "flaps", space)
    for number, seconds in enumerate(DOWN):
        nodes.wait_for(20 + 60 * number)
        nodes.link("down")
        time.sleep(seconds)
        nodes.link("up")
    code, err, other = nodes.end()
    assert (code, other) == (0, 0), err
    assert nodes.incidents() == []
    assert sorted(nodes.losses()) == list(range(201))


@pytest.mark.soak
def test_of_two_parts_that_do_not_hear_each_other_one_ends_and_one_goes_on(place: Path, space: str) -> None:
    """Row 10: the part without the first node ends itself, with all of its ranks, before the other goes on without
    it."""
    nodes = Apart(place, "parted", space)
    nodes.wait_for(20)
    ranks = nodes.ranks(1)
    nodes.link("down")
    cut = nodes.step()
    while nodes.step() <= cut + 2 and nodes.processes[0].poll() is None:
        time.sleep(0.05)
    assert ranks and not any(rank.is_running() for rank in ranks), "both parts train"
    code, err, other = nodes.end()
    assert (code, other) == (0, 75), err
    lost, fault, _, recovery = nodes.incidents()
    assert lost["kind"] == "node_lost" and "silent for 15 s" in fault["cause"]
    assert recovery["source"] == "memory" and recovery.get("lost", 0) <= 10
    assert sorted(nodes.losses()) == list(range(201))


@pytest.mark.soak
def test_the_next_node_leads_after_a_silent_leader_which_joins_it_later(place: Path, space: str) -> None:
    """Row 26, as when its machine loses power: its link is down before it dies, so the other one hears nothing; then
    both come back."""
    nodes = Apart(place, "dark", space)
    nodes.wait_for(25)
    nodes.link("down")
    nodes.processes[0].kill()
    nodes.processes[0].communicate()
    time.sleep(1.0)
    nodes.wait_for_next(nodes.step(), 1)
    nodes.link("up")
    nodes.processes[0] = nodes.start(0)
    code, err, other = nodes.end()
    assert (code, other) == (0, 0), err
    assert f"led by {SECOND}:{PORT}" in err
    assert sorted(nodes.losses()) == list(range(201))
