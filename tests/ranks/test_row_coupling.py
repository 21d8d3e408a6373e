"""Rows that see each other where nothing shows at first: behind a zero, in the backward alone, in a gradient hook.
Refused before a step counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.models.registry import build_reference_model
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

WORDS, WIDTH, ROWS, LENGTH = 40, 16, 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Normed(torch.autograd.Function):
    """The identity; its backward divides by the norm over all rows."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / (gradient.norm() + 1e-6)


class Net(nn.Module):
    """`kind` says what its rows have to do with each other."""

    shift_labels = False

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.table = nn.Embedding(WORDS, WIDTH, scale_grad_by_freq=kind == "frequency")
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)
        self.gate = nn.Parameter(torch.zeros(()))
        if kind == "zero head":
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        if self.kind == "gate":
            x = x + self.gate * (x - x.mean(0, keepdim=True))
        if self.kind == "zero head":
            x = x - x.mean(0, keepdim=True)
        if self.kind == "backward":
            x = Normed.apply(x)
        if self.kind == "hook" and x.requires_grad:
            x.register_hook(lambda gradient: gradient / gradient.norm())
        if self.kind == "halves":
            x = torch.cat([half - 0.1 * half.mean(0, keepdim=True) for half in x.chunk(2)])
        if self.kind == "first rows":
            x = torch.cat([1.1 * x[:3], x[3:]])
        if self.kind == "parts":
            x = torch.cat([1.1 * half for half in x.chunk(2)])
        if self.kind == "mixup" and self.training:
            x = 0.7 * x + 0.3 * x[torch.randperm(len(x))]
        if self.kind == "noise" and self.training:
            x = x + 0.01 * torch.randn_like(x)
        if self.kind == "four rows" and self.training:
            x = x - 0.1 * x.view(-1, 4, *x.shape[1:]).mean(1).repeat_interleave(4, 0)
        if self.kind == "clamp" and x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-1e-4, 1e-4))
        logits: torch.Tensor = self.head(x * (1 + self.gate))
        return logits


