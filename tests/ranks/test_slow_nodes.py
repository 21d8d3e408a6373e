"""A device of another node that becomes slow is left out by the first one, measured where it is, and comes back; the
losses stay those of one device."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fault_runs import ENVIRONMENT, HERE, events, launch, losses
from test_slow_devices import PLANS, predicted, run

from meshwright.core.ipc import IpcMessage
from meshwright.core.secure_channel import TOKEN_VARIABLE
from meshwright.elastic.cluster_agent import ClusterAgent
from meshwright.elastic.devices import DeviceExclusion, ExclusionPolicy
from meshwright.elastic.event_log import EventLog

NODE = """
import sys
from meshwright.core.secure_channel import SecureChannel, open_channel
from meshwright.elastic.node import NodeAgent
end, hello = open_channel("127.0.0.1", int(sys.argv[1]), "secret", {"name": "b", "devices": 2, "order": 1})
sys.exit(NodeAgent(SecureChannel(end, hello), "127.0.0.1", "secret", 1, {"SLOWED_NODE": "b", "MESHWRIGHT_ADDRESS": \
"127.0.0.1"}).run()[0])
"""


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterAgent]:
    """Two devices here and two of a node b, a process of its own."""
    for name, value in {**ENVIRONMENT, TOKEN_VARIABLE: "secret"}.items():
        monkeypatch.setenv(name, value)
    logs = tmp_path / "logs"
    logs.mkdir()
    made = ClusterAgent(logs, ("slow_device",), "127.0.0.1", 0, "secret", 2)
    node = subprocess.Popen([sys.executable, "-c", NODE, str(made.port)], cwd=HERE)
    try:
        end, ready = time.monotonic() + 900.0, False
        while not ready or len(made.slots) < 4:
            ready = any(event["event"] == "ready" for event in made.events(0.1)) or ready
            assert time.monotonic() < end
        yield made
    finally:
        made.end(0, "")
        made.dissolve()
        assert node.wait(900) == 0
        with (
            warnings.catch_warnings()
        ):  # threads that lend copies end with the process of a run, and their sockets with them
            warnings.simplefilter("ignore", ResourceWarning)
            del made
            gc.collect()


@pytest.mark.soak
def test_a_slow_device_of_another_node_is_left_out_measured_there_and_comes_back(
    fleet: ClusterAgent, tmp_path: Path, text: Path
) -> None:
    """4 ranks of ZeRO 2 on two nodes, device 0 of node b slow from step 8 on and well again once it was left out and
    measured."""
    steps, folder = 160, tmp_path / "slow"
    slow = launch(text, folder, "dp4.z2.mb3", steps, {"batch": 12, "precision": "fp64"}, balance=True)

    def hear(step: int) -> None:
        if step == 8:
            (folder / "slow-b0").touch()

    said = run(fleet, slow, PLANS, hear, ExclusionPolicy(predicted, "slow_device:speed", every=0.2, starts=0.0))
    found = events(folder)
    # on a busy machine others may be slow too, and stay
    decided = [
        event for event in found if event.kind in ("resize", "device_readmitted", "rebalance_result") or event.slots
    ]
    assert [event.kind for event in decided] == [
        "slow",
        "resize",
        "rebalance_result",
        "device_readmitted",
        "resize",
        "rebalance_result",
    ]
    out, fewer, _, back, again, _ = decided
    assert (out.ranks, out.slots, fewer.plan, back.slots, again.plan) == ((2,), (2,), PLANS[3], (2,), PLANS[4])
    assert any("goes on without device 0 of node b" in line for line in said) and any(
        "device 0 of node b is used again" in line for line in said
    )
    assert not any(event.lost for event in found)
    whole = launch(text, tmp_path / "whole", "dp1.mb12", steps, {"batch": 12, "precision": "fp64"})
    run(fleet, whole, PLANS, lambda step: None, None)
    expected, ours = losses(tmp_path / "whole"), losses(folder)
    assert sorted(ours) == list(range(steps + 1))
    assert all(abs(loss - expected[step]) < 1e-9 * abs(loss) for step, loss in ours.items())


def slots_of(tmp_path: Path, say: Callable[[str], None]) -> DeviceExclusion:
    """Of two devices of the first node and two of node b."""
    slots = DeviceExclusion(4, EventLog(tmp_path, say), ExclusionPolicy(lambda name, world: (1 / 4, 1 / world)))
    slots.there, slots.first, slots.name = (0, 1, 2, 3), 2, lambda slot: f"{slot % 2} of {'ab'[slot // 2]}"
    slots.started("dp4.z2")
    return slots


def slow(ranks: tuple[int, ...]) -> IpcMessage:
    return {
        "kind": "slow",
        "step": 30,
        "last": 10_000,
        "plan": "dp4.z2",
        "ranks": ranks,
        "times": 4.0,
        "seconds": 4.0,
        "without": 1.0,
    }


def test_the_leader_keeps_a_device_and_a_returning_node_keeps_its_device_ids(tmp_path: Path) -> None:
    said: list[str] = []
    slots = slots_of(tmp_path, said.append)
    slots.hear(slow((0, 1)), (0, 1, 2, 3), 0)
    assert (
        slots.take() is None and "the first node, which leads the run, must use at least one of its devices" in said[-1]
    )
    slots.hear(slow((2,)), (0, 1, 2, 3), 0)
    assert slots.take() == 3 and "goes on without device 0 of b" in said[-1]
    assert slots.of(3) == (0, 1, 3) and slots.room == 3
    slots.there = (0, 1)
    assert slots.room == 2 and slots.of(2) == (0, 1) and slots.of(3) == ()
    slots.there = (0, 1, 2, 3)
    assert slots.room == 3 and slots.of(3) == (0, 1, 3)
