"""Optimizers that people write themselves: updates, checkpoints and refusals beside plain torch in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.core.errors import InputError
from meshwright.runtime.optim import rule_probe
from meshwright.runtime.optim.param_groups import ParamGroups
from meshwright.runtime.optim.rule_probe import ELEMENTWISE, UpdateRule
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import Trainer, parallelize

STEPS = 6


class Body(nn.Module):
    """Filters, blocks and a head for rows of 24 features."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv2d(1, 3, 3, padding=1)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(2)])
        self.head = nn.Linear(24, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.filters(x.view(-1, 1, 4, 6)).mean(1).flatten(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


class Own(torch.optim.Optimizer):
    """Of each tensor `moved(gradient, state)` times the rate is taken away."""

    def __init__(self, given: Iterable[Any], **options: Any) -> None:
        super().__init__(given, {"lr": 1e-2, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(self.moved(parameter.grad, self.state[parameter]), alpha=-group["lr"])

    def moved(self, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        raise NotImplementedError


class LateNorm(Own):
    """Plain steps first, whole tensors divided by their norm later."""

    def moved(self, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["step"] = state.get("step", 0) + 1
        return gradient if state["step"] < 4 else gradient / (gradient.norm() + 1e-3)


class WideCentred(Own):
    """The mean of a row is taken away where a matrix has 16 rows or more."""

    def moved(self, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        wide = gradient.ndim == 2 and len(gradient) >= 16
        return gradient - gradient.mean(1, keepdim=True) if wide else gradient


class FilterCentred(Own):
    """The same of filters alone, which have four dimensions."""

    def moved(self, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return gradient - gradient.mean((1, 2, 3), keepdim=True) if gradient.ndim == 4 else gradient


class Kept(Own):
    """Counts in a number of Python and keeps sums in a list, and needs whole tensors."""

    def moved(self, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        if not state:
            state.update(step=0, sums=[torch.zeros_like(gradient)])
        state["step"] += 1
        state["sums"][0].mul_(0.5).add_(gradient)
        return state["sums"][0] / (gradient.norm() + 1e-3) / state["step"]


class Corrected(Own):
    """Elementwise, with a correction by a count of Python."""

    def moved(self, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["step"] = state.get("step", 0) + 1
        state["sum"] = state["sum"].mul(0.9).add(gradient) if "sum" in state else gradient.clone()
        return state["sum"] / (1 - 0.999 ** state["step"]) * 1e-3


class Counting(torch.optim.Optimizer):
    """Divides by the number of its steps, which it counts itself, and each group once more where that is not empty."""

    def __init__(self, given: Iterable[Any]) -> None:
        super().__init__(given, {"lr": 1e-2})
        self.steps = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            if group["params"]:
                group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * (1 / self.steps + 1 / group["steps"]))


class Clipped(Own):
    """All gradients together are clipped where they are large."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
        norm = torch.stack([each.grad.norm() for each in given]).norm()
        for each in given:
            each.add_(each.grad, alpha=-1e-2 * min(1.0, 1000.0 / float(norm)))


class Unwritable(Own):
    """Needs whole tensors, and keeps a set."""

    def moved(self, gradient: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["seen"] = {1}
        return gradient / (gradient.norm() + 1e-3)


def two_groups(
    kind: Callable[..., torch.optim.Optimizer], **first: Any
) -> Callable[[Iterable[Any]], torch.optim.Optimizer]:
    """Matrices with the options `first`, and vectors."""

    def make(given: Iterable[Any]) -> torch.optim.Optimizer:
        held = list(given)
        matrices = [getattr(each, "is_matrix", each.ndim > 1) for each in held]
        groups = [
            [each for each, is_one in zip(held, matrices, strict=True) if is_one == wanted] for wanted in (True, False)
        ]
        return kind([{"params": groups[0], **first}, {"params": groups[1]}])

    return make


MAKE: dict[str, Callable[[Iterable[Any]], torch.optim.Optimizer]] = {
    "late norm": LateNorm,
    "wide centred": WideCentred,
    "filters centred": FilterCentred,
    "kept": Kept,
    "corrected": Corrected,
    "counting": two_groups(Counting),
    "NAdam of two groups": two_groups(torch.optim.NAdam, betas=(0.5, 0.9), lr=1e-3),
    "ASGD of two groups": two_groups(torch.optim.ASGD, lambd=0.3),
    "Adam with a rate in a tensor": lambda given: torch.optim.Adam(given, torch.tensor(1e-3, dtype=torch.float64)),
    "SGD with a rate of numpy": lambda given: torch.optim.SGD(given, 1e-2),
    "unwritable": Unwritable,
}
NEW_RATE: dict[str, Any] = {
    "Adam with a rate in a tensor": torch.tensor(5e-3, dtype=torch.float64),
    "SGD with a rate of numpy": np.float32(5e-2),
}


def batches() -> list[dict[str, torch.Tensor]]:
    random = torch.Generator().manual_seed(3)
    return [
        {
            "x": torch.randn(4, 24, generator=random, dtype=torch.float64),
            "labels": torch.randint(0, 5, (4,), generator=random),
        }
        for _ in range(STEPS)
    ]


def body() -> Body:
    torch.manual_seed(0)
    return Body().double()


def edit(rule: str, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A rate that the script changes before step 2."""
    for group in optimizer.param_groups if step == 2 and rule in NEW_RATE else ():
        group["lr"] = copy.deepcopy(NEW_RATE[rule])


def alone(rule: str) -> dict[str, torch.Tensor]:
    model = body()
    optimizer = MAKE[rule](list(model.parameters()))
    for step, batch in enumerate(batches()):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch["x"]), batch["labels"]).backward()
        edit(rule, optimizer, step)
        optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}


def of_plan(rule: str, plan: str, precision: str = "fp64") -> Trainer:
    return parallelize(body(), MAKE[rule], plan, precision=precision, prove="never")


def trained(rule: str, plan: str, folder: str | None = None, second: str = "") -> dict[str, torch.Tensor] | None:
    """The weights after all steps; with a `folder`, the last three are made by another trainer of the plan `second`,
    from a checkpoint."""
    trainer = of_plan(rule, plan)
    for step, batch in enumerate(batches()):
        if folder is not None and step == 3:
            path = trainer.save(folder)
            trainer = of_plan(rule, second)
            trainer.load(path)
        edit(rule, trainer.optimizer, step)
        trainer.step(batch)
    return trainer.full_state_dict()


def equal(found: dict[str, torch.Tensor] | None, rule: str) -> bool:
    assert found is not None
    return all(float((found[name] - each).norm()) <= 1e-10 * float(each.norm()) for name, each in alone(rule).items())


SHAPES = {"blocks.0.a": (8, 6), "blocks.0.b": (8,), "head": (40, 8), "filters": (4, 3, 3, 3)}


def rule_of(make: Callable[[Iterable[Any]], torch.optim.Optimizer]) -> UpdateRule:
    return rule_probe.probe_update_rule(ParamGroups(make, SHAPES, {name: name.startswith("blocks") for name in SHAPES}))


def test_a_rule_that_changes_with_sizes_dimensions_or_steps_is_given_whole_tensors() -> None:
    assert rule_of(LateNorm) == UpdateRule(True, True)
    assert rule_of(WideCentred).others
    assert rule_of(FilterCentred).others
    assert rule_of(Corrected) == rule_of(Counting) == ELEMENTWISE


def test_a_rule_that_couples_tensors_by_large_gradients_alone_is_refused() -> None:
    with pytest.raises(InputError, match="depends on other tensors"):
        rule_of(Clipped)


@pytest.mark.parametrize("plan", ["dp2.z1", "dp2.z3"])
@pytest.mark.parametrize("rule", ["late norm", "wide centred", "filters centred", "kept", "counting"])
@pytest.mark.covering(1)
def test_rules_of_others_update_as_on_one_device(ranks: Any, rule: str, plan: str) -> None:
    assert equal(ranks.run(2, trained, rule, plan)[0], rule)


@pytest.mark.parametrize(
    "rule",
    [
        "kept",
        "corrected",
        "counting",
        "NAdam of two groups",
        "ASGD of two groups",
        "Adam with a rate in a tensor",
        "SGD with a rate of numpy",
    ],
)
@pytest.mark.covering(2)
def test_what_a_rule_keeps_comes_through_a_checkpoint_of_another_plan(ranks: Any, tmp_path: Path, rule: str) -> None:
    assert equal(ranks.run(2, trained, rule, "dp2.z1", str(tmp_path), "dp2.z3")[0], rule)


class Wide(nn.Module):
    """One layer of more elements than are updated at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def counts() -> tuple[int, list[int]]:
    trainer = parallelize(Wide(), MAKE["counting"], "dp1", precision="bf16", prove="never")
    for _ in range(3):
        trainer.step({"x": torch.randn(2, 1024), "labels": torch.zeros(2, dtype=torch.int64)})
    optimizer: Any = trainer.optimizer
    return optimizer.steps, [group["steps"] for group in optimizer.param_groups]


def test_a_step_count_advances_once_in_an_update_of_many_windows(ranks: Any) -> None:
    assert ranks.run(1, counts)[0] == (3, [3, 3])


def line_of(what: str, folder: str) -> str:
    """What is said of something that the script does after the first step."""
    rule = "unwritable" if what == "unwritable" else "NAdam of two groups"
    trainer = of_plan(rule, "dp2.z1")
    model, first, *_ = trainer.engine.model, *batches()
    trainer.step(first)
    try:
        if what == "another optimizer":
            trainer.optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        if what == "a new group":
            trainer.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3, dtype=torch.float64))]})
        if what == "a hook":
            trainer.optimizer.register_step_pre_hook(lambda *_: None)
        if what in ("unwritable", "other groups"):
            path = trainer.save(folder)
            of_plan("corrected", "dp2.z1").load(path)
        mode = {
            "no_grad": torch.no_grad,
            "inference": torch.inference_mode,
            "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        }.get(what, torch.enable_grad)
        with mode():
            trainer.step(first)
    except InputError as error:
        return str(error)
    return "it ran"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("another optimizer", "trainer.optimizer is not the SGD that parallelize created"),
        ("a new group", "parameters, but parallelize gave it"),
        ("a hook", "the optimizer got a step hook after parallelize"),
        ("no_grad", "the step is inside torch.no_grad"),
        ("inference", "the step is inside torch.inference_mode"),
        ("autocast", "the step is inside torch.autocast"),
        ("other groups", "the optimizer of the checkpoint has 2 parameter groups, but this one has 1"),
        ("unwritable", "a checkpoint cannot store the optimizer state of"),
        ("nothing", "it ran"),
    ],
)
def test_what_would_train_something_else_is_refused_by_all_ranks_in_one_line(
    ranks: Any, tmp_path: Path, what: str, said: str
) -> None:
    for line in ranks.run(parse_plan("dp2.z1").world, line_of, what, str(tmp_path)):
        assert said in line and "\n" not in line


class Scheduled(Body):
    """Divides by a number that it counts itself and gives to its state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / self.count

    def get_extra_state(self) -> dict[str, Any]:
        return {"count": self.count}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def counted(folder: str) -> tuple[int, bool]:
    """The count after a resume, and on rank 0 whether the plain model takes the whole state dict."""
    made = [Scheduled().double(), Scheduled().double()]
    first, second = (parallelize(each, MAKE["counting"], "dp2.z1", precision="fp64", prove="never") for each in made)
    made[0].count = 3
    first.step(batches()[0])
    second.load(first.save(folder))
    whole = first.full_state_dict()
    return made[1].count, whole is None or not any(Scheduled().double().load_state_dict(whole))


def test_what_modules_give_to_a_state_dict_is_in_checkpoints_and_in_the_full_one(ranks: Any, tmp_path: Path) -> None:
    assert ranks.run(2, counted, str(tmp_path)) == [(3, True)] * 2


def test_a_parameter_of_whole_numbers_is_refused_in_one_line_as_it_would_be_rounded() -> None:
    model = body()
    model.order = nn.Parameter(torch.tensor([2**24 + 1]), requires_grad=False)
    with pytest.raises(InputError, match=r"order \(1,\) is a parameter of dtype int64, .* make it a buffer"):
        parallelize(model, MAKE["counting"], "dp1")


def test_a_gradient_a_millionth_below_the_clip_is_scaled_as_torch_scales_it() -> None:
    def small(output: torch.Tensor, _: Any) -> torch.Tensor:
        return output.square().mean() * 1e-7

    model, first = body(), batches()[0]
    small(model(first["x"]), first).backward()
    norm = float(nn.utils.clip_grad_norm_(model.parameters(), 1e-6))
    assert norm < 1e-6
    torch.optim.SGD(model.parameters(), 1e6).step()
    trainer = parallelize(
        body(),
        lambda given: torch.optim.SGD(given, 1e6),
        "dp1.mb4",
        precision="fp64",
        clip=1e-6,
        loss=small,
        prove="never",
    )
    trainer.step({"x": first["x"]})
    found = trainer.full_state_dict()
    assert found is not None
    for name, each in model.named_parameters():
        assert float((found[name] - each.detach()).norm()) <= 1e-10 * float(each.detach().norm())
