"""kill -9 of the supervisor costs no step: the same command on the same machine adopts its snapshots and ends in the
bytes of a run that nothing disturbed."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from supervisor_killer import KILLS
from test_train_run import JOB, environment, furnished, holder_of, losses, start, train, wait_for_step, weights
from test_train_supervisor import gone

from meshwright.elastic.snapshot_adoption import SOCKET_NAME_FILE
from meshwright.report.faults import read_events
from meshwright.spec.record import EVENTS_FILE_NAME

PHASES = ("data", "backward", "reduce", "agree", "update", "copy")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    return furnished(
        tmp_path_factory.mktemp("killed"), text, JOB.replace("checkpoint_every: 4", "checkpoint_every: 40")
    )


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    code, _, err = train(place, "whole")
    assert code == 0, err
    return place


def moments(seed: int, count: int) -> list[dict[str, Any]]:
    """So many kills at random moments of random steps, one after the other. Steps lie at least 4 apart: a supervisor
    that is killed within a step of its recovery may die before it has read the record that ends the recovery."""
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(2, 38 - 3 * (count - 1)), count))
    steps = [step + 3 * at for at, step in enumerate(steps)]
    return [
        {"rank": chance.randrange(2), "step": step, "phase": chance.choice(PHASES), "delay": chance.uniform(0.0, 0.02)}
        for step in steps
    ]


def launch(place: Path, run: str, kills: list[dict[str, Any]], *more: str) -> subprocess.Popen[str]:
    file = place / f"{run}.json"
    file.write_text(json.dumps(kills))
    there = {
        **environment(place),
        KILLS: str(file),
        "PYTHONPATH": f"{Path(__file__).parent}:{environment(place).get('PYTHONPATH', '')}",
    }
    command = [sys.executable, "-m", "supervisor_killer", "train", "job.yaml", "--folder", f"runs/{run}", *more]
    return subprocess.Popen(command, cwd=place, env=there, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def survive(place: Path, run: str, kills: list[dict[str, Any]]) -> list[str]:
    """Starts the same command until it has not been killed; what each said."""
    said: list[str] = []
    holders: list[psutil.Process] = []
    for _ in kills:
        process = launch(place, run, kills)
        said.append(process.communicate(timeout=900)[1])
        assert process.returncode == -signal.SIGKILL, said[-1]
        holder = holder_of(place, run)
        assert holder is not None
        holders.append(holder)
    process = launch(place, run, kills)
    said.append(process.communicate(timeout=900)[1])
    assert process.returncode == 0, said[-1]
    for holder in holders:
        holder.wait(300)
    return said


def check(place: Path, run: str, kills: list[dict[str, Any]]) -> None:
    said = survive(place, run, kills)
    assert losses(place, run) == losses(place, "whole") and weights(place, run, 40) == weights(place, "whole", 40) != {}
    steps = [json.loads(line)["step"] for line in (place / "runs" / run / "records.jsonl").read_text().splitlines()]
    assert steps == list(range(41)), "a step was lost or run again"
    events = read_events(place / "runs" / run / EVENTS_FILE_NAME)
    assert [(event.source, event.lost) for event in events if event.kind == "recovery"] == [("memory", 0)] * len(kills)
    assert [event.cause for event in events if event.kind == "fault"] == ["the supervisor was killed"] * len(kills)
    assert all("the supervisor was killed" in each and "0 steps lost" in each for each in said[1:-1])
    assert gone(place) and not (place / "runs" / run / SOCKET_NAME_FILE).exists()


@pytest.mark.soak
def test_a_supervisor_that_is_killed_at_random_moments_costs_no_step(whole: Path) -> None:
    check(whole, "three", moments(1, 3))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_a_supervisor_that_is_killed_at_twenty_random_moments_costs_no_step(whole: Path, seed: int) -> None:
    check(whole, f"five-{seed}", moments(100 + seed, 5))


@pytest.mark.soak
def test_a_half_written_snapshot_of_a_killed_supervisor_is_not_adopted(whole: Path) -> None:
    kills = [{"rank": 1, "step": 9, "phase": "copy", "delay": 0.2}]
    check(whole, "half", kills)
    [recovery] = [event for event in read_events(whole / "runs/half" / EVENTS_FILE_NAME) if event.kind == "recovery"]
    assert recovery.step == 8


@pytest.mark.soak
def test_another_plan_adopts_the_snapshots_and_another_job_is_refused(whole: Path) -> None:
    kills = [{"rank": 0, "step": 9, "phase": "update", "delay": 0.0}]
    process = launch(whole, "other", kills)
    process.communicate(timeout=900)
    assert process.returncode == -signal.SIGKILL
    code, _, err = train(whole, "other", "--batch", "16")
    assert code == 2 and "belongs to another job: workload.batch is 8 there and 16 here" in err
    code, _, err = train(whole, "other", "--plan", "tp2")
    assert code == 0 and "a new supervisor adopts its snapshots" in err and "0 steps lost" in err, err
    mine, all_ = losses(whole, "other"), losses(whole, "whole")
    assert {step: mine[step] for step in range(9)} == {step: all_[step] for step in range(9)}
    assert all(abs(mine[step] - all_[step]) < 1e-3 for step in all_)
    assert gone(whole)


@pytest.mark.soak
def test_a_run_that_is_interrupted_leaves_no_process_that_holds_snapshots(whole: Path) -> None:
    process = start(whole, "interrupted", until=6)
    wait_for_step(whole, "interrupted", 4, process)
    holder = holder_of(whole, "interrupted")
    assert holder is not None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=900)
    assert process.returncode == 75, err
    assert not holder.is_running() and not (whole / "runs/interrupted" / SOCKET_NAME_FILE).exists()
