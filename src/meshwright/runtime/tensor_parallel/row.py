"""Computes row layers in chunks, whose reductions over the tensor ranks overlap with the products of later chunks
(asynchronous tensor parallelism, chunks.py).

The tokens of a row layer are divided into chunks. The reduction of a chunk starts when its product is complete, and
runs while the next chunk is computed. So only the reduction of the last chunk is exposed, if a product takes as long as
the reduction of its result. Under sequence parallelism each reduce-scatter has a part of every rank's slice of the
sequence. Backward then gathers the gradient, and computes the gradient of the input while chunks arrive.

In a graph that torch.compile traces, a layer of several chunks is one operator (`row_layer`). The compiler would not
overlap separate products and collectives, because it sees a collective as a call that returns its result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.tensor_parallel.chunks import chunk_count, chunk_slices, gather_products, rank_slices
from meshwright.runtime.weight_gradients import WgradSink, weight_gradient


def row_chunk_count(x: torch.Tensor, outputs: int, backends: str, sequence_ranks: int) -> int:
    """Returns the number of chunks of a row layer with the input `x` (B, T, in) and `outputs` features. `backends`: see
    `chunk_count`. `sequence_ranks`: the number of ranks that slice the sequence, 1 without sequence parallelism."""
    if sequence_ranks > 1 and x.ndim != 3:
        return 1
    tokens = x.numel() // x.shape[-1]
    length = x.shape[1] // sequence_ranks if sequence_ranks > 1 else tokens
    return chunk_count(tokens * outputs * x.element_size(), length, backends, x.device.type)


def row_forward(
    x: torch.Tensor, weight: torch.Tensor, chunks: int, options: tuple[CommGroup, bool, bool, WgradSink | None]
) -> torch.Tensor:
    """Returns the output of a row layer in `chunks` chunks, summed over the ranks. `options` is the group, whether the
    result is this rank's slice of the sequence (sequence parallelism), whether `weight` is (out, in) instead of (in,
    out), and the function that receives the factors of the weight gradient, or None."""
    result: torch.Tensor = _RowMatmul.apply(x, weight, chunks, options)
    return result


class _RowMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, chunks: int, options: tuple[Any, ...]) -> torch.Tensor:
        group, sequence_parallel, linear, _ = options
        ctx.chunks, ctx.options = chunks, options
        ctx.save_for_backward(x, weight)
        multiply = _scatter_products if sequence_parallel else _reduce_products
        # The result must not be an autograd view, because later code may add to it in place.
        return multiply(x, weight.t() if linear else weight, chunks, group).data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        (x, weight), (group, sequence_parallel, linear, sink) = ctx.saved_tensors, ctx.options
        factor = weight if linear else weight.t()
        if sequence_parallel:
            whole, (x_gradient,) = gather_products(gradient, [factor.t()], [None], group, ctx.chunks)
        else:
            whole, x_gradient = gradient, gradient @ factor
        rows, flat = x.flatten(0, -2), whole.flatten(0, -2)
        found = None
        if ctx.needs_input_grad[1]:
            found = sink(rows, flat) if sink is not None else weight_gradient(rows, flat, linear)
        return x_gradient, found, None, None


def _reduce_products(x: torch.Tensor, factor: torch.Tensor, chunks: int, group: CommGroup) -> torch.Tensor:
    """Returns the sum over ranks of x (..., in) times `factor` (in, out)."""
    rows = x.flatten(0, -2)
    out = rows.new_empty(rows.shape[0], factor.shape[1])
    reductions = []
    for part in chunk_slices(rows.shape[0], chunks):
        torch.mm(rows[part], factor, out=out[part])
        reductions.append(async_collectives.all_reduce(out[part].view(-1), group))
    for reduction in reductions:
        reduction.wait()
    return out.view(*x.shape[:-1], -1)


def _scatter_products(x: torch.Tensor, factor: torch.Tensor, chunks: int, group: CommGroup) -> torch.Tensor:
    """Returns this rank's slice (B, T / ranks, out) of the sum over ranks of x (B, T, in) times `factor`."""
    batch, length = x.shape[0], x.shape[1] // group.size
    parts, sent, reductions = [], [], []
    for part in chunk_slices(length, chunks):
        full = rank_slices(x, group.size, part) @ factor
        own = full.new_empty(batch, part.stop - part.start, factor.shape[1])
        reductions.append(async_collectives.reduce_scatter(full.view(-1), own.view(-1), group))
        parts.append(own)
        sent.append(full)  # its memory must not be reused before it is sent
    for reduction in reductions:
        reduction.wait()
    return torch.cat(parts, dim=1)


@torch.library.custom_op(
    "meshwright::row_layer",
    mutates_args=(),
    schema="(Tensor x, Tensor weight, int key, int chunks, bool sequence_parallel) -> Tensor",
)
def row_layer(x: torch.Tensor, weight: torch.Tensor, key: int, chunks: int, sequence_parallel: bool) -> torch.Tensor:
    """Returns x W^T for `weight` (out, in), summed over the ranks of the group with the key `key`. Under sequence
    parallelism the result is this rank's slice."""
    multiply = _scatter_products if sequence_parallel else _reduce_products
    return multiply(x, weight.t(), chunks, CommGroup.by_key[key])


@row_layer.register_fake
def _output(x: torch.Tensor, weight: torch.Tensor, key: int, chunks: int, sequence_parallel: bool) -> torch.Tensor:
    if not sequence_parallel:
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    return x.new_empty(x.shape[0], x.shape[1] // CommGroup.by_key[key].size, weight.shape[0])


@torch.library.custom_op(
    "meshwright::row_layer_backward",
    mutates_args=(),
    schema="(Tensor gradient, Tensor weight, int key, int chunks) -> (Tensor, Tensor)",
)
def row_gradients(
    gradient: torch.Tensor, weight: torch.Tensor, key: int, chunks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gathered slices `gradient` of all ranks, and their product with `weight` (out, in)."""
    whole, (x_gradient,) = gather_products(gradient, [weight.t()], [None], CommGroup.by_key[key], chunks)
    return whole, x_gradient


@row_gradients.register_fake
def _gradients(
    gradient: torch.Tensor, weight: torch.Tensor, key: int, chunks: int
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, length = gradient.shape[0], gradient.shape[1] * CommGroup.by_key[key].size
    return gradient.new_empty(rows, length, gradient.shape[2]), gradient.new_empty(rows, length, weight.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, weight, ctx.key, ctx.chunks, ctx.sequence_parallel = inputs
    ctx.save_for_backward(x, weight)


def _derivative(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    if ctx.sequence_parallel:
        gradient, x_gradient = row_gradients(gradient, weight, ctx.key, ctx.chunks)
    else:
        x_gradient = gradient @ weight
    found = gradient.flatten(0, -2).t() @ x.flatten(0, -2) if ctx.needs_input_grad[1] else None
    return x_gradient, found, None, None, None


row_layer.register_autograd(_derivative, setup_context=_save)
