"""Gradients of matrices made where they are summed: no second tensor of a matrix's size comes and goes with each
micro-batch.

    an embedding   hands on the rows of the words that were read (torch's sparse gradient), which are added to the
    table's gradient
    other layers   the product of a weight's gradient adds to it

[Note: no rows] Which readers of a weight are through, autograd knows. Where the product has been added it is handed no
rows of the weight, so that
a weight with several readers (a tied vocabulary) is whole when it says so, as ever.

[Note: not ours] A model may take gradients inside of its forward, also where a block computes again in backward. These
are no step's: such a product
is made for itself and given to autograd, as torch does. `Own` tells the two apart by the number that autograd gives
each of its runs.

[Note: where not] Without stages, where most plans have one micro-batch a step and there is nothing to add to: products
that end in memory that ranks share
took 2 % more of the processor. On accelerators, whose sums of rows are in no fixed order or of 16 bits; for sums of
integers, which are made of whole gradients;
in less than 32 bits, where a row would be rounded as often as it is read; small matrices, whose gradients come and go
in the cache; compiled blocks; what
waits for W. At ZeRO 2 and 3 a weight with several readers makes a tensor as well, for its unit would be open from the
first to the last of them.

On the reference workload's pipelines of 2 and 4 ranks such tensors and the holes that they leave in the heap were 30 of
213 and 160 MiB.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

MIN_IN_PLACE_ELEMENTS = 1 << 16
"""Elements from which on a matrix has its gradient made in place."""


class StepBackward:
    """The backward of a step."""

    def __init__(self) -> None:
        self._run = -1
        self.is_paused = False
        """In the passes of a check, whose gradients are summed nowhere."""

    @property
    def is_running(self) -> bool:
        """Whether it, and not another one inside of it, asks."""
        return not self.is_paused and self._run == torch._C._current_graph_task_id() != -1

    def watch(self, ends: Iterable[torch.Tensor | GradientEdge]) -> None:
        """With the first of `ends` that it comes to; each is asked once."""
        for end in ends:
            node: Any = end.node if isinstance(end, GradientEdge) else end.grad_fn
            if node is not None:
                node.register_prehook(self._on_first_node)

    def _on_first_node(self, _: Any) -> None:
        self._run = torch._C._current_graph_task_id()


def accumulate_into(into: torch.Tensor, first: bool, gradient: torch.Tensor) -> None:
    """A `gradient`, whole or of some rows, to the sum `into`, which has nothing yet if it is the `first`."""
    if not gradient.is_sparse:
        into.copy_(gradient) if first else into.add_(gradient)
        return
    if first:
        into.zero_()
    into.index_add_(0, gradient._indices()[0], gradient._values().to(into.dtype))
