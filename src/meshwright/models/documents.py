"""Attention over packed documents: each query attends to the keys of its own document up to its own position.

A token begins a document unless its position is the previous position plus one. Hugging Face models interpret
`position_ids` in the same way.

On CUDA devices the documents of a batch are sequences of different lengths for torch's varlen attention, a
FlashAttention kernel. Its work is the sum of the squares of the lengths, and it stores no T x T mask. On other devices
attention has a dense mask, and computes the same. The kernel needs weights of 16 bits, no dropout, and whole sequences.

[Note: sizes of documents] The host must know the number of documents and the length of the longest one, so it waits
for the device once in each forward. Both are rounded up to powers of two, and documents without tokens are added. So a
compiled block has few variants.

Source: Dao, FlashAttention-2 (2023); torch.nn.attention.varlen.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function

MAX_HEAD_DIM, HEAD_DIM_STEP = 256, 8
"""FlashAttention computes heads of at most MAX_HEAD_DIM features, a multiple of HEAD_DIM_STEP."""


class DocumentBounds(NamedTuple):
    """The documents of a batch of B rows. `starts` (N + 1), int32, is the index of the first token of each document
    among the B x T tokens, and B x T at its end. `longest` is an upper bound of their lengths."""

    starts: torch.Tensor
    longest: int


AttentionMask = torch.Tensor | DocumentBounds | None


def document_mask(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns a mask (B, 1, T, T) for the documents of `position_ids` (B, T).

    >>> document_mask(torch.tensor([[0, 1, 0]]))[0, 0].int().tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    documents = _begins(position_ids)[:, 1:].cumsum(-1)
    documents = F.pad(documents, (1, 0))
    same = documents.unsqueeze(-1) == documents.unsqueeze(-2)
    return same.tril().unsqueeze(1)


def document_bounds(position_ids: torch.Tensor) -> DocumentBounds:
    """Returns the documents of `position_ids` (B, T) ([Note: sizes of documents]).

    >>> document_bounds(torch.tensor([[0, 1, 0], [0, 1, 2]]))
    DocumentBounds(starts=tensor([0, 2, 3, 6, 6], dtype=torch.int32), longest=4)
    """
    total = position_ids.numel()
    starts = _begins(position_ids).flatten().nonzero().flatten()
    lengths = F.pad(starts, (0, 1), value=total).diff()
    starts = F.pad(starts, (0, _power_of_two(len(starts)) + 1 - len(starts)), value=total)
    return DocumentBounds(starts.int(), _power_of_two(int(lengths.max())))


def _begins(position_ids: torch.Tensor) -> torch.Tensor:
    """Returns whether each token (B, T) is the first of a document. The first token of a row is."""
    return F.pad(position_ids.diff(dim=-1) != 1, (1, 0), value=True)


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


def attention_mask(position_ids: torch.Tensor | None, hidden: torch.Tensor, dense: bool) -> AttentionMask:
    """Returns what blocks pass to `causal_attention` for the documents of `position_ids`, None without them. `hidden`
    has the dtype and device of the blocks. `dense`: whether attention needs a dense mask, because of dropout, or
    because a rank has only a piece of the sequence."""
    if position_ids is None:
        return None
    if dense or not has_varlen_kernel(hidden):
        return document_mask(position_ids)
    return document_bounds(position_ids)


def is_varlen_head(features: int) -> bool:
    """Returns whether torch's varlen attention can compute heads with `features` features."""
    return features <= MAX_HEAD_DIM and features % HEAD_DIM_STEP == 0


def has_varlen_kernel(hidden: torch.Tensor) -> bool:
    """Returns whether torch has a varlen kernel for tensors like `hidden`."""
    is_half = hidden.dtype in (torch.bfloat16, torch.float16)
    return hidden.device.type == "cuda" and is_half and torch.version.hip is None and varlen_kernel() is not None


@cache
def varlen_kernel() -> Callable[..., torch.Tensor] | None:
    """Returns torch's varlen attention, causal and with the signature (query, key, value, starts, longest). Returns
    None if this torch has none. Older versions have another argument for the causal mask, and need as many key-value
    heads as query heads."""
    try:
        attend = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return causal_varlen(attend)


def causal_varlen(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Returns causal attention by `attend`, a version of torch's `varlen_attn`."""
    known = inspect.signature(attend).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}

    def run(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int
    ) -> torch.Tensor:
        shared = query.shape[1] // key.shape[1]
        more = {"enable_gqa": True} if shared > 1 and "enable_gqa" in known else {}
        if shared > 1 and not more:
            key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
        return attend(query, key, value, starts, starts, longest, longest, **options, **more)

    return run


def document_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int
) -> torch.Tensor:
    """Returns the causal attention (B, heads, T, D) inside of documents. `key` and `value` may have fewer heads."""
    given = query, key, value, starts, longest
    if not torch.compiler.is_compiling() and has_torch_function((query, key, value)):
        found: torch.Tensor = handle_torch_function(document_attention, (query, key, value), *given)
        return found
    attend = varlen_kernel()
    assert attend is not None
    batch, heads, length, width = query.shape
    tokens = (each.transpose(1, 2).flatten(0, 1).contiguous() for each in (query, key, value))
    output = attend(*tokens, starts, longest)
    return output.view(batch, length, heads, width).transpose(1, 2)


def causal_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: AttentionMask, dropout: float = 0.0
) -> torch.Tensor:
    """Returns causal attention (B, heads, T, D). `mask` is the result of `attention_mask`."""
    if isinstance(mask, DocumentBounds):
        return document_attention(query, key, value, *mask)
    is_shared = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, enable_gqa=is_shared
    )
