"""Accumulates weight gradients in place, as Megatron-LM's gradient accumulation fusion does. So no micro-batch needs a
temporary tensor of a matrix's size.

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
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

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
