"""What a model's code does between two blocks: it runs once, on one stage, with its gradients, or the plan is refused
in one line."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.core.errors import InputError
from meshwright.train.trainer import parallelize

torch.set_num_threads(1)
WORDS, WIDTH, LENGTH, BLOCKS = 23, 8, 5, 4
PLANS = ["pp2.mb2", "pp2.mb2.interleaved2", "pp2.mb2.zbv", "dp1.pp2.mb2.z3"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Overwriting(Block):
    """Adds to what it is given in place."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.down(torch.tanh(self.up(1.0 * x)))
        return x


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -0.5 * gradient


class Net(nn.Module):
    """`kind` names what its forward does between blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList((Overwriting if kind == "overwriting" else Block)() for _ in range(BLOCKS))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(BLOCKS))
        self.places, self.each = nn.Embedding(BLOCKS, WIDTH), nn.Embedding(WORDS, BLOCKS * WIDTH)
        self.scales, self.parts = (
            nn.Parameter(torch.ones(BLOCKS)),
            nn.ParameterList(torch.rand(WIDTH) + 0.5 for _ in range(BLOCKS)),
        )
        self.drop = nn.Dropout(1.0)
        self.register_buffer("mean", torch.ones(WIDTH))
        used = self.used()
        for name, _ in list(self.named_children()):
            if name not in ("table", "head", "layers", "drop", *used):
                delattr(self, name)
        if "scales" not in used:
            del self.scales

    def used(self) -> tuple[str, ...]:
        return {
            "norm": ("norms",), "scale": ("scales",), "scales of parts": ("parts",), "embedding": ("places",),
            "early": ("each",), "tied": ("scales",),
        }.get(self.kind, ())  # fmt: skip

    def forward(self, input_ids: torch.Tensor, boost: torch.Tensor | None = None) -> torch.Tensor:
        return RUNS.get(self.kind, plain)(self, input_ids, self.table(input_ids))


def finished(self: Net, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, self.table.weight) * self.scales.sum() if self.kind == "tied" else self.head(x)


def between(self: Net, at: int, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    match self.kind:
        case "dropout":
            return self.drop(x) + 0.1 * x.detach() if at == 1 else x
        case "functional dropout":
            return x + F.dropout(x, 1.0, self.training)
        case "training" if self.training:
            return x * 0.5 + 0.1
        case "reversal":
            return Reversal.apply(x)
        case "detach":
            return x.detach() if at == 1 else x
        case "in place":
            return x.mul_(0.5).add_(0.1)
        case "norm":
            return self.norms[at](x)
        case "scale":
            return x * self.scales[at]
        case "scales of parts":
            return x * self.parts[at]
        case "embedding":
            return x + self.places.weight[at]
        case "early":
            return x + self.each(ids).unflatten(-1, (BLOCKS, WIDTH))[:, :, at]
        case "index":
            return x * (at + 1)
        case "hook":
            if x.requires_grad:
                x.register_hook(lambda gradient: 0.25 * gradient)
            return x
        case "clamp":
            return x.clamp(max=float(x.detach().max()) / 2)
    return x


def plain(self: Net, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    for at, layer in enumerate(self.layers):
        x = between(self, at, ids, layer(x))
    return finished(self, x)


def summed(self: Net, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    total = torch.zeros_like(x)
    for layer in self.layers:
        x = layer(x)
        total = total + x
    return finished(self, total)


def listed(self: Net, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    left = [x]
    for layer in self.layers:
        left.append(layer(left[-1]))
    return finished(self, torch.stack(left).mean(0))


def joined(self: Net, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    left = []
    for layer in self.layers[: BLOCKS // 2]:
        x = layer(x)
        left.append(x)
    for layer in self.layers[BLOCKS // 2 :]:
        x = layer(x + left.pop())
    return finished(self, x)


def in_order(order: list[int]) -> Callable[..., torch.Tensor]:
    def run(self: Net, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        for at in order:
            x = self.layers[at](x)
        return finished(self, x)

    return run


def at_random(self: Net, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        if not self.training or random.random() < 0.6:
            x = layer(x)
    return finished(self, x)


def drawn(self: Net, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        if not self.training or torch.rand(()) < 0.6:
            x = layer(x)
    return finished(self, x)


def again(self: Net, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        x = checkpoint(layer, x, use_reentrant=False) if self.training else layer(x)
    return finished(self, x)


def frozen_block(self: Net, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Calls a block where torch records no gradient."""
    for at, layer in enumerate(self.layers):
        with torch.set_grad_enabled(at != 1):
            y = layer(x)
        x = x + y if at == 1 else y
    return finished(self, x)


