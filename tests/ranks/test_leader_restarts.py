"""The node that leads is killed and started again at any moment later: it leads again or follows, and both nodes
train."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path

import pytest
from test_nodes import JOB, Nodes
from test_train_run import furnished

HUNG = 900.0
"""Seconds after which nodes that make no step count as hung, however slow the machine is."""
TIMES = int(os.environ.get("MESHWRIGHT_TIMES", "20"))
"""How often the soak restarts a leader. `python -m bench.reliability leader` writes a table."""
MOMENTS = [random.Random(13 + number).uniform(0.5, 12.0) for number in range(TIMES)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    return furnished(
        tmp_path_factory.mktemp("restarts"), text, JOB.replace("checkpoint_every: 20", "checkpoint_every: 5")
    )


def restart(place: Path, run: str, seconds: float) -> None:
    """Kills the first node once it has saved, starts it again `seconds` later, and waits until ranks of both have made
    steps."""
    nodes = Nodes(place, run, endless=True)
    try:
        nodes.wait_for(8)
        ranks = nodes.ranks(0)
        for process in (nodes.processes[0], *ranks):
            process.kill()
        nodes.processes[0].wait()
        time.sleep(seconds)
        nodes.processes[0] = nodes.start(0)
        end = time.monotonic() + HUNG
        while (
            not is_whole(nodes)
            and time.monotonic() < end
            and all(process.poll() is None for process in nodes.processes)
        ):
            time.sleep(0.05)
        said = "\n".join(nodes.words(number).read_text() for number in (0, 1))
        assert is_whole(nodes), f"restarted after {seconds:.1f} s:\n{said}"
        before = nodes.step()
        while nodes.step() <= before + 4 and time.monotonic() < end:
            time.sleep(0.05)
        assert nodes.step() > before + 4, said
        for process in nodes.processes:
            process.send_signal(signal.SIGTERM)
        assert {process.wait(HUNG) for process in nodes.processes} <= {0, 75}, said
        losses = nodes.losses()
        assert sorted(losses) == list(range(max(losses) + 1))
    finally:
        for process in nodes.processes:
            process.kill()
            process.wait()
        nodes.held.close()


def is_whole(nodes: Nodes) -> bool:
    """Whether both nodes live and have ranks."""
    return all(nodes.processes[number].poll() is None and len(nodes.ranks(number)) == 2 for number in (0, 1))


@pytest.mark.soak
@pytest.mark.parametrize("seconds", [0.5, 4.0])
def test_a_leader_that_is_killed_and_started_again_trains_with_the_other_node(place: Path, seconds: float) -> None:
    restart(place, f"after-{seconds}", seconds)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(TIMES))
def test_a_leader_restarted_at_a_random_moment_trains_with_the_other_node(place: Path, number: int) -> None:
    restart(place, f"random-{number}", MOMENTS[number])
