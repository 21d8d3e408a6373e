"""Models with unusual parts: each trains as on one device, or every rank refuses it in one line that says why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.analysis.analyze import analyze_model
from meshwright.core.errors import InputError
from meshwright.train.trainer import parallelize

WORDS, WIDTH, INNER, ROWS, LENGTH, STEPS = 24, 8, 16, 16, 8, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    shift_labels = False

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def between(self, x: Any) -> torch.Tensor:
        return x  # type: ignore[no-any-return]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers:
            x = self.between(layer(x))
        return self.head(x)  # type: ignore[no-any-return]


# --- random numbers of a generator of one's own

HIDDEN = torch.Generator()
"""A generator that is no attribute of a module."""


class NoiseBlock(Block):
    rng: torch.Generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (torch.rand(WIDTH, generator=self.rng, dtype=torch.float64) + 0.5).to(x)


class HiddenNoiseBlock(NoiseBlock):
    rng = HIDDEN


class OwnGenerator(Net):
    """`seeds`: whether each forward seeds the generator that all blocks share."""

    def __init__(self, seeds: bool) -> None:
        super().__init__(NoiseBlock)
        self.seeds, self.rng = seeds, torch.Generator().manual_seed(7)
        for layer in self.layers:
            layer.rng = self.rng  # type: ignore[assignment]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.seeds:
            self.rng.manual_seed(1234)
        return super().forward(input_ids)


class HiddenGenerator(Net):
    def __init__(self) -> None:
        super().__init__(HiddenNoiseBlock)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        HIDDEN.manual_seed(1234)
        return super().forward(input_ids)


# --- blocks that return a NamedTuple or a dict


class Out(NamedTuple):
    hidden: torch.Tensor
    scale: float


class TupleBlock(Block):
    def forward(self, x: torch.Tensor) -> Out:
        return Out(super().forward(x), 0.5)


class DictBlock(Block):
    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"hidden": super().forward(x), "scale": 0.5}


class Unpacking(Net):
    def between(self, x: Any) -> torch.Tensor:
        hidden, scale = x.values() if isinstance(x, dict) else x
        return hidden * scale  # type: ignore[no-any-return]


class Lazy(Net):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.LazyLinear(WORDS)


# --- blocks that write into what all of them are given


class StoringBlock(Block):
    def forward(self, x: torch.Tensor, store: Any) -> torch.Tensor:  # type: ignore[override]
        x = super().forward(x)
        if isinstance(store, dict):
            store["sum"] = store.get("sum", 0.0) + 0.1 * x
            return x + store["sum"]
        if isinstance(store, list):
            store[0] += 1
            return x * (1.0 + 0.1 * store[0])
        store.sum = store.sum + 0.1 * x
        return x + store.sum  # type: ignore[no-any-return]


class Storing(Net):
    """`make`: makes the object that a forward gives to all blocks."""

    def __init__(self, make: Callable[[], Any]) -> None:
        super().__init__(StoringBlock)
        self.make = make

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, store = self.words(input_ids), self.make()
        for layer in self.layers:
            x = layer(x, store)
        return self.head(x)  # type: ignore[no-any-return]


# --- branches on values


class BranchesOnValue(Net):
    """Takes another branch if a row begins with a token that no row of the first micro-batch of step 0 begins with."""

    def __init__(self) -> None:
        super().__init__()
        first = batch_of(0)["input_ids"][:, 0].tolist()
        self.mark = next(token for token in first[4:] if token not in first[:4])

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        scale = 1.5 if bool((input_ids[:, 0] == self.mark).any()) else 1.0
        return super().forward(input_ids) * scale


# --- hooks on weights


class WideBlock(Block):
    """Its matrices are so large that pipeline ranks accumulate their gradients in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8192), nn.Linear(8192, WIDTH)
        self.up.weight.register_hook(lambda gradient: 0.5 * gradient)


# --- counters in Python


class CountsBetween(Net):
    turn = 0

    def between(self, x: Any) -> torch.Tensor:
        self.turn += self.training
        return x * (1.0 + 0.05 * self.turn)  # type: ignore[no-any-return]


