"""Computes attention over a part of the keys, and merges the results of several parts. Ring attention (attention.py)
uses this file.

`SdpaCall` stores the arguments of a call of torch's scaled_dot_product_attention. `SdpaInterceptor` intercepts these
calls while a block runs.

For queries q, and keys k and values v of one part, the scores are s = scale q k + bias. The output is o = softmax(s) v,
and the log-sum-exp is l = log sum exp s. The outputs of parts 1 and 2 are merged as follows:

    l = log(exp l1 + exp l2)
    o = o1 exp(l1 - l) + o2 exp(l2 - l)

The backward of a part needs only the merged o and l, because p = exp(s - l) are the probabilities over all parts.

torch's fused kernels compute the parts. The names of these kernels are private to torch, and only this file uses them.
On CUDA the kernels are those of FlashAttention, for 16-bit dtypes without a bias. If no kernel applies, the formulas
run as separate operations.

Sources: Rabe and Staats, Self-attention does not need O(n^2) memory, arXiv 2112.05682; Dao, FlashAttention-2, arXiv
2307.08691, section 3.1; Liu et al., Ring Attention, arXiv 2310.01889.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshwright.analysis.recompute_tape import saved_tensor_state
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of


@dataclass(frozen=True)
class SdpaCall:
    """The arguments of one attention call: queries (B, H, T, D), keys (B, G, T, D) and values (B, G, T, Dv).

    T may be the length of a piece of the sequence. H is a multiple of the number G of key-value heads. The mask, if
    any, covers the whole sequence.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float

    @property
    def sources(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Returns queries, keys and values."""
        return self.query, self.key, self.value

    def objection(self, length: int) -> str:
        """Returns why context ranks cannot compute this call as self-attention over a sequence of `length` positions,
        '' if they can."""
        here, seen = self.query.shape[-2], self.key.shape[-2]
        if self.query.ndim != 4:
            return (
                f"attention of queries with {self.query.ndim} dimensions instead of 4 does not run over context ranks"
            )
        if here != seen:
            return f"attention of {here} queries to {seen} keys is not self-attention over one sequence"
        if self.mask is not None and self.mask.requires_grad:
            return "attention with a learnt bias (a mask that needs a gradient) does not run over context ranks"
        if self.mask is not None and not all(size in (1, length) for size in self.mask.shape[-2:]):
            return (
                f"the last two dimensions of the mask are {list(self.mask.shape[-2:])}, but must be 1 or the sequence "
                f"length {length}"
            )
        return ""

    def check(self, length: int) -> None:
        """Checks that context ranks can compute this call as self-attention over a sequence of `length` positions.

        Raises:
            InputError: context ranks cannot compute this call.
        """
        if why := self.objection(length):
            raise InputError(Message("cp: {why}: use cp1", why=why))


def make_sdpa_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> SdpaCall:
    """Returns the arguments of `scaled_dot_product_attention` as an `SdpaCall`. `enable_gqa` is ignored, because the
    shapes determine the head groups."""
    return SdpaCall(
        query, key, value, attn_mask, float(dropout_p), bool(is_causal), scale or 1.0 / math.sqrt(query.shape[-1])
    )


class SdpaInterceptor(TorchFunctionMode):
    """While active, computes each call of scaled_dot_product_attention with `attend`.

    Raises:
        InputError: an activation checkpoint of the model's own code would recompute attention while this mode is
            inactive.
    """

    def __init__(self, attend: Callable[[SdpaCall], torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def __enter__(self) -> Self:
        self._began = saved_tensor_state()
        super().__enter__()
        return self

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            if not torch.compiler.is_compiling() and saved_tensor_state() != self._began:
                raise InputError(
                    Message(
                        "cp: the model's own activation checkpointing would recompute attention from this rank's "
                        "piece of the sequence alone: turn it off and let the plan recompute (rc-full), or use cp1"
                    )
                )
            return self.attend(make_sdpa_call(*args, **(kwargs or {})))
        return function(*args, **(kwargs or {}))


def torch_sdpa(call: SdpaCall) -> torch.Tensor:
    """Returns the result of torch's own attention for `call`."""
    grouped = call.query.shape[1] != call.key.shape[1]
    return F.scaled_dot_product_attention(
        call.query, call.key, call.value, call.mask, call.dropout, call.causal, scale=call.scale, enable_gqa=grouped
    )


_CPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_CUDA_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
_CUDA_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward
_HALF_DTYPES = (torch.bfloat16, torch.float16)

_MAX_FLASH_HEAD_DIM = 192
"""Largest head dimension for which FlashAttention computes gradients on every device that FlashAttention supports."""


class PartialAttention(NamedTuple):
    """Attention of queries (B, H, Q, D) over a part of the keys and values (B, G, K, ...). H is a multiple of G. `bias`
    (B or 1, H or 1, Q, K) is added to the scores."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    causal: bool = False
    bias: torch.Tensor | None = None

    @property
    def fused(self) -> bool:
        """Whether torch's fused CPU kernel can compute this part."""
        return backend_of(self.query.device).memory_is_host and self.value.shape[-1] == self.query.shape[-1]

    @property
    def flash(self) -> bool:
        """Whether CUDA's FlashAttention kernels can compute this part. torch decides whether the device has these
        kernels and whether they are enabled."""
        backend = backend_of(self.query.device)
        return supports_flash(self) and backend.supports_flash_attention(self.query, self.key, self.value, self.causal)


def supports_flash(part: PartialAttention) -> bool:
    """Returns whether FlashAttention accepts `part`. FlashAttention accepts 16-bit dtypes without a bias. Queries, keys
    and values must have the same head dimension, which must be a multiple of 8 and at most 192.

    >>> def of(width, dtype, bias=None):
    ...     return PartialAttention(*torch.empty(3, 1, 2, 4, width, dtype=dtype), 1.0, bias=bias)
    >>> ([supports_flash(of(width, torch.bfloat16)) for width in (64, 128, 60, 256)],
    ...     supports_flash(of(64, torch.float32)))
    ([True, True, False, False], False)
    >>> supports_flash(of(64, torch.bfloat16, torch.zeros(1, 1, 4, 4)))
    False
    """
    width = part.query.shape[-1]
    same_form = part.value.shape[-1] == width and part.query.dtype == part.key.dtype == part.value.dtype
    return (
        part.bias is None
        and same_form
        and part.query.dtype in _HALF_DTYPES
        and width % 8 == 0
        and width <= _MAX_FLASH_HEAD_DIM
    )


def mask_to_bias(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns a mask as a bias on the scores, with minus infinity for masked keys. A boolean mask is False for masked
    keys. In a floating-point mask, a key is masked if its value is at most half the minimum of the mask's dtype."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    return mask.to(dtype).masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -math.inf)


def attention_forward(part: PartialAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output (B, H, Q, Dv) and the log-sum-exp (B, H, Q). For a query whose keys are all masked, the output
    is 0 and the log-sum-exp is minus infinity."""
    if part.fused:
        output, total = _CPU_FLASH(
            part.query, part.key, part.value, 0.0, part.causal, attn_mask=part.bias, scale=part.scale
        )
    elif part.flash:
        output, total = flash_forward(part)
    else:
        scores = _scores(part)
        total = torch.logsumexp(scores, -1)
        output = (_probabilities(scores, total).to(part.value.dtype) @ _repeat_kv(part.value, part.query)).to(
            part.query.dtype
        )
    if part.bias is not None:  # for a query whose keys are all masked, the fused kernel returns a log-sum-exp of 0
        total = total.masked_fill((part.bias == -math.inf).all(-1), -math.inf)
    return output, total


def attention_backward(
    part: PartialAttention, gradient: torch.Tensor, output: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the contribution of `part` to the gradients of queries, keys and values. `gradient`: the gradient of the
    merged output. `output` and `total`: the merged output and log-sum-exp."""
    total = total.masked_fill(total == -math.inf, 0.0)
    if part.fused:
        found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _CPU_FLASH_BACKWARD(
            gradient,
            part.query,
            part.key,
            part.value,
            output,
            total,
            0.0,
            part.causal,
            attn_mask=part.bias,
            scale=part.scale,
        )
        return found
    if part.flash:
        return flash_backward(part, gradient, output, total)
    precise = total.dtype
    probabilities = _probabilities(_scores(part), total)
    key, value = _repeat_kv(part.key, part.query).to(precise), _repeat_kv(part.value, part.query).to(precise)
    wide = gradient.to(precise)
    of_value = probabilities.transpose(-1, -2) @ wide
    of_scores = probabilities * (wide @ value.transpose(-1, -2) - (wide * output).sum(-1, keepdim=True)) * part.scale
    of_query, of_key = of_scores @ key, of_scores.transpose(-1, -2) @ part.query.to(precise)
    return of_query, _sum_kv_groups(of_key, part.key), _sum_kv_groups(of_value, part.value)


def flash_forward(part: PartialAttention) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the output and the log-sum-exp from the FlashAttention kernel."""
    output, total, *_ = _CUDA_FLASH(part.query, part.key, part.value, 0.0, part.causal, scale=part.scale)
    return output, total


def flash_backward(
    part: PartialAttention, gradient: torch.Tensor, output: torch.Tensor, total: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the gradients of queries, keys and values from FlashAttention's backward kernel.

    The kernel requires a contiguous `total`. Its random state arguments are zeros, because there is no dropout.
    """
    drawn = torch.zeros(2, dtype=torch.uint64, device=part.query.device)
    longest = part.query.shape[2], part.key.shape[2]
    given = gradient.contiguous(), part.query, part.key, part.value, output.contiguous(), total.contiguous()
    found: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _CUDA_FLASH_BACKWARD(
        *given, None, None, *longest, 0.0, part.causal, drawn, drawn.new_zeros(()), scale=part.scale
    )
    return found


class LseMerge:
    """Merges parts of attention one after the other. Accumulates output and log-sum-exp in at least float32.

    `width`: the dimension Dv of a value. The memory layout of the output is (B, Q, H, Dv), like that of torch's
    kernels. The matrix product that follows attention needs the heads of a position next to each other. With this
    layout it can save the output for backward without a copy.
    """

    def __init__(self, query: torch.Tensor, width: int) -> None:
        self.dtype = query.dtype
        precise = torch.float32 if query.dtype in _HALF_DTYPES else query.dtype
        rows, heads, length, _ = query.shape
        self.output = torch.zeros(rows, length, heads, width, dtype=precise, device=query.device).transpose(1, 2)
        self.total = torch.full(query.shape[:-1], -math.inf, dtype=precise, device=query.device)

    def add(self, rows: slice, output: torch.Tensor, total: torch.Tensor) -> None:
        """Merges a part that covers only the queries `rows`. `output` and `total`: the part's output and
        log-sum-exp."""
        before = self.total[..., rows]
        after = torch.logaddexp(before, total)
        level = after.masked_fill(after == -math.inf, 0.0)
        self.output[..., rows, :].mul_((before - level).exp().unsqueeze(-1)).add_(
            output * (total - level).exp().unsqueeze(-1)
        )
        self.total[..., rows] = after

    def result(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the merged output in the dtype of the queries, and the log-sum-exp."""
        return self.output.to(self.dtype), self.total


def _scores(part: PartialAttention) -> torch.Tensor:
    precise = torch.float32 if part.query.dtype in _HALF_DTYPES else part.query.dtype
    scores = part.query.to(precise) @ _repeat_kv(part.key, part.query).to(precise).transpose(-1, -2) * part.scale
    if part.causal:
        scores = scores.masked_fill(
            torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1), -math.inf
        )
    return scores if part.bias is None else scores + part.bias


def _probabilities(scores: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    return (scores - total.masked_fill(total == -math.inf, 0.0).unsqueeze(-1)).exp()


def _repeat_kv(x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Returns `x` with each key-value head repeated for its group of query heads."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1) if x.shape[1] != query.shape[1] else x


def _sum_kv_groups(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return gradient.unflatten(1, (x.shape[1], -1)).sum(2)
