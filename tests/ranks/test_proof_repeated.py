"""What a later proof follows, what it does not judge, and what becomes of a request that one rank cannot answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import anatomy_of, made, make_batch, make_optimizer
from test_proof import trainer_of
from test_proof_models import Net, batch_of

from meshwright.core.errors import InputError
from meshwright.spec.precision import DilocoConfig, recipe
from meshwright.spec.record import ProofCost
from meshwright.train.trainer import Trainer, parallelize


class Warm(Net):
    """Its output grows with the number of calls; `factor` is the user's schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.factor = 0, 1.0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        self.calls += 1
        return super().forward(input_ids) * min(1.0, (self.calls // 100 + 1) / 10) * self.factor


def scheduled() -> list[tuple[int, bool]]:
    """The step of each proof, and whether it found the plan equal, while the user sets numbers between steps."""
    trainer = parallelize(Warm().double(), make_optimizer, "dp2.mb4", precision="fp64", prove=1)
    proofs: list[tuple[int, bool]] = []
    trainer.prover.record = lambda proof: proofs.append((proof.step, proof.equal))
    for step in range(3):
        model: Any = trainer.engine.model
        model.factor, model.calls = 1.0 / (step + 1), 100 * step
        trainer.step(batch_of())
    return proofs


def test_a_later_proof_follows_plain_numbers_that_modules_hold(ranks: Any) -> None:
    assert ranks.run(2, scheduled) == [[(0, True), (1, True), (2, True)]] * 2


def announced(seconds: float, rounding: float = 0.0) -> tuple[list[str], int]:
    """What is said around a proof that was predicted to take `seconds`, or `rounding` more if rounding is measured, and
    how often the rank gave a sign of life meanwhile."""
    trainer = parallelize(Net().double(), make_optimizer, "dp2", precision="fp64", prove="start")
    lines: list[str] = []
    beats: list[int] = []
    trainer.prover.say, trainer.mesh.error_propagator.report_alive = lines.append, lambda: beats.append(1)
    trainer.prover.predicted = ProofCost(seconds=seconds, step=1e-3, rounding=rounding)
    trainer.step(batch_of())
    return lines, len(beats)


def test_a_long_proof_is_announced_and_gives_signs_of_life(ranks: Any) -> None:
    for (first, *others), beats in ranks.run(2, announced, 75.0):
        assert first == "proving the plan before step 1, for about 1 min 15 s"
        assert others[0].startswith("proven equal to one device before step 1: ") and beats > 20


def test_a_proof_that_may_measure_rounding_is_announced_with_both_times(ranks: Any) -> None:
    for (first, second, *_), _ in ranks.run(2, announced, 75.0, 60.0):
        assert first == (
            "proving the plan before step 1, for about 1 min 15 s, or 2 min 15 s if rounding has to be measured"
        )
        assert second.endswith(", 1 min 15 s predicted)")


@pytest.mark.soak
def test_a_short_proof_is_not_announced(ranks: Any) -> None:
    for lines, _ in ranks.run(2, announced, 5.0):
        assert not any(line.startswith("proving") for line in lines)


def poisoned() -> tuple[bool, list[str], str, bool]:
    """Whether a step whose batch gives no finite loss is skipped, what is said, and what the next update's proof
    says."""
    trainer = parallelize(Features().double(), make_optimizer, "dp2", precision="fp64", prove="start", loss=mean_square)
    lines: list[str] = []
    trainer.prover.say = lines.append
    batch = {"x": torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}
    skipped = trainer.step({"x": batch["x"] * torch.inf}).skipped
    trainer.step(batch)
    return skipped, lines, trainer.prover.reason, trainer.prover.proven


class Features(torch.nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def mean_square(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return output.square().mean()


def test_a_step_that_one_device_skips_is_skipped_and_the_next_one_is_proven(ranks: Any) -> None:
    skipped, lines, reason, proven = ranks.run(2, poisoned)[0]
    assert skipped and proven and reason == "before step 1"
    assert "one device's loss or gradients are not finite" in lines[0] and "\n" not in lines[0]


def local() -> list[str]:
    lines: list[str] = []
    rule = recipe("fp32").but(local=DilocoConfig(replicas=2, steps=2, lr=0.7, momentum=0.9))
    trainer = parallelize(
        made("llama", "fp32"), make_optimizer, "dp2", precision=rule, anatomy=anatomy_of("llama"), prove="start"
    )
    trainer.prover.say = lines.append
    for step in range(2):
        trainer.step(make_batch("llama", step))
    return lines


def test_replicas_with_local_steps_say_once_that_nothing_is_proven(ranks: Any) -> None:
    lines = ranks.run(2, local)[0]
    assert len(lines) == 1 and "is not proven: replicas that take local steps" in lines[0], lines


def broken() -> str:
    """What a proof says of which one rank cannot give its part of a weight."""
    trainer: Trainer = trainer_of("llama", "dp2.z3")
    if trainer.mesh.rank == 1:
        unit = trainer.engine.zero.units[1]
        unit.layout = None  # type: ignore[assignment]
    from meshwright.runtime.gather_service import GatherService

    tensors = GatherService(trainer.engine, torch.float64)
    name = next(name for name in tensors.names if "layers.1." in name)
    if trainer.mesh.rank:
        tensors.serve()
        return ""
    try:
        tensors.weights([name], torch.float64)
    except InputError as error:
        return str(error)
    finally:
        tensors.end()
    return "nothing"


def test_a_request_that_one_rank_cannot_answer_fails_on_all_ranks(ranks: Any) -> None:
    line = ranks.run(2, broken)[0]
    assert line.startswith("1 of 2 ranks failed to send their shards of model.layers.1."), line
