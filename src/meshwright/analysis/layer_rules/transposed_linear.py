"""Defines the tensor-parallel rule of `Conv1D` of transformers (GPT-2): a linear layer with a transposed weight."""

from __future__ import annotations

from torch import nn

from meshwright.analysis.layer_rules.rule import LayerRule


class TransposedLinearRule(LayerRule):
    """The rule of y = x W + b with a weight (in, out). It matches the class by name, because transformers may not be
    installed.
    """

    is_matmul = True
    adds_bias_last = True
    output_dim = 1

    def matches(self, module: nn.Module) -> bool:
        """Returns whether the class of `module` is called Conv1D and defines its own forward."""
        return type(module).__name__ == "Conv1D" and type(module).forward is not nn.Linear.forward


RULE = TransposedLinearRule()
