"""Tensor-parallel rules: each type of layer has one, in a file of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import meshwright.analysis.layer_rules as layer_rules
from meshwright.analysis.layer_rules.rule import UNKNOWN_LAYER, LayerRule, registered_rules, rule_of
from meshwright.runtime.tensor_parallel.layers import RowLayer

LAYERS = [nn.Linear(2, 3), nn.Conv1d(2, 3, 1), nn.Conv2d(2, 3, 1), nn.Conv3d(2, 3, 1), nn.Embedding(2, 3)]


class Doubled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2.0 * super().forward(input)


class Scaled(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(input, self.weight) + self.bias


class Conv1D(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.nf, self.nx = nn.Parameter(torch.ones(2, 3)), 3, 2


@pytest.mark.parametrize("layer", [*LAYERS, Conv1D(), Scaled(2, 3)], ids=lambda layer: type(layer).__name__)
def test_each_layer_matches_exactly_one_rule(layer: nn.Module) -> None:
    assert sum(rule.matches(layer) for rule in registered_rules()) == 1
    for name, size in zip(rule_of(layer).size_attributes(layer), layer.get_parameter("weight").shape, strict=False):
        assert getattr(layer, name) == size


def test_a_linear_layer_that_computes_something_else_has_no_rule() -> None:
    assert rule_of(Doubled(2, 3)) is UNKNOWN_LAYER and rule_of(Scaled(2, 3)).is_matmul


@pytest.mark.parametrize("layer", LAYERS[1:4], ids=lambda layer: type(layer).__name__)
def test_a_row_layer_adds_its_bias_after_the_product(layer: nn.Module) -> None:
    x, rule = torch.randn(2, 2, *[4] * (layer.get_parameter("weight").ndim - 2)), rule_of(layer)
    summed = rule.add_bias(rule.forward_without_bias(layer, x), layer.get_parameter("bias"))
    torch.testing.assert_close(summed, layer(x))
    row = RowLayer(layer, rule, lambda total: total[:1])  # a rank may leave with a slice of the sum, as under sp
    torch.testing.assert_close(row.forward(x), layer(x)[:1])


def test_a_file_with_a_rule_is_all_that_a_new_rule_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "doubled.py").write_text(
        "from meshwright.analysis.layer_rules.rule import LayerRule\n"
        "class DoubledRule(LayerRule):\n"
        "    adds_bias_last = True\n"
        "    def matches(self, module): return type(module).__name__ == 'Doubled'\n"
        "RULE = DoubledRule()\n"
    )
    monkeypatch.setattr(layer_rules, "__path__", [*layer_rules.__path__, str(tmp_path)])
    registered_rules.cache_clear()
    try:
        assert isinstance(rule_of(Doubled(2, 3)), LayerRule) and rule_of(Doubled(2, 3)).adds_bias_last
    finally:
        registered_rules.cache_clear()
