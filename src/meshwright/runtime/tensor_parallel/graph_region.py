"""The column layers of a tensor-parallel region as one operator that torch.compile traces ([Note: compiled regions] in
column.py).

Backward does what eager code does (column.py): it first adds the gradients of the region's input, then sums them over
the ranks while it computes the gradients of the weights. The compiler would not overlap the two, because it sees a
collective as a call that returns its result. Under sequence parallelism forward gathers the input and drops it, and
backward gathers it again while it computes the gradient of the input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional as F

from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.tensor_parallel import collectives


@torch.library.custom_op(
    "meshwright::column_layers",
    mutates_args=(),
    schema="(Tensor hidden, Tensor[] weights, int key, bool sequence_parallel) -> Tensor[]",
)
def column_layers(
    hidden: torch.Tensor, weights: Sequence[torch.Tensor], key: int, sequence_parallel: bool
) -> list[torch.Tensor]:
    """Returns x W^T (B, T, out) for each of the local `weights` (out, in). x is `hidden` (B, T, in), or under sequence
    parallelism the slices `hidden` (B, T / ranks, in) of all ranks of the group with the key `key`."""
    group = CommGroup.by_key[key]
    x = collectives.all_gather_dim(hidden, group, 1) if sequence_parallel else hidden
    return [F.linear(x, weight).contiguous() for weight in weights]


@column_layers.register_fake
def _outputs(
    hidden: torch.Tensor, weights: Sequence[torch.Tensor], key: int, sequence_parallel: bool
) -> list[torch.Tensor]:
    rows, length = hidden.shape[0], hidden.shape[1] * (CommGroup.by_key[key].size if sequence_parallel else 1)
    return [hidden.new_empty(rows, length, *hidden.shape[2:-1], weight.shape[0]) for weight in weights]


def column_gradients(
    gradients: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    weights: Sequence[torch.Tensor],
    key: int,
    sequence_parallel: bool,
    needs: Sequence[bool],
) -> list[torch.Tensor]:
    """Returns the gradient of `hidden`, and those of the weights for which `needs` is true."""
    group = CommGroup.by_key[key]
    x, gathering = hidden, async_collectives.COMPLETED_WORK
    if sequence_parallel:
        pieces = torch.empty(group.size, *hidden.shape, dtype=hidden.dtype, device=hidden.device)
        gathering = async_collectives.all_gather(pieces.view(-1), hidden.contiguous().view(-1), group)
    flat = [gradient.flatten(0, -2) for gradient in gradients]
    total = flat[0] @ weights[0]
    for gradient, weight in zip(flat[1:], weights[1:], strict=True):
        total.addmm_(gradient, weight)
    total = total.view(*gradients[0].shape[:-1], -1)
    gathering.wait()
    if sequence_parallel:
        x = pieces.movedim(0, 1).flatten(1, 2)
        parts = collectives.stack_slices(total, group, 1)
        total = torch.empty_like(parts[0])
        reducing = async_collectives.reduce_scatter(parts.view(-1), total.view(-1), group)
    else:
        reducing = async_collectives.all_reduce(total, group)
    rows = x.flatten(0, -2)
    found = [gradient.t() @ rows for gradient, is_needed in zip(flat, needs, strict=True) if is_needed]
    reducing.wait()
    return [total, *found]


_backward = torch.library.custom_op(
    "meshwright::column_layers_backward",
    column_gradients,
    mutates_args=(),
    schema="(Tensor[] gradients, Tensor hidden, Tensor[] weights, int key, bool sequence_parallel, bool[] needs)"
    " -> Tensor[]",
)


@_backward.register_fake
def _gradients(
    gradients: Sequence[torch.Tensor],
    hidden: torch.Tensor,
    weights: Sequence[torch.Tensor],
    key: int,
    sequence_parallel: bool,
    needs: Sequence[bool],
) -> list[torch.Tensor]:
    wanted = [weight.new_empty(weight.shape) for weight, is_needed in zip(weights, needs, strict=True) if is_needed]
    return [hidden.new_empty(hidden.shape), *wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    hidden, weights, ctx.key, ctx.sequence_parallel = inputs
    ctx.save_for_backward(hidden, *weights)


def _derivative(ctx: Any, gradients: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    hidden, *weights = ctx.saved_tensors
    needs = list(ctx.needs_input_grad[1])
    first, *rest = _backward(list(gradients), hidden, weights, ctx.key, ctx.sequence_parallel, needs)
    left = iter(rest)
    return first, [next(left) if is_needed else None for is_needed in needs], None, None


column_layers.register_autograd(_derivative, setup_context=_save)
