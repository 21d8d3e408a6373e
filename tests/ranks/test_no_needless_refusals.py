"""Models and batches that plans refused without need: each trains as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.train.trainer import parallelize

torch.set_num_threads(1)
WORDS, WIDTH, LENGTH = 23, 8, 5


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Frozen(nn.Module):
    """`kind` 'batch' or 'instance': a norm whose statistics are fixed, as those of a backbone that is tuned."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        made = nn.BatchNorm1d(WIDTH) if kind == "batch" else nn.InstanceNorm1d(WIDTH, track_running_stats=True)
        self.table, self.norm, self.layers = nn.Embedding(WORDS, WIDTH), made, nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.norm.running_mean.uniform_(-0.3, 0.3)
        self.norm.running_var.uniform_(0.5, 1.5)
        self.norm.eval()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.norm(self.table(input_ids).transpose(1, 2)).transpose(1, 2)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Frozen(kind).double()


def batch_of(step: int, rows: int = 8) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def mean_of_rows(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Of each row first: a loss of one's own, which weighs rows alike."""
    losses = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="none")
    return losses.view(batch["labels"].shape).square().mean(1).mean()


def run(trainer: Any, batches: list[dict[str, torch.Tensor]]) -> Any:
    loss, _, gradients = trainer.gradients(batches[0])
    first = {name: gradient.clone() for name, gradient in (gradients or {}).items()}
    return [loss, *(trainer.step(batch).loss for batch in batches)], first


def under(kind: str, plan: str, rows: tuple[int, ...], own: bool) -> Any:
    loss = {"loss": lambda output, batch: mean_of_rows(output, batch)} if own else {}
    try:
        return run(
            parallelize(made(kind), adamw, plan, precision="fp64", **loss),
            [batch_of(step, each) for step, each in enumerate(rows)],
        )
    except InputError as error:
        return str(error)


def alone(kind: str, rows: tuple[int, ...], own: bool) -> Any:
    model, losses, first = made(kind), [], {}
    optimizer = adamw(model.parameters())
    for step, each in enumerate(rows):
        batch = batch_of(step, each)
        optimizer.zero_grad()
        output = model(batch["input_ids"])
        loss = mean_of_rows(output, batch) if own else F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        first = first or {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return [losses[0], *losses], first


def check(found: list[Any], expected: Any) -> None:
    for one in found:
        assert not isinstance(one, str), one
        assert one[0] == pytest.approx(expected[0], rel=1e-10)
    assert found[0][1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert torch.allclose(found[0][1][name], gradient, rtol=1e-10, atol=1e-13), name


@pytest.mark.parametrize("kind", ["batch", "instance"])
@pytest.mark.parametrize("plan", ["dp2.mb2", pytest.param("dp2.z3.mb2", marks=pytest.mark.soak)])
def test_a_norm_in_eval_mode_does_not_couple_rows(ranks: Any, kind: str, plan: str) -> None:
    check(ranks.run(2, under, kind, plan, (8, 8), False), alone(kind, (8, 8), False))


def turned_on() -> str:
    model = made("batch")
    trainer = parallelize(model, adamw, "dp2.mb2", precision="fp64")
    model.train()
    try:
        trainer.step(batch_of(0))
    except InputError as error:
        return str(error)
    return "it ran"


def test_a_norm_that_is_put_in_training_mode_later_is_refused_at_the_next_step(ranks: Any) -> None:
    first, second = ranks.run(2, turned_on)
    assert first == second and "norm is a norm with batch statistics" in first


@pytest.mark.parametrize("plan", ["dp2.mb2", "dp2.z3.mb1", "dp2.z1.mb2.ga3-1", "pp2.mb2", "pp2.mb2.interleaved2"])
@pytest.mark.parametrize("last", [7, 5, 1])
@pytest.mark.covering(1)
def test_a_partial_last_batch_counts_each_row_once_in_a_custom_mean(ranks: Any, plan: str, last: int) -> None:
    check(ranks.run(2, under, "batch", plan, (8, last), True), alone("batch", (8, last), True))


def test_an_own_loss_whose_first_batch_is_odd_is_that_of_one_device(ranks: Any) -> None:
    check(ranks.run(2, under, "batch", "dp2.mb2", (3, 8), True), alone("batch", (3, 8), True))


class Sharing(nn.Module):
    """Two of its blocks have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.layers[2].up.weight = self.layers[0].up.weight

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sharing(plan: str | None) -> Any:
    torch.manual_seed(0)
    model, losses, first = Sharing().double(), [], {}
    if plan is not None:
        return run(
            parallelize(model, adamw, plan, precision="fp64", prove="never"), [batch_of(step) for step in range(3)]
        )
    optimizer = adamw(model.parameters())
    for step in range(3):
        batch = batch_of(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        first = first or {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return [losses[0], *losses], first


@pytest.mark.parametrize("plan", [pytest.param("dp2.z3.mb2", marks=pytest.mark.soak), "dp2.z3.mb4.rc-full"])
def test_a_weight_that_two_blocks_share_trains_under_zero_3(ranks: Any, plan: str) -> None:
    check(ranks.run(2, sharing, plan), sharing(None))