def weighted_by_counts(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """A loss with a weight that depends on the counts of even and odd labels of all rows."""
    odd = batch["labels"] % 2
    weight = (1 - odd).sum() / odd.sum()
    return F.binary_cross_entropy_with_logits(output[..., 0], odd.to(output), pos_weight=weight)


def with_counts(plan: str) -> str:
    """Of a batch whose first two rows have equal counts, and its other rows not."""
    batch = batch_of(0, 8)
    batch["labels"] = torch.tensor([[0, 1] * (LENGTH // 2)] * 2 + [[0, 0, 1] * (LENGTH // 3), [1] * LENGTH] * 3)
    try:
        trainer = parallelize(Net("plain").double(), adamw, plan, precision="fp64", loss=weighted_by_counts)
        return str(trainer.step(batch).loss)
    except InputError as error:
        return str(error)


class Contrast:
    """A mean over the rows and, from the second step on, a contrast of them."""

    def __init__(self, kind: str) -> None:
        self.kind, self.calls = kind, 0
        self.weight = 0.0

    def __call__(self, output: torch.Tensor, batch: Any) -> torch.Tensor:
        each = F.cross_entropy(output.transpose(1, 2), batch["labels"], reduction="none").mean(1).mean()
        return each + self.weight * F.cross_entropy(output[:, 0] @ output[:, 1].T, torch.arange(len(output)))


def batch_of(step: int, rows: int = ROWS) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (rows, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def under(kind: str, plan: str, rows: int = ROWS, steps: int = 3) -> list[Any]:
    """Losses of the steps that counted, and the line of the one that was refused."""
    found: list[Any] = []
    model = Net(kind).double()
    loss = Contrast(kind) if kind == "late term" else None
    try:
        trainer = parallelize(model, adamw, plan, precision="fp64", **({} if loss is None else {"loss": loss}))
        for step in range(steps):
            found.append(trainer.step(batch_of(step, rows)).loss)
            if loss is not None:
                loss.weight = 0.5
    except InputError as error:
        found.append(str(error))
    return found


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def alone(kind: str) -> list[float]:
    model, losses = Net(kind).double(), []
    optimizer = adamw(model.parameters())
    for step in range(3):
        optimizer.zero_grad()
        batch = batch_of(step)
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def refused_at(said: list[list[Any]], step: int) -> None:
    """All ranks say the same line, in place of the step number `step`."""
    assert said[0] == said[1]
    assert len(said[0]) == step and isinstance(said[0][-1], str), said[0]
    assert "rows of a batch depend on each other" in said[0][-1] and "\n" not in said[0][-1]


@pytest.mark.parametrize("plan", ["dp2.mb2", "dp2.z3.mb1", "pp2.mb2"])
@pytest.mark.parametrize("kind", ["gate", "zero head", "frequency", "backward", "hook"])
@pytest.mark.covering(4)
def test_row_coupling_in_backward_only_is_refused_before_the_first_step(ranks: Any, kind: str, plan: str) -> None:
    refused_at(ranks.run(2, under, kind, plan), 1)


def refused_with(said: list[list[Any]], words: str) -> None:
    """All ranks refuse the first step with one line that has these words."""
    assert said[0] == said[1] and len(said[0]) == 1, said
    assert words in said[0][0] and "\n" not in said[0][0]


@pytest.mark.parametrize("plan", ["dp2.mb2", "pp2.mb1", "dp2.z3.mb1"])
@pytest.mark.parametrize("kind", ["halves", "first rows"])
@pytest.mark.covering(3)
def test_parts_of_the_rows_that_a_micro_batch_divides_otherwise_are_refused(ranks: Any, kind: str, plan: str) -> None:
    refused_with(ranks.run(2, under, kind, plan, 8), "depends on the number of rows at test_row_coupling.py:")


@pytest.mark.parametrize("plan", ["dp2.mb2", pytest.param("pp2.mb2", marks=pytest.mark.soak)])
def test_rows_that_random_numbers_mix_are_refused(ranks: Any, plan: str) -> None:
    refused_with(ranks.run(2, under, "mixup", plan, 8), "mixes the rows of a batch in training, by random numbers")


def test_random_numbers_that_leave_rows_independent_are_not_refused(ranks: Any) -> None:
    for losses in ranks.run(2, under, "noise", "dp2.mb2", 8):
        assert all(isinstance(each, float) for each in losses), losses


def test_code_that_fails_with_few_rows_is_refused_in_one_line(ranks: Any) -> None:
    refused_with(ranks.run(2, under, "four rows", "dp2.mb2", 8), "the model or its loss fails with some rows")


def test_rows_of_other_micro_batches_are_compared_too(ranks: Any) -> None:
    for line in ranks.run(2, with_counts, "tp2.mb2"):
        assert "rows of a batch depend on each other" in line


@pytest.mark.parametrize("kind", ["gate", "hook"])
def test_one_row_for_each_rank_is_compared_too(ranks: Any, kind: str) -> None:
    refused_at(ranks.run(2, under, kind, "dp2.mb1", 2), 1)


def test_a_new_loss_term_is_refused_at_the_step_where_it_appears(ranks: Any) -> None:
    refused_at(ranks.run(2, under, "late term", "dp2.mb2"), 2)


@pytest.mark.parametrize("plan", ["dp2.mb1", "dp2.z3.mb2", "pp2.mb2", "pp2.mb2.zbv", "dp2.z1.mb2.rc-full"])
@pytest.mark.parametrize("kind", ["plain", "clamp", "parts"])
@pytest.mark.covering(1)
def test_a_model_with_independent_rows_trains_and_no_check_leaves_a_trace(ranks: Any, kind: str, plan: str) -> None:
    for losses in ranks.run(2, under, kind, plan):
        assert losses == pytest.approx(alone(kind), rel=1e-10)


def late(plan: str) -> list[Any]:
    """Of a loss whose second term has a weight that guards do not compare, and that is 0 in the first step."""
    weights, found = [0.0], list[Any]()

    def loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
        each = F.cross_entropy(output.transpose(1, 2), batch["labels"])
        return each + weights[0] * F.cross_entropy(output[:, 0] @ output[:, 1].T, torch.arange(len(output)))

    trainer = parallelize(Net("plain").double(), adamw, plan, precision="fp64", prove="never", loss=loss)
    try:
        for step in range(3):
            found.append(trainer.step(batch_of(step)).loss)
            weights[0] = 0.5
    except InputError as error:
        found.append(str(error))
    return found


@pytest.mark.parametrize("plan", ["dp2.mb1", "dp1.mb2", pytest.param("dp2.z3.mb2", marks=pytest.mark.soak)])
def test_a_term_that_comes_in_at_step_2_is_refused_there_without_proofs_too(ranks: Any, plan: str) -> None:
    for losses in ranks.run(1 if plan == "dp1.mb2" else 2, late, plan):
        assert len(losses) == 2 and "rows of a batch depend on each other" in losses[1], losses


def test_rows_that_see_each_other_pass_together_on_one_rank(ranks: Any) -> None:
    for kind in ("gate", "zero head", "frequency", "backward", "hook"):
        assert ranks.run(1, under, kind, "dp1.mb4")[0] == pytest.approx(alone(kind), rel=1e-10)


def most_tokens(plan: str) -> int:
    """On every rank: the largest number of token ids that a real forward of the first two steps gets, with rows of
    2,048 tokens."""
    torch.manual_seed(0)
    model = build_reference_model(
        {"kind": "llama", "layers": 2, "hidden": 8, "heads": 2, "ffn": 8, "vocab": 16, "seq": 2048}
    )
    seen = []

    def note(module: nn.Module, inputs: Any) -> None:
        if inputs[0].device.type == "cpu":
            seen.append(inputs[0].numel())

    model.model.embed_tokens.register_forward_pre_hook(note)
    trainer = parallelize(model, adamw, plan, precision="fp64")
    ids = torch.randint(0, 16, (4, 2048), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        trainer.step({"input_ids": ids, "labels": ids})
    return max(seen)


@pytest.mark.parametrize("plan", ["dp1.mb1", "dp2.mb2", pytest.param("tp2.sp.mb1", marks=pytest.mark.soak)])
def test_the_checks_run_no_more_tokens_than_a_micro_batch(ranks: Any, plan: str) -> None:
    """On a device that a plan fills, a pass of more rows would run out of memory in the first step."""
    rows = parse_plan(plan).micro_batch
    assert ranks.run(parse_plan(plan).world, most_tokens, plan) == [rows * 2048] * parse_plan(plan).world


def test_rows_are_checked_in_the_first_step_whose_batch_has_several_parts() -> None:
    """The steps whose rows are checked had one micro-batch, in which rows may depend on each other."""
    trainer = parallelize(
        Net("zero head").double(),
        lambda each: torch.optim.SGD(each, lr=0.1),
        "dp1.mb4",
        precision="fp64",
        prove="never",
    )
    ids = torch.randint(0, WORDS, (2 * ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    for _ in range(4):
        trainer.step({"input_ids": ids[:ROWS], "labels": ids[:ROWS]})
    with pytest.raises(InputError, match="rows of a batch depend on each other"):
        trainer.step({"input_ids": ids, "labels": ids})
