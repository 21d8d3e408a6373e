"""Collectives as operators that torch.compile traces. Code of compiled blocks calls them if
`torch.compiler.is_compiling()`, so that a block with collectives is one graph (runtime/compile.py).

torch's own functional collectives need a process group of torch, which ranks that share memory do not have. So an
operator receives the `key` of a `CommGroup`, and calls the same collectives as eager code (async_collectives.py). The
compiler knows the shape of the result and the derivative:

| kind | input | result | derivative |
|---|---|---|---|
| all_reduce | x | the sum over ranks, in the shape of x | identity, because every rank computes the same loss |
| all_gather | x | x of all ranks, in the shape (ranks, *x.shape) | reduce_scatter |
| reduce_scatter | x (ranks, *) | this rank's part of the sum, in the shape x.shape[1:] | all_gather |
| all_to_all | x (ranks, *) | part i of x goes to rank i | all_to_all |

Every rank of a group compiles the same graph, so the ranks start their collectives in the same order.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import CommGroup

_DERIVATIVES = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "all_to_all": "all_to_all"}


@torch.library.custom_op("meshwright::collective", mutates_args=(), schema="(Tensor x, int key, str kind) -> Tensor")
def collective(x: torch.Tensor, key: int, kind: str) -> torch.Tensor:
    """Runs the collective `kind` of the table above over the group with the key `key`, and waits for it. The result is
    contiguous."""
    group = CommGroup.by_key[key]
    out = _result(x, key, kind)
    if kind == "all_reduce":
        async_collectives.all_reduce(out.copy_(x).view(-1), group).wait()
        return out
    start = getattr(async_collectives, kind)
    one, other = x.contiguous().view(-1), out.view(-1)
    start(*((one, other) if kind == "reduce_scatter" else (other, one)), group).wait()
    return out


@collective.register_fake
def _result(x: torch.Tensor, key: int, kind: str) -> torch.Tensor:
    shape = {"all_gather": (CommGroup.by_key[key].size, *x.shape), "reduce_scatter": x.shape[1:]}.get(kind, x.shape)
    return torch.empty(shape, dtype=x.dtype, device=x.device)


def _save_kind(ctx: Any, inputs: tuple[torch.Tensor, int, str], output: torch.Tensor) -> None:
    _, ctx.key, ctx.kind = inputs


def _derivative(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
    back = _DERIVATIVES.get(ctx.kind)
    return gradient if back is None else collective(gradient, ctx.key, back), None, None


collective.register_autograd(_derivative, setup_context=_save_kind)


def sum_gradient(x: torch.Tensor, group: CommGroup) -> torch.Tensor:
    """Returns `x`. Its gradient is summed over the ranks of `group`, which is the transpose of a sum whose derivative
    is the identity."""
    result: torch.Tensor = _SumGradient.apply(x, group.key)
    return result


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, key: int) -> torch.Tensor:
        ctx.key = key
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return collective(gradient, ctx.key, "all_reduce"), None
