"""Parameters outside of the forward: read and changed whole by a way that says so, else one line; never a signal, never
a lost change."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from residual_model import WIDTH, WORDS, Model, adamw, batch, made
from torch import nn
from torch.optim.swa_utils import AveragedModel
from world_group import between_hosts

from meshwright.core.errors import InputError
from meshwright.train.trainer import Trainer, parallelize


def trainer_of(plan: str, precision: str = "fp64", apart: bool = False) -> tuple[Model, Trainer]:
    model = made()
    with between_hosts(apart):
        return model, parallelize(model, adamw, plan, precision=precision)


USES: dict[str, Callable[[Model], Any]] = {
    "reads a weight": lambda model: model.head.weight.sum(),
    "reads one number": lambda model: model.head.weight[0, 0].item(),
    "takes a norm": lambda model: [parameter.norm() for parameter in model.parameters()],
    "clamps": lambda model: [parameter.clamp_(-0.1, 0.1) for parameter in model.parameters()],
    "clamps the data": lambda model: [parameter.data.clamp_(-0.1, 0.1) for parameter in model.parameters()],
    "decays by hand": lambda model: [parameter.mul_(0.9) for parameter in model.parameters()],
    "detaches": lambda model: [parameter.detach().clone() for parameter in model.parameters()],
    "moves an average": lambda model: [
        torch.lerp(parameter, parameter, 0.5) for _, parameter in model.named_parameters()
    ],
    "copies many": lambda model: torch._foreach_mul(list(model.parameters()), 2.0),
    "makes a list": lambda model: model.head.weight.tolist(),
    "takes an array": lambda model: model.head.weight.detach().numpy(),
    "loads a state": lambda model: model.load_state_dict(made().double().state_dict()),
    "loads a state of a part": lambda model: model.head.load_state_dict(made().double().head.state_dict()),
    "makes a state": lambda model: {name: value.sum() for name, value in model.state_dict().items()},
    "saves the model": lambda model: torch.save(model, io.BytesIO()),
    "pickles a weight": lambda model: pickle.dumps(model.head.weight),
    "copies a part": lambda model: copy.deepcopy(model.head.weight),
    "moves the model": lambda model: model.to("cpu"),
    "halves the model": lambda model: model.half(),
    "calls a part": lambda model: F.linear(torch.ones(1, WIDTH, dtype=torch.float64), model.head.weight),
    "initialises": lambda model: nn.init.zeros_(model.head.weight),
    "asks for the memory": lambda model: model.head.weight.data_ptr(),
    "makes a vector": lambda model: nn.utils.parameters_to_vector(model.parameters()),
}


def used(plan: str, apart: bool) -> dict[str, str]:
    """Of each use what it ended in, after a step."""
    model, trainer = trainer_of(plan, apart=apart)
    trainer.step(batch(0))
    said = {}
    for name, use in USES.items():
        try:
            with torch.no_grad():
                use(model)
            said[name] = "done"
        except InputError as error:
            said[name] = str(error)
    said["loss"] = str(trainer.step(batch(1)).loss)
    trainer.close()
    return said


def undisturbed(plan: str, apart: bool) -> str:
    _, trainer = trainer_of(plan, apart=apart)
    trainer.step(batch(0))
    return str(trainer.step(batch(1)).loss)


@pytest.mark.parametrize(
    ("plan", "apart"),
    [
        ("dp2.z3", False),
        pytest.param("dp2.z3", True, marks=pytest.mark.soak),
        pytest.param("dp2.z3.off-parameters", False, marks=pytest.mark.soak),
    ],
)
def test_closed_weights_refuse_every_use_in_one_line_that_names_the_way_out(ranks: Any, plan: str, apart: bool) -> None:
    for said in ranks.run(2, used, plan, apart):
        assert said.pop("loss") == ranks.once(2, undisturbed, plan, apart)[0]
        for use, line in said.items():
            assert line.startswith(f"plan {plan}: ") and "with trainer.full_parameters(" in line and "\n" not in line, (
                f"{use}: {line}"
            )


def forms(plan: str) -> list[Any]:
    model, trainer = trainer_of(plan)
    weight = model.head.weight
    found = [
        weight.shape,
        weight.dtype,
        weight.device.type,
        weight.requires_grad,
        weight.numel(),
        len(weight),
        weight.ndim,
        weight.grad,
    ]
    found += [
        sum(parameter.numel() for parameter in model.parameters()),
        isinstance(weight, nn.Parameter),
        f"{weight!r}",
        weight in {weight},
    ]
    trainer.close()
    return found


def test_closed_weights_tell_their_form(ranks: Any) -> None:
    count = sum(parameter.numel() for parameter in Model().parameters())
    told = [torch.Size([WORDS, WIDTH]), torch.float64, "cpu", True, WORDS * WIDTH, WORDS, 2, None, count, True]
    for found in ranks.run(2, forms, "dp2.z3"):
        assert found == [*told, f"Parameter containing:\nhead.weight ({WORDS}, {WIDTH}) torch.float64, closed", True]


def clamped_alone(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = made().double()
    optimizer, losses = adamw(model.parameters()), []
    for step in range(steps):
        given = batch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(given["input_ids"]).flatten(0, 1), given["labels"].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5 / parameter.norm().clamp_min(0.5))
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def clamped(plan: str, precision: str) -> tuple[list[float], dict[str, torch.Tensor] | None]:
    """Weights whose norm is at most one half after every step: what no shard can find out."""
    model, trainer = trainer_of(plan, precision)
    losses = []
    for step in range(3):
        losses.append(trainer.step(batch(step)).loss)
        with trainer.full_parameters(write=True) as full, torch.no_grad():
            assert [(name, id(value)) for name, value in model.named_parameters()] == [
                (name, id(value)) for name, value in full.items()
            ]
            for parameter in model.parameters():
                parameter.mul_(0.5 / parameter.norm().clamp_min(0.5))
    found = trainer.full_state_dict()
    trainer.close()
    return losses, found


PLANS = ["dp2", "dp2.z1", "dp2.z2", "dp2.z3", "dp2.z3.off-parameters", "tp2", "pp2.mb2", "pp2.mb2.zbv", "pp2.z3.mb2"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.covering(1)
def test_whole_parameters_may_be_changed_between_steps_under_every_plan(ranks: Any, plan: str) -> None:
    losses, weights = clamped_alone(3)
    for ours, full in ranks.run(2, clamped, plan, "fp64"):
        assert ours == pytest.approx(losses, rel=1e-10)
        for name, value in (full or {}).items():
            torch.testing.assert_close(value, weights[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "plan", ["dp2.z2", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("dp2", "dp2.z3", "tp2"))]
)
def test_a_change_reaches_the_master_weights_of_mixed_precision(ranks: Any, plan: str) -> None:
    for losses, full in ranks.run(2, clamped, plan, "bf16"):
        assert losses == pytest.approx(clamped_alone(3)[0], rel=2e-2)
        assert all(value.norm() <= 0.5 + 1e-5 for value in (full or {}).values())


def misused(plan: str) -> list[str]:
    model, trainer = trainer_of(plan)
    said = []
    for rank_factor, write in ((0.0, False), (1.0, True)):
        try:
            with trainer.full_parameters(model.head, write=write) as full:
                assert list(full) == ["head.weight", "head.bias"]
                full["head.bias"].data.add_(1.0 + rank_factor * trainer.mesh.rank)
        except InputError as error:
            said.append(str(error))
    try:
        with trainer.full_parameters(nn.Linear(1, 1)):
            pass
    except InputError as error:
        said.append(str(error))
    trainer.close()
    return said


@pytest.mark.parametrize("plan", ["dp2", "dp2.z3"])
def test_changes_that_would_be_lost_or_differ_between_ranks_are_refused(ranks: Any, plan: str) -> None:
    for said in ranks.run(2, misused, plan):
        assert said == [
            "full_parameters: head.bias was changed, and the change is lost: call full_parameters(write=True)",
            "full_parameters: head.bias was changed differently on rank 1 than on rank 0: make the same change on "
            "every rank",
            "full_parameters: Linear is not a module of this model",
        ]


def averaged(plan: str) -> str:
    model, trainer = trainer_of(plan)
    try:
        average = AveragedModel(model)
        for step in range(2):
            trainer.step(batch(step))
            average.update_parameters(model)
        return str(len(list(average.parameters())) == len(list(model.parameters())))
    except InputError as error:
        return str(error)
    finally:
        trainer.close()


@pytest.mark.parametrize(("plan", "said"), [("dp2", ""), ("dp2.z3", "z3"), ("tp2", "tp2"), ("pp2.mb8", "pp2.mb8")])
def test_a_copy_of_a_model_of_which_ranks_store_parts_is_refused(ranks: Any, plan: str, said: str) -> None:
    for line in ranks.run(2, averaged, plan):
        assert said in line and ("only this rank's part of the parameters" in line if said else line == "True"), line
