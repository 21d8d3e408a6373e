"""Computes the weight gradients of linear layers in place of autograd: accumulated in place, or deferred to a separate
action.

`accumulate_into` accumulates weight gradients in place, as Megatron-LM's gradient accumulation fusion does. So no
micro-batch needs a temporary tensor of a matrix's size.

    embedding      returns torch's sparse gradient with the rows of the tokens that were read, which are added to the
                   gradient of the table
    other layers   the matrix product of a weight's gradient is added to the accumulated gradient

[Note: no rows] After the product is added, autograd receives a sparse gradient without rows. So autograd still
determines when all consumers of a weight are complete, including those of a tied vocabulary.

[Note: not ours] A model may compute gradients inside of its forward, also when a block is recomputed. These gradients
belong to no step, and autograd receives them as usual. `StepBackward` identifies the step's backward by the number that
autograd gives to each of its runs.

[Note: where not] Gradients are not accumulated in place in these cases:

- Plans without pipeline stages. Most of them have one micro-batch per step, and products into shared memory used 2 %
  more CPU.
- Accelerators, where sums of rows have no fixed order, or gradients have 16 bits.
- Integer sums, which need full gradients.
- Dtypes below 32 bits, where a row would be rounded at each read.
- Small matrices, whose gradients stay in the cache.
- Compiled blocks and deferred weight gradients.
- At ZeRO 2 and 3, weights with several consumers. Their group would stay incomplete from the first consumer to the
  last.

In pipelines of 2 and 4 ranks of the reference workload, temporary tensors and the fragmentation that they cause took 30
MiB of 213 MiB and of 160 MiB.

`WgradQueue` splits backward into two actions. B computes the gradient of a stage's input. W computes the gradients of
its weights later, when the schedule requires it.

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
    """Identifies the run of autograd that is the backward of a step."""

    def __init__(self) -> None:
        self._run = -1
        self.is_paused = False

    @property
    def is_running(self) -> bool:
        """Whether the backward of the step is running, and not a backward nested in a forward."""
        return not self.is_paused and self._run == torch._C._current_graph_task_id() != -1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Disables in-place accumulation inside the context. Gradients of preflight checks do not belong to a step."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def watch(self, ends: Iterable[torch.Tensor | GradientEdge]) -> None:
        """Registers hooks on `ends`. The run in which autograd reaches the first of them is the backward of the
        step."""
        for end in ends:
            node: Any = end.node if isinstance(end, GradientEdge) else end.grad_fn
            if node is not None:
                node.register_prehook(self._on_first_node)

    def _on_first_node(self, _: Any) -> None:
        self._run = torch._C._current_graph_task_id()


def accumulate_into(into: torch.Tensor, first: bool, gradient: torch.Tensor) -> None:
    """Adds a dense or sparse `gradient` to `into`. If `first`, `into` is uninitialised and is overwritten."""
    if not gradient.is_sparse:
        into.copy_(gradient) if first else into.add_(gradient)
        return
    if first:
        into.zero_()
    into.index_add_(0, gradient._indices()[0], gradient._values().to(into.dtype))


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
