"""Computes row layers in chunks, whose reductions over the tensor ranks overlap with the products of later chunks
(asynchronous tensor parallelism).

The tokens of a row layer are divided into chunks. The reduction of a chunk starts when its product is complete, and
runs while the next chunk is computed. So only the reduction of the last chunk is exposed, if a product takes as long as
the reduction of its result. Under sequence parallelism each reduce-scatter has a part of every rank's slice of the
sequence, and backward starts the all-gathers of all chunks at once and computes the gradients of a chunk's input while
later chunks arrive.

Ranks of one host share memory: their reductions occupy the same cores as the products, so their layers have one chunk.
In a graph that torch.compile traces, a layer of several chunks is one operator (`row_layer`). The compiler would not
overlap separate products and collectives, because it sees a collective as a call that returns its result.

Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import CommGroup, uses_nccl
from meshwright.runtime.weight_gradients import WgradSink, weight_gradient
from meshwright.spec.layout import MAX_ROW_CHUNKS, MIN_ROW_CHUNK_BYTES


def least_chunk_bytes(backends: str, device: str) -> int:
    """Returns the minimum bytes of the result of a chunk on `device`. `backends`: those of the group
    (`CommGroup.backends`). If it is empty, because ranks share memory, returns 0."""
    return MIN_ROW_CHUNK_BYTES["nccl" if uses_nccl(backends, device) else "gloo"] if backends else 0


def chunk_count(x: torch.Tensor, outputs: int, least: int, sequence_ranks: int) -> int:
    """Returns the number of chunks of a row layer with the input `x` (B, T, in) and `outputs` features. `least` is the
    result of `least_chunk_bytes`. `sequence_ranks`: the number of ranks that slice the sequence, 1 without sequence
    parallelism."""
    if not least or (sequence_ranks > 1 and x.ndim != 3):
        return 1
    tokens = x.numel() // x.shape[-1]
    parts = min(MAX_ROW_CHUNKS, tokens * outputs * x.element_size() // least)
    return max(min(parts, x.shape[1] // sequence_ranks if sequence_ranks > 1 else tokens), 1)


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
            whole, x_gradient = _gather_gradients(gradient, factor, ctx.chunks, group)
        else:
            whole, x_gradient = gradient, gradient @ factor
        rows, flat = x.flatten(0, -2), whole.flatten(0, -2)
        found = None
        if ctx.needs_input_grad[1]:
            found = sink(rows, flat) if sink is not None else weight_gradient(rows, flat, linear)
        return x_gradient, found, None, None


def _slices(length: int, chunks: int) -> Iterator[slice]:
    """Yields `chunks` parts of nearly equal size of the range 0 to `length`."""
    bounds = [length * at // chunks for at in range(chunks + 1)]
    yield from map(slice, bounds[:-1], bounds[1:])


def _reduce_products(x: torch.Tensor, factor: torch.Tensor, chunks: int, group: CommGroup) -> torch.Tensor:
    """Returns the sum over ranks of x (..., in) times `factor` (in, out)."""
    rows = x.flatten(0, -2)
    out = rows.new_empty(rows.shape[0], factor.shape[1])
    reductions = []
    for part, product in zip(rows.tensor_split(chunks), out.tensor_split(chunks), strict=True):
        torch.mm(part, factor, out=product)
        reductions.append(async_collectives.all_reduce(product.view(-1), group))
    for reduction in reductions:
        reduction.wait()
    return out.view(*x.shape[:-1], -1)


def _scatter_products(x: torch.Tensor, factor: torch.Tensor, chunks: int, group: CommGroup) -> torch.Tensor:
    """Returns this rank's slice (B, T / ranks, out) of the sum over ranks of x (B, T, in) times `factor`."""
    batch, length = x.shape[0], x.shape[1] // group.size
    by_rank = x.view(batch, group.size, length, -1).movedim(1, 0)
    parts, sent, reductions = [], [], []
    for part in _slices(length, chunks):
        full = by_rank[:, :, part].flatten(0, 2) @ factor
        own = full.new_empty(batch, part.stop - part.start, factor.shape[1])
        reductions.append(async_collectives.reduce_scatter(full.view(-1), own.view(-1), group))
        parts.append(own)
        sent.append(full)  # its memory must not be reused before it is sent
    for reduction in reductions:
        reduction.wait()
    return torch.cat(parts, dim=1)


def _gather_gradients(
    gradient: torch.Tensor, factor: torch.Tensor, chunks: int, group: CommGroup
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the gradients (B, T, out) of all ranks' slices `gradient` (B, T / ranks, out), and their product with
    `factor` (out, in)."""
    batch, length, width = gradient.shape
    arriving = []
    for part in _slices(length, chunks):
        own = gradient[:, part].contiguous()
        full = own.new_empty(group.size, *own.shape)
        arriving.append((part, full, async_collectives.all_gather(full.view(-1), own.view(-1), group)))
    whole = gradient.new_empty(batch, group.size, length, width)
    x_gradient = gradient.new_empty(batch, group.size, length, factor.shape[1])
    for part, full, work in arriving:
        work.wait()
        whole[:, :, part] = full.movedim(0, 1)
        x_gradient[:, :, part] = (full @ factor).movedim(0, 1)
    return whole.flatten(1, 2), x_gradient.flatten(1, 2)


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
    return _gather_gradients(gradient, weight, chunks, CommGroup.by_key[key])


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
