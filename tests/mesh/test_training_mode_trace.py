"""Candidates for tensor splits are found in the run that trains, whichever mode the model stands in."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.analysis.analyze import analyze_model

WIDTH, WORDS = 16, 40


class Block(nn.Module):
    """`way`: a second pair of layers that runs in training alone or in eval mode alone, what training does between the
    first pair, or a chance to be left out."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.side_up, self.side_down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.way == "dropped" and self.training and torch.rand(()).item() < 0.9:
            return x
        if self.way == "python" and self.training:
            random.random()
        inner = F.gelu(self.up(x))
        if self.way == "training norm" and self.training:
            inner = F.layer_norm(inner, (32,))
        x = x + self.down(inner)
        if self.way == ("training pair" if self.training else "eval pair"):
            x = x + self.side_down(F.gelu(self.side_up(x)))
        return x


class Net(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(way) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.words(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def columns_of(model: nn.Module) -> set[str]:
    return {
        path.removeprefix("blocks.0.")
        for region in analyze_model(model).regions
        for path in region.columns
        if path.startswith("blocks.0.")
    }


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("way", "shared"),
    [("nothing", {"up"}), ("training pair", {"up", "side_up"}), ("eval pair", {"up"}), ("training norm", set())],
)
def test_layers_are_shared_as_training_uses_them(way: str, shared: set[str], training: bool) -> None:
    model = Net(way).train(training)
    assert columns_of(model) == shared
    assert {module.training for module in model.modules()} == {training}


def test_the_reason_why_layers_stay_whole_is_that_of_training() -> None:
    found = analyze_model(Net("training norm").eval())
    assert any(
        line.startswith("up are not sharded: ") and "all features for layer_norm" in line for line in found.findings
    ), found.findings


def test_no_block_is_left_out_by_chance_and_generators_are_left_alone() -> None:
    assert len(analyze_model(Net("dropped")).stacks) == len(analyze_model(Net("nothing")).stacks) == 1
    model, state = Net("python"), random.getstate()
    assert columns_of(model) == {"up"}
    assert random.getstate() == state
