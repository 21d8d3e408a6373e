"""Splits backward into two actions. B computes the gradient of a stage's input. W computes the gradients of its weights
later, when the schedule requires it.

In B a matrix layer of a block computes only the gradient of its input. The input of the layer and the gradient of its
output go to the queue of the parameter group. W multiplies the two. Other gradients of such a group in B (norms,
biases) are queued as well. So W completes the group, one micro-batch after another, and reductions start in the order
of the schedule on every rank. B frees the graph and, at ZeRO 3, the weights, because W needs neither. So nothing is
computed twice, and the sums are those of an ordinary backward.

[Note: not deferred] B computes the gradients of vocabulary and head, because their inputs are as large as the logits,
and their gradients are as large as the vocabulary. A rank may defer as many micro-batches as the pipeline has ranks,
minus one. B also computes the gradients of blocks that recompute or offload activations. Otherwise recomputed or
fetched tensors would stay in memory as long as saved tensors. Layers with their own forward (convolutions, stacked
experts) compute as usual, and only the accumulation is deferred. Source: Qi et al., Zero Bubble Pipeline Parallelism,
arXiv 2401.10241, section 2. Here the deferral is per layer, and autograd's graph is traversed only once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

WgradFunction = Callable[[], torch.Tensor]
WgradSink = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
"""A function that receives the input (N, in) of a layer and the gradient of its output (N, out). It returns the
gradient of the weight for autograd."""


class WgradQueue:
    """The deferred weight gradients of one parameter group. W passes each to `accumulate(name, gradient)`."""

    def __init__(self, accumulate: Callable[[str, torch.Tensor], None]) -> None:
        self.accumulate = accumulate
        self._current: dict[str, list[WgradFunction]] = {}
        self._sealed: dict[int, dict[str, list[WgradFunction]]] = {}

    @property
    def is_open(self) -> bool:
        """Whether a gradient was added since the end of the last B."""
        return bool(self._current)

    def push(self, name: str, compute: WgradFunction) -> None:
        """Adds a gradient during B. W calls `compute` for its value."""
        self._current.setdefault(name, []).append(compute)

    def seal(self, micro_batch: int) -> None:
        """Ends the B of `micro_batch`."""
        self._sealed[micro_batch], self._current = self._current, {}

    @torch.no_grad()  # deferred inputs belong to an autograd graph
    def run(self, micro_batch: int) -> None:
        """Runs W of `micro_batch`: computes, accumulates and frees each gradient, in the order of backward."""
        deferred = self._sealed.pop(micro_batch)
        for name in list(deferred):
            first, *more = deferred.pop(name)
            gradient = first()
            for compute in more:
                gradient = gradient + compute()
            self.accumulate(name, gradient)


def defer_wgrad(module: nn.Module, sink: WgradSink) -> None:
    """Makes the plain matrix layer `module` pass the two factors of its weight gradient to `sink`."""
    module.put_off = sink  # type: ignore[assignment]
    if "forward" not in vars(module):  # tensor-parallel layers have replaced their forward and use the sink themselves
        module.forward = partial(_layer_forward, module, isinstance(module, nn.Linear))  # type: ignore[method-assign]


def matmul_forward(module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, linear: bool) -> torch.Tensor:
    """Returns x W^T + b if `linear`, otherwise x W + b. W is the weight of `module`."""
    weight: Any = module._parameters["weight"]
    sink: WgradSink | None = getattr(module, "put_off", None)
    if sink is None or not torch.is_grad_enabled() or _is_functorch_tensor(x):
        return F.linear(x, weight if linear else weight.t(), bias)
    return _DeferredMatmul.apply(x, weight, bias, sink, linear)


def _is_functorch_tensor(x: torch.Tensor) -> bool:
    """Returns whether `x` is a tensor of torch.func, which does not support this custom autograd function."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def _layer_forward(module: nn.Module, linear: bool, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    (x,) = (*args, *kwargs.values())  # the argument has different names in Linear and Conv1D
    return matmul_forward(module, x, module._parameters.get("bias"), linear)


def weight_gradient(x: torch.Tensor, gradient: torch.Tensor, linear: bool) -> torch.Tensor:
    """Returns the weight gradient of the product of `x` (N, in) with a weight. `gradient` (N, out) is the gradient of
    the output."""
    return gradient.t() @ x if linear else x.t() @ gradient


class _DeferredMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, sink: WgradSink, linear: bool
    ) -> torch.Tensor:
        ctx.sink, ctx.linear = sink, linear
        ctx.save_for_backward(x, weight)
        # Some products return an autograd view. `.data` allows later code to write to the result in place.
        return F.linear(x, weight if linear else weight.t(), bias).data

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_input = gradient @ (weight if ctx.linear else weight.t()) if needs_input else None
        flat = gradient.flatten(0, -2)
        of_weight = ctx.sink(x.flatten(0, -2), flat) if needs_weight else None
        return of_input, of_weight, flat.sum(0) if needs_bias else None, None, None
