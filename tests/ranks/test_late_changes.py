"""A change that begins in a step that no check was due for: values that the user's code stores, and unequal numbers of
labels under a loss of the user. If the rows of a batch depend on each other from that step on, the step is refused
before it counts; otherwise it trains as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.train.trainer import parallelize

WORDS, WIDTH, ROWS, LENGTH, STEPS, LATE = 24, 8, 16, 8, 7, 5
KINDS = ("none", "config", "class", "dict", "list", "buffer", "callable", "batch")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Options:
    mix = 0.0


class Net(nn.Module):
    """`where`: what stores the weight `mix` of the mean over rows (`couples`) or of a harmless term."""

    shift_labels = False
    mix = 0.0

    def __init__(self, where: str, couples: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.where, self.couples = where, couples
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)
        self.alpha: float | None = None
        self.mixer: Any = None
        self.config, self.flags, self.weights = Options(), {"mix": 0.0}, [0.0]
        self.register_buffer("gate", torch.zeros(()))

    def weight(self, options: Any) -> Any:
        found = {
            "none": self.alpha,
            "config": self.config.mix,
            "class": self.mix,
            "dict": self.flags["mix"],
            "list": self.weights[0],
            "buffer": self.gate,
            "batch": None if options is None else options["mix"],
        }
        return found.get(self.where)

    def forward(self, input_ids: torch.Tensor, labels: Any = None, options: Any = None, mask: Any = None) -> Any:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        mix = self.weight(options)
        if mix is not None:
            x = x + mix * (x.mean(0, keepdim=True) if self.couples else x.mean(2, keepdim=True))
        if self.mixer is not None:
            x = self.mixer(x)
        return self.head(x)


def rows_mixed(x: torch.Tensor) -> torch.Tensor:
    return x + 0.5 * x.mean(0, keepdim=True)


def features_mixed(x: torch.Tensor) -> torch.Tensor:
    return x + 0.5 * x.mean(2, keepdim=True)


def set_from_step(model: Any, step: int) -> None:
    """What the user's loop does before a step, counted from 0."""
    if step != LATE:
        return
    if model.where == "none":
        model.alpha = 0.5
    model.config.mix = model.mix = model.flags["mix"] = model.weights[0] = 0.5
    model.gate.fill_(0.5)
    if model.where == "callable":
        model.mixer = rows_mixed if model.couples else features_mixed


def batch_of(step: int, where: str = "") -> dict[str, Any]:
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    batch: dict[str, Any] = {"input_ids": ids, "labels": ids.roll(-1, 1)}
    if where == "batch":
        batch["options"] = {"mix": 0.5 if step >= LATE else 0.0}
    return batch


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def run(where: str, couples: bool, plan: str | None, prove: Any = None) -> list[Any]:
    """Returns the losses of the steps, without a plan those of one device, and the line of a refusal."""
    model, losses = Net(where, couples).double(), list[Any]()
    try:
        if plan is not None:
            trainer = parallelize(model, adamw, plan, precision="fp64", prove=prove, example=batch_of(0, where))
        optimizer = adamw(model.parameters())
        for step in range(STEPS):
            set_from_step(model, step)
            batch = batch_of(step, where)
            if plan is not None:
                losses.append(trainer.step(batch).loss)
                continue
            optimizer.zero_grad()
            output = model(**{name: value for name, value in batch.items() if name != "labels"})
            loss = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    except InputError as error:
        losses.append(str(error))
    return losses


@pytest.mark.parametrize("plan", ["dp2.mb2", "dp2.z3.mb4", "pp2.mb4"])
@pytest.mark.parametrize("where", KINDS)
@pytest.mark.covering(2)
def test_a_stored_value_that_couples_rows_is_refused_at_that_step(ranks: Any, where: str, plan: str) -> None:
    expected = run(where, True, None)
    for *losses, line in ranks.run(2, run, where, True, plan):
        assert losses == pytest.approx(expected[:LATE], rel=1e-10) and len(losses) == LATE
        assert "rows of a batch depend on each other" in line and "\n" not in line


@pytest.mark.parametrize("plan", ["dp2.mb2", "dp2.z3.mb4", "pp2.mb4", "tp2.mb8"])
@pytest.mark.parametrize("where", KINDS)
@pytest.mark.covering(2)
def test_a_stored_value_that_couples_nothing_is_proven_again_and_trains(ranks: Any, where: str, plan: str) -> None:
    expected = run(where, False, None)
    for losses in ranks.run(2, run, where, False, plan, "start"):
        assert losses == pytest.approx(expected, rel=1e-10)


