"""A copy of a model runs by itself, whatever its functions refer to, or it is known that it does not."""

from __future__ import annotations

import functools
import types
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.analysis.model_copy import ModelCopy, isolated_run
from meshwright.core.errors import InputError


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.functions: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class Outer(nn.Module):
    first: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(x))


class ByClass(Outer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(type(self).first.inner(x))


OTHER = Outer()


def closure(model: Outer) -> None:
    inner = model.inner
    model.inner.forward = lambda x: inner.down(inner.up(x)) + x


def wrapper(model: Outer) -> None:
    own = model.inner.forward

    @functools.wraps(own)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return own(x) * 2

    model.inner.forward = forward


def method(model: Outer) -> None:
    own = model.inner.forward
    model.inner.forward = types.MethodType(lambda self, x: own(x) + self.up(x), model.inner)


def partly(model: Outer) -> None:
    model.inner.forward = functools.partial(lambda layer, x: layer.up(x), model.inner)


def table(model: Outer) -> None:
    inner = model.inner
    inner.functions = {"both": [lambda x: inner.up(x)]}
    inner.forward = lambda x: inner.functions["both"][0](x)


def held(model: Outer) -> None:
    state = SimpleNamespace(models=[model.inner])
    model.inner.forward = lambda x: state.models[0].up(x)


def hook(model: Outer) -> None:
    inner = model.inner
    model.head.register_forward_hook(lambda module, args, output: output + inner.up(args[0]))


def default(model: Outer) -> None:
    def forward(
        x: torch.Tensor, layer: nn.Module = model.inner.up, *, other: nn.Module = model.inner.down
    ) -> torch.Tensor:
        return layer(x) + other(x)

    model.inner.forward = forward


def variable(model: Outer) -> None:
    """A global variable of a script, which a replaced forward reads."""
    names = {"model": model}
    exec("def forward(x):\n    return model.inner.up(x)", names)
    model.inner.forward = names["forward"]


REPLACED = [closure, wrapper, method, partly, table, held, hook, default, variable]


@pytest.mark.parametrize("replace", REPLACED)
def test_a_copy_calls_its_own_modules_and_gives_what_the_model_gives(replace: Any) -> None:
    torch.manual_seed(0)
    model, x = Outer(), torch.randn(2, 4)
    replace(model)
    expected = model(x)
    copied = ModelCopy(model).with_parameters(lambda parameter: parameter.clone()).model
    with isolated_run(model):
        assert torch.equal(copied(x), expected)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert torch.equal(model(x), expected) and not copied(x).any()


def test_a_copy_of_a_copy_runs_by_itself_too() -> None:
    model, x = Outer(), torch.randn(2, 4)
    table(model)
    first = ModelCopy(model).with_parameters(lambda parameter: parameter.clone())
    second = first.with_parameters(lambda parameter: parameter.clone())
    with isolated_run(model), isolated_run(first.model):
        second.model(x)


def test_hooks_of_gradients_and_losses_are_those_of_the_copy() -> None:
    model, x, seen = Outer(), torch.randn(2, 4), list[Any]()
    head = model.head
    model.inner.up.weight.register_hook(lambda gradient: seen.append(head.weight))
    copied = ModelCopy(model, lambda output, batch: (output - head.bias).sum()).with_parameters(
        lambda parameter: parameter.clone()
    )
    assert copied.loss is not None
    with isolated_run(model):
        copied.loss(copied.model(x), {}).backward()
    assert seen[0] is copied.model.head.weight and head.bias.grad is None  # type: ignore[union-attr]


def test_what_no_function_leads_to_the_model_from_is_shared() -> None:
    """A list in a loss that a script writes to, such as the weight of a term, is that of the copy too."""
    weights = [0.0]
    copied = ModelCopy(Outer(), lambda output, batch: output.sum() * weights[0]).with_parameters(
        lambda parameter: parameter.clone()
    )
    weights[0] = 1.0
    assert copied.loss is not None and float(copied.loss(torch.ones(2), {})) == 2.0


@pytest.mark.parametrize("reads", ["module", "parameter"])
def test_a_copy_whose_class_leads_to_the_model_is_known(reads: str) -> None:
    model = ByClass()
    ByClass.first = model if reads == "module" else SimpleNamespace(inner=lambda x: x @ model.inner.up.weight)
    copied = ModelCopy(model).with_parameters(lambda parameter: parameter.clone()).model
    said = "calls inner of the original model" if reads == "module" else "reads inner.up.weight of the original model"
    with isolated_run(model), pytest.raises(InputError, match=said):
        copied(torch.randn(2, 4))
