"""Experts that take only so many tokens of a sequence: the same tokens are dropped under every plan, those that one
device drops."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
from equality import alone, anatomy_of, difference, loss_of, make_batch, make_model, make_optimizer

from meshwright.core.errors import InputError
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

FACTOR = 0.75
SAMPLE = ["tp2.sp.ep2.mb4", "cp2.ep2.rc-full.mb2"]
WIDE = [
    "dp2.ep2.z1.mb2",
    "tp2.pp2.mb4",
    "dp1",
    "tp2.mb2",
    "cp2.ulysses",
    "tp2.sp.cp2.ep4.mb2",
    "dp2.tp2.ep4.z3.rc-full",
    "dp2.pp2.ep2.z2.zbh1",
    "tp4.ep2.mb2",
    "cp4.ulysses2.ep2.mb2",
]


def dropping(module: Any, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Before the experts of one device, token by token: whoever comes when an expert is full weighs nothing."""
    hidden, index, weights = given
    rows, experts = 8, 8
    keeping = torch.ones_like(weights)
    length = index.shape[0] // rows
    most = math.ceil(FACTOR * length * index.shape[1] / experts)
    for row in range(rows):
        taken = [0] * experts
        for token in range(row * length, (row + 1) * length):
            for place, expert in enumerate(index[token].tolist()):
                taken[expert] += 1
                keeping[token, place] = float(taken[expert] <= most)
    dropped.append(1 - keeping.mean().item())
    return hidden, index, weights * keeping


dropped: list[float] = []


@functools.cache
def expected(name: str) -> tuple[float, dict[str, torch.Tensor], float]:
    """Loss and gradients of one device, and the share of pairs that it drops."""
    model = make_model(name).double()
    for module in model.modules():
        if type(module).__name__ in ("MoeExperts", "MixtralExperts"):
            module.register_forward_pre_hook(dropping)
    dropped.clear()
    loss = loss_of(model, name, make_batch(name, 0))[0]
    loss.backward()
    gradients = {key: value.grad for key, value in model.named_parameters() if value.grad is not None}
    return loss.item(), gradients, sum(dropped) / len(dropped)


def limited(name: str, plan: str, factor: float = FACTOR) -> Any:
    """On every rank: the first loss and gradients, and what the first record says was dropped."""
    model = make_model(name)
    model.expert_capacity = factor  # type: ignore[assignment]
    trainer = parallelize(model, make_optimizer, plan, precision="fp64", anatomy=anatomy_of(name))
    loss, _, gradients = trainer.gradients(make_batch(name, 0))
    return loss, gradients, trainer.step(make_batch(name, 0)).experts.dropped


@pytest.mark.parametrize("model", ["mixture", pytest.param("mixtral", marks=pytest.mark.soak)])
@pytest.mark.parametrize("plan", [*SAMPLE, *(pytest.param(plan, marks=pytest.mark.soak) for plan in WIDE)])
def test_what_is_beyond_an_experts_capacity_is_dropped_as_on_one_device(ranks: Any, model: str, plan: str) -> None:
    loss, gradients, share = expected(model)
    assert share > 0.05
    results = ranks.run(parse_plan(plan).world, limited, model, plan)
    for found, _, said in results:
        assert found == pytest.approx(loss, rel=1e-10) and said == pytest.approx(share, rel=1e-10)
    for name, gradient in gradients.items():
        if gradient.norm() > 1e-9:
            assert difference(results[0][1][name], gradient) < 1e-10, name


def test_a_capacity_of_a_model_without_experts_is_refused() -> None:
    model = make_model("llama")
    model.expert_capacity = 1.25  # type: ignore[assignment]
    with pytest.raises(InputError, match="the model has no such"):
        parallelize(model, make_optimizer, "dp1")


def test_enough_capacity_drops_nothing_and_changes_nothing(ranks: Any) -> None:
    straight = alone("mixture", "fp64", steps=1)
    loss, _, share = ranks.run(2, limited, "mixture", "dp2.ep2.z1", 8.0)[0]
    assert loss == pytest.approx(straight["first"], rel=1e-10) and share == 0.0