class CountsBefore(CountsBetween):
    def between(self, x: Any) -> torch.Tensor:
        return x * (1.0 + 0.05 * self.turn)  # type: ignore[no-any-return]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        self.turn += self.training
        return super().forward(input_ids)


class CountingBlock(Block):
    def __init__(self, counts: dict[str, int] | None = None) -> None:
        super().__init__()
        self.counts = {"turn": 0} if counts is None else counts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.counts["turn"] += self.training
        return super().forward(x) * (1.0 + 0.05 * self.counts["turn"])  # type: ignore[no-any-return]


class NestedCountingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.options = {"count": SimpleNamespace(turn=[0])}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.options["count"].turn[0] += self.training
        return super().forward(x) * (1.0 + 0.05 * self.options["count"].turn[0])  # type: ignore[no-any-return]


# --- state outside of the model's modules

CALLS = {"turn": 0}


class CountsInGlobal(Net):
    def __init__(self) -> None:
        super().__init__()
        CALLS["turn"] = 0

    def counted(self) -> int:
        CALLS["turn"] += self.training
        return CALLS["turn"]

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * (1.0 + 0.05 * self.counted())


class CountsInClass(CountsInGlobal):
    turn = 0

    def __init__(self) -> None:
        super().__init__()
        type(self).turn = 0

    def counted(self) -> int:
        type(self).turn += self.training
        return type(self).turn


class CountsInIterator(CountsInGlobal):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = count(1)

    def counted(self) -> int:
        return next(self.numbers)


class CarriesBuffer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("carry", torch.zeros(WIDTH), persistent=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids) + 0.1 * self.carry
        for layer in self.layers:
            x = layer(x)
        if self.training:
            self.carry = x.detach().mean((0, 1))
        return self.head(x)  # type: ignore[no-any-return]


# --- code that runs in evaluation only


class EvaluationRows(Net):
    """Subtracts the mean over rows in evaluation."""

    def between(self, x: Any) -> torch.Tensor:
        return x if self.training else x - 0.5 * x.mean(0, keepdim=True)  # type: ignore[no-any-return]


class EvaluationSequence(Net):
    """Adds the mean over positions in evaluation."""

    def between(self, x: Any) -> torch.Tensor:
        return x if self.training else x + 0.5 * x.mean(1, keepdim=True)  # type: ignore[no-any-return]


class EvaluationBlock(Block):
    """Sums positions in evaluation, inside the block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if self.training else x.cumsum(1))  # type: ignore[no-any-return]


class Attention(Block):
    """`sums`: whether evaluation sums positions before attention."""

    def __init__(self, sums: bool) -> None:
        super().__init__()
        self.sums, self.mixed = sums, nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.cumsum(1) if self.sums and not self.training else x
        q, k, v = self.mixed(y).unflatten(-1, (3, 2, WIDTH // 2)).movedim(-3, 0).transpose(2, 3).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return super().forward(x + mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


# --- dropout inside of torch functions


class Encoder(Net):
    """torch's encoder layers. `mixes`: whether training adds the mean over rows."""

    def __init__(self, mixes: bool) -> None:
        super().__init__(partial(nn.TransformerEncoderLayer, WIDTH, 2, INNER, 0.1, batch_first=True))
        self.mixes = mixes

    def between(self, x: Any) -> torch.Tensor:
        return x + 2.0 * x.mean(0, keepdim=True) if self.mixes and self.training else x  # type: ignore[no-any-return]


class Recurrent(Net):
    def __init__(self) -> None:
        super().__init__(partial(nn.LSTM, WIDTH, WIDTH, 2, dropout=0.1, batch_first=True))

    def between(self, x: Any) -> torch.Tensor:
        return x[0] + 2.0 * x[0].mean(0, keepdim=True) if self.training else x[0]  # type: ignore[no-any-return]


