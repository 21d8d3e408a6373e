"""Attention of some queries to some keys, with the log-sum-exp of each query's scores, so that the parts over all keys can be put together.

With scores s = scale q k + bias over a part of the keys, o = softmax(s) v and l = log sum exp s:

    merge      l = log(exp l1 + exp l2),  o = o1 exp(l1 - l) + o2 exp(l2 - l)
    backward   of a part needs only the merged o and l: p = exp(s - l) are the final probabilities

Sources: Rabe and Staats, Self-attention does not need O(n^2) memory, arXiv 2112.05682; Dao, FlashAttention-2, arXiv 2307.08691, section 3.1;
Liu et al., Ring Attention, arXiv 2310.01889. torch's own fused kernels compute the parts (private names of torch, only here), on CUDA those of
FlashAttention for types of 16 bits and without a bias; where they do not apply the formulas are written out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

_FUSED = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_FUSED_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
_LOW = (torch.bfloat16, torch.float16)

_WIDEST = 192
"""Of a head whose gradients FlashAttention computes on every device that it runs on."""


class Part(NamedTuple):
    """Queries (B, H, Q, D) against keys and values (B, G, K, ...), H a multiple of G. `bias` (B or 1, H or 1, Q, K) is added to scores."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    causal: bool = False
    bias: torch.Tensor | None = None

    @property
    def fused(self) -> bool:
        return self.query.device.type == "cpu" and self.value.shape[-1] == self.query.shape[-1]

    @property
    def flash(self) -> bool:
        """Whether CUDA's kernels take it; torch knows which devices have them, and whether somebody has turned them off."""
        if not self.query.is_cuda or torch.version.hip or not flash_fits(self):
            return False
        grouped = self.key.shape[1] != self.query.shape[1]
        asked = torch.backends.cuda.SDPAParams(self.query, self.key, self.value, None, 0.0, self.causal, grouped)
        return torch.backends.cuda.can_use_flash_attention(asked)


def flash_fits(part: Part) -> bool:
    """By types and shapes: 16 bits, no bias, heads of whole vectors of 16 bytes.

    >>> of = lambda width, dtype, bias=None: Part(*torch.empty(3, 1, 2, 4, width, dtype=dtype), 1.0, bias=bias)
    >>> [flash_fits(of(width, torch.bfloat16)) for width in (64, 128, 60, 256)], flash_fits(of(64, torch.float32))
    ([True, True, False, False], False)
    >>> flash_fits(of(64, torch.bfloat16, torch.zeros(1, 1, 4, 4)))
    False
    """
    width = part.query.shape[-1]
    alike = part.value.shape[-1] == width and part.query.dtype == part.key.dtype == part.value.dtype
    return part.bias is None and alike and part.query.dtype in _LOW and width % 8 == 0 and width <= _WIDEST


def bias_of(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A mask as what is added to scores: minus infinity where nothing is seen, also where a mask says so by the lowest number."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    return mask.to(dtype).masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -math.inf)


def forward(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, H, Q, Dv) and log-sum-exp (B, H, Q), of which a query that sees nothing has zeros and minus infinity."""
    if part.fused:
        output, total = _FUSED(part.query, part.key, part.value, 0.0, part.causal, attn_mask=part.bias, scale=part.scale)
    elif part.flash:
        output, total = flash_forward(part)
    else:
        scores = _scores(part)
        total = torch.logsumexp(scores, -1)
        output = (_probabilities(scores, total).to(part.value.dtype) @ _repeated(part.value, part.query)).to(part.query.dtype)
    if part.bias is not None:  # the fused kernel says 0 of a query that sees nothing
        total = total.masked_fill((part.bias == -math.inf).all(-1), -math.inf)
    return output, total


def backward(
    part: Part, gradient: torch.Tensor, output: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The part's share of the gradients of queries, keys and values, from the merged `output` and `total`."""
    total = total.masked_fill(total == -math.inf, 0.0)
    if part.fused:
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _FUSED_BACKWARD(
            gradient, part.query, part.key, part.value, output, total, 0.0, part.causal, attn_mask=part.bias, scale=part.scale
        )
        return found
    if part.flash:
        return flash_backward(part, gradient, output, total)
    precise = total.dtype
    probabilities = _probabilities(_scores(part), total)
    key, value = _repeated(part.key, part.query).to(precise), _repeated(part.value, part.query).to(precise)
    wide = gradient.to(precise)
    of_value = probabilities.transpose(-1, -2) @ wide
    of_scores = probabilities * (wide @ value.transpose(-1, -2) - (wide * output).sum(-1, keepdim=True)) * part.scale
    of_query, of_key = of_scores @ key, of_scores.transpose(-1, -2) @ part.query.to(precise)
    return of_query, _gathered(of_key, part.key), _gathered(of_value, part.value)


def flash_forward(part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    output, total, *_ = _FLASH(part.query, part.key, part.value, 0.0, part.causal, scale=part.scale)
    return output, total


def flash_backward(
    part: Part, gradient: torch.Tensor, output: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`total` is read as it lies, row by row. Without dropout nothing is drawn: what says how is of its type and empty."""
    drawn = torch.zeros(2, dtype=torch.uint64, device=part.query.device)
    longest = part.query.shape[2], part.key.shape[2]
    given = gradient.contiguous(), part.query, part.key, part.value, output.contiguous(), total.contiguous()
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _FLASH_BACKWARD(
        *given, None, None, *longest, 0.0, part.causal, drawn, drawn.new_zeros(()), scale=part.scale
    )
    return found


class Merged:
    """Output and log-sum-exp of all queries over the parts seen so far, in float32 at least. It lies in memory as (B, Q, H, Dv), as torch's kernels leave
    theirs: what reads all heads of a position side by side, the next product, keeps this very output, not a copy."""

    def __init__(self, query: torch.Tensor, width: int) -> None:
        self.dtype = query.dtype
        precise = torch.float32 if query.dtype in _LOW else query.dtype
        rows, heads, length, _ = query.shape
        self.output = torch.zeros(rows, length, heads, width, dtype=precise, device=query.device).transpose(1, 2)
        self.total = torch.full(query.shape[:-1], -math.inf, dtype=precise, device=query.device)

    def add(self, rows: slice, output: torch.Tensor, total: torch.Tensor) -> None:
        """A part over the queries `rows`."""
        before = self.total[..., rows]
        after = torch.logaddexp(before, total)
        level = after.masked_fill(after == -math.inf, 0.0)
        self.output[..., rows, :].mul_((before - level).exp().unsqueeze(-1)).add_(output * (total - level).exp().unsqueeze(-1))
        self.total[..., rows] = after

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.output.to(self.dtype), self.total


def _scores(part: Part) -> torch.Tensor:
    precise = torch.float32 if part.query.dtype in _LOW else part.query.dtype
    scores = part.query.to(precise) @ _repeated(part.key, part.query).to(precise).transpose(-1, -2) * part.scale
    if part.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1), -math.inf)
    return scores if part.bias is None else scores + part.bias


def _probabilities(scores: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return (scores - total.masked_fill(total == -math.inf, 0.0).unsqueeze(-1)).exp()


def _repeated(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Each key-value head for its group of query heads."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1) if x.shape[1] != query.shape[1] else x


def _gathered(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return gradient.unflatten(1, (x.shape[1], -1)).sum(2)
