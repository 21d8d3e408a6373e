"""A stage that cannot run by itself is refused by every rank in one line, before anything is trained."""

from __future__ import annotations

from typing import Any

import torch
from equality import VOCABULARY, make_batch, make_optimizer
from torch import nn

from meshwright.anatomy import read
from meshwright.base.errors import InputError
from meshwright.train.trainer import parallelize


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.doubled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.doubled = True
        return x + self.inner(x).relu()


@torch.no_grad()
def write(layer: nn.Module) -> None:
    layer.inner.weight.mul_(1.0)


class Writing(nn.Module):
    """Its forward writes to the weights of all blocks, also of those that another rank holds: before the first one (`ahead`), or on the way."""

    def __init__(self, ahead: bool) -> None:
        super().__init__()
        self.ahead = ahead
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers if self.ahead else ():
            write(layer)
        for layer in self.layers:
            write(layer)
            x = layer(x)
        return self.head(x)


def refused(ahead: bool) -> str:
    torch.manual_seed(0)
    trainer = parallelize(Writing(ahead), make_optimizer, "pp2.mb2", anatomy=read(Writing(ahead)))
    try:
        trainer.step(make_batch("llama", 0))
    except InputError as error:
        return str(error)
    return "it ran"


def test_what_fails_on_one_stage_alone_is_the_same_line_on_every_rank(ranks: Any) -> None:
    for ahead, stage in ((True, 0), (False, 1)):
        first, second = ranks.run(2, refused, ahead)
        assert first == second and "\n" not in first
        assert first.startswith(f"plan pp2.mb2: stage {stage} of this model does not run without the layers of the others"), first


def test_reading_a_model_leaves_what_its_forward_notes_as_it_was() -> None:
    model = Writing(ahead=False)
    read(model)
    assert not any(layer.doubled for layer in model.layers) and model.training
