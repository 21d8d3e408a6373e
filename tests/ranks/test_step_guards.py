"""What a script changes between steps is trained as on one device, checked again, or refused in one line before the
step counts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from odd_data import optimizer_of, plain_loss
from odd_models import Job, Odd
from torch import nn
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.train.memory import trace_memory
from meshwright.train.step.inputs import LocalBatch
from meshwright.train.trainer import parallelize

WORDS, WIDTH, ROWS, LENGTH = 40, 16, 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    shift_labels = False

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.coupled, self.tag = 0.0, 0
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, shift: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        if shift is not None:
            x = x + shift[..., None] - shift.mean()
        logits: torch.Tensor = self.head(x + self.coupled * x.mean(0, keepdim=True))
        return logits


def batch_of(step: int, length: int = LENGTH) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    ids = torch.randint(0, WORDS, (ROWS, length), generator=random)
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def change(model: Any, step: int, what: str, batch: dict[str, torch.Tensor]) -> None:
    """Before step number `step`, counted from 0."""
    if what == "froze" and step == 4:
        model.layers[0].up.weight.requires_grad = False
        model.head.requires_grad_(False)
    if what == "froze first" and step == 0:
        model.layers[1].requires_grad_(False)
    if what == "thawed" and step == 4:
        model.table.weight.requires_grad = True
    if what == "coupled" and step == 5:
        model.coupled = 0.5
    if what == "coupled on one rank" and step == 5 and dist.get_rank() == 1:
        model.coupled = 0.5
    if what == "tagged on one rank" and step in (3, 5) and dist.is_initialized() and dist.get_rank() == 1:
        model.tag += 1
    if what == "key" and step == 4:
        batch["shift"] = torch.randn(ROWS, LENGTH, generator=torch.Generator().manual_seed(step)).double()


def run(what: str, plan: str, prove: Any = None) -> list[Any]:
    model, found = Net().double(), []
    model.table.weight.requires_grad = what != "thawed"
    try:
        trainer = parallelize(model, adamw, plan, precision="fp64", prove=prove)
        for step in range(6):
            batch = batch_of(step, LENGTH + step % 4 if what == "lengths" else LENGTH)
            change(model, step, what, batch)
            found.append(trainer.step(batch).loss)
    except InputError as error:
        found.append(str(error))
    return found


def alone(what: str) -> list[float]:
    model, losses = Net().double(), []
    optimizer = adamw(model.parameters())
    for step in range(6):
        batch = batch_of(step, LENGTH + step % 4 if what == "lengths" else LENGTH)
        change(model, step, what, batch)
        optimizer.zero_grad()
        loss = F.cross_entropy(
            model(batch["input_ids"], shift=batch.get("shift")).flatten(0, 1), batch["labels"].flatten()
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("plan", ["dp2.mb1", "dp2.z1.mb2", "dp2.z3.mb2", "pp2.mb2", "dp2.z1.mb2.off-optimizer"])
@pytest.mark.parametrize("what", ["froze", "froze first"])
@pytest.mark.covering(1)
def test_a_parameter_that_is_frozen_after_parallelize_stays_as_it_is(ranks: Any, what: str, plan: str) -> None:
    for losses in ranks.run(2, run, what, plan):
        assert losses == pytest.approx(alone(what), rel=1e-10)


@pytest.mark.parametrize(
    "plan", ["tp2.mb4", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("dp2.mb2", "dp2.z3.mb2", "pp2.mb2"))]
)
@pytest.mark.parametrize("what", ["froze", pytest.param("froze first", marks=pytest.mark.soak)])
def test_a_proof_follows_what_is_frozen_after_parallelize(ranks: Any, what: str, plan: str) -> None:
    for losses in ranks.run(2, run, what, plan, 2):
        assert losses == pytest.approx(alone(what), rel=1e-10)


@pytest.mark.parametrize(
    "plan", ["pp2.mb2", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("dp2.mb2", "dp2.z3.mb2"))]
)
def test_a_parameter_that_is_trained_later_is_refused_at_that_step_by_all_ranks(ranks: Any, plan: str) -> None:
    found = ranks.run(2, run, "thawed", plan)
    assert found[0] == found[1] and len(found[0]) == 5
    assert "table.weight is trained since step 5, but it was frozen" in found[0][-1] and "\n" not in found[0][-1]


@pytest.mark.parametrize(("what", "steps"), [("coupled", 5), ("key", 4)])
@pytest.mark.parametrize("plan", ["dp2.mb1", "dp2.z3.mb2", "pp2.mb2"])
@pytest.mark.covering(1)
def test_row_coupling_from_an_unchecked_step_is_refused_at_that_step(
    ranks: Any, what: str, steps: int, plan: str
) -> None:
    found = ranks.run(2, run, what, plan)
    assert found[0] == found[1] and len(found[0]) == steps + 1, found[0]
    assert isinstance(found[0][-1], str) and "\n" not in found[0][-1]
    if what == "coupled" or not plan.startswith("pp"):
        assert "rows of a batch depend on each other" in found[0][-1]


@pytest.mark.parametrize("plan", ["dp2.mb1", pytest.param("dp2.z3.mb2", marks=pytest.mark.soak)])
def test_a_number_that_couples_rows_on_one_rank_alone_is_refused_by_all_ranks(ranks: Any, plan: str) -> None:
    found = ranks.run(2, run, "coupled on one rank", plan)
    assert found[0] == found[1] and len(found[0]) == 6, found[0]
    assert "rows of a batch depend on each other" in found[0][-1] and "\n" not in found[0][-1]


@pytest.mark.parametrize(
    "plan", ["pp2.mb2", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("dp2.mb1", "dp2.z3.mb2"))]
)
def test_an_unread_attribute_that_changes_on_one_rank_lets_all_ranks_continue(ranks: Any, plan: str) -> None:
    for losses in ranks.run(2, run, "tagged on one rank", plan):
        assert losses == pytest.approx(alone("tagged on one rank"), rel=1e-10)


@pytest.mark.parametrize(
    "plan", ["pp2.mb2", *(pytest.param(plan, marks=pytest.mark.soak) for plan in ("dp2.mb1", "dp2.z3.mb2"))]
)
def test_batches_of_many_lengths_train_as_on_one_device(ranks: Any, plan: str) -> None:
    for losses in ranks.run(2, run, "lengths", plan):
        assert losses == pytest.approx(alone("lengths"), rel=1e-10)


def of_length(step: int, length: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(step)
    return {name: torch.randint(0, 24, (8, length), generator=random) for name in ("given", "labels")}


def on_lengths(feature: str, lengths: list[int], plan: str | None, prove: Any = None) -> tuple[list[Any], list[str]]:
    """Losses of an odd model on batches of `lengths`, without a `plan` those of one device; and what is said of
    proofs."""
    job, lines = Job(3, (feature,)), list[str]()
    model, losses = Odd(job).double(), list[Any]()
    try:
        if plan is not None:
            trainer = parallelize(
                model, optimizer_of(job), plan, precision="fp64", prove=prove, example=of_length(0, lengths[0])
            )
            trainer.prover.say = lines.append
            losses.extend(trainer.step(of_length(step, length)).loss for step, length in enumerate(lengths))
            return losses, lines
        optimizer = optimizer_of(job)(model.parameters())
        for batch in (of_length(step, length) for step, length in enumerate(lengths)):
            optimizer.zero_grad()
            loss = plain_loss(job, model(batch["given"]), batch["labels"])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    except InputError as error:
        losses.append(str(error))
    return losses, lines


@pytest.mark.parametrize("prove", ["auto", *(pytest.param(prove, marks=pytest.mark.soak) for prove in ("start", 4))])
@pytest.mark.parametrize(
    "lengths", [[8, 8, 8, 8, 8, 12, 12], pytest.param([8, 7, 6, 5, 5, 12, 12, 12, 8], marks=pytest.mark.soak)]
)
def test_features_that_are_mixed_from_a_length_on_are_refused_before_the_step_counts(
    ranks: Any, lengths: list[int], prove: Any
) -> None:
    expected, _ = on_lengths("inner:long-mean", lengths, None)
    for (*losses, line), _ in ranks.run(2, on_lengths, "inner:long-mean", lengths, "tp2.mb8", prove):
        assert (
            losses == pytest.approx(expected[:5], rel=1e-10) and len(losses) == 5
        )  # the sixth batch is the first long one
        assert "the proof run differs from one device" in line and "\n" not in line


@pytest.mark.parametrize(
    "plan", ["tp2.mb8", "dp2.z1.mb4", "dp2.z3.mb2", "pp2.mb2", "dp2.mb2.off-optimizer", "tp2.mb8.sp"]
)
@pytest.mark.covering(1)
def test_a_length_is_proven_once_and_known_between_the_shortest_and_the_longest(ranks: Any, plan: str) -> None:
    lengths = [16, 10, 24, 18, 6, 20]
    expected, _ = on_lengths("inner:half-detach", lengths, None)
    for losses, lines in ranks.run(2, on_lengths, "inner:half-detach", lengths, plan, "start"):
        assert losses == pytest.approx(expected, rel=1e-10)
        why = [line.split(": loss")[0] for line in lines]
        other = (
            "proven equal to one device again (the batch has other sizes: given ({0}), labels ({0}), known are 8 to "
            "{1})"
        )
        assert why == ["proven equal to one device before step 1", other.format(24, 16), other.format(6, 24)], why


def of_shares(lengths: list[list[int]], plan: str | None) -> list[Any]:
    """As on_lengths, of micro-batches of 2 rows that have lengths of their own; a list of them is a step, half of them
    each replica's."""
    job = Job(3, ("inner:half-detach",))
    model, losses = Odd(job).double(), list[Any]()
    steps = [[of_length(10 * step + at, length) for at, length in enumerate(each)] for step, each in enumerate(lengths)]
    steps = [[{name: value[:2] for name, value in each.items()} for each in step] for step in steps]
    if plan is not None:
        trainer = parallelize(model, optimizer_of(job), plan, precision="fp64", prove="start", example=steps[0][0])
        mine = slice(dist.get_rank(), None, 2)
        return [trainer.step(LocalBatch(step[mine])).loss for step in steps]
    optimizer = optimizer_of(job)(model.parameters())
    for step in steps:
        optimizer.zero_grad()
        count = sum(batch["labels"].numel() for batch in step)
        loss = sum(
            plain_loss(job, model(batch["given"]), batch["labels"]) * batch["labels"].numel() / count for batch in step
        )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("steps", [2, pytest.param(5, marks=pytest.mark.soak)])
