"""Backward in two actions: the gradient of a stage's input at once (B), those of its weights when the schedule says
(W).

Rule: in B a matrix layer of a block multiplies only for the gradient of its input, and leaves its input and the
gradient of its output in the
backlog of its flat unit; W multiplies these two. What else autograd finds for such a unit in B (norms, biases) waits
there as well, so that
W makes the unit whole, one micro-batch after the other, and reductions start in the order of the schedule on every
rank. The graph is freed
in B, and at ZeRO 3 the weights too: W needs neither. So nothing is computed twice, and the sums are those of a whole
backward.

[Note: not put off] Gradients of vocabulary and head are made in B: their inputs are as large as the logits, the
gradients as large as the
vocabulary, and a rank may put off p - 1 micro-batches. Nor are those of blocks that recompute, or whose activations
wait elsewhere: what was
made again, or fetched, would wait as long as if it had been kept. Layers with a forward of their own (convolutions,
stacked experts) compute as ever, and only their unit's taking waits.
Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2; putting off by layer instead of
walking autograd's graph twice.
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
"""Takes the input (N, in) of a layer and the gradient of its output (N, out); gives what autograd is to have as the
gradient of the weight."""


class WgradQueue:
    """What waits for W in one flat unit, whose `take(name, gradient)` it ends in."""

    def __init__(self, take: Callable[[str, torch.Tensor], None]) -> None:
        self.accumulate = take
        self._current: dict[str, list[WgradFunction]] = {}
        self._sealed: dict[int, dict[str, list[WgradFunction]]] = {}

    @property
    def is_open(self) -> bool:
        """Whether anything was added since the last B."""
        return bool(self._current)

    def push(self, name: str, make: WgradFunction) -> None:
        """During a B."""
        self._current.setdefault(name, []).append(make)

    def seal(self, micro_batch: int) -> None:
        """At the end of the B of `micro_batch`."""
        self._sealed[micro_batch], self._current = self._current, {}

    @torch.no_grad()  # the inputs that wait have a graph
    def run(self, micro_batch: int) -> None:
        """W: each gradient is made, taken and freed, in the order in which backward came to it."""
        waiting = self._sealed.pop(micro_batch)
        for name in list(waiting):
            first, *more = waiting.pop(name)
            gradient = first()
            for make in more:
                gradient = gradient + make()
            self.accumulate(name, gradient)


def defer_wgrad(module: nn.Module, leave: WgradSink) -> None:
    """From here on the plain matrix layer `module` leaves the gradient of its weight to `leave`."""
    module.put_off = leave  # type: ignore[assignment]
    if "forward" not in vars(module):  # else a layer of tensor parallelism, which asks for `defer_wgrad` itself
        module.forward = partial(_layer_forward, module, isinstance(module, nn.Linear))  # type: ignore[method-assign]


def matmul_forward(module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, linear: bool) -> torch.Tensor:
    """x W^T + b when `linear`, else x W + b, with W the weight of `module`."""
    weight: Any = module._parameters["weight"]
    leave: WgradSink | None = getattr(module, "put_off", None)
    if leave is None or not torch.is_grad_enabled() or _is_functorch_tensor(x):
        return F.linear(x, weight if linear else weight.t(), bias)
    return _DeferredMatmul.apply(x, weight, bias, leave, linear)


def _is_functorch_tensor(x: torch.Tensor) -> bool:
    """Inside of torch.func, which takes no function of ours."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def _layer_forward(module: nn.Module, linear: bool, *given: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
    (x,) = (*given, *named.values())  # Linear and Conv1D call it by unlike names
    return matmul_forward(module, x, module._parameters.get("bias"), linear)


def weight_gradient(x: torch.Tensor, gradient: torch.Tensor, linear: bool) -> torch.Tensor:
    """Of a product of `x` (N, in), whose output has `gradient` (N, out)."""
    return gradient.t() @ x if linear else x.t() @ gradient


class _DeferredMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, leave: WgradSink, linear: bool
    ) -> torch.Tensor:
        ctx.leave, ctx.linear = leave, linear
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight if linear else weight.t(), bias).data  # as in tensor/columns.py

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_input = gradient @ (weight if ctx.linear else weight.t()) if needs_input else None
        flat = gradient.flatten(0, -2)
        of_weight = ctx.leave(x.flatten(0, -2), flat) if needs_weight else None
        return of_input, of_weight, flat.sum(0) if needs_bias else None, None, None
