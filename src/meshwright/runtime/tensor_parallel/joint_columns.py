"""Computes the column layers of a tensor-parallel region together, so that collectives overlap with the products of all
layers: in eager code as one autograd function (`joint_columns`), and in a graph that torch.compile traces as one
operator (`column_layers`). [Note: joint regions] in column.py says when.

Under sequence parallelism, forward multiplies the slice of this rank while those of the other ranks arrive (chunks.py).
Backward computes the gradient of the region's input in chunks. The sum of a chunk over the ranks runs during the
products of the next chunk, and the sum of the last one during the products for the weights. Under sequence parallelism
backward also gathers the input again, while it computes the gradient of the input. The compiler would not overlap
separate products and collectives, because it sees a collective as a call that returns its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.async_collectives import CollectiveWork
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.tensor_parallel import collectives
from meshwright.runtime.tensor_parallel.chunks import (
    chunk_count,
    chunk_slices,
    gather_products,
    network_backends,
    rank_slices,
)
from meshwright.runtime.weight_gradients import WgradSink, weight_gradient


class JointColumns(NamedTuple):
    """The column layers of a region: their group, whether the hidden state is divided along the sequence, whether each
    weight is (out, in) instead of (in, out), and for each layer the function that receives the factors of the weight
    gradient, or None."""

    group: CommGroup
    sequence_parallel: bool
    linear: Sequence[bool]
    sinks: Sequence[WgradSink | None]

    def by_outputs(self, weights: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Returns `weights` as (out, in)."""
        return [weight if linear else weight.t() for weight, linear in zip(weights, self.linear, strict=True)]


def joint_columns(
    hidden: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], columns: JointColumns
) -> list[torch.Tensor]:
    """Returns the input of the region for the hidden state `hidden`, and the outputs of its column layers."""
    return list(_JointColumns.apply(hidden, columns, *weights, *biases))


