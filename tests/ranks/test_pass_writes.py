"""Parameters and buffers that the user's code writes in a pass: equal to one device by the table of
runtime/preflight/user_writes.py, or refused before a step counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.train.trainer import parallelize

WORDS, WIDTH, ROWS, LENGTH = 40, 16, 4, 6


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Counter(Block):
    """Counts the steps; nothing reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        return super().forward(x)


class Replacing(Counter):
    """Registers a new tensor each time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps = self.steps + self.training
        return Block.forward(self, x)


class Rows(Counter):
    """Counts the rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training * len(x)
        return Block.forward(self, x)


class Backwards(Counter):
    """Counts the backwards."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(lambda gradient: self.steps.add_(1) and None)
        return Block.forward(self, x)


class Running(Block):
    """A running mean that only an evaluation reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
            return super().forward(x)
        return super().forward(x - self.mean)


class Spectral(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.spectral_norm(self.up)


class Normalised(Block):
    """Normalises its own columns before they are used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.up.weight.data = F.normalize(self.up.weight.data, dim=0)
        return super().forward(x)


class Shrinking(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.99)
        return super().forward(x)


class Hooked(Block):
    """Writes to a weight in the backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.requires_grad:
            x.register_hook(self._write)
        return super().forward(x)

    def _write(self, gradient: torch.Tensor) -> None:
        self.down.bias.data.mul_(0.9)


class Taught(Block):
    """An EMA teacher that follows in each forward."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(WIDTH, 32).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.teacher.weight.lerp_(self.up.weight, 0.1)
        return super().forward(x) + 0.1 * self.teacher(x).mean(-1, keepdim=True)


KINDS: dict[str, Any] = {each.__name__.lower(): each for each in Block.__subclasses__()}
KINDS |= {each.__name__.lower(): each for each in Counter.__subclasses__()} | {"plain": Block, "renormed": Block}


class Net(nn.Module):
    shift_labels = False

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH, max_norm=1.0 if kind == "renormed" else None)
        self.layers = nn.ModuleList(KINDS[kind]() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def batch_of(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids.roll(-1, 1)}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def under(kind: str, plan: str) -> Any:
    try:
        trainer = parallelize(Net(kind).double(), adamw, plan, precision="fp64")
        losses = [trainer.step(batch_of(step)).loss for step in range(4)]
    except InputError as error:
        return str(error)
    return losses, trainer.full_state_dict()


def alone(kind: str) -> Any:
    model, losses = Net(kind).double(), []
    optimizer = adamw([each for each in model.parameters() if each.requires_grad])
    for step in range(4):
        optimizer.zero_grad()
        batch = batch_of(step)
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def equal(ranks: Any, kind: str, plan: str, world: int = 2) -> None:
    found, (losses, weights) = ranks.run(world, under, kind, plan), alone(kind)
    assert not isinstance(found[0], str), found[0]
    for said in found:
        assert said[0] == pytest.approx(losses, rel=1e-10)
    for name, tensor in weights.items():
        assert torch.allclose(found[0][1][name].to(tensor), tensor, rtol=1e-8, atol=1e-10), name


@pytest.mark.parametrize(
    "plan", ["dp2.mb1", "dp2.mb2", "dp2.z1.mb1", "dp2.z3.mb1", "dp2.mb1.rc-full", "pp2.mb1", "tp2.mb2"]
)
@pytest.mark.parametrize("kind", ["counter", "replacing"])
@pytest.mark.covering(2)
def test_a_counter_of_steps_counts_steps_and_no_micro_batches(ranks: Any, kind: str, plan: str) -> None:
    equal(ranks, kind, plan)


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("taught", "dp2.mb2"),
        pytest.param("taught", "dp2.z1.mb2", marks=pytest.mark.soak),
        ("shrinking", "dp2.mb2"),
        ("hooked", "dp2.z2.mb2"),
    ],
)
def test_identical_writes_of_replicas_to_a_parameter_equal_one_device(ranks: Any, kind: str, plan: str) -> None:
    equal(ranks, kind, plan)


def test_zero_3_of_one_process_frees_weights_that_a_check_has_seen(ranks: Any) -> None:
    equal(ranks, "counter", "z3.mb2", 1)
    assert "layers.0.teacher.weight" in ranks.run(1, under, "taught", "z3.mb4")[0]


@pytest.mark.parametrize(
    "kind", ["taught", "shrinking", "hooked", "running", "spectral", "rows", "backwards", "renormed"]
)
def test_one_process_with_one_micro_batch_is_one_device(ranks: Any, kind: str) -> None:
    equal(ranks, kind, "dp1.mb4", 1)


def test_an_embedding_with_a_largest_norm_may_pass_in_micro_batches_on_one_process(ranks: Any) -> None:
    equal(ranks, "renormed", "dp1.mb1", 1)


@pytest.mark.parametrize(
    ("kind", "plan", "said"),
    [
        ("taught", "dp2.mb1", "writes to its parameter layers.0.teacher.weight"),
        ("taught", "dp2.z3.mb2", "layers.0.teacher.weight"),
        ("taught", "pp2.mb4", "writes to the parameter layers.0.teacher.weight"),
        ("shrinking", "dp1.mb2", "writes to its parameter layers.0.up.weight"),
        ("shrinking", "tp2.mb4", "layers.0.up.weight"),
        ("hooked", "dp2.mb1", "writes to its parameter layers.0.down.bias"),
        ("hooked", "tp2.mb4", "writes to its parameter layers.0.down.bias"),
        ("normalised", "tp2.mb4", "use tp1"),
        ("normalised", "dp1.mb4", "replaces the tensor of its parameter layers.0.up.weight"),
        ("normalised", "dp2.mb2", "layers.0.up.weight"),
        ("renormed", "dp2.mb2", "table has max_norm"),
        ("renormed", "tp2.mb4", "table has max_norm"),
        ("running", "dp2.mb2", "value of the buffer layers.0.mean depends on the rows"),
        ("running", "dp1.mb2", "value of the buffer layers.0.mean depends on the rows"),
        ("rows", "dp2.mb1", "value of the buffer layers.0.steps depends on the rows"),
        ("backwards", "dp2.mb1", "backward changes the buffer layers.0.steps"),
        ("spectral", "dp2.mb1", "changes a state that the next one reads"),
    ],
)
def test_other_writes_are_refused_by_all_ranks_in_one_line(ranks: Any, kind: str, plan: str, said: str) -> None:
    found = ranks.run(1 if plan.startswith("dp1") else 2, under, kind, plan)
    assert isinstance(found[0], str), "it ran"
    assert said in found[0] and "\n" not in found[0]
    assert all(each == found[0] for each in found)
