"""Tricks of odd models: what may happen to a hidden state in front of, inside, between and behind blocks.

A `Trick` is code that a user might write at any place: `apply(owner, x, index)` returns the hidden state x [rows,
length,
WIDTH] changed, with parameters and buffers that `setup(owner)` registers on `owner`, a module; `index` is the number of
the block before it. `against` names what the documentation does not promise for it, in words of `AGAINST`. A job that
breaks none of them is legal, and must run; every other one may be refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

WIDTH, BLOCKS = 8, 4

AGAINST = ("rows", "state", "sequence", "values", "tensor", "stages", "writes", "any")
"""rows: rows of a batch meet; state: kept between calls; sequence: places of a sequence meet; values: Python reads
numbers;
tensor, stages: not cut by tp, pp; writes: weights change in the forward; any: promised nowhere."""


@dataclass(frozen=True)
class Trick:
    apply: Callable[[Any, torch.Tensor, int], torch.Tensor]
    setup: Callable[[Any], None] = lambda owner: None
    against: str = ""


# --- functions with a backward of their own -------------------------------------------------------------------------


class Reverse(torch.autograd.Function):
    """Turns the gradient round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -0.5 * gradient


class UnitGradient(torch.autograd.Function):
    """Divides the gradient by its norm over the whole batch."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 0.1 * gradient / (gradient.norm() + 1e-3)


class CenteredGradient(torch.autograd.Function):
    """Subtracts the mean of the gradient over the rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient - 0.5 * gradient.mean(0, keepdim=True)


class ClippedGradient(torch.autograd.Function):
    """Bends the gradient place by place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return torch.tanh(50 * gradient) / 50


# --- what a trick does ----------------------------------------------------------------------------------------------


def hooked(x: torch.Tensor, hook: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    x = x * 1.0
    if x.requires_grad:
        x.register_hook(hook)
    return x


def trained_only(
    change: Callable[[Any, torch.Tensor], torch.Tensor],
) -> Callable[[Any, torch.Tensor, int], torch.Tensor]:
    return lambda owner, x, index: change(owner, x) if owner.training else x


def by_numpy(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    return x * torch.from_numpy(1 + 0.1 * np.sin(x.detach().cpu().numpy()))


def by_list(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    sums = [sum(row) for row in x.detach().flatten(1).tolist()]
    return x * (1 + 0.05 * torch.tensor(sums, dtype=x.dtype).sin()).view(-1, 1, 1)


def by_unique(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    kinds, place = (x.detach()[..., 0] * 2).round().unique(return_inverse=True)
    return x + (0.1 * kinds.cos())[place].unsqueeze(-1)


def by_nonzero(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    where = (x.detach()[..., 0] > 0).nonzero(as_tuple=True)
    return x.index_put(where, x[where] * 1.1)


def branch(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    return x * 1.2 if x.detach().mean() > 0 else x + 0.1


def item(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    return x * (1 + 0.01 * x.detach().abs().max().item())


def logged(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    owner.log.append(x.detach().norm())
    owner.latest = float(owner.log[-1])
    return x


def sorted_rows(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    order = x.detach().sum((1, 2)).argsort()
    return (1.1 * x[order])[order.argsort()]


def borrowed(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    """Reads the first vector of weights that `owner` has, which another layer uses too."""
    found = next((each for each in owner.parameters() if each.shape == (WIDTH,)), None)
    return x if found is None else x * (1 + 0.1 * found)


@torch.jit.script
def scripted(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) + 0.5 * x


@torch.jit.script
def scripted_rows(x: torch.Tensor) -> torch.Tensor:
    if x.shape[0] > 1:
        x = x + 0.3 * x.mean(0, keepdim=True)
    return x


class Symmetric(nn.Module):
    """A parametrization."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


