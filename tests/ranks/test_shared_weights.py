"""Weights that another module reads than the one that holds them: gathered for it under ZeRO 3, and held by each stage
that reads them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.analysis.dataflow import WeightUse
from meshwright.analysis.dataflow_recorder import record_dataflow
from meshwright.core.errors import InputError
from meshwright.train.trainer import parallelize

torch.set_num_threads(1)
WORDS, WIDTH = 39, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Its head is its table, by name or by a layer that is never called, as MobileBERT's is."""

    shift_labels = False

    def __init__(self, named: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layers, self.norm = (
            nn.Embedding(WORDS, WIDTH),
            nn.ModuleList(Block() for _ in range(4)),
            nn.LayerNorm(WIDTH),
        )
        self.head = nn.Linear(WIDTH, WORDS) if named else None
        if self.head is not None:
            self.head.weight = self.table.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        if self.head is None:
            return F.linear(self.norm(x), self.table.weight)
        return self.norm(x).matmul(torch.cat([self.head.weight.t()])) + self.head.bias


class Scaled(Net):
    """Reads the weight of a block outside of all blocks, before and behind them."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        before = self.layers[1].up.weight.mean()
        return super().forward(input_ids) * (1 + before + self.layers[0].down.weight.square().mean())


def made(named: bool | None) -> nn.Module:
    return (Net(named) if named is not None else Scaled(False)).double()


def batch_of(named: bool | None) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def under(named: bool | None, plan: str) -> Any:
    try:
        trainer = parallelize(made(named), torch.optim.AdamW, plan, precision="fp64")
    except InputError as error:
        return str(error)
    loss, _, gradients = trainer.gradients(batch_of(named))
    found = {name: gradient.clone() for name, gradient in (gradients or {}).items()}
    return loss, trainer.step(batch_of(named)).loss, trainer.step(batch_of(named)).loss, found


def alone(named: bool | None) -> Any:
    model, batch, losses = made(named), batch_of(named), []
    optimizer, first = torch.optim.AdamW(model.parameters()), {}
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        first = first or {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses[0], *losses, first


def test_readers_are_noted_with_the_blocks_that_had_begun() -> None:
    found = record_dataflow(Net(False), [f"layers.{index}" for index in range(4)]).reads
    assert found["table.weight"] == {WeightUse("table", 0), WeightUse("", 4)}
    assert found["layers.1.up.weight"] == {WeightUse("layers.1.up", 2)}


@pytest.mark.parametrize(
    ("named", "plan"),
    [
        pytest.param(False, "dp2.z3", marks=pytest.mark.soak),
        (True, "dp2.z3"),
        pytest.param(None, "dp2.z3", marks=pytest.mark.soak),
        (None, "dp2.z3.mb1.rc-full"),
    ],
)
def test_a_weight_that_is_read_past_its_layer_is_whole_there_under_zero_3(ranks, named: bool | None, plan: str) -> None:
    *losses, gradients = ranks.run(2, under, named, plan)[0]
    *expected, first = alone(named)
    assert losses == pytest.approx(expected, rel=1e-10)
    assert all(torch.allclose(gradients[name], gradient, rtol=1e-9, atol=1e-13) for name, gradient in first.items())


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("plan", ["pp2.mb2", "pp2.mb1.zbv", "dp1.pp2.mb2.interleaved2"])
@pytest.mark.covering(1)
def test_a_table_that_the_last_stage_reads_past_its_layer_is_held_by_both(ranks, named: bool, plan: str) -> None:
    *losses, gradients = ranks.run(2, under, named, plan)[0]
    *expected, first = alone(named)
    assert losses == pytest.approx(expected, rel=1e-10)
    assert all(torch.allclose(gradients[name], gradient, rtol=1e-9, atol=1e-13) for name, gradient in first.items())


def test_a_weight_of_a_block_that_another_stage_reads_is_refused_in_one_line(ranks) -> None:
    first, second = ranks.run(2, under, None, "pp2.mb2")
    assert first == second and "stage 1 reads layers.0.down.weight, which belongs to a block of stage 0" in first
