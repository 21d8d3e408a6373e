"""Accumulates weight gradients in place, as Megatron-LM's gradient accumulation fusion: no temporary tensor of a
matrix's size per micro-batch.

    embedding      passes on the rows of the tokens that were read (torch's sparse gradient), which are added to the
                   gradient of the table
    other layers   the matrix product of a weight's gradient is added to the accumulated gradient

[Note: no rows] After the product is added, autograd receives a sparse gradient without rows. So autograd still
determines when all consumers of a weight are complete, including those of a tied vocabulary.

[Note: not ours] A model may take gradients inside of its forward, also when a block is recomputed. These belong to no
step. Such a product is returned to autograd, as torch does. `StepBackward` distinguishes the two by the number that
autograd gives each of its runs.

[Note: where not] Not without pipeline stages: most such plans have one micro-batch per step, and products into shared
memory used 2 % more CPU. Not on accelerators, whose row sums have no fixed order or 16 bits. Not for integer sums,
which need full gradients. Not below 32 bits, where a row would round at each read. Not for small matrices, whose
gradients stay in the cache; not for compiled blocks; not for deferred weight gradients. At ZeRO 2 and 3 a weight with
several consumers uses a temporary tensor too. Otherwise its group would stay incomplete from the first consumer to the
last.

In pipelines of 2 and 4 ranks of the reference workload such tensors, and the fragmentation that they cause, were 30 of
213 and 160 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

MIN_IN_PLACE_ELEMENTS = 1 << 16
"""Smallest number of elements of a matrix whose gradient is accumulated in place."""


class StepBackward:
    """Identifies the backward run of a step."""

    def __init__(self) -> None:
        self._run = -1
        self.is_paused = False

    @property
    def is_running(self) -> bool:
        """Whether the step's backward is running, and not a backward nested in a forward."""
        return not self.is_paused and self._run == torch._C._current_graph_task_id() != -1

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Disables accumulation inside the context, because gradients of preflight checks do not belong to a step."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def watch(self, ends: Iterable[torch.Tensor | GradientEdge]) -> None:
        """Registers hooks: the backward of the step is the run in which autograd reaches the first of `ends`."""
        for end in ends:
            node: Any = end.node if isinstance(end, GradientEdge) else end.grad_fn
            if node is not None:
                node.register_prehook(self._on_first_node)

    def _on_first_node(self, _: Any) -> None:
        self._run = torch._C._current_graph_task_id()


def accumulate_into(into: torch.Tensor, first: bool, gradient: torch.Tensor) -> None:
    """Adds a dense or sparse `gradient` to `into`, which is uninitialised if it is the `first`."""
    if not gradient.is_sparse:
        into.copy_(gradient) if first else into.add_(gradient)
        return
    if first:
        into.zero_()
    into.index_add_(0, gradient._indices()[0], gradient._values().to(into.dtype))
