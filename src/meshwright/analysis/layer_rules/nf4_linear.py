"""Defines the tensor-parallel rule of `Nf4Linear` (analysis/nf4.py): a linear layer with a weight in 4 bits."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.analysis.layer_rules.rule import LayerRule


class Nf4LinearRule(LayerRule):
    """The rule of y = x W^T + b with the bytes of W (out, in / 64 x 34). It matches the class by name, because the
    module of the class imports these rules.
    """

    adds_bias_last = True

    def matches(self, module: nn.Module) -> bool:
        """Returns whether the class of `module` is called Nf4Linear."""
        return type(module).__name__ == "Nf4Linear"

    def size_attributes(self, module: nn.Module) -> tuple[str, str]:
        """Returns the names of the attributes with the number of outputs and of bytes of a row."""
        return "out_features", "row_bytes"

    def forward_without_bias(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns the product over the local inputs, without bias."""
        output: torch.Tensor = module.product(x)
        return output


RULE = Nf4LinearRule()
