"""Divides a hidden state into chunks, whose collectives over the tensor ranks overlap with matrix products
(asynchronous tensor parallelism). row.py and joint_columns.py use it.

Ranks of one host share memory: their collectives occupy the same cores as the products, so they have one chunk.

[Note: order of chunks] A chunk is multiplied while other chunks are in transit. Nothing overlaps with the product of
the first chunk or with the sum of the last one. So these two are half as large as the others.

Source: Wang et al., Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import CommGroup, uses_nccl
from meshwright.runtime.tensor_parallel.collectives import all_gather_dim
from meshwright.spec.layout import MAX_TENSOR_CHUNKS, MIN_TENSOR_CHUNK_BYTES


def network_backends(group: CommGroup) -> str:
    """Returns the backends of `group` (`CommGroup.backends`), or '' if ranks of the group share memory."""
    return group.backends if group.process_group is not None and group.shm is None else ""


def chunk_count(state_bytes: int, length: int, backends: str, device: str) -> int:
    """Returns the number of chunks of a hidden state on `device` with `state_bytes` bytes on all ranks together.
    `length` is the number of positions that are divided. `backends` is the result of `network_backends`."""
    if not backends:
        return 1
    least = MIN_TENSOR_CHUNK_BYTES["nccl" if uses_nccl(backends, device) else "gloo"]
    return max(min(MAX_TENSOR_CHUNKS, state_bytes // least, length), 1)


def chunk_slices(length: int, chunks: int) -> Iterator[slice]:
    """Yields `chunks` parts of the range 0 to `length`, none of them empty if `length` is at least `chunks`. The first
    and the last part are half as large as the others, up to rounding.

    >>> [part.stop - part.start for part in chunk_slices(12, 4)], list(chunk_slices(4, 1))
    ([2, 4, 4, 2], [slice(0, 4, None)])
    """
    inner = [length * (2 * at - 1) // (2 * chunks - 2) for at in range(1, chunks)]
    bounds = [0, *(min(max(bound, at), length - chunks + at) for at, bound in enumerate(inner, 1)), length]
    yield from map(slice, bounds[:-1], bounds[1:])


def rank_slices(x: torch.Tensor, ranks: int, part: slice) -> torch.Tensor:
    """Returns the positions `part` of each rank's slice of `x` (B, T, *) as rows (ranks * B * positions, *), in the
    order in which a reduce-scatter sends them."""
    by_rank = x.reshape(x.shape[0], ranks, x.shape[1] // ranks, *x.shape[2:])
    return by_rank[:, :, part].movedim(1, 0).flatten(0, -2)


def gather_products(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    group: CommGroup,
    chunks: int,
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Gathers the slices `x` (B, T / ranks, *, in) of all ranks in `chunks` chunks. Returns them joined, and their
    products with each of the `weights` (out, in), plus the bias. With several chunks, the slice of this rank is
    multiplied while the others arrive, and each chunk of the others while later chunks arrive."""
    if chunks == 1:
        joined = all_gather_dim(x, group, 1)
        return joined, [F.linear(joined, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
    arriving = []
    for part in chunk_slices(x.shape[1], chunks):
        own = x[:, part].contiguous()
        full = own.new_empty(group.size, *own.shape)
        arriving.append((part, full, async_collectives.all_gather(full.view(-1), own.view(-1), group)))
    shape = (x.shape[0], group.size, *x.shape[1:-1])
    whole = x.new_empty(*shape, x.shape[-1])
    products = [x.new_empty(*shape, weight.shape[0]) for weight in weights]

    def multiply(ranks: slice, part: slice, rows: torch.Tensor) -> None:
        whole[:, ranks, part] = rows.movedim(0, 1)
        for product, weight, bias in zip(products, weights, biases, strict=True):
            product[:, ranks, part] = F.linear(rows, weight, bias).movedim(0, 1)

    multiply(slice(group.index, group.index + 1), slice(None), x.unsqueeze(0))
    for part, full, work in arriving:
        work.wait()
        for others in (slice(0, group.index), slice(group.index + 1, group.size)):
            if others.start < others.stop:
                multiply(others, part, full[others])
    return whole.flatten(1, 2), [product.flatten(1, 2) for product in products]
