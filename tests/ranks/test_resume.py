"""A loop of one's own that is stopped and started again: the newest valid checkpoint, the place in the data, and how
many checkpoints remain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch import nn

import meshwright as mw

STEPS = 6


def loop(folder: Path, plan: str, until: int = STEPS, keep: int = 2) -> tuple[list[float], Any]:
    """The losses of this start, after a resume first that of an evaluation, and the `extra` that was found."""
    torch.manual_seed(1)
    ids = torch.randint(64, (STEPS, 4, 8))
    model = nn.Sequential(nn.Embedding(64, 16), nn.Linear(16, 64))
    trainer = mw.parallelize(model, optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2), plan=plan)
    state = trainer.resume(folder)
    losses = []
    if state is not None and state["next"] < until:  # an evaluation needs no step, and changes nothing
        batch = {"input": ids[state["next"]], "labels": (ids[state["next"]] + 1) % 64}
        losses.append(trainer.evaluate(batch))
    for number in range((state or {"next": 0})["next"], until):
        losses.append(trainer.step({"input": ids[number], "labels": (ids[number] + 1) % 64}).loss)
        trainer.save(folder, extra={"next": number + 1, "mine": [number, "a"]}, keep=keep)
    return losses, state


def folders(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.iterdir() if path.name.startswith("step-"))


def test_a_loop_that_is_started_again_goes_on_with_the_next_batch_bit_for_bit(ranks: Pool, tmp_path: Path) -> None:
    whole = ranks.run(2, loop, tmp_path / "whole", "dp2.z1", STEPS, 0)[0][0]
    assert folders(tmp_path / "whole") == [1, 2, 3, 4, 5, 6], "keep is 0"
    first = ranks.run(2, loop, tmp_path / "a", "dp2.z1", 3)
    assert all(state is None for _, state in first) and folders(tmp_path / "a") == [2, 3]
    again = ranks.run(2, loop, tmp_path / "a", "dp2.z1")
    assert all(state == {"next": 3, "mine": [2, "a"]} for _, state in again)
    evaluated, *trained = again[0][0]
    assert (
        first[0][0] + trained == whole
        and evaluated == pytest.approx(whole[3], rel=1e-6)
        and folders(tmp_path / "a") == [5, 6]
    )


def test_a_damaged_newest_checkpoint_is_skipped_and_one_rank_goes_on(ranks: Pool, tmp_path: Path) -> None:
    whole = ranks.run(2, loop, tmp_path, "dp2.z1", STEPS, 0)[0][0]
    for step in (5, 6):
        for file in (tmp_path / f"step-{step:08}").glob("*.safetensors"):
            file.write_bytes(file.read_bytes()[:-8])
    ((losses, state),) = ranks.run(1, loop, tmp_path, "dp1")
    assert state["next"] == 4 and losses == pytest.approx([whole[4], *whole[4:]], rel=1e-6)


def test_without_a_valid_checkpoint_nothing_starts_from_step_0_in_silence(ranks: Pool, tmp_path: Path) -> None:
    ranks.run(1, loop, tmp_path, "dp1", 1)
    for file in (tmp_path / "step-00000001").glob("*.safetensors"):
        file.write_bytes(b"")
    with pytest.raises(Exception, match="none of the 1 checkpoints in"):
        ranks.run(2, loop, tmp_path, "dp2")


def test_a_negative_number_of_checkpoints_is_refused(ranks: Pool, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="keep = -1: at least one checkpoint must stay"):
        ranks.run(1, loop, tmp_path, "dp1", 1, -1)
