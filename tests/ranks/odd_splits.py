"""Small models that do something along the sequence, in training alone, with an optional input, or with a layer's own
weights; float64.

`outcomes(plan, names)` runs on every rank: for each name the loss and the gradients of one batch, or why the plan is
refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from equality import adapted
from torch import nn
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.spec.workload import LoraConfig
from meshwright.train.trainer import parallelize

WORDS, WIDTH, HEADS, LENGTH, ROWS = 48, 16, 4, 16, 4

ALONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x + x.mean(1, keepdim=True),
    "cumsum": lambda x: x + 0.1 * x.cumsum(1),
    "first token": lambda x: x + x[:, :1],
    "last token": lambda x: x + x[:, -1:],
    "norm": lambda x: F.normalize(x, dim=1),
    "length": lambda x: x * (1 + 1 / x.shape[1]),
    "shift": lambda x: x + F.pad(x[:, :-1], (0, 0, 1, 0)),
    "flip": lambda x: x + x.flip(1),
    "roll": lambda x: x + x.roll(1, 1),
    "positions": lambda x: x + torch.outer(torch.arange(x.shape[1]), torch.arange(x.shape[2]).sin()).to(x),
    "softmax": lambda x: x + x.softmax(1),
    "detached mean": lambda x: x * (1 + x.detach().mean((1, 2), keepdim=True)),
    "rare": lambda x: x + 1e-4 * x.mean(1, keepdim=True),
    "late": lambda x: x + x.mean(1, keepdim=True) if x.shape[1] < 12 else x,
}
"""What mixes positions of the sequence, by name."""

ALONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nothing": lambda x: x,
    "scale": lambda x: 1.5 * x,
    "tanh": lambda x: x + x.tanh(),
    "feature norm": lambda x: F.normalize(x, dim=-1),
}
"""What works on each position alone."""


class Block(nn.Module):
    """`way`: what it does beyond attention and two products."""

    def __init__(self, way: str, number: int) -> None:
        super().__init__()
        self.way, self.is_first = way, number == 0
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.one, self.two = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.0)
        self.gate = nn.Parameter(torch.zeros(1))
        if way == "running mean":
            self.register_buffer("seen", torch.zeros(2 * WIDTH))
        if way == "zero gate":
            nn.init.zeros_(self.down.weight)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        place, _, name = self.way.partition(": ")
        if place == "in" or (place == "first block" and self.is_first) or (place == "training" and self.training):
            x = {**ALONG, **ALONE}[name](x)
        if place == "gated":
            x = x + self.gate * (ALONG[name](x) - x)
        q, k, v = (
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in self.qkv(self.one(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(self.inner(self.up(self.two(x)), mask))

    def inner(self, h: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Between the column layer and the row layer."""
        match self.way:
            case "training mean" if self.training:
                h = h - h.mean(-1, keepdim=True)
            case "training width" if self.training:
                h = h * (1 + 1 / h.shape[-1])
            case "long width" if h.shape[1] > 6:
                h = h * (1 + 1 / h.shape[-1])
            case "backward width":
                h = Scaled.apply(h)
            case "masked width" if mask is not None:
                h = h * (1 + 1e-4 * mask.unsqueeze(-1) / h.shape[-1])
            case "masked" if mask is not None:
                h = h * mask.unsqueeze(-1)
            case "running mean":
                h = h - self.seen[: h.shape[-1]]
                self.seen[: h.shape[-1]].copy_(h.detach().mean((0, 1)))
            case "columns normed":
                self.up.weight.data.div_(self.up.weight.data.norm(dim=0, keepdim=True))
            case "max norm":
                self.up.weight.data.copy_(torch.renorm(self.up.weight.data, 2, 1, 0.5))
        return F.gelu(h)


class Scaled(torch.autograd.Function):
    """The same forward; backward it is divided by the width that it sees."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * (1 + 1 / gradient.shape[-1])


class Odd(nn.Module):
    shift_labels = True

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(2 * LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block(way, number) for number in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.between = nn.Linear(WIDTH, WIDTH)

    def forward(self, input_ids: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.words(input_ids) + self.places(torch.arange(input_ids.shape[1]))
        place, _, name = self.way.partition(": ")
        for number, block in enumerate(self.blocks):
            x = block(x) if mask is None else block(x, mask)
            if place == "between" and number == 0:
                x = self.between(x) if name == "layer" else {**ALONG, **ALONE}[name](x)
        x = {**ALONG, **ALONE}[name](x) if place == "behind" else x
        return self.head(self.norm(x))


def make(way: str) -> nn.Module:
    """`way` with ", adapted" at its end: a low-rank adapter on the layer between the blocks, on one in the blocks,
    nothing else is trained."""
    torch.manual_seed(0)
    model = Odd(way.removesuffix(", adapted")).double()
    return adapted(model, LoraConfig(rank=2, alpha=4, target=("between", "up"))) if way.endswith(", adapted") else model


def batch_of(way: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :5] = -100
    batch = {"input_ids": ids, "labels": labels}
    return {**batch, "mask": (ids % 3 > 0).double()} if "masked" in way else batch


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def outcomes(plan: str, ways: Sequence[str]) -> list[Any]:
    return [outcome(plan, way) for way in ways]


def outcome(plan: str, way: str, change: Callable[[nn.Module], Any] = lambda model: None) -> Any:
    """On a rank: loss, gradients (on rank 0) and losses of two steps, of a model to which `change` was made; or why
    the plan is refused."""
    model, batch = make(way), batch_of(way)
    change(model)
    given = {"example": {key: value for key, value in batch.items() if key != "labels"}} if "mask" in batch else {}
    try:
        trainer = parallelize(model, sgd, plan, precision="fp64", prove="never", **given)
        loss, _, gradients = trainer.gradients(batch)
        losses = [trainer.step(batch).loss for _ in range(2)]
        trainer.close()
    except InputError as error:
        return str(error)
    return loss, gradients, losses


def alone(way: str) -> tuple[float, dict[str, torch.Tensor], list[float]]:
    """On one device, with torch's own loss."""
    model, batch = make(way), batch_of(way)
    labels = F.pad(batch.pop("labels")[:, 1:], (0, 1), value=-100)

    def loss_of() -> torch.Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(**batch).flatten(0, 1), labels.flatten(), ignore_index=-100)
        loss.backward()
        return loss

    loss = loss_of()
    gradients = {name: tensor.grad.clone() for name, tensor in model.named_parameters() if tensor.grad is not None}
    optimizer, losses = sgd(model.parameters()), []
    for _ in range(2):
        losses.append(loss_of().item())
        optimizer.step()
    return loss.item(), gradients, losses


def is_equal(found: Any, way: str) -> bool:
    """Whether a rank found the loss, the gradients (rank 0 has them) and the losses of two steps that one device
    does, to 1e-10."""
    loss, gradients, losses = alone(way)
    scale = max(float(gradient.norm()) for gradient in gradients.values())
    off = (
        [float((found[1][name] - gradient).norm()) <= 1e-10 * scale for name, gradient in gradients.items()]
        if found[1]
        else [True]
    )
    same = [abs(one / two - 1) <= 1e-10 for one, two in zip((found[0], *found[2]), (loss, *losses), strict=True)]
    return all(off) and all(same)
