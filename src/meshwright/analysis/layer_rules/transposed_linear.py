"""The rule of `Conv1D` of transformers (GPT-2): a linear layer with a transposed weight."""

from __future__ import annotations

from torch import nn

from meshwright.analysis.layer_rules.rule import LayerRule


class TransposedLinearRule(LayerRule):
    """y = x W + b with a weight (in, out). The class is matched by name: transformers need not be installed."""

    is_matmul = True
    adds_bias_last = True
    output_dim = 1

    def matches(self, module: nn.Module) -> bool:
        """Whether its class is called Conv1D and has a forward of its own."""
        return type(module).__name__ == "Conv1D" and type(module).forward is not nn.Linear.forward


RULE = TransposedLinearRule()