class _JointColumns(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, columns: JointColumns, *factors: torch.Tensor | None
    ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        count = len(columns.linear)
        weights, biases = factors[:count], factors[count:]
        ctx.columns = columns
        ctx.save_for_backward(hidden, *weights)
        by_outputs = columns.by_outputs(weights)  # type: ignore[arg-type]
        entered, outputs = _outputs(hidden, by_outputs, biases, columns.group, columns.sequence_parallel)
        # The outputs must not be autograd views, because later code may write to them in place.
        return entered, *(output.data for output in outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, entered: torch.Tensor | None, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        (hidden, *weights), columns, count = ctx.saved_tensors, ctx.columns, len(gradients)
        needs_weights, needs_biases = ctx.needs_input_grad[2 : 2 + count], ctx.needs_input_grad[2 + count :]
        finish: list[WgradSink | None] = [
            (sink or partial(weight_gradient, linear=linear)) if needed and gradient is not None else None
            for sink, linear, needed, gradient in zip(
                columns.sinks, columns.linear, needs_weights, gradients, strict=True
            )
        ]
        of_hidden, of_weights = _gradients(
            gradients,
            hidden,
            columns.by_outputs(weights),
            (columns.group, columns.sequence_parallel),
            finish,
            entered,
            ctx.needs_input_grad[0],
        )
        of_biases = [
            gradient.flatten(0, -2).sum(0) if needed and gradient is not None else None
            for needed, gradient in zip(needs_biases, gradients, strict=True)
        ]
        return of_hidden, None, *of_weights, *of_biases


def _outputs(
    hidden: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: CommGroup,
    sequence_parallel: bool,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns the input of the region, and its products with `weights` (out, in)."""
    if sequence_parallel:
        return gather_products(hidden, weights, biases, group, _chunks(hidden, group, sequence_parallel))
    return hidden.view_as(hidden), [
        F.linear(hidden, weight, bias) for weight, bias in zip(weights, biases, strict=True)
    ]


def _length(hidden: torch.Tensor, sequence_parallel: bool) -> int:
    """Returns the number of positions that chunks divide: of a rank's slice of the sequence, or of all tokens."""
    return hidden.shape[1] if sequence_parallel else hidden.numel() // hidden.shape[-1]


def _chunks(hidden: torch.Tensor, group: CommGroup, sequence_parallel: bool) -> int:
    state_bytes = hidden.numel() * hidden.element_size() * (group.size if sequence_parallel else 1)
    return chunk_count(state_bytes, _length(hidden, sequence_parallel), network_backends(group), hidden.device.type)


def _gradients(
    gradients: Sequence[torch.Tensor | None],
    hidden: torch.Tensor,
    weights: Sequence[torch.Tensor],
    ranks: tuple[CommGroup, bool],
    finish: Sequence[WgradSink | None],
    other: torch.Tensor | None = None,
    needs_hidden: bool = True,
) -> tuple[torch.Tensor | None, list[torch.Tensor | None]]:
    """Returns the gradient of `hidden`, and those of the weights for which `finish` has a function. `other` is the
    gradient of the region's input that autograd has computed, because not only column layers read this input."""
    group, sequence_parallel = ranks
    x, gathering = hidden, async_collectives.COMPLETED_WORK
    if sequence_parallel and any(finish):
        pieces = hidden.new_empty(group.size, *hidden.shape)
        gathering = async_collectives.all_gather(pieces.view(-1), hidden.contiguous().view(-1), group)
    used = [(gradient, weight) for gradient, weight in zip(gradients, weights, strict=True) if gradient is not None]
    needs_hidden &= bool(used) or other is not None
    summed = _start_sums(used, hidden, ranks, other) if needs_hidden else (lambda: None)
    gathering.wait()
    if sequence_parallel and any(finish):
        x = pieces.movedim(0, 1).flatten(1, 2)
    rows = x.flatten(0, -2)
    found = [
        None if of_weight is None or gradient is None else of_weight(rows, gradient.flatten(0, -2))
        for of_weight, gradient in zip(finish, gradients, strict=True)
    ]
    return summed(), found


def _start_sums(
    used: Sequence[tuple[torch.Tensor, torch.Tensor]],
    hidden: torch.Tensor,
    ranks: tuple[CommGroup, bool],
    other: torch.Tensor | None,
) -> Callable[[], torch.Tensor]:
    """Computes the gradient of the region's input in chunks: the sum of gradient x weight (out, in) over `used`, plus
    `other`. Returns a function that waits for the sums over the ranks, and returns the gradient of `hidden`."""
    group, sequence_parallel = ranks
    sums: list[torch.Tensor] = []
    sent: list[tuple[torch.Tensor, CollectiveWork]] = []  # memory must not be reused before it is sent
    length, chunks = _length(hidden, sequence_parallel), _chunks(hidden, *ranks)
    sliced = sequence_parallel and chunks > 1  # one chunk is sliced after the products, which copies less
    for part in chunk_slices(length, chunks):

        def rows_of(tensor: torch.Tensor, part: slice = part) -> torch.Tensor:
            if sliced:
                return rank_slices(tensor, group.size, part)
            return tensor.flatten(0, -2) if sequence_parallel else tensor.flatten(0, -2)[part]

        total = None if other is None else rows_of(other).clone(memory_format=torch.contiguous_format)
        for gradient, weight in used:
            rows = rows_of(gradient)
            total = rows @ weight if total is None else total.addmm_(rows, weight)
        assert total is not None
        if sequence_parallel and not sliced:
            shape = hidden.shape[0], group.size * length, *hidden.shape[2:]
            total = collectives.stack_slices(total.view(shape), group, 1)
        if sequence_parallel:
            own = total.new_empty(hidden.shape[0], part.stop - part.start, *hidden.shape[2:])
            work = async_collectives.reduce_scatter(total.view(-1), own.view(-1), group)
        else:
            own, work = total, async_collectives.all_reduce(total.view(-1), group)
        sums.append(own)
        sent.append((total, work))

    def finish() -> torch.Tensor:
        for _, work in sent:
            work.wait()
        joined = sums[0] if len(sums) == 1 else torch.cat(sums, dim=int(sequence_parallel))
        return joined.view(hidden.shape)

    return finish


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
    biases = [None] * len(weights)
    _, outputs = _outputs(hidden, weights, biases, CommGroup.by_key[key], sequence_parallel)
    return [output.contiguous() for output in outputs]


@column_layers.register_fake
def _fake_outputs(
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
    finish = [partial(weight_gradient, linear=True) if is_needed else None for is_needed in needs]
    total, found = _gradients(gradients, hidden, weights, (CommGroup.by_key[key], sequence_parallel), finish)
    assert total is not None
    return [total, *(gradient for gradient in found if gradient is not None)]


_backward = torch.library.custom_op(
    "meshwright::column_layers_backward",
    column_gradients,
    mutates_args=(),
    schema="(Tensor[] gradients, Tensor hidden, Tensor[] weights, int key, bool sequence_parallel, bool[] needs)"
    " -> Tensor[]",
)


@_backward.register_fake
def _fake_gradients(
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
