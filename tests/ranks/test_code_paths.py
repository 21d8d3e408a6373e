"""Branches on values that go the other way at a later step: equal to one device, or refused before that step counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.train.trainer import parallelize

WORDS, WIDTH, ROWS, LENGTH, STEPS, LATE = 24, 8, 8, 8, 8, 5
"""Steps are counted from 0: the branch goes the other way in step LATE."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor, is_late: bool = False) -> torch.Tensor:
        h = F.gelu(self.up(x))
        return x + self.down(h - h.mean(-1, keepdim=True) if is_late else h)


class Net(nn.Module):
    """`kind` says what its forward does where the weight of the head has become smaller than `limit`."""

    shift_labels = False

    def __init__(self, kind: str, limit: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.limit = kind, limit
        self.words, self.layers, self.head = (
            nn.Embedding(WORDS, WIDTH),
            nn.ModuleList(Block() for _ in range(4)),
            nn.Linear(WIDTH, WORDS),
        )
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def is_late(self) -> bool:
        return float(self.limit - self.head.weight.detach().norm()) > 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x, self.kind == "features" and self.is_late())
        if self.kind == "rows" and self.is_late():
            x = x + x.mean(0, keepdim=True)
        if self.kind == "factor":
            x = x + x.mean(0, keepdim=True) * float(self.is_late())
        if self.kind == "harmless" and self.is_late():
            x = torch.tanh(x)
        if self.kind == "marked":  # rows meet in the micro-batches that hold a mark
            x = x + x.mean(0, keepdim=True) if bool((input_ids == WORDS - 1).any()) else x
        if self.kind == "experts":
            chosen = self.gate(x).argmax(-1)
            for expert in chosen.unique().tolist():
                where = (chosen == expert).nonzero(as_tuple=True)
                x = x.index_put(where, self.experts[expert](x[where]))
        return self.head(x)


def batch_of(step: int, kind: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS - 1, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    if kind == "marked" and step == LATE:
        ids[ROWS - 1, 3] = WORDS - 1
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def alone(kind: str, limit: float, norms: list[float] | None = None) -> list[float]:
    model, losses = Net(kind, limit).double(), []
    optimizer = adamw(model.parameters())
    for step in range(STEPS):
        if norms is not None:
            norms.append(float(model.head.weight.detach().norm()))
        batch = batch_of(step, kind)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def limit_of(kind: str) -> float:
    """Between the norms of two steps, so that the branch goes the other way in step LATE."""
    norms: list[float] = []
    alone(kind, -1.0, norms)
    return (norms[LATE - 1] + norms[LATE]) / 2


def run(kind: str, limit: float, plan: str, prove: Any) -> list[Any]:
    found: list[Any] = []
    try:
        trainer = parallelize(
            Net(kind, limit).double(), adamw, plan, precision="fp64", prove=prove, example=batch_of(0, "")
        )
        for step in range(STEPS):
            found.append(trainer.step(batch_of(step, kind)).loss)
        found.append(trainer.engine.preflight.paths.asks)
    except InputError as error:
        found.append(str(error))
    return found


MEETING = [
    (kind, plan, prove)
    for kind in ("rows", "factor", "marked")
    for plan in ("dp2.mb4", "dp2.mb2", "dp1.mb2", "dp2.z3.mb2")
    for prove in ("start", "never")
]
APART = ["dp2.mb4", "dp2.z1.mb2", "dp2.z3.mb2", "dp1.mb2", "dp2.mb2.off-optimizer"]
KEPT_APART = [
    (kind, plan, prove)
    for kind, plans in (("experts", APART), ("harmless", [*APART, "tp2.mb8"]))
    for plan in plans
    for prove in ("start", "never")
]
FEW = {("marked", "dp2.mb4", "start"), ("factor", "dp1.mb2", "never"), ("harmless", "dp2.mb4", "never")}


def sample(cases: list[tuple[str, str, str]]) -> list[Any]:
    return [case if case in FEW else pytest.param(*case, marks=pytest.mark.soak) for case in cases]


@pytest.mark.parametrize(("kind", "plan", "prove"), sample(MEETING))
def test_rows_that_meet_in_a_branch_that_is_taken_late_are_refused_at_that_step(
    ranks: Any, kind: str, plan: str, prove: str
) -> None:
    limit = limit_of(kind)
    found = ranks.run(1 if plan.startswith("dp1") else 2, run, kind, limit, plan, prove)
    losses, line = found[0][:-1], found[0][-1]
    assert losses == pytest.approx(alone(kind, limit)[:LATE], rel=1e-10) and len(losses) == LATE, found[0]
    assert "rows of a batch depend on each other" in line and "\n" not in line
    assert all(each[-1] == line for each in found)


@pytest.mark.parametrize(("kind", "plan", "prove"), sample(KEPT_APART))
def test_a_branch_that_is_taken_late_and_keeps_rows_apart_trains_as_on_one_device(
    ranks: Any, kind: str, plan: str, prove: str
) -> None:
    limit = limit_of(kind)
    for *losses, asks in ranks.run(1 if plan.startswith("dp1") else 2, run, kind, limit, plan, prove):
        assert losses == pytest.approx(alone(kind, limit), rel=1e-10)
        assert asks is True


def test_a_model_whose_code_asks_for_no_value_pays_nothing(ranks: Any) -> None:
    for found in ranks.run(2, run, "plain", -1.0, "dp2.mb2", "start"):
        assert found[-1] is False


def test_features_coupled_by_a_late_branch_are_refused_at_that_step_under_tp(ranks: Any) -> None:
    limit = limit_of("features")
    for *losses, line in ranks.run(2, run, "features", limit, "tp2.mb8", "start"):
        assert losses == pytest.approx(alone("features", limit)[:LATE], rel=1e-10) and len(losses) == LATE
        assert "the proof run differs from one device" in line and "\n" not in line
