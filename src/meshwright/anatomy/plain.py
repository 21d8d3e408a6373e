"""Which layers are bare products, y = x W + b, so that their forward may be replaced by one of ours; and convolutions, which sum likewise."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F


def is_plain(module: nn.Module) -> bool:
    """Linear, a Linear with a forward of its own that computes the same, or Conv1D of transformers."""
    kind = type(module)
    if kind.forward is nn.Linear.forward or kind.__name__ == "Conv1D":
        return True
    return isinstance(module, nn.Linear) and not module._modules and computes_a_product(kind)  # type: ignore[arg-type]


def is_convolution(module: nn.Module) -> bool:
    """A convolution of torch's own."""
    return type(module).forward in (nn.Conv1d.forward, nn.Conv2d.forward, nn.Conv3d.forward)


@functools.cache
def computes_a_product(kind: type[nn.Linear]) -> bool:
    """Tried on a small one with numbers."""
    try:
        with torch.device("cpu"), torch.random.fork_rng(devices=()), torch.no_grad():
            small = kind(3, 5, bias=True).double()
            x = torch.randn(2, 4, 3, dtype=torch.float64)
            return bool(torch.allclose(small(x), F.linear(x, small.weight, small.bias), atol=1e-12, rtol=1e-12))
    except Exception:
        return False
