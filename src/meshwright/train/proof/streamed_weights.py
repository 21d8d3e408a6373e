"""Streams the weights of large embeddings and output heads through rank 0, a range of rows at a time. The reference run
of a proof (reference_run.py), which computes a step on one device, uses it.

Forward requests the rows of the weight range by range. Backward requests them again if the input needs a gradient. Each
range of the weight's gradient is compared as soon as it is computed, and dropped. So rank 0 stores one range of the
weight and one range of its gradient, whatever the size of the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.train.proof.proof_tolerance import COMPARE_CHUNK_ELEMENTS

RANGE_ELEMENTS = 1 << 23
"""The maximum number of elements of a range, unless the smallest possible range is larger (`rows_per_range`)."""


class RangeExchange(Protocol):
    """The source of weight rows and the receiver of gradient rows. `name`: the name of the weight."""

    def weight_rows(self, name: str, first: int, last: int) -> torch.Tensor:
        """Returns the rows [first, last) of the weight, in the dtype of the reference run."""

    def pass_gradient(self, name: str, first: int, gradient: torch.Tensor) -> None:
        """Receives rows of the weight's gradient, from row `first` on. Ranges arrive in the order of the rows."""


class StreamedWeight:
    """The streamed weight (rows, columns) of one module. `calls`: the number of forward calls of the module. The
    streamed ranges of the gradient are complete only if the module is called exactly once."""

    def __init__(self, name: str, weight: torch.Tensor, exchange: RangeExchange) -> None:
        self.name, self.exchange, self.trains = name, exchange, weight.requires_grad
        self.rows, self.columns = weight.shape
        self.anchor = torch.zeros((), dtype=weight.dtype, device=weight.device, requires_grad=self.trains)
        """A scalar that makes autograd run the backward of an embedding, although its input (indices) needs no
        gradient."""
        self.calls = 0

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yields the ranges [first, last) of rows, in order."""
        step = rows_per_range(self.columns)
        return ((first, min(first + step, self.rows)) for first in range(0, self.rows, step))

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Returns x (..., columns) times the transposed weight, plus `bias` (rows,)."""
        # Under autocast, the product with a range may have a different dtype than the product with the full weight. A
        # count of two calls makes the reference run store the full weight instead.
        self.calls += 2 if torch.is_autocast_enabled(x.device.type) else 1
        output: torch.Tensor = _StreamedLinear.apply(x, bias, self.anchor, self)
        return output

    def embedding(self, indices: torch.Tensor, padding: int | None) -> torch.Tensor:
        """Returns the rows `indices` of the weight, (..., columns). The row `padding` gets no gradient, unless it is
        None."""
        self.calls += 1
        output: torch.Tensor = _StreamedEmbedding.apply(indices, self.anchor, self, padding)
        return output


class _StreamedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, anchor: torch.Tensor, weight: StreamedWeight
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        output = x.new_empty(*x.shape[:-1], weight.rows)
        for first, last in weight.ranges():
            part = weight.exchange.weight_rows(weight.name, first, last)
            output[..., first:last] = F.linear(x, part, None if bias is None else bias[first:last])
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        flat, inputs = gradient.reshape(-1, weight.rows), x.reshape(-1, weight.columns)
        of_input = (
            inputs.new_zeros(inputs.shape, dtype=torch.promote_types(x.dtype, torch.float32))
            if ctx.needs_input_grad[0]
            else None
        )
        for first, last in weight.ranges():
            part = flat[:, first:last]
            if of_input is not None:
                of_input += part @ weight.exchange.weight_rows(weight.name, first, last)
            if weight.trains:
                weight.exchange.pass_gradient(weight.name, first, part.t() @ inputs)
        of_bias = flat.sum(0) if ctx.needs_input_grad[1] else None
        return None if of_input is None else of_input.view(x.shape).to(x.dtype), of_bias, None, None


class _StreamedEmbedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indices: torch.Tensor, anchor: torch.Tensor, weight: StreamedWeight, padding: int | None
    ) -> torch.Tensor:
        ctx.save_for_backward(indices)
        ctx.weight, ctx.padding = weight, padding
        output = anchor.new_empty(*indices.shape, weight.columns)
        for first, last in weight.ranges():
            part = weight.exchange.weight_rows(weight.name, first, last)
            inside = (indices >= first) & (indices < last)
            output[inside] = part[indices[inside] - first]
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, ...]:
        (indices,), weight = ctx.saved_tensors, ctx.weight
        for first, last in weight.ranges():
            inside = (indices >= first) & (indices < last)
            if ctx.padding is not None:
                inside &= indices != ctx.padding
            part = gradient.new_zeros(last - first, weight.columns)
            part.index_add_(0, indices[inside] - first, gradient[inside])
            weight.exchange.pass_gradient(weight.name, first, part)
        return (None,) * 4


def rows_per_range(columns: int) -> int:
    """Returns the number of rows per range for a weight with `columns` columns. A range has about RANGE_ELEMENTS
    elements, and begins at a multiple of COMPARE_CHUNK_ELEMENTS elements, as `sketch_gradient` requires.

    >>> rows_per_range(2048)  # 2^23 / 2048
    4096
    """
    step = COMPARE_CHUNK_ELEMENTS // math.gcd(columns, COMPARE_CHUNK_ELEMENTS)
    return max(RANGE_ELEMENTS // (step * columns), 1) * step


def can_stream_rows(module: nn.Module) -> bool:
    """Returns whether the weight of `module` can be streamed by rows. The module must be exactly torch's Linear or
    Embedding, with its original forward. Its weight must have several ranges of rows and no hooks. An Embedding must
    not use max_norm, scale_grad_by_freq or sparse gradients."""
    if type(module) not in (nn.Linear, nn.Embedding) or "forward" in vars(module):
        return False
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    if (
        weight.shape[0] <= rows_per_range(weight.shape[1])
        or weight._backward_hooks
        or weight._post_accumulate_grad_hooks
    ):
        return False
    return isinstance(module, nn.Linear) or not (module.max_norm or module.scale_grad_by_freq or module.sparse)


def stream_rows(module: nn.Module, name: str, exchange: RangeExchange) -> StreamedWeight:
    """Replaces the forward of `module` by a function that requests the weight in ranges of rows. `name`: the name of
    the weight. Returns the streamed weight, which counts the forward calls."""
    weight = module.weight
    assert isinstance(weight, torch.Tensor)
    streamed = StreamedWeight(name, weight, exchange)
    if isinstance(module, nn.Embedding):
        padding = module.padding_idx
        module.forward = lambda input: streamed.embedding(input, padding)  # type: ignore[assignment, method-assign]
    else:
        bias: Any = module.bias
        module.forward = lambda input: streamed.linear(input, bias)  # type: ignore[assignment, method-assign]
    return streamed