class Case(NamedTuple):
    """`plans`: those under which the model must be equal to one device, and then those under which it must be refused
    with `line`. `proves`: the modes of the proof."""

    make: Callable[[], nn.Module]
    equal: str = ""
    refused: str = ""
    line: str = ""
    proves: tuple[str, ...] = ("start", "never")


CASES = {
    "generator that each forward seeds": Case(
        lambda: OwnGenerator(True), "dp2.mb8.rc-full dp2.mb4", "pp2.mb8", "torch.Generator of its own"
    ),
    "generator that goes on": Case(
        lambda: OwnGenerator(False), "dp1.mb16 tp2.mb16 dp2.mb8", "dp2.mb4 dp2.mb8.rc-full", "generator, spectral norm"
    ),
    "generator that is no attribute": Case(
        HiddenGenerator, "dp1.mb16.rc-sac", "dp2.mb8.rc-full", "torch.Generator that recompute", ("never",)
    ),
    "blocks that return a NamedTuple": Case(lambda: Unpacking(TupleBlock), "tp2.sp.mb8"),
    "blocks that return a dict": Case(lambda: Unpacking(DictBlock), "tp2.sp.mb8"),
    "rows that meet in evaluation": Case(EvaluationRows, "dp1.mb16", "dp2.mb2 dp1.mb4", "rows of a batch depend"),
    "positions that meet between blocks in evaluation": Case(
        EvaluationSequence, "tp2.mb16", "tp2.sp.mb16", "in evaluation mode", ("never",)
    ),
    "positions that meet in blocks in evaluation": Case(
        lambda: Net(EvaluationBlock), "tp2.mb16", "tp2.sp.mb16", "in evaluation mode", ("never",)
    ),
    "positions that meet before attention in evaluation": Case(
        lambda: Net(partial(Attention, True)), "dp2.mb4", "cp2.mb16", "in evaluation mode", ("never",)
    ),
    "attention": Case(lambda: Net(partial(Attention, False)), "cp2.mb16", proves=("never",)),
    "dropout in attention, rows that meet in training": Case(
        lambda: Encoder(True), "", "dp2.mb2", "rows of a batch depend", ("never",)
    ),
    "dropout in a recurrent layer, rows that meet in training": Case(
        Recurrent, "", "dp2.mb2", "rows of a batch depend", ("never",)
    ),
    "dict that blocks change": Case(
        lambda: Storing(dict), "tp2.mb16 dp2.mb4", "pp2.mb16 pp2.mb4.zbv", "changes an argument of layers", ("never",)
    ),
    "list that blocks change": Case(
        lambda: Storing(lambda: [0]), "tp2.mb16", "pp2.mb16", "changes an argument of layers", ("never",)
    ),
    "object that blocks change": Case(
        lambda: Storing(lambda: SimpleNamespace(sum=0.0)), "dp2.mb4", "pp2.mb16", "comes from block", ("never",)
    ),
    "branch on a value of all rows": Case(
        BranchesOnValue, "dp1.mb16", "dp1.mb2 dp1.mb4 dp2.mb4 pp2.mb4", "reads a value of all rows", ("never",)
    ),
    "hooks on large weights": Case(
        lambda: Net(WideBlock), "dp1.mb4 pp2.mb8 pp2.mb8.zbh1 pp2.mb8.z2", proves=("never", "start")
    ),
    "counter between blocks": Case(CountsBetween, "tp2.mb16", "pp2.mb16", "forward changes model.turn", ("never",)),
    "counter before blocks": Case(
        CountsBefore, "pp2.mb16", "pp2.mb16.zbv", "forward changes model.turn", ("never", "start")
    ),
    "counter of each block": Case(
        lambda: Net(CountingBlock), "pp2.mb16 pp2.mb16.zbv tp2.mb16", proves=("never", "start")
    ),
    "nested counter of each block": Case(
        lambda: Net(NestedCountingBlock), "tp2.mb16", "dp2.mb2", "changes a state that the next one", ("never",)
    ),
    "counter that blocks share": Case(
        lambda: (lambda counts: Net(partial(CountingBlock, counts)))({"turn": 0}),
        "dp1.mb16",
        "pp2.mb16",
        "counts.turn",
        ("never",),
    ),
    "counter in a global variable": Case(
        CountsInGlobal, "dp1.mb16 dp2.mb8 tp2.mb16", "dp1.mb4 dp2.mb2", "changes a state", ("never",)
    ),
    "counter in a class": Case(
        CountsInClass, "dp1.mb16 dp2.mb8 tp2.mb16", "dp1.mb4 dp2.mb2", "changes a state", ("never", "start")
    ),
    "counter in a global variable, stages": Case(
        CountsInGlobal, "", "pp2.mb16", "the forward changes test_unusual_models.CALLS.turn", ("never",)
    ),
    "counter in an iterator": Case(
        CountsInIterator, "", "dp1.mb16 dp1.mb4 tp2.mb16 pp2.mb16", "two forwards of the same rows", ("never",)
    ),
    "buffer that the next forward reads": Case(
        CarriesBuffer, "dp1.mb16", "pp2.mb16", "stage 1 writes to the buffer carry", ("never", "start")
    ),
    "layer without a size": Case(Lazy, "", "dp2.mb8 dp1.mb16", "head is a LazyLinear", ("never",)),
}


