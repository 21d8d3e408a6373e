"""Defines the tensor-parallel rule of a layer type: what the analysis and the runtime need to split its weight."""

from __future__ import annotations

import functools
import importlib
import pkgutil
from typing import Any

import torch
from torch import nn

import meshwright.analysis.layer_rules as rules


class LayerRule:
    """Defines how layers of one type are split over tensor ranks: by output features (column layer) or by input
    features (row layer).

    The defaults apply to layers without a rule. Such a layer runs its own forward on a local weight. It can be a row
    layer only if it has no bias.
    """

    is_matmul: bool = False
    """Whether the forward is a product with W or W^T, plus b. If so, the runtime replaces it by the forward of a fused
    column or row layer.
    """
    adds_bias_last: bool = False
    """Whether the layer adds its bias after the product. If so, a row layer adds the bias once, after the sum over
    ranks.
    """
    output_dim: int = 0
    """The dimension of the weight that indexes the output features."""

    def matches(self, module: nn.Module) -> bool:
        """Returns whether the rule applies to `module`."""
        return False

    def size_attributes(self, module: nn.Module) -> tuple[str, str]:
        """Returns the names of the module attributes that store the sizes of the first and of the second dimension of
        the weight.
        """
        return ("nx", "nf") if hasattr(module, "nf") else ("out_features", "in_features")

    def forward_without_bias(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of a row layer before the sum over ranks. Used only for rules with `adds_bias_last`."""
        raise NotImplementedError(f"{type(module).__name__} has no forward without its bias")

    def add_bias(self, output: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Returns `output` + `bias`, with the bias along the output features."""
        return output + bias


UNKNOWN_LAYER = LayerRule()


@functools.cache
def registered_rules() -> tuple[LayerRule, ...]:
    """Returns the `RULE` of every file in this folder."""
    names = sorted(info.name for info in pkgutil.iter_modules(rules.__path__))
    modules = [importlib.import_module(f"{rules.__name__}.{name}") for name in names]
    return tuple(module.RULE for module in modules if hasattr(module, "RULE"))


def rule_of(module: nn.Module) -> LayerRule:
    """Returns the rule for `module`, `UNKNOWN_LAYER` if there is none."""
    return next((rule for rule in registered_rules() if rule.matches(module)), UNKNOWN_LAYER)


def is_linear_like(module: nn.Module) -> bool:
    """Returns whether the forward of `module` is a product with its weight plus a bias, so that the runtime may replace
    it.
    """
    return rule_of(module).is_matmul
