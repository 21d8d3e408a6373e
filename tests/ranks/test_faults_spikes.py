"""A loss that rises and stays is gone back from, and the batches that it came with are left out: the end is that of a
run that never saw them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from fault_runs import events, launch, losses, state, train

from meshwright.core.errors import MeshwrightError
from meshwright.elastic.local_agent import LocalAgent
from meshwright.report.run import read_run, summarize_run
from meshwright.spec.record import StepRecord
from meshwright.train.loss_spike import MAX_ROLLBACKS, MEDIAN_WINDOW_STEPS, SPIKE_STEPS, LossSpikeDetector

LONG = 64
POISON = [52, 53, 54]
RUN = {"steps": LONG, "checkpoint_every": 8, "keep": 9}


def test_a_run_that_went_back_ends_as_if_it_had_never_seen_the_batches(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    """Three batches of noise; and a rank is killed while the steps behind the checkpoint are run again."""
    run = {**RUN, "checkpoint_every": 24}
    clean, hurt = (launch(text, tmp_path / name, "dp2.z1", **run) for name in ("clean", "hurt"))
    faults = [{"rank": 1, "step": 50, "phase": "backward", "how": "SIGKILL", "times": 2}]
    train(agent, hurt, faults, poison=POISON)
    found = events(tmp_path / "hurt")
    [spike] = [event for event in found if event.kind == "spike"]
    assert (spike.step, spike.lost, spike.batches) == (55, 7, (51, 55))
    found_ledger = summarize_run(read_run(tmp_path / "hurt")).ledger
    assert found_ledger is not None and found_ledger.problems == () and found_ledger.left_out == 4
    assert found_ledger.proven >= LONG - 1
    train(agent, clean, [], left_out=[[51, 55]])
    assert losses(tmp_path / "hurt") == losses(tmp_path / "clean")
    assert state(tmp_path / "hurt", LONG) == state(tmp_path / "clean", LONG) != {}


@pytest.mark.soak
def test_without_a_checkpoint_from_before_it_is_said_and_training_goes_on(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    notes: list[str] = []
    train(agent, launch(text, tmp_path / "run", "dp1", LONG, checkpoint_every=0), [], notes, poison=POISON)
    assert not [event for event in events(tmp_path / "run") if event.kind == "spike"]
    assert sorted(losses(tmp_path / "run")) == list(range(LONG + 1))


def heard(losses: list[float], scaled: bool = False, skipped: tuple[int, ...] = ()) -> list[int]:
    """The steps after which a guard sees a spike."""
    guard, found = LossSpikeDetector({}, True, scaled), []
    for step, loss in enumerate(losses, 1):
        record = StepRecord(step=step, loss=loss, tokens=1, gradient_norm=1, lr=1, seconds=1, skipped=step in skipped)
        guard.heed(record)
        if guard.is_spike:
            found.append(step)
            guard.forget()
    return found


def noisy(count: int, seed: int) -> list[float]:
    chance = random.Random(seed)
    return [6.0 * (step + 10) ** -0.3 + chance.gauss(0.0, 0.1) for step in range(count)]


def test_no_spike_is_seen_in_a_hundred_healthy_curves_nor_in_a_single_bad_batch() -> None:
    for seed in range(100):
        curve = noisy(400, seed)
        curve[100 + seed] += 5.0
        assert heard(curve) == [], seed


def test_a_rise_that_stays_is_seen_in_three_steps_a_loss_that_is_not_finite_too() -> None:
    for seed in range(100):
        curve = noisy(400, seed)
        assert heard([*curve[:200], *(loss + 2.0 for loss in curve[200:203])]) == [200 + SPIKE_STEPS]
    assert heard([2.0, float("nan"), float("inf"), float("nan")]) == [4]
    assert heard([2.0] * 5, skipped=(2, 3, 4)) == [4] and heard([2.0] * 5, scaled=True, skipped=(2, 3, 4)) == []
    assert heard([2.0] * (MEDIAN_WINDOW_STEPS - 1) + [9.0] * SPIKE_STEPS) == []


def test_a_run_that_rolls_back_to_one_checkpoint_repeatedly_ends_with_the_reason() -> None:
    guard = LossSpikeDetector({}, True, False)
    for time in range(MAX_ROLLBACKS):
        guard.goes_back(100, 200, guard.left_out, (150 + time, 152 + time))
    assert guard.left_out == [(150, 152 + MAX_ROLLBACKS - 1)]
    with pytest.raises(
        MeshwrightError, match="the loss has risen again after step 100, although batches were left out 3 times"
    ):
        guard.goes_back(100, 200, guard.left_out, (160, 161))
