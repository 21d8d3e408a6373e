"""Losses that read activations which the model or a hook keeps: equal to one device where each rank has them whole,
refused in one line where it does not. Lists that blocks append to do not grow in a recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright.core.errors import InputError
from meshwright.train.trainer import parallelize

WORDS, WIDTH, ROWS = 64, 16, 8
GLOBAL: list[torch.Tensor] = []


class Block(nn.Module):
    """A perceptron that keeps its output or its inner activation, in an attribute, a list or a global list."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.what, self.where = what, where
        self.kept: list[torch.Tensor] = []

    def keep(self, what: str, x: torch.Tensor) -> None:
        if what == self.what:
            if self.where == "attribute":
                self.kept = [x]
            else:
                (self.kept if self.where == "list" else GLOBAL).append(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = F.gelu(self.up(self.norm(x)))
        self.keep("inner", inner)
        x = x + self.down(inner)
        self.keep("output", x)
        return x


class Model(nn.Module):
    def __init__(self, what: str, where: str) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block(what, where) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class KeptLoss:
    """Cross-entropy plus the squares of the kept activations, which it then forgets."""

    def __init__(self, model: Model) -> None:
        self.blocks: list[Any] = list(model.layers)

    def __call__(self, output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        kept = [x for block in self.blocks for x in block.kept] + GLOBAL
        loss = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
        loss = loss + 0.05 * sum(x.square().mean() for x in kept)
        for each in (GLOBAL, *(block.kept for block in self.blocks)):
            each.clear()
        return loss


def trained(what: str, where: str, plan: str) -> tuple[list[float], list[float] | str]:
    """Losses of three steps on one device and under the plan, or the line that refuses it."""
    torch.manual_seed(0)
    GLOBAL.clear()
    batch = {name: torch.randint(0, WORDS, (ROWS, 8)) for name in ("ids", "labels")}
    alone, model = Model(what, where).double(), Model(what, where).double()
    model.load_state_dict(alone.state_dict())
    loss, optimizer, expected = KeptLoss(alone), torch.optim.AdamW(alone.parameters(), lr=1e-2), []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss(alone(batch["ids"]), batch)
        value.backward()
        optimizer.step()
        expected.append(value.item())
    try:
        trainer = parallelize(
            model,
            lambda weights: torch.optim.AdamW(weights, lr=1e-2),
            plan,
            precision="fp64",
            loss=KeptLoss(model),
            example=batch,
        )
        return expected, [trainer.step(batch).loss for _ in range(3)]
    except InputError as error:
        return expected, str(error)


@pytest.mark.parametrize("where", ["attribute", "list", "global"])
@pytest.mark.parametrize(
    ("what", "plan"),
    [
        ("inner", "dp2"),
        ("inner", "dp2.z3.mb2.rc-full"),
        ("inner", "dp2.mb4.rc-sac"),
        ("output", "dp2.mb4.rc-full"),
        ("output", "tp2.mb8"),
    ],
)
def test_a_loss_reads_activations_that_each_rank_has_whole(ranks: Any, what: str, where: str, plan: str) -> None:
    for expected, found in ranks.run(2, trained, what, where, plan):
        assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("where", ["attribute", "list", "global"])
@pytest.mark.parametrize(
    ("what", "plan", "line"),
    [
        ("inner", "tp2.mb8", "reads an activation that tp shards"),
        ("inner", "tp2.sp.mb8", "reads an activation that sp shards"),
        ("output", "tp2.sp.mb8", "reads an activation that sp shards"),
        ("output", "pp2.mb4", "use pp1"),
    ],
)
def test_a_loss_that_reads_split_activations_is_refused(
    ranks: Any, what: str, where: str, plan: str, line: str
) -> None:
    for _, found in ranks.run(2, trained, what, where, plan):
        assert isinstance(found, str)
        assert line in found and "\n" not in found