# --- an own loss that is a mean over labels -----------------------------------------------------------------------


def masked(step: int, uneven: bool) -> dict[str, Any]:
    """From the step LATE on, a mask ignores some labels: as many in each row, or `uneven` numbers."""
    batch = batch_of(step)
    batch["mask"] = torch.ones(ROWS, LENGTH, dtype=torch.float64)
    if step >= LATE:
        for row in range(ROWS):
            batch["mask"][row, LENGTH - (row % 5 if uneven else 2) :] = 0
    return batch


def sum_by_sum(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    each = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="none").view_as(batch["mask"])
    return (each * batch["mask"]).sum() / batch["mask"].sum()


def cross_entropy(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    labels = batch["labels"].masked_fill(batch["mask"] == 0, -100)
    return F.cross_entropy(output.flatten(0, 1), labels.flatten())


def selected(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    each = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="none").view_as(batch["mask"])
    return each[batch["mask"] > 0].mean()


def of_rows(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """A mean over rows, each a mean over its own labels."""
    each = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="none").view_as(batch["mask"])
    return ((each * batch["mask"]).sum(1) / batch["mask"].sum(1).clamp(min=1)).mean()


LOSSES = {each.__name__: each for each in (sum_by_sum, cross_entropy, selected, of_rows)}


def with_loss(name: str, uneven: bool, plan: str | None) -> list[Any]:
    model, losses, loss = Net("", False).double(), list[Any](), LOSSES[name]
    try:
        if plan is not None:
            trainer = parallelize(model, adamw, plan, precision="fp64", loss=loss, example=masked(0, uneven))
        optimizer = adamw(model.parameters())
        for step in range(STEPS):
            batch = masked(step, uneven)
            if plan is not None:
                losses.append(trainer.step(batch).loss)
                continue
            optimizer.zero_grad()
            found = loss(model(batch["input_ids"]), batch)
            found.backward()
            optimizer.step()
            losses.append(found.item())
    except InputError as error:
        losses.append(str(error))
    return losses


@pytest.mark.parametrize("plan", ["dp2.mb2", "dp1.mb4", "dp2.mb8", "dp2.z3.mb4", "pp2.mb4"])
@pytest.mark.parametrize("name", ["sum_by_sum", "cross_entropy", "selected"])
@pytest.mark.covering(2)
def test_a_mean_over_labels_is_refused_at_the_first_step_with_unequal_numbers(ranks: Any, name: str, plan: str) -> None:
    expected = with_loss(name, True, None)
    for *losses, line in ranks.run(1 if plan.startswith("dp1") else 2, with_loss, name, True, plan):
        assert losses == pytest.approx(expected[:LATE], rel=1e-10) and len(losses) == LATE
        assert "in step 6 the loss divides by" in line and "\n" not in line


@pytest.mark.parametrize("plan", ["dp2.mb2", "dp1.mb4", "dp2.z3.mb4", "pp2.mb4"])
@pytest.mark.parametrize(("name", "uneven"), [("sum_by_sum", False), ("cross_entropy", False), ("of_rows", True)])
@pytest.mark.covering(2)
def test_a_loss_that_is_a_mean_over_rows_trains_with_a_mask(ranks: Any, name: str, uneven: bool, plan: str) -> None:
    expected = with_loss(name, uneven, None)
    for losses in ranks.run(1 if plan.startswith("dp1") else 2, with_loss, name, uneven, plan):
        assert losses == pytest.approx(expected, rel=1e-10)


# --- code that depends on the number of rows ----------------------------------------------------------------------


class ByRows(Net):
    """Runs other code for more than 8 rows: `kind` says which."""

    def __init__(self, kind: str) -> None:
        super().__init__("", False)
        self.kind = kind

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        if self.kind == "mean":
            x = x + 0.5 * x.mean(0, keepdim=True) if len(x) > 8 else x
        elif self.kind == "factor":
            x = x + 0.5 * (x.shape[0] > 8) * x.mean(0, keepdim=True)
        elif self.kind == "number":
            x = x * (1 + 1 / max(len(x), 8))
        elif self.kind == "two changes":
            x = x + 0.5 * x.mean(0, keepdim=True) if len(x) > 8 else torch.tanh(x) if len(x) > 4 else x.tanh()
        elif self.kind == "chunks":
            x = torch.cat([torch.tanh(each) for each in x.split(4)]) if len(x) > 8 else torch.tanh(x)
        return self.head(x)


def by_rows(kind: str, plan: str | None) -> list[Any]:
    model, losses = ByRows(kind).double(), list[Any]()
    try:
        if plan is not None:
            trainer = parallelize(model, adamw, plan, precision="fp64", example=batch_of(0), prove="never")
            return [trainer.step(batch_of(step)).loss for step in range(3)]
        optimizer = adamw(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            batch = batch_of(step)
            loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    except InputError as error:
        losses.append(str(error))
    return losses


@pytest.mark.parametrize("plan", ["dp2.mb2", "dp1.mb2", "dp2.z3.mb2", "pp2.mb4"])
@pytest.mark.parametrize("kind", ["mean", "factor", "number", "two changes"])
@pytest.mark.covering(2)
def test_code_that_depends_on_the_number_of_rows_is_refused_before_the_first_step(
    ranks: Any, kind: str, plan: str
) -> None:
    for found in ranks.run(1 if plan.startswith("dp1") else 2, by_rows, kind, plan):
        assert len(found) == 1 and "9 rows have a loss of" in found[0], found
        assert "test_late_changes.py" in found[0] and "\n" not in found[0]


@pytest.mark.parametrize(("kind", "plan"), [("chunks", "dp2.mb2"), ("mean", "dp1.mb16"), ("mean", "tp2.mb16")])
def test_equal_code_for_many_rows_and_one_micro_batch_train(ranks: Any, kind: str, plan: str) -> None:
    expected = by_rows(kind, None)
    for losses in ranks.run(1 if plan.startswith("dp1") else 2, by_rows, kind, plan):
        assert losses == pytest.approx(expected, rel=1e-10)


# --- branches on a value of all rows ------------------------------------------------------------------------------

MARK = WORDS - 1


class Branching(Net):
    """Takes another branch, or another factor (`kind`), if a row begins with MARK. With `kind` "rows", each row takes
    its own branch."""

    def __init__(self, kind: str) -> None:
        super().__init__("", False)
        self.kind = kind

    def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x)
        marked = input_ids[:, 0] == MARK
        if self.kind == "rows":
            found = marked.nonzero().flatten()
            x = x.index_add(0, found, x[found]) if len(found) else x + 0.0
        elif self.kind == "factor":
            x = x * (1.5 if bool(marked.any()) else 1.2)
        else:
            x = torch.tanh(x) if bool(marked.any()) else torch.sigmoid(x)
        return self.head(x)


def marked_batch(step: int) -> dict[str, Any]:
    """All rows begin with MARK in step 2, no row in other steps, and the last row from the step LATE on."""
    batch = batch_of(step)
    batch["input_ids"][:, 0] = MARK if step == 1 else 0
    if step >= LATE:
        batch["input_ids"][-1, 0] = MARK
    return batch


def branching(kind: str, plan: str | None, prove: Any = "never") -> list[Any]:
    model, losses = Branching(kind).double(), list[Any]()
    try:
        if plan is not None:
            trainer = parallelize(model, adamw, plan, precision="fp64", example=marked_batch(0), prove=prove)
        optimizer = adamw(model.parameters())
        for step in range(STEPS):
            batch = marked_batch(step)
            if plan is not None:
                losses.append(trainer.step(batch).loss)
                continue
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    except InputError as error:
        losses.append(str(error))
    return losses


@pytest.mark.parametrize("plan", ["dp1.mb4", "dp2.mb8", "dp2.mb2", "dp2.z3.mb8", "pp2.mb4"])
@pytest.mark.parametrize("kind", ["branch", "factor"])
@pytest.mark.covering(2)
def test_paths_that_meet_late_in_one_step_are_compared(ranks: Any, kind: str, plan: str) -> None:
    expected = branching(kind, None)
    for *losses, line in ranks.run(1 if plan.startswith("dp1") else 2, branching, kind, plan):
        assert losses == pytest.approx(expected[:LATE], rel=1e-10) and len(losses) == LATE
        assert "reads a value of all rows" in line and "\n" not in line


@pytest.mark.parametrize(("plan", "prove"), [("dp1.mb4", "never"), ("dp2.mb8", "start"), ("dp2.z3.mb8", "never")])
def test_rows_that_take_their_own_branch_train(ranks: Any, plan: str, prove: str) -> None:
    expected = branching("rows", None)
    for losses in ranks.run(1 if plan.startswith("dp1") else 2, branching, "rows", plan, prove):
        assert losses == pytest.approx(expected, rel=1e-10)
