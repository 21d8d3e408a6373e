"""What one operation costs: FLOPs of matrix products, FLOPs of attention, bytes that everything else moves through memory.

Sources: torch's own formulas for products and convolutions (`torch.utils.flop_counter`); attention executes two products over the context,
which a causal mask halves (Korthikanti et al., arXiv 2205.05198, count both halves). Operations that only look at memory otherwise cost nothing.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
FUSED = frozenset(
    {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
     "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_attention_math_for_mps"}
)  # fmt: skip
CAUSAL_AT = {"_scaled_dot_product_efficient_attention": 5, "_scaled_dot_product_cudnn_attention": 6}
"""Place of `is_causal` among the arguments; 4 elsewhere."""
GROUPED = "_grouped_mm"


class Cost(NamedTuple):
    """Of one operation, forward. `is_product`: a matrix product or convolution, also of two activations."""

    flops: float = 0.0
    attention: float = 0.0
    moved: float = 0.0
    is_product: bool = False


def name_of(operation: Any) -> str:
    return str(operation.overloadpacket.__name__)


def cost(operation: Any, args: Any, kwargs: Any, given: list[torch.Tensor], made: list[torch.Tensor], weighs: bool) -> Cost:
    """`given` and `made` are its tensors in and out; `weighs` whether a parameter is among them."""
    name = name_of(operation)
    if name in FUSED:
        return Cost(attention=fused_flops(name, args, kwargs), is_product=False)
    if name == GROUPED:
        flops = 2.0 * math.prod(made[0].shape) * given[0].shape[-1]
    elif operation.overloadpacket in flop_registry:
        flops = float(flop_registry[operation.overloadpacket](*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made)))
    else:
        return Cost(moved=float(sum(size(tensor) for tensor in (*given, *made))))
    return Cost(flops=flops, is_product=True) if weighs else Cost(attention=flops, is_product=True)


def fused_flops(name: str, args: Any, kwargs: Any) -> float:
    query, key, value = args[:3]
    place = CAUSAL_AT.get(name, 4)
    causal = kwargs.get("is_causal", args[place] if len(args) > place else False)
    products = 2.0 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    return products / 2 if causal else products


def size(tensor: torch.Tensor) -> int:
    """Bytes that reading all of `tensor` takes: what is expanded is read once."""
    elements = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride) if tensor.numel() else 0
    return elements * tensor.element_size()
