"""Drift that is planted in a run is noticed by all ranks at the step where it begins, and named."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from equality import anatomy_of, make_batch, make_model
from pool import unchecked

from meshwright.spec.record import ProofMode
from meshwright.train.silent_corruption import repair_replicas
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.step.invariants import InvariantViolated
from meshwright.train.trainer import Trainer, parallelize


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def made(plan: str, prove: ProofMode = "never") -> Trainer:
    model = make_model("llama").double()
    return parallelize(model, adamw, plan, precision="fp64", prove=prove, anatomy=anatomy_of("llama"))


def drifting(plan: str, fault: str, at: int) -> tuple[int, str]:
    """Steps that counted, and the line; `fault` is planted before step `at`."""
    trainer = made(plan)
    try:
        for step in range(10):
            batch: Any = make_batch("llama", step)
            if step + 1 == at:
                batch = planted(trainer, fault, batch)
            trainer.step(batch)
    except InvariantViolated as drift:
        return trainer.steps, str(drift)
    return trainer.steps, ""


def planted(trainer: Trainer, fault: str, batch: Any) -> Any:
    engine, pipeline = trainer.engine, trainer.engine.pipeline
    if fault == "weight" and trainer.mesh.rank == 1:  # a bit flips: no version of a tensor counts it
        last = [*engine.zero.units[0].parameters.values()][-1]
        last.data.view(-1)[-1] *= 1 + 1e-6
    if fault == "micro-batch":
        run = pipeline.run
        pipeline.run = lambda batches, scale: run(batches[1:], scale)  # type: ignore[method-assign]
    if fault == "gradient":
        finish = engine.zero.finish_gradients

        def scaled() -> None:
            finish()
            engine.zero.trainable[-1].gradients.shard.mul_(1.01 if trainer.mesh.rank == 1 else 1.0)

        engine.zero.finish_gradients = scaled  # type: ignore[method-assign]
    if fault == "labels":
        rows = [{name: value[first : first + 4] for name, value in batch.items()} for first in (0, 4)]
        return LocalBatch([rows[trainer.mesh.replica]], trainer.engine.objective.count(batch) + 3)
    return batch


@pytest.mark.parametrize(
    ("plan", "fault", "at", "said"),
    [
        *(
            pytest.param(
                plan,
                "weight",
                7,
                "weights that must be equal on several ranks differ: rank 0 has",
                marks=pytest.mark.soak,
            )
            for plan in ("dp2.mb4", "dp2.z2.mb4")
        ),
        ("dp2.mb1", "micro-batch", 5, "passes fewer than micro-batches"),
        pytest.param(
            "dp2.mb4",
            "gradient",
            6,
            "gradients that must be equal on several ranks differ: rank 0 has",
            marks=pytest.mark.soak,
        ),
        ("dp2.mb4", "labels", 4, "valid labels, but the loss is divided by"),
    ],
)
def test_what_begins_to_drift_is_noticed_at_that_step_by_all_ranks(
    ranks: Any, plan: str, fault: str, at: int, said: str
) -> None:
    for steps, line in ranks.run(2, unchecked, drifting, plan, fault, at):
        assert steps == at - 1, (steps, line)
        assert line.startswith(f"step {at}: ") and said in line and "\n" not in line


@pytest.mark.parametrize("at", [2, 3, 4, 10])
@pytest.mark.parametrize("plan", ["dp2.mb4", "dp2.z2.mb4"])
@pytest.mark.covering(1)
def test_a_bit_that_flips_before_a_step_is_noticed_at_that_step(ranks: Any, plan: str, at: int) -> None:
    for steps, line in ranks.run(2, drifting, plan, "weight", at):
        assert steps == at - 1 and line.startswith(
            f"step {at}: weights that must be equal on several ranks differ: rank 0 has"
        ), (
            steps,
            line,
        )


@pytest.mark.soak
@pytest.mark.parametrize(
    "plan", ["dp2.mb2", "dp2.z1.mb2", "dp2.z3.mb2", "pp2.mb2", "tp2.mb4", "cp2.mb4", "pp2.mb2.zbv"]
)
def test_nothing_is_noticed_where_nothing_drifts(ranks: Any, plan: str) -> None:
    assert ranks.run(2, drifting, plan, "", 0) == [(10, "")] * 2


def mended(at: int, prove: ProofMode = "never", steps: int = 5) -> tuple[list[float], set[int]]:
    """Losses, and the steps after which copies were mended; a weight of rank 1 changes before step `at`."""
    trainer, found = made("dp3.mb2", prove), set[int]()
    trainer.mend = partial(repair_replicas, trainer, lambda line, step, rank: found.add(step))
    losses = []
    for step in range(steps):
        batch = make_batch("llama", step, rows=6)
        losses.append(trainer.step(planted(trainer, "weight", batch) if step + 1 == at else batch).loss)
    return losses, found


@pytest.mark.soak
@pytest.mark.parametrize("at", [2, 3, 4])
def test_the_majority_of_three_replicas_repairs_the_one_that_drifted(ranks: Any, at: int) -> None:
    clean, drifted = ranks.once(3, mended, 0), ranks.run(3, mended, at)
    assert [losses for losses, _ in drifted] == [losses for losses, _ in clean]
    assert all(steps == {at - 1} for _, steps in drifted) and all(steps == set() for _, steps in clean)


@pytest.mark.parametrize("steps", [3, pytest.param(5, marks=pytest.mark.soak)])
def test_a_proof_that_a_drifted_copy_spoils_is_made_again_with_the_majoritys_weights(ranks: Any, steps: int) -> None:
    drifted = ranks.run(3, mended, 2, "start", steps)
    assert drifted == [(losses, {1}) for losses, _ in ranks.once(3, unchecked, mended, 0, "never", steps)]
