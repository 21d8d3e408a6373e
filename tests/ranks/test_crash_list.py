"""What crashed: each trains as on one device, or every rank says one line."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import residual_model
import torch
import torch.nn.functional as F
from residual_model import WIDTH, adamw
from torch import nn
from torch.nn.utils import parametrizations

from meshwright.core.errors import InputError
from meshwright.train.trainer import parallelize


class Model(residual_model.Model):
    def __init__(self) -> None:
        super().__init__()
        self.act: Callable[[torch.Tensor], torch.Tensor] = nn.Identity()

    def forward(self, input_ids: torch.Tensor, temperature: torch.Tensor | float = 1.0) -> torch.Tensor:
        x = self.act(self.words(input_ids))
        for layer in self.layers:
            x = layer(x)
        return self.head(x) / temperature


class Overwriting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.exp()
        return x + y.add_(1)


class Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.phase).real


class Drawing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 0.1 * random.random())


class DrawingArrays(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1 + 0.1 * float(np.random.rand()))


def drawing(model: Model) -> None:
    model.act = Drawing()


def drawing_arrays(model: Model) -> None:
    model.act = DrawingArrays()


def sharing(model: Model) -> None:
    for layer in model.layers:
        layer.down = model.layers[0].down


def empty(model: Model) -> None:
    model.nothing = nn.Parameter(torch.zeros(0, WIDTH))


def orthogonal(model: Model) -> None:
    parametrizations.orthogonal(model.layers[0].up)


def weight_norm(model: Model) -> None:
    for layer in model.layers:
        parametrizations.weight_norm(layer.up)


def overwriting(model: Model) -> None:
    model.act = Overwriting()


def turning(model: Model) -> None:
    model.act = Turning()


def plain(model: Model) -> None:
    pass


Change = Callable[[Model], None]


def made(change: Change) -> Model:
    torch.manual_seed(0)
    model = Model()
    change(model)
    return model.double()


def batch(step: int, scalar: bool = False) -> dict[str, torch.Tensor]:
    temperature = {"temperature": torch.tensor(1.0 + step, dtype=torch.float64)} if scalar else {}
    return {**residual_model.batch(step), **temperature}


def alone(change: Change, scalar: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, losses = made(change), []
    optimizer = adamw(model.parameters())
    for step in range(3):
        given = batch(step, scalar)
        labels = given.pop("labels")
        optimizer.zero_grad()
        loss = F.cross_entropy(model(**given).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def trained(plan: str, change: Change, scalar: bool = False) -> tuple[list[float], dict[str, torch.Tensor] | None]:
    trainer = parallelize(made(change), adamw, plan, precision="fp64")
    losses = [trainer.step(batch(step, scalar)).loss for step in range(3)]
    return losses, trainer.full_state_dict()


def check(ranks: Any, plan: str, change: Change, scalar: bool = False) -> None:
    losses, weights = alone(change, scalar)
    results = ranks.run(1 if plan == "dp1" else 2, trained, plan, change, scalar)
    for found, _ in results:
        assert found == pytest.approx(losses, rel=1e-10)
    full = results[0][1]
    assert full.keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(full[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("plan", ["dp1", pytest.param("dp2", marks=pytest.mark.soak), "dp2.z2.mb1"])
def test_a_module_shared_by_several_blocks_trains_as_on_one_device(ranks: Any, plan: str) -> None:
    check(ranks, plan, sharing)


@pytest.mark.parametrize(
    "plan", ["dp2.z3", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("dp2", "pp2.mb2"))]
)
def test_parameters_without_elements_are_in_the_full_state(ranks: Any, plan: str) -> None:
    check(ranks, plan, empty)


@pytest.mark.parametrize("change", [orthogonal, weight_norm])
@pytest.mark.parametrize("plan", ["dp2.z1", "dp2.z3", "pp2.mb2"])
@pytest.mark.covering(1)
def test_parametrized_weights_are_trained_and_in_the_full_state(ranks: Any, plan: str, change: Change) -> None:
    check(ranks, plan, change)


@pytest.mark.parametrize(
    "plan", ["pp2.mb2", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("dp2", "dp2.mb1", "dp2.z3", "tp2"))]
)
def test_a_tensor_without_dimensions_goes_to_every_micro_batch_as_it_is(ranks: Any, plan: str) -> None:
    check(ranks, plan, plain, scalar=True)


def refused(plan: str, change: Change, given: dict[str, Any] | None, **known: Any) -> str:
    try:
        parallelize(made(change), adamw, plan, precision="fp64", **known).step(batch(0) if given is None else given)
    except InputError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize(
    ("plan", "change", "given", "line"),
    [
        ("dp2", turning, None, "act.phase (16,) is complex"),
        ("dp2", overwriting, None, "plan dp2: backward needs a tensor of shape ["),
        pytest.param("tp2", overwriting, None, "plan tp2: backward needs a tensor of shape [", marks=pytest.mark.soak),
        ("dp2", plain, {}, "the batch holds no tensors"),
        ("dp2", plain, {"input_ids": torch.zeros(0, 8).long(), "labels": torch.zeros(0, 8).long()},
            "the batch is empty: 'input_ids'"),
        ("dp2", plain, {"input_ids": [[1, 2], [3, 4]]}, "the batch's 'input_ids' is a list"),
        ("dp2", plain, {**batch(0), "input_idx": batch(0)["input_ids"]},
            "the batch has 'input_idx', which Model.forward does not take"),
        ("dp2", plain, {"input_ids": batch(0)["input_ids"]}, "the loss is not known: the batch has ['input_ids']"),
        ("dp2", plain, [batch(0)], "a batch must be a dict of tensors"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_said_in_one_line(
    ranks: Any, plan: str, change: Change, given: Any, line: str
) -> None:
    for said in ranks.run(2, refused, plan, change, given):
        assert said.startswith(line) and "\n" not in said, said


@pytest.mark.parametrize(("change", "what"), [(drawing, "Python's random"), (drawing_arrays, "numpy.random")])
@pytest.mark.parametrize("plan", ["tp2", "pp2.mb2", "dp2.rc-full"])
@pytest.mark.covering(2)
def test_random_numbers_outside_of_torch_are_refused_where_rows_are_recomputed(
    ranks: Any, plan: str, change: Change, what: str
) -> None:
    for said in ranks.run(2, refused, plan, change, None):
        assert f"the model's forward draws random numbers from {what}" in said, said
    assert ranks.run(2, refused, "dp2.z1", change, None) == ["trained"] * 2


def examples(plan: str) -> list[str]:
    given = [{"inputs": torch.zeros(2, 8).long()}, {}, {"input_ids": torch.zeros(2, 8, 3).long()}]
    said = []
    for example in given:
        try:
            parallelize(made(plain), adamw, plan, precision="fp64", example=example)
            said.append("parallelized")
        except InputError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("plan", ["tp2"])
def test_an_example_that_does_not_fit_is_said_in_one_line(ranks: Any, plan: str) -> None:
    for wrong, nothing, odd in ranks.run(2, examples, plan):
        assert wrong.startswith(
            "the example has 'inputs', which Model.forward does not take (it takes input_ids, temperature)"
        )
        assert nothing == "the example is empty: give a batch of a few rows, as step takes it"
        assert odd == "parallelized" or "\n" not in odd
