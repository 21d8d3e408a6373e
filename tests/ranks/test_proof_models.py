"""The proof run of models whose passes are not plain: dropout, own losses, losses that read weights, draws, and
micro-batches of each replica."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from equality import make_optimizer
from torch import nn
from torch.nn import functional as F

from meshwright.spec.grid import micro_batch_rows
from meshwright.spec.record import ProofResult
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.trainer import Trainer, parallelize

WORDS, HIDDEN, LENGTH = 50, 32, 16
Batch = dict[str, torch.Tensor]


class Block(nn.Module):
    """Its last layer is zero at first, so that nothing before it has a gradient yet."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(HIDDEN), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(HIDDEN, 2 * HIDDEN), nn.Linear(2 * HIDDEN, HIDDEN)
        nn.init.zeros_(self.down.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """Dropout in blocks and before them; a layer that no loss reaches. `noise`: drawn in training."""

    shift_labels = True

    def __init__(self, noise: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.noise = nn.Embedding(WORDS, HIDDEN), noise
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head, self.unused = nn.Linear(HIDDEN, WORDS, bias=False), nn.Linear(3, 3)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = F.dropout(self.table(input_ids), 0.2, self.training)
        if self.noise and self.training:
            x = x + self.noise * torch.randn_like(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(rows: int = 8) -> Batch:
    ids = torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def cross_entropy(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def trainer_of(model: Net, plan: str, **known: Any) -> Trainer:
    return parallelize(model, make_optimizer, plan, precision="fp64", prove="start", example=batch_of(2), **known)


def of_dropout(plan: str) -> ProofResult:
    return trainer_of(Net(), plan).prove(batch_of())


@pytest.mark.parametrize(
    "plan", ["tp2", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("pp2", "dp2.z3.rc-full"))]
)
def test_dropout_is_a_factor_on_both_sides(ranks: Any, plan: str) -> None:
    proof = ranks.run(2, of_dropout, plan)[0]
    assert proof.equal and proof.gradient < 1e-12, proof.line


def of_lost_dropout(plan: str) -> ProofResult:
    trainer = trainer_of(Net(), plan)
    for module in trainer.engine.model.modules():
        if isinstance(module, nn.Dropout):
            module.forward = lambda x: x  # type: ignore[method-assign]
    return trainer.prove(batch_of())


def test_a_dropout_that_a_plan_loses_is_found_in_the_block_that_lost_it(ranks: Any) -> None:
    proof = ranks.run(2, of_lost_dropout, "pp2")[0]
    assert not proof.equal and "blocks.0.drop" in proof.line


def with_weights(model: Net) -> Callable[[torch.Tensor, Batch], torch.Tensor]:
    return lambda output, batch: (
        cross_entropy(output, batch) + 1e-2 * sum(each.square().sum() for each in model.parameters())
    )


def of_own_loss(plan: str, reads_weights: bool) -> ProofResult:
    model = Net()
    return trainer_of(model, plan, loss=with_weights(model) if reads_weights else cross_entropy).prove(batch_of())


@pytest.mark.parametrize("reads_weights", [pytest.param(False, marks=pytest.mark.soak), True])
def test_an_own_loss_is_proven_under_dp_also_where_it_reads_weights(ranks: Any, reads_weights: bool) -> None:
    proof = ranks.run(2, of_own_loss, "dp2", reads_weights)[0]
    assert proof.equal, proof.line


def of_draws(plan: str) -> ProofResult:
    return trainer_of(Net(noise=1.0), plan).prove(batch_of())


def test_a_model_that_draws_is_proven_in_eval_mode_and_the_proof_says_so(ranks: Any) -> None:
    proof = ranks.run(2, of_draws, "dp2")[0]
    assert proof.equal and any("random numbers other than dropout" in note for note in proof.notes)


def of_share(plan: str) -> tuple[ProofResult | None, float]:
    trainer, whole = trainer_of(Net(), plan), batch_of()
    parts = [
        {name: value[first : first + size] for name, value in whole.items()}
        for first, size in micro_batch_rows(trainer.plan, 8, trainer.mesh.replica)
    ]
    record = trainer.step(LocalBatch(parts))
    return trainer.prover.last, record.loss


def test_a_step_on_shares_of_a_batch_is_proven_on_rows_of_every_replica(ranks: Any) -> None:
    results = ranks.run(2, of_share, "dp2")
    assert all(proof is not None and proof.equal for proof, _ in results)
    assert results[0][0].rows == 8
