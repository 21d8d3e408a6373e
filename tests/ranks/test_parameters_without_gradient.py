"""A parameter without a gradient in a step is skipped as torch's optimizers skip it: weights, states and count of steps
stay, whatever the plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import VOCABULARY, make_batch
from torch import nn

from meshwright.core.errors import InputError
from meshwright.spec.precision import Recipe, recipe
from meshwright.train.trainer import parallelize

STEPS = 5
LATE, EARLY = (2, 4), (0, 3)
"""Steps in which `late`, and `early`, take part; `idle` never does. The model tells them by the length of the
sequences."""
LENGTHS = {"late": 9, "early": 13}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.late = (
            nn.LayerNorm(16),
            nn.Linear(16, 32),
            nn.Linear(32, 16),
            nn.Parameter(torch.randn(16)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu()) * (self.late if x.shape[1] < 12 else 1.0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.head = nn.Embedding(VOCABULARY, 16), nn.LayerNorm(16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.late, self.early, self.idle = nn.Linear(16, 16), nn.Linear(16, 16), nn.Parameter(torch.randn(16))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        x = self.early(x) if x.shape[1] == LENGTHS["early"] else x
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x + self.late(x) if x.shape[1] < 12 else x))


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def batches() -> list[dict[str, torch.Tensor]]:
    found = [make_batch("llama", step) for step in range(STEPS)]
    for name, steps in (("late", LATE), ("early", EARLY)):
        for step in steps:
            found[step] = {key: value[:, : LENGTHS[name]] for key, value in found[step].items()}
    return found


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.5)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.5)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def fused_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2, fused=True)


def fused_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, fused=True)


def adagrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(parameters, lr=1e-2, lr_decay=0.1, weight_decay=0.1)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2, weight_decay=0.5)


RULES = {rule.__name__: rule for rule in (adamw, sgd, fused_adam, fused_sgd, adagrad, adafactor)}


def alone(rule: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """torch on one device; `fused_sgd` as the kernel that takes parameters with and without states together."""
    model = net()
    made = (
        torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        if rule == "fused_sgd"
        else RULES[rule](model.parameters())
    )
    losses = []
    for batch in batches():
        labels = batch.pop("labels")
        made.zero_grad()
        loss = F.cross_entropy(model(**batch).flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        made.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def trained(plan: str, rule: str) -> tuple[list[float], Any]:
    trainer = parallelize(net(), RULES[rule], plan, precision="fp64")
    return [trainer.step(batch).loss for batch in batches()], trainer.full_state_dict()


def resumed(first: str, second: str, rule: str, at: Sequence[int], folder: str) -> tuple[list[float], Any]:
    """The same with a checkpoint after each of the steps `at`, from which a new trainer under the other plan goes
    on."""
    plans, losses = [first, second], []
    trainer = parallelize(net(), RULES[rule], first, precision="fp64")
    for step, batch in enumerate(batches()):
        if step in at:
            saved = trainer.save(folder)
            plans.reverse()
            trainer = parallelize(net(), RULES[rule], plans[0], precision="fp64")
            trainer.load(saved)
        losses.append(trainer.step(batch).loss)
    return losses, trainer.full_state_dict()


def check(found: tuple[list[float], Any], rule: str) -> None:
    losses, weights = alone(rule)
    assert found[0] == pytest.approx(losses, rel=1e-10)
    for name, weight in weights.items():
        assert torch.allclose(found[1][name], weight, rtol=1e-10, atol=1e-12), (
            name,
            (found[1][name] - weight).abs().max(),
        )


def world(plan: str) -> int:
    return 1 if plan.startswith("dp1") else 2


@pytest.mark.parametrize("rule", ["adamw", "sgd"])
@pytest.mark.parametrize(
    "plan",
    [
        "dp1",
        "dp1.mb2",
        "dp2",
        "dp2.z1",
        "dp2.z2",
        "dp2.z3",
        "tp2",
        "pp2.mb2",
        "pp2.mb2.zbv.z3",
        "dp2.off-optimizer",
        "dp1.off-optimizer50",
        "dp2.z1.off-optimizer-disk",
        "dp2.z3.off-optimizer-disk60.off-parameters-disk50",
    ],
)
@pytest.mark.covering(2)
def test_parameters_without_a_gradient_are_skipped_as_on_one_device(ranks: Any, plan: str, rule: str) -> None:
    check(ranks.run(world(plan), trained, plan, rule)[0], rule)


@pytest.mark.parametrize("rule", ["fused_adam", "fused_sgd", "adagrad", "adafactor"])
@pytest.mark.parametrize("plan", ["dp1", "dp2.z1", "dp2.z1.off-optimizer"])
@pytest.mark.covering(2)
def test_other_rules_skip_them_too(ranks: Any, plan: str, rule: str) -> None:
    if rule == "adafactor" and "off" in plan:
        plan = "dp2"  # whole tensors are updated on the device
    check(ranks.run(world(plan), trained, plan, rule)[0], rule)


@pytest.mark.parametrize("rule", ["adamw", "sgd", "adafactor"])
@pytest.mark.parametrize("at", [(1,), (1, 2, 3, 4)])
@pytest.mark.parametrize(
    ("first", "second"), [("dp2.z1", "dp2.z1"), ("dp2.z3", "pp2.mb2"), ("pp2.mb2", "dp2.off-optimizer")]
)
@pytest.mark.covering(1)
def test_their_counts_of_steps_come_through_checkpoints_of_any_plan(
    ranks: Any, first: str, second: str, at: Sequence[int], rule: str, tmp_path: Path
) -> None:
    if rule == "adafactor" and "off" in second:
        second = "dp2"
    check(ranks.run(2, resumed, first, second, rule, at, str(tmp_path))[0], rule)


def low(plan: str, chosen: Recipe, folder: str) -> tuple[float, bool, bool]:
    """How far the first update of `late` moves it, in rates; whether `idle` stayed; whether going on from a checkpoint
    is never having stopped."""
    trainers = [parallelize(net().float(), adam, plan, precision=chosen) for _ in range(2)]
    weights = []
    for step, batch in enumerate(batches()):
        trainers[0].step(batch)
        weights.append(trainers[0].full_state_dict())
        if step == LATE[0]:
            trainers[1].load(trainers[0].save(folder))
        elif step > LATE[0]:
            trainers[1].step(batch)
    again = trainers[1].full_state_dict()
    if weights[0] is None:
        return 0.0, True, True
    before, after, last = weights[LATE[0] - 1], weights[LATE[0]], weights[-1]
    far = (after["late.weight"].float() - before["late.weight"].float()).abs().mean().item()
    return (
        far / 1e-2,
        torch.equal(before["idle"], last["idle"]),
        all(torch.equal(again[name], last[name]) for name in last),
    )


@pytest.mark.parametrize("plan", ["dp1", "dp2.z1", "dp2.z3.off-optimizer"])
@pytest.mark.parametrize("chosen", [recipe("bf16"), recipe("bf16-pure"), recipe("fp32", state="8bit")], ids=str)
@pytest.mark.covering(2)
def test_recipes_of_fewer_bytes_count_their_steps_too(ranks: Any, plan: str, chosen: Recipe, tmp_path: Path) -> None:
    """Adam moves each weight by the rate in its first step; by 0.74 of it, if it counted the two steps before."""
    if "off" in plan and not chosen.master:
        plan = "dp2.z3"  # states of fewer bytes are updated on the device
    far, stayed, same = ranks.run(world(plan), low, plan, chosen, str(tmp_path))[0]
    assert far == pytest.approx(1.0, abs=0.03) and stayed and same


class Listing(torch.optim.SGD):
    """Keeps a list of what it was made of."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=1e-2)
        self.all = [each for group in self.param_groups for each in group["params"]]


class Around(torch.optim.Optimizer):
    """Another optimizer does its work."""

    def __init__(self, parameters: Any) -> None:
        given = list(parameters)
        super().__init__(given, {"lr": 1e-2})
        self.inner = adamw(given)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


def told(plan: str) -> str:
    trainer = parallelize(net(), Listing, plan, precision="fp64")
    with pytest.raises(InputError) as caught:
        trainer.step(batches()[0])
    return str(caught.value)


def around(plan: str) -> tuple[list[float], Any]:
    trainer = parallelize(net(), Around, plan, precision="fp64")
    return [trainer.step(batch).loss for batch in batches()], trainer.full_state_dict()


def test_an_optimizer_with_a_private_list_is_refused_and_a_wrapper_is_not(ranks: Any) -> None:
    for line in ranks.run(2, told, "dp2.z1"):
        assert "Listing also stores parameters in its attribute all, outside of" in line and "idle" in line
        assert "\n" not in line
    check(ranks.run(2, around, "dp2.z1")[0], "adamw")
