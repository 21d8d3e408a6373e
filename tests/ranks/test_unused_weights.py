"""Weights that no loss reaches stay as they are, as torch's optimizers leave one without a gradient alone, whatever the
plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import VOCABULARY, make_batch
from torch import nn

from meshwright.train.trainer import parallelize


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.idle = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).relu()


class Net(nn.Module):
    """Each block has a layer that does not run, and `late` runs where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.late, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.late(x) if input_ids.shape[1] < 16 else x)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, weight_decay=0.5)


def batches() -> list[dict[str, torch.Tensor]]:
    found = [make_batch("llama", step) for step in range(4)]
    return [
        {name: value[:, :9] if step > 1 else value for name, value in batch.items()} for step, batch in enumerate(found)
    ]


def trained(plan: str, rule: Any) -> tuple[Any, Any]:
    trainer = parallelize(net(), rule, plan, precision="fp64")
    gradients = trainer.gradients(batches()[0])[2]
    for batch in batches():
        trainer.step(batch)
    return gradients, trainer.full_state_dict()


def alone(rule: Any) -> tuple[set[str], dict[str, torch.Tensor]]:
    model, reached = net(), set()
    optimizer = rule(model.parameters())
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        F.cross_entropy(
            model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100
        ).backward()
        reached |= (
            {name for name, parameter in model.named_parameters() if parameter.grad is not None} if not step else set()
        )
        optimizer.step()
    return reached, model.state_dict()


@pytest.mark.parametrize(
    "plan",
    [
        "pp2.mb2",
        *(
            pytest.param(plan, marks=pytest.mark.soak)
            for plan in (
                "dp1",
                "dp2",
                "dp2.z1",
                "dp2.z3",
                "pp2.mb2.zbv.z3",
                "dp1.off-optimizer50",
                "dp2.z1.off-optimizer-disk",
                "dp2.z3.off-parameters-disk",
                "dp2.z3.off-optimizer-disk60.off-parameters-disk50",
            )
        ),
    ],
)
def test_decay_leaves_alone_what_no_loss_has_reached(ranks: Any, plan: str) -> None:
    gradients, weights = ranks.run(1 if plan.startswith("dp1") else 2, trained, plan, sgd)[0]
    reached, expected = alone(sgd)
    assert gradients.keys() == reached
    assert any(not torch.equal(weights[name], net().state_dict()[name]) for name in ("late.weight",)), (
        "it runs from the third step on"
    )
    for name, weight in expected.items():
        assert torch.allclose(weights[name], weight, rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize(
    "plan",
    [
        "dp2.z1.off-optimizer50",
        *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("dp2.z1", "pp2.mb2", "dp2.z1.off-optimizer")),
    ],
)
def test_adamw_leaves_idle_layers_bit_for_bit_alone(ranks: Any, plan: str) -> None:
    before = net().state_dict()
    _, weights = ranks.run(2, trained, plan, adamw)[0]
    idle = [name for name in before if ".idle." in name]
    assert len(idle) == 8 and all(torch.equal(weights[name], before[name]) for name in idle)


def early_batches() -> list[dict[str, torch.Tensor]]:
    """`late` runs in the first two steps alone."""
    return [
        {name: value[:, :9] if step < 2 else value for name, value in make_batch("llama", step).items()}
        for step in range(4)
    ]


def stopped(plan: str, folder: str) -> tuple[Any, Any]:
    """The weights of four steps, and of two and two with a checkpoint between."""
    whole = parallelize(net(), sgd, plan, precision="fp64")
    for batch in early_batches():
        whole.step(batch)
    first, second = (parallelize(net(), sgd, plan, precision="fp64") for _ in range(2))
    for batch in early_batches()[:2]:
        first.step(batch)
    second.load(first.save(folder))
    for batch in early_batches()[2:]:
        second.step(batch)
    return whole.full_state_dict(), second.full_state_dict()


@pytest.mark.soak
@pytest.mark.parametrize("plan", ["dp2.z1", "pp2.mb2"])
def test_what_a_loss_had_reached_before_a_checkpoint_counts_as_reached_behind_it(
    ranks: Any, tmp_path: Path, plan: str
) -> None:
    """Decay goes on: a run that goes on is bit for bit one that never stopped."""
    whole, again = ranks.run(2, stopped, plan, str(tmp_path / plan))[0]
    assert whole.keys() == again.keys()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert not torch.equal(again["late.weight"], net().state_dict()["late.weight"])


class Chosen(Net):
    """Gives rows and whether each counts."""

    def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return super().forward(input_ids), input_ids[:, 0] < VOCABULARY // 2


def of_chosen(output: tuple[torch.Tensor, torch.Tensor], batch: Any) -> torch.Tensor:
    values, counts = output
    if not bool(counts.any()):
        return torch.zeros((), dtype=values.dtype)  # no weight has a part in it
    return (values.square().flatten(1).sum(1) * counts).mean()


def some_rows() -> dict[str, torch.Tensor]:
    """Of two rows at a time, the second pair does not count."""
    ids = make_batch("llama", 0)["input_ids"]
    ids[:, 0] = torch.tensor([1, 95, 95, 95, 95, 1, 1, 1])
    return {"input_ids": ids}


def chosen(plan: str) -> tuple[list[float], Any]:
    torch.manual_seed(0)
    trainer = parallelize(Chosen().double(), sgd, plan, precision="fp64", loss=of_chosen, example=some_rows())
    return [trainer.step(some_rows()).loss for _ in range(2)], trainer.full_state_dict()


@pytest.mark.parametrize(
    "plan",
    [
        "dp2.z2.mb2",
        "pp2.zbh1.mb2",
        *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("dp1.mb2", "dp2.mb2", "pp2.mb2")),
    ],
)
def test_a_micro_batch_in_whose_loss_no_weight_has_a_part_adds_nothing(ranks: Any, plan: str) -> None:
    """It has no backward, and one of another micro-batch waited for it."""
    expected, whole = ranks.run(1, chosen, "dp1.mb8")[0]
    for losses, weights in ranks.run(1 if plan.startswith("dp1") else 2, chosen, plan):
        assert losses == pytest.approx(expected, rel=1e-10)
        assert weights is None or all(
            torch.allclose(weights[name], whole[name], rtol=1e-9, atol=1e-12) for name in whole
        )
