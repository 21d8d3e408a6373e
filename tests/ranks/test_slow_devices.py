"""A device that becomes slow in the middle of a run is left out where no shares help, and comes back when it is well;
the losses stay those of one device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_runs import FIRST, SCRIBE, events, launch, losses

from meshwright.elastic.attempt import RankJob
from meshwright.elastic.devices import ExclusionPolicy
from meshwright.elastic.local_agent import LocalAgent
from meshwright.elastic.restart_policy import FaultPolicy
from meshwright.elastic.supervisor import Supervisor
from meshwright.spec.job import LaunchSpec
from meshwright.spec.plan import parse_plan

PLANS = {4: "dp4.z2.mb3", 3: "dp3.z2.mb4"}


def work_of(work: LaunchSpec) -> RankJob:
    return RankJob(
        "slow_device:train",
        work.plan.world,
        work.model_dump(mode="json"),
        Path(work.run.folder),
        plan=work.plan.name,
        scribe=SCRIBE,
    )


def run(
    agent: LocalAgent,
    work: LaunchSpec,
    plans: dict[int, str],
    hear: Callable[[int], None],
    leaving: ExclusionPolicy | None,
) -> list[str]:
    """What was said. `hear` gets the number of each step that has ended."""
    folder, notes = Path(work.run.folder), list[str]()
    folder.mkdir()
    (folder / "launch.json").write_text(work.to_json())

    def heard(rank: int, message: dict[str, Any]) -> None:
        if rank == 0 and message["kind"] == "record":
            hear(message["record"]["step"])
        if message["kind"] == "note":
            notes.append(message["line"])

    care = FaultPolicy(
        work.run.retries, 0.0, lambda world: work_of(work.but(plan=parse_plan(plans[world]))), leaving=leaving
    )
    Supervisor(work_of(work), heard, notes.append, generation=next(FIRST), care=care, agent=agent).run()
    return notes


def predicted(name: str, world: int) -> tuple[float, float]:
    """The work is divided."""
    return (1 / 4, 1 / 3) if world == 3 else (1 / 3, 1 / 4)


def trained(folder: Path) -> dict[int, dict[int, bool]]:
    """Which devices took part in each step, and whether they were slow; of one that was begun again, by other ranks,
    those that ended it."""
    found: dict[int, tuple[int, dict[int, bool]]] = {}
    for line in (folder / "devices").read_text().splitlines():
        step, world, slot, slow = map(int, line.split())
        if step not in found or found[step][0] != world:
            found[step] = (world, {})
        found[step][1][slot] = bool(slow)
    return {step: by_device for step, (_, by_device) in found.items()}


@pytest.mark.soak
def test_a_device_that_becomes_slow_is_left_out_and_comes_back_when_it_is_well(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    """4 ranks of ZeRO 2, device 1 slow from step 8 on and well again once it was left out and measured."""
    steps, folder = 160, tmp_path / "slow"
    whole, slow = (
        launch(text, tmp_path / name, plan, steps, {"batch": 12, "precision": "fp64"}, balance=True)
        for name, plan in (("whole", "dp1.mb12"), ("slow", "dp4.z2.mb3"))
    )

    def hear(step: int) -> None:
        if step == 8:
            (folder / "slow-1").touch()

    said = run(agent, slow, PLANS, hear, ExclusionPolicy(predicted, "slow_device:speed", every=0.2, starts=0.0))
    run(agent, whole, PLANS, lambda step: None, None)
    expected, found = losses(tmp_path / "whole"), events(folder)
    assert sorted(losses(folder)) == list(range(steps + 1))
    assert all(abs(loss - expected[step]) < 1e-9 * abs(loss) for step, loss in losses(folder).items())
    assert any("device 1 is used again" in line for line in said)
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
    out, fewer, gained, back, again, _ = decided
    assert (out.ranks, out.slots, fewer.plan, back.slots, again.plan) == ((1,), (1,), PLANS[3], (1,), PLANS[4])
    assert out.predicted > 2.0 and gained.measured > 0.0 and gained.predicted == out.predicted
    without, within = (
        event.step for event in found if event.kind == "recovery"
    )  # the last steps before: ranks may be ahead of what was heard of them
    devices = trained(folder)
    assert all(set(devices[step]) == {0, 1, 2, 3} for step in (*range(1, without + 1), *range(within + 1, steps + 1)))
    assert all(set(devices[step]) == {0, 2, 3} for step in range(without + 1, within + 1)) and without < within
    slow_steps = [step for step, by_device in devices.items() if any(by_device.values())]
    assert slow_steps and min(slow_steps) > 8 and max(slow_steps) <= without, "no step waits for it once it is out"
    assert not any(event.lost for event in found)
