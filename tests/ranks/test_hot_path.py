"""What runs once for each parameter in every step costs the same for each, however many there are."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.train.trainer import parallelize


class Many(nn.Module):
    """So many parameters of one number."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.numbers = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.cat(list(self.numbers)).sum()


def trainer_of(count: int, plan: str) -> Any:
    make = lambda parameters: torch.optim.AdamW(parameters, lr=0.1)
    return parallelize(Many(count), make, plan, loss=lambda output, batch: output.mean(), example={"x": torch.ones(1)})


FEW, MANY, PASSES = 100, 4000, 10


def seconds_each(plan: str) -> list[float]:
    """Of this thread for taking one gradient, of FEW and of MANY in turn. Of each FEW that follow one another the least
    of several passes over all
    counts: what else runs here makes one longer, and nothing makes it shorter."""
    trainers, gradient = [trainer_of(count, plan) for count in (FEW, MANY)], torch.ones(1)
    units = [unit for trainer in trainers for unit in trainer.engine.zero.trainable]
    for unit in units:
        unit.reducer = None
    found = [[float("inf")] * (len(unit.parameters) // FEW) for unit in units]
    for _ in range(PASSES):
        for unit, least in zip(units, found, strict=True):
            names = list(unit.parameters)
            unit.gradients.begin_step(1)
            for at in range(len(least)):
                began = time.thread_time()
                for name in names[at * FEW : (at + 1) * FEW]:
                    unit.accumulate_grad(name, gradient)
                least[at] = min(least[at], time.thread_time() - began)
    return [sum(least) / len(unit.parameters) for unit, least in zip(units, found, strict=True)]


@pytest.mark.parametrize("plan", ["dp1", pytest.param("dp1.z3", marks=pytest.mark.soak)])
def test_taking_a_gradient_costs_the_same_however_many_a_unit_has(ranks: Any, plan: str) -> None:
    ((few, many),) = ranks.run(1, seconds_each, plan)
    assert many < 3 * few


class Counting(dict[Any, Any]):
    """How often anything is looked up."""

    looked = 0

    def __getitem__(self, key: Any) -> Any:
        Counting.looked += 1
        return super().__getitem__(key)

    def get(self, key: Any, default: Any = None) -> Any:
        Counting.looked += 1
        return super().get(key, default)


def looked_at(length: int) -> tuple[int, int]:
    """Runs of a master, and how often `states` looks up one of them where nothing is to be laid."""
    model = nn.Linear(length, 1, bias=False)
    trainer = parallelize(
        model, lambda parameters: torch.optim.AdamW(parameters), "dp1", loss=lambda output, batch: output.mean()
    )
    trainer.step({"input": torch.ones(2, length)})
    (unit,) = trainer.engine.zero.trainable
    trainer.optimizer.state = Counting(trainer.optimizer.state)
    Counting.looked = 0
    states = unit.optim_shard.states(trainer.optimizer)
    assert set(states) == {"exp_avg", "exp_avg_sq"}
    return len(unit.optim_shard.params), Counting.looked


def test_whether_states_lie_together_is_seen_without_looking_at_every_run(ranks: Any) -> None:
    (few, little), (many, as_little) = (ranks.run(1, looked_at, length)[0] for length in (1 << 19, 1 << 23))
    assert many > 10 * few and as_little == little