def not_on_meta(self: Net, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Its forward asks for numbers of the batch, so that it does not run without memory; and it drops an operation if
    nothing is done about it."""
    factor = 1 + len(set(ids.tolist()[0])) / 10 + ids.unique().numel() / 100 + int(ids.nonzero()[:, 1].max()) / 1000
    for at, layer in enumerate(self.layers):
        x = layer(x) * (factor if at == 1 else 1)
    return finished(self, x)


def not_on_meta_twice(self: Net, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    assert ids.tolist()
    return in_order([0, 1, 1, 2, 3])(self, ids, x)


RUNS: dict[str, Callable[..., torch.Tensor]] = {
    "sum of all": summed, "list of all": listed, "unet": joined, "again": in_order([0, 1, 2, 1, 3]),
    "reversed": in_order([3, 2, 1, 0]), "left out": in_order([0, 1, 3]), "random": at_random, "random of torch": drawn,
    "checkpoint": again, "no gradient": frozen_block,
    "numbers of the batch": not_on_meta, "twice, with numbers": not_on_meta_twice,
}  # fmt: skip

RUN = (
    "dropout", "functional dropout", "training", "reversal", "detach", "in place", "overwriting", "norm", "scale",
    "scales of parts", "embedding", "early", "index", "tied", "numbers of the batch",
)  # fmt: skip
"""What stands between blocks and runs under every plan."""

REFUSED = {
    "sum of all": "compute but do not send", "list of all": "compute but do not send",
    "unet": "compute but do not send", "again": "layers.1 runs more than once",
    "reversed": "runs after a later block", "left out": "layers.2 did not run",
    "random": "runs in some forwards and not in others", "random of torch": "runs in some forwards and not in others",
    "checkpoint": "by the model's own activation checkpointing", "twice, with numbers": "layers.1 runs more than once",
    "no gradient": "records no gradients",
}  # fmt: skip


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Net(kind).double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(step))
    ids[:, -1] = ids[0, -1]  # as many different ones in each row and each micro-batch
    ids[:] = ids[0]
    return {"input_ids": ids.roll(1, 1), "labels": (ids + step) % WORDS}


def under(kind: str, plan: str) -> Any:
    try:
        trainer = parallelize(made(kind), adamw, plan, precision="fp64", prove="never")
        loss, _, gradients = trainer.gradients(batch_of(0))
        first = {name: gradient.clone() for name, gradient in (gradients or {}).items()}
        losses = [trainer.step(batch_of(step)).loss for step in range(3)]
        return [loss, *losses], first, trainer.full_state_dict()
    except InputError as error:
        return str(error)


def alone(kind: str) -> Any:
    model, losses, first = made(kind), [], {}
    optimizer = adamw(model.parameters())
    for step in range(3):
        batch = batch_of(step)
        optimizer.zero_grad()
        parts = [model(rows) for rows in batch["input_ids"].split(2)]
        loss = F.cross_entropy(torch.cat(parts).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        first = first or {
            name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
        }
        optimizer.step()
        losses.append(loss.item())
    return [losses[0], *losses], first, model.state_dict()


def check(found: list[Any], expected: Any) -> None:
    for one in found:
        assert not isinstance(one, str), one
        assert one[0] == pytest.approx(expected[0], rel=1e-10)
    for at in (1, 2):
        for name, value in expected[at].items():
            assert torch.allclose(found[0][at][name], value, rtol=1e-10, atol=1e-12), (at, name)
    assert found[0][1].keys() == expected[1].keys()


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", RUN)
@pytest.mark.covering(5)
def test_what_stands_between_blocks_runs_on_one_stage_with_its_gradients(ranks: Any, kind: str, plan: str) -> None:
    check(ranks.run(2, under, kind, plan), alone(kind))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["hook", "clamp"])
@pytest.mark.covering(2)
def test_what_only_one_stage_can_do_is_equal_or_refused_by_all(ranks: Any, kind: str, plan: str) -> None:
    first, second = ranks.run(2, under, kind, plan)
    if isinstance(first, str):
        assert first == second and "\n" not in first
    else:
        check([first, second], alone(kind))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.covering(6)
def test_blocks_that_are_not_called_one_after_the_other_are_refused_by_all(ranks: Any, kind: str, plan: str) -> None:
    first, second = ranks.run(2, under, kind, plan)
    assert first == second and REFUSED[kind] in first and "\n" not in first, (plan, first)
