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

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.autograd.graph import GradientEdge

from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.layer_rules.rule import is_linear_like
from meshwright.runtime.backend import backend_of
from meshwright.runtime.wgrad.deferred import defer_wgrad, weight_gradient
from meshwright.spec.plan import Plan

if TYPE_CHECKING:
    from meshwright.runtime.zero.param_group import FlatParamGroup

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


def install_wgrad_accumulation(
    model: nn.Module, anatomy: ModelGraph, flat: Mapping[int, Sequence[FlatParamGroup]], plan: Plan
) -> StepBackward:
    """Embeddings outside of the blocks, and plain matrix layers, see [Note: where not]; what tells their backward."""
    own = StepBackward()
    if plan.pp == 1:
        return own
    units = {
        id(tensor): (unit, name) for held in flat.values() for unit in held for name, tensor in unit.parameters.items()
    }
    within = tuple(f"{path}." for path, _ in anatomy.stacks) or (f"{anatomy.blocks}.",)
    layers = [
        (path.startswith(within), module, module._parameters.get("weight"))
        for path, module in model.named_modules()
        if path
    ]
    readers = Counter(id(weight) for _, _, weight in layers if weight is not None)
    for is_inside, module, weight in layers:
        unit, name = units.get(id(weight), (None, ""))
        if (
            unit is None
            or weight is None
            or not _can_accumulate_in_place(unit)
            or weight.numel() < MIN_IN_PLACE_ELEMENTS
            or (is_inside and plan.compile)
        ):
            continue
        if isinstance(module, nn.Embedding):
            module.sparse = not (is_inside or module.scale_grad_by_freq)
            continue
        at_once = unit.zero_stage < 2 or (unit.wgrad_queue is None and readers[id(weight)] == 1)
        if (
            at_once
            and is_linear_like(module)
            and getattr(module, "put_off", None) is None
            and unit.gradients.dtype == unit.dtype
        ):
            defer_wgrad(module, partial(_accumulate_wgrad, own, unit, name, isinstance(module, nn.Linear)))
    return own


def _can_accumulate_in_place(unit: FlatParamGroup) -> bool:
    return (
        not unit.frozen
        and unit.exact is None
        and backend_of(unit.gradients.device).memory_is_host
        and unit.gradients.itemsize >= 4
    )


def _accumulate_wgrad(
    own: StepBackward, unit: FlatParamGroup, name: str, linear: bool, x: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """No rows of the weight `name`, whose gradient the product of `x` (N, in) and the `gradient` (N, out) of what
    follows has been added to."""
    if not own.is_running:
        return weight_gradient(x, gradient, linear)
    into, first = unit.grad_slot(name)
    factors = (gradient.t(), x) if linear else (x.t(), gradient)
    torch.mm(*factors, out=into) if first else into.addmm_(*factors)
    no_rows = torch.empty(1, 0, dtype=torch.int64), into.new_empty(0, *into.shape[1:])
    return torch.sparse_coo_tensor(*no_rows, into.shape, check_invariants=False)
