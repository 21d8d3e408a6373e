"""Computes the weight gradients of linear layers, which autograd would compute otherwise. Either accumulates them in
place, or defers them to a separate action of the pipeline schedule. Layers reach this code through `matmul_forward`.

In-place accumulation, as in Megatron-LM's gradient accumulation fusion, needs no temporary tensor with the size of a
weight matrix for each micro-batch:

    embedding      Autograd receives torch's sparse gradient, which has only the rows of the tokens in the batch. These
                   rows are added to the accumulated gradient (`accumulate_into`).
    other layers   The matrix product that computes the gradient also adds it to the accumulated gradient.

[Note: no rows] After the matrix product has added the gradient, autograd receives a sparse gradient without rows. So
autograd still determines when the gradients from all consumers of a weight are complete (for example from the embedding
and the head, if their weights are tied).

[Note: nested backward] A model may compute gradients inside its forward, and again when a block is recomputed. These
gradients are not gradients of the step, so autograd receives them as usual. `StepBackward` identifies the backward of
the step by its graph task id, which autograd assigns to each call of backward.

[Note: where not] Gradients are not accumulated in place in these cases:

- Plans without pipeline stages. Most of these plans have one micro-batch per step, so nothing is accumulated. Such a
  plan used 2 % more CPU time when products were written directly to gradients in shared memory.
- Accelerators, where sums of embedding rows have no fixed order.
- Exact sums (zero/exact_sum.py), which need full gradients.
- Gradients of fewer than 32 bits, because each accumulation of an embedding row would round the row.
- Matrix layers whose gradients have a different dtype than their weights.
- Small matrices, whose gradients stay in the cache.
- Embeddings inside blocks or with `scale_grad_by_freq`.
- Compiled blocks and deferred weight gradients.
- Weights with a gradient hook of the user, which autograd must call with the whole gradient.
- At ZeRO 2 and 3, weights with several consumers. The gradients of their group would use memory from the first
  consumer's backward until the last consumer's backward.

Without in-place accumulation, a rank of the reference workload used 213 MiB with 2 pipeline ranks, and 160 MiB with 4.
Of this memory, temporary tensors and their fragmentation took 30 MiB.

Deferral: `WgradQueue` splits the backward of a stage into two actions. B computes the gradient of the stage's input. W
computes the gradients of the stage's weights, at a later position in the schedule.

In B, a matrix layer of a block computes only the gradient of its input. The layer's input and the gradient of its
output are added to the queue of the parameter group, and W multiplies the two. Gradients of norms and biases in this
group are queued too. So W completes the gradients of the group, one micro-batch after another, and reductions start in
the order of the schedule on every rank. After B the graph and, at ZeRO 3, the weights are freed, because W needs
neither of them. Nothing is computed twice, and the accumulated gradients equal those of an ordinary backward.

[Note: not deferred] B, not W, computes these weight gradients:

- Those of embedding and head. In the queue, an output gradient of the head would be as large as the logits, and a
  weight gradient of the embedding as large as the vocabulary weight, for up to (pipeline ranks - 1) micro-batches.
- Those of blocks that recompute or offload activations. W would need the recomputed or fetched tensors, which would
  have to stay in memory.
- Those of weights with a gradient hook of the user, because autograd calls the hook in B.
- Those of layers that are not plain matrix products (convolutions, stacked experts). Only the accumulation is deferred.

Source: Qi et al., Zero Bubble Pipeline Parallelism, arXiv 2401.10241, section 2. In this implementation, deferral is
per layer, and autograd's graph is traversed only once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge
from torch.nn import functional as F

MIN_IN_PLACE_ELEMENTS = 1 << 16
"""Minimum number of elements of a matrix whose gradient is accumulated in place."""


class StepBackward:
    """Distinguishes the backward of a training step from other calls of backward ([Note: nested backward])."""

    def __init__(self) -> None:
        self._run = -1
        self.is_paused = False

    @property
    def is_running(self) -> bool:
        """Returns whether the backward of the step is running. A backward that is nested in a forward does not
        count."""
        return not self.is_paused and self._run == torch._C._current_graph_task_id() != -1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Disables in-place accumulation inside the context, for preflight checks: their gradients do not belong to a
        step."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def watch(self, ends: Iterable[torch.Tensor | GradientEdge]) -> None:
        """Registers hooks on `ends`, the roots of the next backward of the step. The call of backward that reaches one
        of them is the backward of the step."""
        for end in ends:
            node: Any = end.node if isinstance(end, GradientEdge) else end.grad_fn
            if node is not None:
                node.register_prehook(self._on_first_node)

    def _on_first_node(self, _: Any) -> None:
        self._run = torch._C._current_graph_task_id()


def accumulate_into(into: torch.Tensor, first: bool, gradient: torch.Tensor) -> None:
    """Adds a dense or sparse `gradient` to `into`. `first`: whether `into` has no values yet and is overwritten."""
    if not gradient.is_sparse:
        into.copy_(gradient) if first else into.add_(gradient)
        return
    if first:
        into.zero_()
    into.index_add_(0, gradient._indices()[0], gradient._values().to(into.dtype))


WgradFunction = Callable[[], torch.Tensor]
WgradSink = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | None]
"""A function that receives the input (N, in) of a layer and the gradient (N, out) of the layer's output. It returns
what autograd receives as weight gradient: None after deferral, a sparse gradient without rows after accumulation in
place, or else the gradient itself."""


class WgradQueue:
    """Queues the deferred weight gradients of one parameter group. W passes each gradient to `accumulate`, which takes
    the parameter name and the gradient."""

    def __init__(self, accumulate: Callable[[str, torch.Tensor], None]) -> None:
        self.accumulate = accumulate
        self._current: dict[str, list[WgradFunction]] = {}
        self._sealed: dict[int, dict[str, list[WgradFunction]]] = {}

    @property
    def is_open(self) -> bool:
        """Returns whether a gradient was added since the end of the last B."""
        return bool(self._current)

    def push(self, name: str, compute: WgradFunction) -> None:
        """Queues a gradient of the parameter `name` during B. W calls `compute` to get the gradient."""
        self._current.setdefault(name, []).append(compute)

    def seal(self, micro_batch: int) -> None:
        """Ends the B of `micro_batch`, to which the gradients queued since the last call belong."""
        self._sealed[micro_batch], self._current = self._current, {}

    @torch.no_grad()  # deferred inputs belong to an autograd graph
    def run(self, micro_batch: int) -> None:
        """Runs W of `micro_batch`: computes, accumulates and frees each of its gradients, in the order in which they
        were queued."""
        deferred = self._sealed.pop(micro_batch)
        for name in list(deferred):
            first, *more = deferred.pop(name)
            gradient = first()
            for compute in more:
                gradient = gradient + compute()
            self.accumulate(name, gradient)


def defer_wgrad(module: nn.Module, sink: WgradSink) -> None:
    """Makes the plain matrix layer `module` call `sink` with the two factors of its weight gradient, instead of
    computing the gradient."""
    module.put_off = sink  # type: ignore[assignment]
    if "forward" not in vars(module):  # tensor-parallel layers have replaced their forward and use the sink themselves
        module.forward = partial(_layer_forward, module, isinstance(module, nn.Linear))  # type: ignore[method-assign]


def matmul_forward(module: nn.Module, x: torch.Tensor, bias: torch.Tensor | None, linear: bool) -> torch.Tensor:
    """Returns x W^T + b if `linear`, otherwise x W + b. W is the weight of `module`, b is `bias`. If `defer_wgrad` has
    given `module` a sink, the sink computes the weight gradient."""
    weight: Any = module._parameters["weight"]
    sink: WgradSink | None = getattr(module, "put_off", None)
    if sink is None or not torch.is_grad_enabled() or is_functorch_tensor(x) or has_users_hook(weight):
        return F.linear(x, weight if linear else weight.t(), bias)
    return _DeferredMatmul.apply(x, weight, bias, sink, linear)


def has_users_hook(weight: Any) -> bool:
    """Returns whether the user has registered a gradient hook on a weight. The parameter group has registered one."""
    return bool(weight._backward_hooks) or len(weight._post_accumulate_grad_hooks or ()) > 1


def is_functorch_tensor(x: torch.Tensor) -> bool:
    """Returns whether `x` is a tensor of torch.func, which does not support this custom autograd function."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x)


def _layer_forward(module: nn.Module, linear: bool, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
    (x,) = (*args, *kwargs.values())  # the argument has different names in Linear and Conv1D
    return matmul_forward(module, x, module._parameters.get("bias"), linear)


def weight_gradient(x: torch.Tensor, gradient: torch.Tensor, linear: bool) -> torch.Tensor:
    """Returns the weight gradient of a layer with the input `x` (N, in) and the output gradient `gradient` (N, out).
    The result is (out, in) if `linear`, otherwise (in, out)."""
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
