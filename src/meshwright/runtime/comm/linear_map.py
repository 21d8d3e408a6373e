"""A linear map between ranks as an autograd function: its backward is the transposed map."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

TensorMap = Callable[[torch.Tensor], torch.Tensor]


def linear_map(x: torch.Tensor, there: TensorMap, back: TensorMap) -> torch.Tensor:
    """Returns `there(x)`. The gradient of `x` is `back(gradient)`. `back` must be the transpose of the linear map
    `there`."""
    result: torch.Tensor = _LinearMap.apply(x, there, back)
    return result


class _LinearMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, there: TensorMap, back: TensorMap) -> torch.Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return ctx.back(gradient), None, None
