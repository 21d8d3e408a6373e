"""Experts in a plain list that the block runs through: under every legal plan the losses and gradients of one device,
also where no token asks for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equality import difference
from torch import nn
from torch.nn import functional as F

from meshwright.core.errors import InputError
from meshwright.spec.plan import parse_plan
from meshwright.train.trainer import parallelize

WORDS, WIDTH, ROWS, LENGTH, EXPERTS = 40, 16, 4, 8, 4


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Listed(nn.Module):
    """A norm, a router that takes the best two of four experts, and the experts one behind the other. The last gets no
    token. `kind`: each runs on the
    tokens that chose it, and not at all where none did; or on all tokens, with a weight of zero for the others."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = self.norm(x).flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        weights, chosen = (scores * scores.new_tensor([1, 1, 1, 0])).topk(2, dim=-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            if self.kind == "all tokens":
                out = out + expert(flat) * (weights * (chosen == number)).sum(1, keepdim=True)
                continue
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                out = out.index_add(0, token, expert(flat[token]) * weights[token, place].unsqueeze(1))
        return x + out.view_as(x)


class Net(nn.Module):
    shift_labels = False

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Listed(kind) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """The second batch is of one word, so that only two experts of a layer get tokens."""
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    ids = ids if step != 1 else torch.full_like(ids, 7)
    return {"input_ids": ids, "labels": ids.roll(1, 1)}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def trained(kind: str, plan: str) -> Any:
    """On every rank: the losses of three steps, the gradients before each of them and the last weights (rank 0); or why
    the plan is refused."""
    try:
        trainer = parallelize(Net(kind).double(), adamw, plan, precision="fp64", prove="never")
        losses, gradients = [], []
        for step in range(3):
            gradients.append(trainer.gradients(batch_of(step))[2])
            losses.append(trainer.step(batch_of(step)).loss)
        weights = trainer.full_state_dict()
        trainer.close()
    except InputError as error:
        return str(error)
    return losses, gradients, weights


def one_device(kind: str) -> Any:
    model = Net(kind).double()
    optimizer, losses, gradients = adamw(model.parameters()), [], []
    for step in range(3):
        optimizer.zero_grad()
        batch = batch_of(step)
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        losses.append(loss.item())
        gradients.append({name: one.grad.clone() for name, one in model.named_parameters() if one.grad is not None})
        optimizer.step()
    return losses, gradients, dict(model.named_parameters())


PLANS = [("its tokens", plan) for plan in ("dp2.z1", "dp2.z3", "pp2.mb2", "dp2.z3.rc-full")]
PLANS += [("all tokens", plan) for plan in ("dp2.z1", "dp2.z3", "tp2", "pp2.mb2")]


@pytest.mark.parametrize(("kind", "plan"), PLANS)
@pytest.mark.covering(2)
def test_experts_in_a_list_train_as_on_one_device(ranks: Any, kind: str, plan: str) -> None:
    losses, gradients, weights = one_device(kind)
    assert all(
        not one[name].any() if kind == "all tokens" else name not in one
        for one in gradients
        for name in weights
        if ".experts.3." in name
    )
    assert kind == "all tokens" or {name for name in gradients[0] if ".experts." in name} - gradients[1].keys()
    results = ranks.run(parse_plan(plan).world, trained, kind, plan)
    for found in results:
        assert not isinstance(found, str), found
        assert found[0] == pytest.approx(losses, rel=1e-10)
    _, theirs, ended = results[0]
    for step, expected in enumerate(gradients):
        for name, gradient in theirs[step].items():
            there = expected.get(name)
            assert there is None or difference(gradient, there) < 1e-10 or not (gradient.any() or there.any()), (
                step,
                name,
            )
            assert there is not None or gradient is None or not gradient.any(), (step, name)
        assert expected.keys() <= theirs[step].keys()
    for name, weight in weights.items():
        assert difference(ended[name], weight.detach()) < 1e-8, name


@pytest.mark.parametrize(
    ("kind", "plan", "line"),
    [
        ("its tokens", "tp2", "it does not run with input_ids (2, 7)"),
        ("all tokens", "dp2.ep2.z1", "the model has none"),
    ],
)
def test_what_experts_in_a_list_are_not_divided_for_is_refused_in_one_line(
    ranks: Any, kind: str, plan: str, line: str
) -> None:
    said = ranks.run(2, trained, kind, plan)
    assert said[0] == said[1]
    assert said[0].startswith(f"plan {plan}: ")
    assert line in said[0]
    assert "\n" not in said[0]
