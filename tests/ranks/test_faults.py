"""Faults for real: ranks of a training run are killed, frozen and broken where chance says; the end is that of the
undisturbed run, to the bit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from fault_runs import STEPS, events, launch, losses, random_faults, state, train

from meshwright.checkpoint.load import iter_full_tensors, read_full_tensor
from meshwright.checkpoint.verify import CheckpointReader, verify_checkpoint
from meshwright.core.errors import MeshwrightError
from meshwright.elastic.failure import RankFailed
from meshwright.elastic.local_agent import LocalAgent

PLANS = ["dp2.tp2.z1", "dp2.pp2.z2.mb2", "dp4.mb2", "dp2x2.z2.mb2", "dp2.tp2.z3", "dp4.z3"]


@pytest.mark.soak
@pytest.mark.parametrize("plan", PLANS)
def test_ranks_killed_or_crashed_anywhere_cost_no_step_and_no_bit(
    agent: LocalAgent, tmp_path: Path, text: Path, plan: str
) -> None:
    whole, broken = (launch(text, tmp_path / name, plan) for name in ("whole", "broken"))
    train(agent, whole, [])
    how = ["SIGKILL"] if PLANS.index(plan) % 2 == 0 else ["SIGSEGV", "SIGABRT", "exit", "raise"]
    faults = random_faults(3, 4, how, seed=len(plan), apart=4)
    train(agent, broken, faults)
    found = events(tmp_path / "broken")
    assert [event.kind for event in found] == ["fault", "recovery"] * 3
    assert [event.rank for event in found if event.kind == "fault"] == [fault["rank"] for fault in faults]
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")
    assert state(tmp_path / "broken") == state(tmp_path / "whole") != {}


@pytest.mark.soak
def test_all_ranks_killed_at_once_lose_nothing_either(agent: LocalAgent, tmp_path: Path, text: Path) -> None:
    work = launch(text, tmp_path / "run", "dp4.z3")
    train(agent, work, [{"rank": rank, "step": 6, "phase": "backward", "how": "SIGKILL"} for rank in range(4)])
    *_, recovery = events(tmp_path / "run")
    assert recovery.source == "memory" and recovery.lost == 0
    assert sorted(losses(tmp_path / "run")) == list(range(STEPS + 1))


def test_the_same_error_in_the_same_step_twice_ends_the_run_with_its_verdict(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    work = launch(text, tmp_path / "run", "dp2.z1")
    with pytest.raises(RankFailed, match=r"rank 1 of 2 .*ValueError: hidden 100 is not divisible") as caught:
        train(agent, work, [{"rank": 1, "step": 5, "phase": "update", "how": "raise", "always": True}])
    assert "gave up after the same error in the same step again" in str(caught.value)
    assert [event.kind for event in events(tmp_path / "run")] == ["fault", "verdict"]


@pytest.mark.soak
def test_async_checkpoints_equal_those_of_the_ranks_themselves(agent: LocalAgent, tmp_path: Path, text: Path) -> None:
    """Every fourth step, with ranks killed meanwhile; the same steps written by the ranks, which have no copies in
    memory then."""
    plan = "dp2.tp2.z1"
    beside, alone = (
        launch(text, tmp_path / "beside", plan, checkpoint_every=4, keep=9),
        launch(text, tmp_path / "alone", plan, checkpoint_every=4, memory_checkpoints=False, keep=9),
    )
    train(agent, alone, [])
    train(agent, beside, [{"rank": 1, "step": 5, "phase": "backward", "how": "SIGKILL"}])
    for step in (4, 8, 12, 16):
        path = tmp_path / "beside" / "checkpoints" / f"step-{step:08d}"
        if path.exists() or step == STEPS:
            assert verify_checkpoint(path) == []
            assert (
                dict(iter_full_tensors(path, "")).keys()
                == dict(iter_full_tensors(tmp_path / "alone" / "checkpoints" / path.name, "")).keys()
            )
            for name, tensor in iter_full_tensors(path, ""):
                assert torch.equal(
                    tensor, read_full_tensor(CheckpointReader(tmp_path / "alone" / "checkpoints" / path.name), name)
                ), f"{step} {name}"
    assert len(list((tmp_path / "beside" / "checkpoints").glob("step-*"))) >= 2
    saves = events(tmp_path / "beside", saves=True)
    assert saves[-1].step == STEPS and saves[-1].seconds > 0.0 and all(event.seconds == 0.0 for event in saves[:1])
    assert not [name for name in os.listdir(tmp_path / "beside" / "checkpoints") if name.startswith(".")]


@pytest.mark.soak
def test_a_bit_that_flips_in_one_of_several_copies_is_voted_out_and_mended(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    """At the end of a step, before the copies are compared: nobody has computed with it yet, so nothing of it is
    left."""
    whole, broken = (launch(text, tmp_path / name, "dp4.mb2", replica_check_every=4) for name in ("whole", "broken"))
    train(agent, whole, [])
    train(agent, broken, [{"rank": 2, "step": 8, "phase": "compare", "how": "flip"}])
    [event] = events(tmp_path / "broken")
    assert (event.kind, event.rank, event.step) == ("divergence", 2, 8)
    assert state(tmp_path / "broken") == state(tmp_path / "whole") != {}


@pytest.mark.soak
def test_copies_are_never_compared_where_nobody_asked_for_it(agent: LocalAgent, tmp_path: Path, text: Path) -> None:
    """Nor at the end."""
    train(
        agent,
        launch(text, tmp_path / "run", "dp4.mb2", replica_check_every=0),
        [{"rank": 2, "step": STEPS, "phase": "update", "how": "flip"}],
    )
    assert not (tmp_path / "run" / "events.jsonl").exists() or events(tmp_path / "run") == []


def test_two_copies_that_differ_end_the_run_because_nobody_can_say_which_is_right(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    work = launch(text, tmp_path / "run", "dp2.mb4", replica_check_every=4)
    with pytest.raises(MeshwrightError, match="the states of ranks 0, 1 differ after step 8 and no majority shows"):
        train(agent, work, [{"rank": 1, "step": 8, "phase": "update", "how": "flip"}])


def test_a_run_whose_weights_drift_ends_in_one_line(agent: LocalAgent, tmp_path: Path, text: Path) -> None:
    """Nothing starts again by itself: the copies in memory are those of the step before, and hold what a window of the
    sentinel has not come to yet."""
    work = launch(text, tmp_path / "run", "dp2.mb4", replica_check_every=0)
    with pytest.raises(
        MeshwrightError,
        match=r"^step 7: weights that must be equal on several ranks differ: rank 0 has [0-9]+, rank 1 has [0-9]+: ",
    ) as caught:
        train(agent, work, [{"rank": 1, "step": 7, "phase": "backward", "how": "flip"}])
    assert caught.value.exit_code == 1 and "\n" not in str(caught.value)
    assert max(losses(tmp_path / "run")) == 6


def test_ranks_that_share_rows_and_read_other_bytes_end_the_run_with_their_names(
    agent: LocalAgent, tmp_path: Path, text: Path
) -> None:
    work = launch(text, tmp_path / "run", "tp2.dp2.mb2")
    with pytest.raises(
        MeshwrightError, match=r"step 6: rank [23] and rank [23] must read identical rows, but read different bytes"
    ):
        train(agent, work, [], poison=[5], poisoned=3)
    assert max(losses(tmp_path / "run")) == 5
