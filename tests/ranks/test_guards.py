"""What a script changes between steps is trained as on one device, checked again, or refused in one line before the
step counts."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.train.memory import trace_memory
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


def run(what: str, plan: str) -> list[Any]:
    model, found = Net().double(), []
    model.table.weight.requires_grad = what != "thawed"
    try:
        trainer = parallelize(model, adamw, plan, precision="fp64")
        for step in range(7):
            batch = batch_of(step, LENGTH + step % 4 if what == "lengths" else LENGTH)
            change(model, step, what, batch)
            found.append(trainer.step(batch).loss)
    except InputError as error:
        found.append(str(error))
    return found


def alone(what: str) -> list[float]:
    model, losses = Net().double(), []
    optimizer = adamw(model.parameters())
    for step in range(7):
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
@pytest.mark.covering(4)
def test_a_parameter_that_is_frozen_after_parallelize_stays_as_it_is(ranks: Any, what: str, plan: str) -> None:
    for losses in ranks.run(2, run, what, plan):
        assert losses == pytest.approx(alone(what), rel=1e-10)


@pytest.mark.parametrize("plan", ["dp2.mb2", "dp2.z3.mb2", "pp2.mb2"])
def test_a_parameter_that_is_trained_later_is_refused_at_that_step_by_all_ranks(ranks: Any, plan: str) -> None:
    found = ranks.run(2, run, "thawed", plan)
    assert found[0] == found[1] and len(found[0]) == 5
    assert "table.weight is trained since step 5 and was frozen" in found[0][-1] and "\n" not in found[0][-1]


@pytest.mark.parametrize(("what", "steps"), [("coupled", 5), ("key", 4)])
@pytest.mark.parametrize("plan", ["dp2.mb1", "dp2.z3.mb2", "pp2.mb2"])
def test_what_couples_rows_from_a_step_that_no_schedule_checks_is_refused_at_that_step(
    ranks: Any, what: str, steps: int, plan: str
) -> None:
    found = ranks.run(2, run, what, plan)
    assert found[0] == found[1] and len(found[0]) == steps + 1, found[0]
    assert isinstance(found[0][-1], str) and "\n" not in found[0][-1]
    if what == "coupled" or not plan.startswith("pp"):
        assert "rows of a batch see each other" in found[0][-1]


@pytest.mark.parametrize("plan", ["dp2.mb1", "dp2.z3.mb2"])
def test_a_number_that_couples_rows_on_one_rank_alone_is_refused_by_all_ranks(ranks: Any, plan: str) -> None:
    found = ranks.run(2, run, "coupled on one rank", plan)
    assert found[0] == found[1] and len(found[0]) == 6, found[0]
    assert "rows of a batch see each other" in found[0][-1] and "\n" not in found[0][-1]


@pytest.mark.parametrize("plan", ["dp2.mb1", "dp2.z3.mb2", "pp2.mb2"])
def test_a_number_that_changes_on_one_rank_alone_and_nobody_reads_lets_all_ranks_go_on(ranks: Any, plan: str) -> None:
    for losses in ranks.run(2, run, "tagged on one rank", plan):
        assert losses == pytest.approx(alone("tagged on one rank"), rel=1e-10)


@pytest.mark.parametrize("plan", ["dp2.mb1", "dp2.z3.mb2", "pp2.mb2"])
def test_batches_of_many_lengths_train_as_on_one_device(ranks: Any, plan: str) -> None:
    for losses in ranks.run(2, run, "lengths", plan):
        assert losses == pytest.approx(alone("lengths"), rel=1e-10)


def reasons_for_proofs(hooked: bool) -> list[str]:
    """On a rank: the lines of proofs of two steps, the second while the memory is watched, or with a hook of the
    user's."""
    lines: list[str] = []
    trainer = parallelize(Net(), adamw, "dp2", precision="fp64", prove="start", example=batch_of(0))
    trainer.prover.say = lines.append
    trainer.step(batch_of(0))
    with nullcontext() if hooked else trace_memory(trainer.engine.model):
        if hooked:
            trainer.engine.model.get_submodule("layers.0").register_forward_hook(lambda *_: None)
        trainer.step(batch_of(1))
    trainer.step(batch_of(2))
    return lines


def test_who_watches_the_memory_changes_no_model_and_who_hooks_it_does(ranks: Any) -> None:
    assert [line.split(": ")[0] for line in ranks.run(2, reasons_for_proofs, False)[0]] == [
        "proven equal to one device before step 1"
    ]
    again = "proven equal to one device again (the number of hooks of layers.0 (_forward_hooks) is 1 and was 0)"
    assert [line.split(": ")[0] for line in ranks.run(2, reasons_for_proofs, True)[0]] == [
        "proven equal to one device before step 1",
        again,
    ]
