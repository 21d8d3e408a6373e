"""A stage that cannot run by itself is refused by every rank in one line, before anything is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equality import VOCABULARY, make_batch, make_optimizer
from torch import nn

from meshwright.analysis.analyze import analyze_model
from meshwright.core.errors import InputError
from meshwright.train.trainer import parallelize


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.doubled = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.doubled = True
        return x + self.inner(x).relu()


def check(layer: nn.Module) -> None:
    assert type(layer.inner) is nn.Linear


class Checking(nn.Module):
    """Its forward looks into all blocks, also of those that another rank holds: before the first one (`ahead`), or on
    the way."""

    def __init__(self, ahead: bool) -> None:
        super().__init__()
        self.ahead = ahead
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(4))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for layer in self.layers if self.ahead else ():
            check(layer)
        for layer in self.layers:
            check(layer)
            x = layer(x)
        return self.head(x)


def refused(ahead: bool) -> str:
    torch.manual_seed(0)
    trainer = parallelize(Checking(ahead), make_optimizer, "pp2.mb2", anatomy=analyze_model(Checking(ahead)))
    try:
        trainer.step(make_batch("llama", 0))
    except InputError as error:
        return str(error)
    return "it ran"


def test_what_fails_on_one_stage_alone_is_the_same_line_on_every_rank(ranks: Any) -> None:
    for ahead in (True, False):
        first, second = ranks.run(2, refused, ahead)
        assert first == second and "\n" not in first
        assert first.startswith("plan pp2.mb2: stage 0 of this model cannot run without layers of other stages"), first


def test_reading_a_model_leaves_what_its_forward_notes_as_it_was() -> None:
    model = Checking(ahead=False)
    analyze_model(model)
    assert not any(layer.doubled for layer in model.layers) and model.training


class Net(nn.Module):
    """`far`: by block, whose output is added to what it is given. 0 is what the first block is given, as in a model
    that hands the embedding to later blocks."""

    def __init__(self, far: dict[int, int]) -> None:
        super().__init__()
        self.far = far
        self.words, self.head = nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY)
        self.layers = nn.ModuleList(Block() for _ in range(8))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        left = [self.words(input_ids)]
        for number, layer in enumerate(self.layers):
            left.append(layer(left[-1] + left[self.far[number]] if number in self.far else left[-1]))
        return self.head(left[-1])


def far_trained(far: dict[int, int], plan: str) -> list[float] | str:
    torch.manual_seed(0)
    try:
        trainer = parallelize(Net(far).double(), make_optimizer, plan, precision="fp64")
        return [trainer.step(make_batch("llama", step)).loss for step in range(2)]
    except InputError as error:
        return str(error)


@pytest.mark.parametrize(
    "plan", ["pp2.mb2", *(pytest.param(f"pp2.mb2.{way}", marks=pytest.mark.soak) for way in ("interleaved2", "zbv"))]
)
def test_a_skip_connection_into_a_later_stage_is_refused_by_every_rank(ranks: Any, plan: str) -> None:
    for far in ({7: 1}, {5: 2}):
        first, second = ranks.run(2, far_trained, far, plan)
        assert first == second and "reads values that layers of an earlier stage compute" in first, first


def test_a_connection_over_blocks_within_a_stage_trains_as_on_one_device(ranks: Any) -> None:
    far = {3: 1, 7: 6}
    torch.manual_seed(0)
    model = Net(far).double()
    optimizer, losses = make_optimizer(model.parameters()), []
    for step in range(2):
        batch = make_batch("llama", step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found in ranks.run(2, far_trained, far, "pp2.mb2"):
        assert found == pytest.approx(losses, rel=1e-10)
