"""Attention as devices run it: by a fused kernel that drops inside, whatever the widths of queries and values.

On host tensors torch falls back on whole matrices of scores where there is dropout, or where values have another width than queries (multi-head
latent attention). CUDA kernels do not: dropout is repeated from its seed, and the memory-efficient kernel takes any width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F


def attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attn_mask: torch.Tensor | None = None, *rest: Any, **named: Any
) -> torch.Tensor:
    """The arguments of `scaled_dot_product_attention`."""
    causal = bool(named.get("is_causal", rest[1] if len(rest) > 1 else False))
    scale, grouped = named.get("scale"), bool(named.get("enable_gqa", False))
    if value.shape[-1] == query.shape[-1] or query.ndim != 4:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, 0.0, causal, scale=scale, enable_gqa=grouped)
    if attn_mask is not None:
        bias = torch.zeros_like(attn_mask, dtype=query.dtype) if attn_mask.dtype == torch.bool else attn_mask
        attn_mask = bias.expand(*query.shape[:-1], key.shape[-2])
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, True, 0.0, causal, scale=scale
    )[0]
    return output
