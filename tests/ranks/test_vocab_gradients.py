"""Gradients of a vocabulary are made where they are summed: no second tensor of its size, and the numbers of one
device, whoever reads the table how often."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from equality import alone as one_device
from equality import check, train
from torch import nn
from torch.nn import functional as F

from meshwright.models.registry import build_reference_model
from meshwright.runtime import weight_gradients
from meshwright.spec.plan import parse_plan
from meshwright.train.memory import trace_memory
from meshwright.train.trainer import parallelize

WIDE = {"layers": 2, "hidden": 64, "heads": 2, "ffn": 96, "vocab": 8192, "seq": 16}
"""A vocabulary of 2 MiB, beside which blocks and what they keep are small."""
WORDS = 48


def passing(plan: str, tied: bool, precision: str) -> tuple[int, int]:
    """Bytes that come and go in a step above what is held, on this rank, and those of the vocabulary's gradient as
    backward would make it."""
    torch.manual_seed(0)
    trainer = parallelize(
        build_reference_model({"kind": "llama", **WIDE, "tied": tied}), torch.optim.SGD, plan, precision=precision
    )
    ids = torch.randint(WIDE["vocab"], (4, 16), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        trainer.step({"input_ids": ids, "labels": ids})
    with trace_memory() as watch:
        trainer.step({"input_ids": ids, "labels": ids})
    trainer.close()
    return watch.peak, WIDE["vocab"] * WIDE["hidden"] * torch.finfo(
        getattr(torch, trainer.engine.recipe.compute)
    ).bits // 8


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("plan", ["pp2.mb1", "pp2.mb1.zbh1", "pp2.mb1.lc2"])
@pytest.mark.covering(1)
def test_no_tensor_of_a_vocabularys_size_comes_and_goes(ranks: Any, plan: str, tied: bool) -> None:
    """But where the loss is made in chunks, which keep one: the test would see it."""
    found = ranks.run(2, passing, plan, tied, "fp32")
    assert [most > gradient for most, gradient in found] == [False, ".lc" in plan], found


class Block(nn.Module):
    """`slope`: it takes a gradient inside of its forward, 'once', or so that it can be differentiated again
    ('twice')."""

    def __init__(self, slope: str) -> None:
        super().__init__()
        self.up, self.down, self.slope = (
            nn.Linear(16, 32),
            nn.Linear(32, 16),
            slope if slope in ("once", "twice") else "",
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.slope and torch.is_grad_enabled():
            given = x.detach().requires_grad_() if self.slope == "once" else x
            (slope,) = torch.autograd.grad(
                self.down(self.up(given).tanh()).square().sum(), given, create_graph=self.slope == "twice"
            )
            x = x + slope / 9
        return x + self.down(torch.relu(self.up(x)))


class Reader(nn.Module):
    """Words are looked up twice, some stand for nothing, places are learned, and `form` says what else is odd."""

    shift_labels = False

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.form = form
        self.table = nn.Embedding(WORDS, 16, padding_idx=3, scale_grad_by_freq=form == "by frequency")
        self.places = nn.Embedding(8, 16)
        self.layers, self.head = nn.ModuleList(Block(form) for _ in range(2)), nn.Linear(16, WORDS, bias=form != "tied")
        if form == "tied":
            self.head.weight = self.table.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(input_ids) + self.places(torch.arange(input_ids.shape[1])) + self.table(input_ids.roll(1, 1)) / 2
        for layer in self.layers:
            x = layer(x)
        if self.form == "head twice":
            return self.head(x) + self.head(x.roll(1, 1)) / 2
        return self.head(x) + F.linear(x.roll(1, 1), self.table.weight) if self.form == "as a product" else self.head(x)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 9, (8, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.roll(1, 1)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@contextmanager
def however_small() -> Iterator[None]:
    """Matrices of this file are small."""
    before, weight_gradients.MIN_IN_PLACE_ELEMENTS = weight_gradients.MIN_IN_PLACE_ELEMENTS, 1
    try:
        yield
    finally:
        weight_gradients.MIN_IN_PLACE_ELEMENTS = before


def trained(
    form: str, plan: str, precision: str
) -> tuple[list[float], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    with however_small():
        trainer = parallelize(Reader(form), sgd, plan, precision=precision)
    _, _, gradients = trainer.gradients(batch())
    losses = [trainer.step(batch()).loss for _ in range(3)]
    weights = trainer.full_state_dict()
    trainer.close()
    return losses, gradients, weights


def alone(form: str) -> tuple[list[float], dict[str, torch.Tensor], nn.Module]:
    model, given, losses = Reader(form).double(), batch(), []
    optimizer, first = sgd(model.parameters()), {}
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(given["input_ids"]).flatten(0, 1), given["labels"].flatten())
        loss.backward()
        first = first or {name: weight.grad.clone() for name, weight in model.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return losses, first, model


PLANS = ("pp2.mb2", "pp2.mb1.zbh1", "pp2.mb1.z2.zbh1", "dp2.pp2.mb1", "dp2.pp2.mb1.z2", "dp2.pp2.mb1.z3", "tp2.pp2.mb2")
PAIRS = [(form, plan) for form in ("plain", "tied", "head twice") for plan in PLANS]
PAIRS += [(form, plan) for form in ("once", "twice") for plan in ("pp2.mb2", "dp2.pp2.mb1.z2", "pp2.mb2.rc-full")]


FEW = {("tied", "tp2.pp2.mb2"), ("head twice", "pp2.mb1.z2.zbh1"), ("once", "pp2.mb2.rc-full")}


@pytest.mark.parametrize(
    ("form", "plan"), [pair if pair in FEW else pytest.param(*pair, marks=pytest.mark.soak) for pair in PAIRS]
)
def test_whoever_reads_a_table_how_often_gets_the_gradients_of_one_device(ranks: Any, form: str, plan: str) -> None:
    world = parse_plan(plan).world
    losses, gradients, model = alone(form)
    found = ranks.run(world, trained, form, plan, "fp64")
    for on_rank in found:
        assert on_rank[0] == pytest.approx(losses, rel=1e-10)
    for name, weight in model.named_parameters():
        assert torch.allclose(found[0][1][name], gradients[name], rtol=1e-10, atol=1e-12), name
        assert torch.allclose(found[0][2][name], weight, rtol=1e-10, atol=1e-12), name


def small(name: str, plan: str, precision: str) -> dict[str, Any]:
    with however_small():
        return train(name, plan, precision, 2)


FAMILIES = [("llama", f"pp2.mb2{kind}") for kind in ("", ".rc-sac", ".rc-attn", ".zbh1", ".interleaved2")]
FAMILIES += [
    ("llama-tied", "pp2.mb2.zbv"),
    ("llama", "tp2.pp2.sp.mb2"),
    ("llama", "dp2.pp2.mb1.z3.rc-full"),
    ("llama", "pp2.cp2.mb2"),
]
FAMILIES += [
    ("gpt2", "pp2.mb2"),
    ("hf-gpt2", "dp2.pp2.mb1.z3"),
    ("bert", "pp2.tp2.mb2.z2"),
    ("llama-tied", "dp2.pp2.mb1.z2"),
]


@pytest.mark.parametrize(("name", "plan"), FAMILIES)
@pytest.mark.covering(1)
def test_gradients_made_in_place_are_those_of_one_device(ranks: Any, name: str, plan: str) -> None:
    check(one_device(name, "fp64", 2), ranks.run(parse_plan(plan).world, small, name, plan, "fp64"), "fp64")


def two_steps(plan: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    found = small("llama", plan, "fp32")
    return found["losses"], found["weights"]


@pytest.mark.soak
@pytest.mark.parametrize("way", ["rc-full", "rc-sac", "rc-full1"])
def test_what_blocks_compute_again_changes_no_bit_of_gradients_made_in_place(ranks: Any, way: str) -> None:
    expected, plain = ranks.once(2, two_steps, "pp2.mb2")[0]
    losses, weights = ranks.run(2, two_steps, f"pp2.mb2.{way}")[0]
    assert losses == expected
    assert all(torch.equal(weights[name], weight) for name, weight in plain.items())