def capacity(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    kind = (x.detach().reshape(-1, WIDTH)[:, 0] > 0).long()
    place = F.one_hot(kind, 2).cumsum(0).gather(1, kind.unsqueeze(1))
    return torch.where((place <= 8).view(*x.shape[:2], 1), x * 1.3, x)


def slope(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    with torch.enable_grad():
        given = torch.autograd.grad(owner.gain.square().sum(), owner.gain, create_graph=owner.training)[0]
    return x * (1 + 0.1 * given.mean())


def in_place(owner: Any, x: torch.Tensor, index: int) -> torch.Tensor:
    x = x.clone()
    x[:, :, 0] += 0.1
    x.mul_(1.1)
    return x


def spaced(x: torch.Tensor) -> torch.Tensor:
    return 0.1 * torch.sin(torch.arange(x.shape[-1], dtype=x.dtype))


def linear(
    name: str, wrap: Callable[[nn.Module], nn.Module] = lambda module: module, **more: Any
) -> Callable[[Any], None]:
    return lambda owner: setattr(owner, name, wrap(nn.Linear(WIDTH, WIDTH, **more)))


def parameter(name: str, make: Callable[[], torch.Tensor]) -> Callable[[Any], None]:
    return lambda owner: setattr(owner, name, nn.Parameter(make()))


def buffer(name: str, make: Callable[[], torch.Tensor], persistent: bool = True) -> Callable[[Any], None]:
    return lambda owner: owner.register_buffer(name, make(), persistent=persistent)


SEQUENCE: dict[str, Trick] = {
    "mean": Trick(lambda owner, x, index: x + x.mean(1, keepdim=True), against="sequence"),
    "cumsum": Trick(lambda owner, x, index: x + 0.1 * x.cumsum(1), against="sequence"),
    "first": Trick(lambda owner, x, index: x + 0.5 * x[:, :1], against="sequence"),
    "last": Trick(lambda owner, x, index: x + 0.5 * x[:, -1:], against="sequence"),
    "length": Trick(lambda owner, x, index: x * (1 + 1 / x.shape[1]), against="sequence"),
    "shift": Trick(lambda owner, x, index: x + 0.5 * F.pad(x, (0, 0, 1, 0))[:, :-1], against="sequence"),
    "roll": Trick(lambda owner, x, index: x + 0.5 * x.roll(1, 1), against="sequence"),
    "sequence-norm": Trick(lambda owner, x, index: x / (0.5 + x.norm(dim=1, keepdim=True)), against="sequence"),
    "length-branch": Trick(lambda owner, x, index: x * 1.2 if x.shape[1] > 7 else x * 0.7, against="sequence"),
    "flip": Trick(lambda owner, x, index: x + 0.2 * x.flip(1), against="sequence"),
    "places": Trick(
        lambda owner, x, index: x + owner.by_place.weight[: x.shape[1]],
        lambda owner: setattr(owner, "by_place", nn.Embedding(16, WIDTH)),
        "sequence",
    ),
    "train-mean": Trick(trained_only(lambda owner, x: x + x.mean(1, keepdim=True)), against="sequence"),
    "group-norm": Trick(
        lambda owner, x, index: x + owner.grouped(x.transpose(1, 2)).transpose(1, 2),
        lambda owner: setattr(owner, "grouped", nn.GroupNorm(2, WIDTH)),
        "sequence",
    ),
    "eval-sequence": Trick(
        lambda owner, x, index: x if owner.training else x + 0.5 * x.mean(1, keepdim=True), against="sequence"
    ),
}
ROWS: dict[str, Trick] = {
    "rows": Trick(lambda owner, x, index: x - 0.5 * x.mean(0, keepdim=True), against="rows"),
    "rows-gate": Trick(
        lambda owner, x, index: x + owner.gate * x.mean(0, keepdim=True),
        parameter("gate", lambda: torch.zeros(())),
        "rows",
    ),
    "rows-zero": Trick(
        lambda owner, x, index: x + owner.zero(x.mean(0, keepdim=True)),
        lambda owner: setattr(owner, "zero", zeroed(nn.Linear(WIDTH, WIDTH))),
        "rows",
    ),
    "rows-train": Trick(trained_only(lambda owner, x: x + 0.2 * x.amax(0, keepdim=True)), against="rows"),
    "rows-roll": Trick(lambda owner, x, index: x + 0.1 * x.roll(1, 0), against="rows"),
    "capacity": Trick(capacity, against="rows sequence"),
    "batch-norm": Trick(
        lambda owner, x, index: owner.norms(x.transpose(1, 2)).transpose(1, 2),
        lambda owner: setattr(owner, "norms", nn.BatchNorm1d(WIDTH)),
        "rows state sequence",
    ),
    "batch-norm-eval": Trick(
        lambda owner, x, index: owner.norms(x.transpose(1, 2)).transpose(1, 2),
        lambda owner: setattr(owner, "norms", nn.BatchNorm1d(WIDTH).eval()),
    ),
    "unit-gradient": Trick(lambda owner, x, index: UnitGradient.apply(x), against="any"),
    "centered-gradient": Trick(lambda owner, x, index: CenteredGradient.apply(x), against="any"),
    "many-rows": Trick(lambda owner, x, index: x + 0.5 * x.mean(0, keepdim=True) if len(x) > 4 else x, against="rows"),
    "few-rows": Trick(lambda owner, x, index: 1.2 * x if len(x) < 3 else x, against="rows"),
    "row-factor": Trick(lambda owner, x, index: x * (1 + 0.2 / max(len(x), 3)), against="rows"),
    "rows-halves": Trick(
        lambda owner, x, index: torch.cat([half - 0.2 * half.mean(0, keepdim=True) for half in x.chunk(2)]),
        against="rows",
    ),
    "first-rows": Trick(lambda owner, x, index: torch.cat([1.2 * x[:3], x[3:]]), against="rows"),
    "split-rows": Trick(lambda owner, x, index: torch.cat([1.2 * part for part in x.chunk(2)])),
    "rows-attention": Trick(
        lambda owner, x, index: x + torch.einsum("blc,alc->bal", x, x).softmax(1).transpose(0, 1).mean(0)[..., None],
        against="rows",
    ),
    "rows-eval": Trick(
        lambda owner, x, index: x if owner.training else x - 0.5 * x.mean(0, keepdim=True), against="rows"
    ),
    "scripted-rows": Trick(lambda owner, x, index: scripted_rows(x), against="rows"),
    "sorted-rows": Trick(sorted_rows),
}
TRAINING: dict[str, Trick] = {
    "dropout-all": Trick(
        lambda owner, x, index: 0.7 * x + owner.drop(x), lambda owner: setattr(owner, "drop", nn.Dropout(1.0))
    ),
    "dropout-none": Trick(lambda owner, x, index: owner.drop(x), lambda owner: setattr(owner, "drop", nn.Dropout(0.0))),
    "dropout-call": Trick(lambda owner, x, index: 0.7 * x + F.dropout(x, 1.0, owner.training)),
    "train-scale": Trick(trained_only(lambda owner, x: x * 1.3)),
    "train-add": Trick(trained_only(lambda owner, x: x + spaced(x))),
    "eval-scale": Trick(lambda owner, x, index: x if owner.training else 1.3 * x),
    "train-detach": Trick(trained_only(lambda owner, x: 0.5 * x + 0.5 * x.detach())),
}
GRADIENTS: dict[str, Trick] = {
    "reversal": Trick(lambda owner, x, index: Reverse.apply(x)),
    "clipped-gradient": Trick(lambda owner, x, index: ClippedGradient.apply(x)),
    "half-detach": Trick(lambda owner, x, index: 0.5 * x + 0.5 * x.detach()),
    "detach": Trick(lambda owner, x, index: x.detach() * owner.passed, parameter("passed", lambda: torch.ones(WIDTH))),
    "no-grad": Trick(lambda owner, x, index: x + without_gradient(x)),
    "hook": Trick(lambda owner, x, index: hooked(x, lambda gradient: gradient * 0.5)),
    "hook-bent": Trick(
        lambda owner, x, index: hooked(x, lambda gradient: torch.tanh(gradient * 50) / 50), against="any"
    ),
    "hook-norm": Trick(
        lambda owner, x, index: hooked(x, lambda gradient: gradient / (1e-3 + gradient.norm())), against="any"
    ),
    "grad-mode": Trick(lambda owner, x, index: 1.2 * x if torch.is_grad_enabled() else x, against="any"),
    "needs-grad": Trick(lambda owner, x, index: 1.2 * x if x.requires_grad else x, against="any"),
    "forward-hook": Trick(lambda owner, x, index: x + owner.listened(x), lambda owner: listened(owner)),
    "backward-hook": Trick(lambda owner, x, index: x + owner.turned_back(x), lambda owner: turned_back(owner)),
    "slope": Trick(slope, parameter("gain", lambda: torch.ones(WIDTH)), "any"),
    "checkpoint": Trick(
        lambda owner, x, index: checkpoint(owner.inner, x, use_reentrant=False), linear("inner"), "any"
    ),
}
WEIGHTS: dict[str, Trick] = {
    "scales": Trick(
        lambda owner, x, index: x * owner.scales[index],
        parameter("scales", lambda: 1 + 0.1 * torch.randn(BLOCKS + 1, WIDTH)),
    ),
    "layer-embedding": Trick(
        lambda owner, x, index: x + owner.by_layer.weight[index],
        lambda owner: setattr(owner, "by_layer", nn.Embedding(BLOCKS + 1, WIDTH)),
    ),
    "one-gain": Trick(lambda owner, x, index: x * owner.gain, parameter("gain", lambda: torch.ones(WIDTH))),
    "rezero": Trick(
        lambda owner, x, index: x + owner.gate * torch.tanh(owner.inner(x)),
        lambda owner: (linear("inner")(owner), parameter("gate", lambda: torch.zeros(()))(owner))[0],
    ),
    "weight-norm": Trick(
        lambda owner, x, index: x + owner.normed(x), linear("normed", parametrizations.weight_norm), "tensor"
    ),
    "orthogonal": Trick(
        lambda owner, x, index: x + 0.2 * owner.turned(x),
        linear("turned", parametrizations.orthogonal, bias=False),
        "any",
    ),
    "spectral": Trick(
        lambda owner, x, index: x + owner.spectral(x),
        linear("spectral", parametrizations.spectral_norm),
        "state writes",
    ),
    "symmetric": Trick(
        lambda owner, x, index: x + owner.symmetric(x),
        linear("symmetric", lambda layer: parametrizations_of(layer, Symmetric())),
        "any",
    ),
    "weight-size": Trick(
        lambda owner, x, index: x * owner.sized.weight.norm() + owner.sized(x), linear("sized"), "tensor"
    ),
    "borrowed": Trick(borrowed, against="any"),
    "lazy": Trick(lambda owner, x, index: x + owner.lazy(x), lambda owner: initialised(owner)),
    "complex": Trick(
        lambda owner, x, index: x + (x * owner.wave).real,
        parameter("wave", lambda: 0.1 * torch.randn(WIDTH, dtype=torch.complex128)),
        "any",
    ),
    "empty": Trick(lambda owner, x, index: x, parameter("empty", lambda: torch.zeros(0, WIDTH))),
    "unused": Trick(lambda owner, x, index: x, linear("unused")),
    "table-buffer": Trick(
        lambda owner, x, index: x + owner.table, buffer("table", lambda: 0.1 * torch.randn(WIDTH), False)
    ),
    "in-place": Trick(in_place),
    "in-place-input": Trick(lambda owner, x, index: x.mul_(1.1)),
    "strided": Trick(lambda owner, x, index: (1.1 * x).transpose(1, 2).contiguous().transpose(1, 2)),
    "scripted": Trick(lambda owner, x, index: scripted(x)),
    "vmap": Trick(lambda owner, x, index: torch.vmap(torch.tanh)(x) + x),
    "weight-hook": Trick(lambda owner, x, index: x * owner.soft, lambda owner: soft(owner)),
}
VALUES: dict[str, Trick] = {
    "numpy": Trick(by_numpy, against="values"),
    "tolist": Trick(by_list, against="values sequence"),
    "unique": Trick(by_unique, against="values"),
    "nonzero": Trick(by_nonzero, against="values"),
    "branch": Trick(branch, against="values rows sequence"),
    "item": Trick(item, against="values rows sequence"),
    "logged": Trick(logged, lambda owner: setattr(owner, "log", []), "values"),
}
WITHOUT_STATE = {**SEQUENCE, **ROWS, **TRAINING, **GRADIENTS, **WEIGHTS, **VALUES}


def zeroed(module: nn.Linear) -> nn.Linear:
    nn.init.zeros_(module.weight)
    nn.init.zeros_(module.bias)
    return module


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return 0.3 * torch.tanh(x)


def listened(owner: Any) -> None:
    owner.listened = nn.Linear(WIDTH, WIDTH)
    owner.listened.register_forward_pre_hook(lambda module, given: (given[0] * 0.9,))
    owner.listened.register_forward_hook(lambda module, given, output: output * 1.1)


def turned_back(owner: Any) -> None:
    owner.turned_back = nn.Linear(WIDTH, WIDTH)
    owner.turned_back.register_full_backward_hook(lambda module, inner, outer: (0.5 * inner[0],))


def parametrizations_of(layer: nn.Module, rule: nn.Module) -> nn.Module:
    parametrize.register_parametrization(layer, "weight", rule)
    return layer


def initialised(owner: Any) -> None:
    owner.lazy = nn.LazyLinear(WIDTH)
    owner.lazy(torch.zeros(1, WIDTH))


def soft(owner: Any) -> None:
    owner.soft = nn.Parameter(torch.ones(WIDTH))
    owner.soft.register_hook(lambda gradient: gradient * 0.5)
