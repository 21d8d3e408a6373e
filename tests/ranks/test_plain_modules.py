"""Plain modules that no library wrote: with a loss of their own, weights tied by hand, an autograd function, buffers.
Equal to one device, or one line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from meshwright.core.errors import InputError
from meshwright.train.trainer import parallelize

WORDS, WIDTH = 32, 16


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        share = x.sigmoid()
        return gradient * (share + x * share * (1 - share))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(Swish.apply(self.up(x * self.scale)))


class Stack(nn.Module):
    """Demands labels and returns its loss in a dict; the head is the embedding, tied by hand. `recurrent`: an LSTM
    instead of blocks."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(0 if recurrent else 4))
        self.memory = nn.LSTM(WIDTH, WIDTH, batch_first=True) if recurrent else None
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.words(input_ids)
        x = self.memory(x)[0] if self.memory is not None else x
        for layer in self.layers:
            x = layer(x)
        return {"loss": F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def make(recurrent: bool) -> Stack:
    torch.manual_seed(0)
    return Stack(recurrent).double()


def batches() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, WORDS, (3, 4, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in ids]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def under(plan: str, recurrent: bool, own_loss: bool = True) -> list[float] | str:
    loss = {"loss": lambda output, batch: output["loss"]} if own_loss else {}
    try:
        trainer = parallelize(make(recurrent), adamw, plan, precision="fp64", **loss)
    except InputError as error:
        return str(error)
    return [trainer.step(batch).loss for batch in batches()]


def alone(recurrent: bool) -> list[float]:
    model, losses = make(recurrent), []
    optimizer = adamw(model.parameters())
    for batch in batches():
        optimizer.zero_grad()
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("plan", "recurrent"),
    [
        ("dp2.z3", True),
        *(pytest.param("dp2.mb2", recurrent, marks=pytest.mark.soak) for recurrent in (False, True)),
        pytest.param("dp2.z3", False, marks=pytest.mark.soak),
    ],
)
def test_a_model_with_a_loss_and_a_tie_of_its_own_trains_as_on_one_device(
    ranks: Any, plan: str, recurrent: bool
) -> None:
    for losses in ranks.run(2, under, plan, recurrent):
        assert losses == pytest.approx(alone(recurrent), rel=1e-10)


def test_a_tie_by_hand_between_stages_trains_as_on_one_device(ranks: Any) -> None:
    for losses in ranks.run(2, under, "pp2", False):
        assert losses == pytest.approx(alone(False), rel=1e-10)


def test_a_model_that_demands_labels_is_told_to_bring_its_loss(ranks: Any) -> None:
    for said in ranks.run(2, under, "dp2", False, False):
        assert said.startswith("Stack.forward requires labels, but the trainer passes them only to the loss")


class Remembering(nn.Module):
    """Each block is given what the one before it returned beside the hidden state, as the routers of Zaya are."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.up, self.down, self.note = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
            nn.Linear(WIDTH, WIDTH),
        )
        self.first = number == 0

    def forward(self, x: torch.Tensor, noted: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        note = self.note(x)
        if noted is not None and not self.first:
            note = note + noted
        return x + self.down(F.silu(self.up(x + note))), note


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(map(Remembering, range(4)))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x, noted = self.words(input_ids), None
        for layer in self.layers:
            x, noted = layer(x, noted)
        return self.head(x)


def chained(plan: str) -> list[float]:
    torch.manual_seed(0)
    trainer = parallelize(Chain().double(), adamw, plan, precision="fp64")
    return [trainer.step(batch).loss for batch in batches()]


@pytest.mark.parametrize(
    "plan", [*(pytest.param(plan, marks=pytest.mark.soak) for plan in ("pp2.mb2", "pp2.mb2.zbv")), "pp2.mb2.z3.rc-full"]
)
def test_tensors_that_blocks_pass_besides_the_hidden_state_cross_stages(ranks: Any, plan: str) -> None:
    torch.manual_seed(0)
    model = Chain().double()
    optimizer, losses = adamw(model.parameters()), []
    for batch in batches():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found in ranks.run(2, chained, plan):
        assert found == pytest.approx(losses, rel=1e-10)


class Apart(torch.autograd.Function):
    """Blocks inside a function with a backward of its own, as reversible layers are."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layers: nn.ModuleList) -> torch.Tensor:
        for layer in layers:
            x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class Reversing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return Apart.apply(self.table(input_ids), self.layers)


def reversed_under(plan: str) -> str:
    try:
        parallelize(Reversing(), adamw, plan, loss=lambda output, batch: output.mean())
    except InputError as error:
        return str(error)
    return "parallelized"


def test_blocks_that_run_in_a_backward_of_the_models_own_are_cut_by_no_stage(ranks: Any) -> None:
    for said in ranks.run(2, reversed_under, "pp2"):
        assert said.startswith("plan pp2: layers.0 runs inside a custom autograd function or torch.no_grad")


class InPlace(nn.Module):
    """Its activation overwrites what the layer before gave, of four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8)) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x


def in_place(plan: str) -> list[float]:
    given = {"x": torch.randn(4, 3, 5, 4, generator=torch.Generator().manual_seed(1)).double()}
    mean = lambda output, batch: output.square().flatten(1).sum(1).mean()
    if plan:
        trainer = parallelize(InPlace().double(), adamw, plan, precision="fp64", loss=mean, example=given)
        return [trainer.step(given).loss for _ in range(2)]
    model, losses = InPlace().double(), []
    optimizer = adamw(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss = mean(model(**given), given)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("plan", ["tp2", "pp2.zbh1"])
def test_what_a_layer_gives_may_be_written_to_in_place(ranks: Any, plan: str) -> None:
    for losses in ranks.run(2, in_place, plan):
        assert losses == pytest.approx(in_place(""), rel=1e-10)


def gathered_bytes(plan: str) -> tuple[int, int]:
    """What this rank sends for the whole weights, and as many bytes as the weights have."""
    trainer = parallelize(
        InPlace().double(),
        adamw,
        plan,
        precision="fp64",
        loss=lambda output, batch: output.mean(),
        example={"x": torch.zeros(2, 3, 5, 4)},
    )
    sent, gather = [0], dist.gather_object

    def noted(given: Any, *args: Any, **kwargs: Any) -> None:
        sent[0] += sum(data.untyped_storage().nbytes() for _, data in given)
        gather(given, *args, **kwargs)

    dist.gather_object = noted
    try:
        trainer.full_state_dict()
    finally:
        dist.gather_object = gather
    return sent[0], sum(8 * parameter.numel() for parameter in InPlace().parameters())


def test_whole_weights_are_gathered_once_and_not_once_for_every_tensor_of_a_unit(ranks: Any) -> None:
    assert all(sent <= whole for sent, whole in ranks.run(2, gathered_bytes, "dp2.z1"))
