"""Defines the tensor-parallel rule of convolutions: they are split by channels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright.analysis.layer_rules.rule import LayerRule


class ConvolutionRule(LayerRule):
    """The rule of `nn.Conv1d`, `nn.Conv2d` and `nn.Conv3d`: weight (out, in, ...), output (batch, out, ...)."""

    adds_bias_last = True

    def matches(self, module: nn.Module) -> bool:
        """Returns whether `module` runs the forward of `nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d`."""
        return type(module).forward in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)

    def size_attributes(self, module: nn.Module) -> tuple[str, str]:
        """Returns the names of the attributes with the numbers of output and of input channels."""
        return "out_channels", "in_channels"

    def forward_without_bias(self, module: Any, x: torch.Tensor) -> torch.Tensor:
        """Returns the convolution over the local input channels, without bias."""
        output: torch.Tensor = module._conv_forward(x, module.weight, None)
        return output

    def add_bias(self, output: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Returns `output` + `bias`, with the bias along the channels."""
        return output + bias.view(-1, *[1] * (output.ndim - 2))


RULE = ConvolutionRule()