def batch_of(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def mean_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def alone(name: str) -> list[float]:
    model, losses = CASES[name].make().double(), []
    optimizer = sgd(model.parameters())
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = mean_loss(model, batch_of(step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, mean_loss(model.eval(), batch_of(99)).item()]


def under(name: str, plan: str, prove: str) -> list[float] | str:
    try:
        model = CASES[name].make().double()
        trainer = parallelize(model, sgd, plan, precision="fp64", prove=prove, example=batch_of(0))
        losses = [trainer.step(batch_of(step)).loss for step in range(STEPS)]
        return [*losses, trainer.evaluate(batch_of(99))]
    except InputError as error:
        return str(error)


def listed(equal: bool) -> list[Any]:
    return [
        pytest.param(name, plan, prove, id=f"{name}, {plan}, {prove}")
        for name, case in CASES.items()
        for plan in (case.equal if equal else case.refused).split()
        for prove in case.proves
    ]


def on_ranks(ranks: Any, name: str, plan: str, prove: str) -> list[Any]:
    return ranks.run(1 if plan.startswith("dp1") else 2, under, name, plan, prove)  # type: ignore[no-any-return]


@pytest.mark.parametrize(("name", "plan", "prove"), listed(True))
@pytest.mark.covering(14)
def test_an_unusual_model_trains_and_evaluates_as_on_one_device(ranks: Any, name: str, plan: str, prove: str) -> None:
    for found in on_ranks(ranks, name, plan, prove):
        assert found == pytest.approx(alone(name), rel=1e-9), found


@pytest.mark.parametrize(("name", "plan", "prove"), listed(False))
@pytest.mark.covering(8)
def test_a_model_that_a_plan_would_train_wrong_is_refused_in_one_line(
    ranks: Any, name: str, plan: str, prove: str
) -> None:
    for said in on_ranks(ranks, name, plan, prove):
        assert isinstance(said, str) and CASES[name].line in said and "\n" not in said, said


def proven(plan: str) -> tuple[bool, tuple[str, ...]]:
    model = Encoder(False).double()
    found = parallelize(model, sgd, plan, precision="fp64", example=batch_of(0), prove="start").prove(batch_of(0))
    return found.equal, found.notes


def test_dropout_in_attention_is_proven_in_training_mode(ranks: Any) -> None:
    assert ranks.run(2, proven, "dp2.mb2") == [(True, ())] * 2


class Long(Net):
    """Runs with at least 6 positions: with those of the analysis (7), not with the shorter text of the check (4)."""

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] < 6:
            raise ValueError("too short")
        return super().forward(input_ids)


def test_inputs_that_the_check_of_splits_leaves_out_are_a_finding() -> None:
    assert any(
        "not checked with 1 of the test inputs" in each and "too short" in each
        for each in analyze_model(Long()).findings
    )
    assert not any("were not checked" in each for each in analyze_model(Net()).findings)
