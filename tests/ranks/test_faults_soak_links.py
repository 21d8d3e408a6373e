"""Twenty flaps and twenty partitions of the link between two nodes: the first cost the wait, of the second one part
goes on, and the other one joins it again. What is measured stands in bench/results/faults.md."""

from __future__ import annotations

import random
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest
from network_namespace import FIRST, SECOND, ip
from test_faults_soak import FAULTS
from test_faults_soak_rows import settle
from test_nodes import JOB
from test_nodes_links import Apart
from test_train_run import furnished, weights
from test_train_run import train as launched

from meshwright.report.run import read_run, summarize_run

pytestmark = pytest.mark.soak

PLAN = "dp4.z1"
NOBODY = "02:00:00:00:00:99"
"""An address that no interface has: what is sent to it vanishes without a word."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    return furnished(
        tmp_path_factory.mktemp("links"),
        text,
        JOB.replace("batch: 8, steps: 60", "batch: 64, steps: 200").replace("1.0e-2", "1.0e-3"),
    )


def stopped(nodes: Apart) -> int:
    """The last step of a run that is asked to stop."""
    nodes.processes[0].send_signal(signal.SIGTERM)
    code, err, other = nodes.end()
    assert (code, other) == (75, 75), err
    return nodes.step()


def test_twenty_flaps_of_a_link_cost_nothing_but_the_wait(place: Path, space: str) -> None:
    """Row 9, in one run. In time: the step behind a flap ends within half a second and its own length."""
    chance, waits, flaps = random.Random(9), list[float](), list[float]()
    nodes = Apart(place, "flaps", space, endless=True)
    nodes.wait_for(10)
    for _ in range(FAULTS):
        nodes.wait_for_next(nodes.step() + chance.randrange(3, 12), 0)
        time.sleep(chance.uniform(0.0, 0.1))
        flaps.append(chance.uniform(0.2, 5.0))
        nodes.link("down")
        time.sleep(flaps[-1])
        nodes.link("up")
        up, step = time.monotonic(), nodes.step()
        nodes.wait_for_next(step, 0)
        waits.append(time.monotonic() - up)
    print([(round(flap, 2), round(wait, 2)) for flap, wait in zip(flaps, waits, strict=True)])
    last = stopped(nodes)
    whole = Apart(place, "calm", space, steps=last)
    code, err, other = whole.end()
    assert (code, other) == (0, 0), err
    assert nodes.incidents() == []
    equal = nodes.losses() == whole.losses() and weights(place, "flaps", last) == weights(place, "calm", last) != {}
    step_seconds = median(record.seconds for record in read_run(whole.folder).steps if record.seconds)
    in_time = sum(wait <= 0.5 + step_seconds for wait in waits)
    times = {
        "in_time": f"{in_time} of {FAULTS}",
        "silence": median(flaps),
        "recovery": median(waits),
        "largest": max(waits),
    }
    settle("9 a link flaps", PLAN, len(waits), nodes.folder, equal, **times)


class Parted(Apart):
    """Nodes that count as gone sooner than others, and a link that carries frames both ways, one way, or none."""

    program = (sys.executable, str(Path(__file__).parent / "short_keepalive.py"))

    def cut(self, deaf: str) -> None:
        """`deaf`: the node that no longer hears the other one, or both."""
        if deaf == "both":
            self.link("down")
        else:
            assert ip(*self._towards(deaf, "replace"), "lladdr", NOBODY, "nud", "permanent")

    def mend(self, deaf: str) -> None:
        if deaf == "both":
            self.link("up")
        else:
            assert ip(*self._towards(deaf, "del"))

    def _towards(self, deaf: str, do: str) -> tuple[str, ...]:
        """Of the neighbours of who speaks: where frames to `deaf` go."""
        if deaf == "1":
            return "neigh", do, SECOND, "dev", f"{self.space}a"
        return "-n", self.space, "neigh", do, FIRST, "dev", f"{self.space}b"

    def next_of(self, kind: str, seen: int) -> dict[str, Any]:
        """The first event of `kind` behind the first `seen`."""
        end = time.monotonic() + 120.0
        while True:
            found = next((event for event in self.events()[seen:] if event["kind"] == kind), None)
            if found is not None:
                return found
            assert time.monotonic() < end and all(process.poll() is None for process in self.processes), f"no {kind}"
            time.sleep(0.02)


@pytest.fixture
def parted(place: Path, space: str, request: pytest.FixtureRequest) -> Iterator[Parted]:
    nodes = Parted(place, request.node.name.partition("[")[2].rstrip("]"), space, endless=True)
    yield nodes
    for process in nodes.processes:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("way", ["both", "one"])
def test_twenty_partitions_leave_one_part_that_goes_on_and_is_joined_by_the_other(
    place: Path, parted: Parted, way: str
) -> None:
    """Row 10: the ranks of the part without the node that leads have ended before the other part has made a step."""
    chance, passed, margins = random.Random(way), 0, list[float]()
    parted.wait_for(10)
    for _ in range(FAULTS):
        deaf, ranks, seen = chance.choice("01") if way == "one" else "both", parted.ranks(1), len(parted.events())
        time.sleep(chance.uniform(0.0, 0.2))
        parted.cut(deaf)
        _, alive = psutil.wait_procs(ranks, 60)
        margins.append(-time.time())
        alone = parted.next_of("recovery", seen)
        margins[-1] += alone["at"]
        parted.mend(deaf)
        parted.next_of("node_joined", seen)
        parted.next_of("recovery", seen + 1 + parted.events()[seen:].index(alone))
        resized = [event["cause"] for event in parted.events()[seen:] if event["kind"] == "resize"]
        passed += bool(ranks) and not alive and margins[-1] > 0.0 and resized == ["4 to 2 ranks", "2 to 4 ranks"]
        parted.wait_for_next(parted.step() + chance.randrange(2, 8), 0)
    last = stopped(parted)
    code, _, err = launched(place, f"whole-{way}", "--steps", str(last), "--plan", "dp2.z1")
    assert code == 0, err
    run = read_run(parted.folder)
    ledger = summarize_run(run).ledger
    assert ledger is not None and ledger.problems == ()
    expected = {record.step: record.loss for record in read_run(place / "runs" / f"whole-{way}").steps}
    found = {record.step: record.loss for record in run.steps}
    assert found.keys() == expected.keys() and all(
        abs(found[step] - loss) <= 1e-6 * loss for step, loss in expected.items()
    )
    print([round(margin, 2) for margin in margins])
    healed = [event for event in parted.events() if event["kind"] == "recovery"]
    seconds, lost = [event["seconds"] for event in healed], sum(event.get("lost", 0) for event in healed)
    times = {"recovery": median(seconds), "largest": max(seconds)}
    settle(f"10 a partition, {way} way{'s' * (way == 'both')}", PLAN, passed, parted.folder, costs=lost, **times)