@pytest.mark.parametrize("plan", ["dp2.mb2", pytest.param("dp2.z3.mb2", marks=pytest.mark.soak)])
def test_micro_batches_of_many_lengths_are_proven_and_train_as_on_one_device(ranks: Any, plan: str, steps: int) -> None:
    lengths = [[8, 8, 10, 10], [8, 12, 6, 9], [20, 8, 8, 8], [8, 8, 8, 30], [9, 8, 11, 30]][:steps]
    for losses in ranks.run(2, of_shares, lengths, plan):
        assert losses == pytest.approx(of_shares(lengths, None), rel=1e-10)


def reasons_for_proofs(hooked: bool) -> list[str]:
    """On a rank: the lines of proofs of four steps, the third while the memory is watched, or with a hook of the
    user's."""
    lines: list[str] = []
    trainer = parallelize(Net(), adamw, "dp2", precision="fp64", prove="start", example=batch_of(0))
    trainer.prover.say = lines.append
    trainer.step(batch_of(0))
    trainer.step(batch_of(1))
    with nullcontext() if hooked else trace_memory(trainer.engine.model):
        if hooked:
            trainer.engine.model.get_submodule("layers.0").register_forward_hook(lambda *_: None)
        trainer.step(batch_of(2))
    trainer.step(batch_of(3))
    return lines


@pytest.mark.soak
def test_who_watches_the_memory_changes_no_model(ranks: Any) -> None:
    assert [line.split(": ")[0] for line in ranks.run(2, reasons_for_proofs, False)[0]] == [
        "proven equal to one device before step 1"
    ]


def test_a_hook_of_the_user_on_a_module_is_a_change_that_is_proven_again(ranks: Any) -> None:
    again = "proven equal to one device again (the number of hooks of layers.0 (_forward_hooks) is 1 and was 0)"
    assert [line.split(": ")[0] for line in ranks.run(2, reasons_for_proofs, True)[0]] == [
        "proven equal to one device before step 1",
        again,
    ]
