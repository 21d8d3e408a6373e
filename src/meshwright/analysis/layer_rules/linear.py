"""Defines the tensor-parallel rule of `nn.Linear`, and of subclasses whose forward computes the same linear map."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.analysis.layer_rules.rule import LayerRule


class LinearRule(LayerRule):
    """The rule of y = x W^T + b with a weight (out, in)."""

    is_matmul = True
    adds_bias_last = True

    def matches(self, module: nn.Module) -> bool:
        """Returns whether `module` runs the forward of `nn.Linear`, or is a subclass without submodules that computes
        the same linear map.
        """
        kind = type(module)
        if kind.forward is nn.Linear.forward:
            return True
        return isinstance(module, nn.Linear) and not module._modules and computes_linear(kind)  # type: ignore[arg-type]


@functools.cache
def computes_linear(kind: type[nn.Linear]) -> bool:
    """Returns whether the class `kind` computes x W^T + b, tested on a small layer with random input."""
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=()), torch.no_grad():
            small = kind(3, 5, bias=True).double()
            x = torch.randn(2, 4, 3, dtype=torch.float64)
            return bool(torch.allclose(small(x), F.linear(x, small.weight, small.bias), atol=1e-12, rtol=1e-12))
    except Exception:
        return False


RULE = LinearRule()
