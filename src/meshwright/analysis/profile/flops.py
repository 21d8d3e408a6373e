"""Computes the cost of one operation: FLOPs of matrix products, FLOPs of attention, and bytes that other operations
move. activations.py adds up the costs of each layer.

FLOPs of products and convolutions follow torch's own formulas (`torch.utils.flop_counter`). Attention executes two
products over the context. A causal mask halves their FLOPs. (Korthikanti et al., arXiv 2205.05198, count the full
products.) Views cost nothing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
FUSED_ATTENTION_OPS = frozenset(
    {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention",
     "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
     "_scaled_dot_product_attention_math_for_mps"}
)  # fmt: skip
IS_CAUSAL_INDEX = {"_scaled_dot_product_efficient_attention": 5, "_scaled_dot_product_cudnn_attention": 6}
"""The position of the argument `is_causal` by kernel. It is 4 for the kernels that are not listed."""
GROUPED_MM = "_grouped_mm"


class OperationCost(NamedTuple):
    """The forward cost of one operation: `flops` of a product with a weight, `attention` FLOPs of any other product,
    bytes `moved` by any other operation. `is_product`: whether it is a matrix product or convolution.
    """

    flops: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    is_product: bool = False


def operation_name(operation: Any) -> str:
    """Returns the name of an operation without its overload."""
    return str(operation.overloadpacket.__name__)


def operation_cost(
    operation: Any, args: Any, kwargs: Any, given: list[torch.Tensor], made: list[torch.Tensor], has_weight: bool
) -> OperationCost:
    """Returns the cost of one call of `operation`. `given` and `made` are its input and output tensors. `has_weight`:
    whether an input is a parameter. If so, FLOPs count as `flops`, otherwise as `attention`.
    """
    name = operation_name(operation)
    if name in FUSED_ATTENTION_OPS:
        return OperationCost(attention=fused_attention_flops(name, args, kwargs), is_product=False)
    if name == GROUPED_MM:
        flops = 2.0 * math.prod(made[0].shape) * given[0].shape[-1]
    elif operation.overloadpacket in flop_registry:
        flops = float(
            flop_registry[operation.overloadpacket](*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made))
        )
    else:
        return OperationCost(moved=float(sum(tensor_bytes(tensor) for tensor in (*given, *made))))
    return (
        OperationCost(flops=flops, is_product=True) if has_weight else OperationCost(attention=flops, is_product=True)
    )


def fused_attention_flops(name: str, args: Any, kwargs: Any) -> float:
    """Returns the forward FLOPs of a call of the fused attention kernel `name`."""
    query, key, value = args[:3]
    place = IS_CAUSAL_INDEX.get(name, 4)
    causal = kwargs.get("is_causal", args[place] if len(args) > place else False)
    products = 2.0 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    return products / 2 if causal else products


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Returns the number of bytes that reading `tensor` moves. Elements along expanded dimensions count once."""
    elements = (
        math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
        if tensor.numel()
        else 0
    )
    return elements * tensor.element_size()
