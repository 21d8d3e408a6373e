"""Implements the collectives of tensor parallelism as autograd functions on local tensors. The row layers in layers.py
call the reductions at the end of a region. (A region is a part of a block, from the input of column layers to the
output of row layers.) `scatter_sequence` and `gather_replicated` begin and end sequence parallelism. The token
dispatcher of experts (expert_parallel) uses all four functions. If the group is None, each function returns its input.

| function | forward | backward |
|---|---|---|
| reduce_from_region | all-reduce | identity |
| reduce_scatter_from_region | reduce-scatter | all-gather |
| scatter_sequence | local slice | all-gather |
| gather_replicated | all-gather | local slice |

column.py implements the entry of a region. The forward of the entry is the identity and its backward an all-reduce.
Under sequence parallelism the forward is an all-gather and the backward a reduce-scatter. The functions in this file
have no state, so a recomputed layer may run them again. Sources: Shoeybi et al., Megatron-LM (2019), section 3 (its g
is `reduce_from_region`); Korthikanti et al., Reducing Activation Recomputation (2022), section 4.2.2 (its g-bar is
`reduce_scatter_from_region`).
"""

from __future__ import annotations

from functools import partial

import torch

from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.graph_collectives import collective
from meshwright.runtime.comm.group import CommGroup, linear_map


def reduce_from_region(x: torch.Tensor, group: CommGroup | None) -> torch.Tensor:
    """Returns the sum of `x` over ranks, which is the output of a row layer. `x` may be overwritten, so no other code
    may use it afterwards."""
    if group is None:
        return x
    if torch.compiler.is_compiling():
        return collective(x, group.key, "all_reduce")
    # The result must not be an autograd view, because later code may add to it in place.
    return linear_map(x, lambda x: all_reduce_sum(x, group).data, _identity)


def reduce_scatter_from_region(x: torch.Tensor, group: CommGroup | None, dim: int = 1) -> torch.Tensor:
    """Returns this rank's slice, along `dim`, of the sum of `x` over ranks, which is the output of a row layer under
    sequence parallelism."""
    if group is None:
        return x
    if torch.compiler.is_compiling():
        return collective(stack_slices(x, group, dim), group.key, "reduce_scatter")
    return linear_map(
        x, partial(reduce_scatter_dim, group=group, dim=dim), partial(all_gather_dim, group=group, dim=dim)
    )


def scatter_sequence(x: torch.Tensor, group: CommGroup | None, dim: int = 1) -> torch.Tensor:
    """Returns this rank's slice of `x` along `dim`. `x` must be equal on all ranks."""
    return (
        x
        if group is None
        else linear_map(x, partial(slice_dim, group=group, dim=dim), partial(all_gather_dim, group=group, dim=dim))
    )


def gather_replicated(x: torch.Tensor, group: CommGroup | None, dim: int = 1) -> torch.Tensor:
    """Returns the slices `x` of all ranks, joined along `dim`. Every rank must repeat the computation that uses the
    result, so that the gradient of the result is equal on all ranks."""
    return (
        x
        if group is None
        else linear_map(x, partial(all_gather_dim, group=group, dim=dim), partial(slice_dim, group=group, dim=dim))
    )


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def all_reduce_sum(x: torch.Tensor, group: CommGroup) -> torch.Tensor:
    """Returns the sum of `x` over `group`. If `x` is contiguous, it is overwritten with the sum."""
    x = x.contiguous()
    async_collectives.all_reduce(x, group).wait()
    return x


def all_gather_dim(x: torch.Tensor, group: CommGroup, dim: int) -> torch.Tensor:
    """Returns `x` of all ranks concatenated along `dim`, in order of rank."""
    ranks = group.size
    if torch.compiler.is_compiling():
        full = collective(x, group.key, "all_gather")
    else:
        full = torch.empty(ranks, *x.shape, dtype=x.dtype, device=x.device)
        async_collectives.all_gather(full.view(-1), x.contiguous().view(-1), group).wait()
    shape = (*x.shape[:dim], ranks * x.shape[dim], *x.shape[dim + 1 :])
    return full.movedim(0, dim).reshape(shape)


def stack_slices(x: torch.Tensor, group: CommGroup, dim: int) -> torch.Tensor:
    """Splits `x` along `dim` into one slice per rank. Returns the slices, stacked along a new first dimension."""
    ranks = group.size
    split = x.view(*x.shape[:dim], ranks, x.shape[dim] // ranks, *x.shape[dim + 1 :])
    return split.movedim(dim, 0).contiguous()


def reduce_scatter_dim(x: torch.Tensor, group: CommGroup, dim: int) -> torch.Tensor:
    """Returns this rank's slice along `dim` of the sum of `x` over `group`."""
    full = stack_slices(x, group, dim)
    out = torch.empty_like(full[0])
    async_collectives.reduce_scatter(full.view(-1), out.view(-1), group).wait()
    return out


def slice_dim(x: torch.Tensor, group: CommGroup, dim: int) -> torch.Tensor:
    """Returns a copy of this rank's slice of `x` along `dim`."""
    each = x.shape[dim] // group.size
    return x.narrow(dim, group.index * each, each).clone(memory_format=torch.contiguous_format)
