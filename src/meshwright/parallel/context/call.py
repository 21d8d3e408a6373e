"""A call of torch's scaled_dot_product_attention as data, and the mode that sees every such call while a block runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from meshwright.anatomy.keeper import recording
from meshwright.base.errors import InputError


@dataclass(frozen=True)
class Call:
    """Queries (B, H, T, D), keys and values (B, G, T, ...), where T may be a piece; the mask, if any, is of the whole sequence."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    scale: float

    @property
    def sources(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values."""
        return self.query, self.key, self.value

    def objection(self, length: int) -> str:
        """Why this is no attention of a sequence of `length` over itself that a piece of it can share in; empty when it is one."""
        here, seen = self.query.shape[-2], self.key.shape[-2]
        if self.query.ndim != 4 or here != seen:
            return f"attention from {here} positions to {seen} others is not of one sequence over itself"
        if self.mask is not None and self.mask.requires_grad:
            return "attention with a learnt bias (a mask that needs a gradient) does not run over context ranks"
        if self.mask is not None and not all(size in (1, length) for size in self.mask.shape[-2:]):
            return f"a mask of {list(self.mask.shape[-2:])} is not one of the whole sequence ({length})"
        return ""

    def check(self, length: int) -> None:
        """Raises InputError with the objection."""
        if why := self.objection(length):
            raise InputError(f"cp: {why}: use cp1")


def call_of(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Call:
    """The arguments of `scaled_dot_product_attention`. Its groups of heads are told by the shapes."""
    return Call(query, key, value, attn_mask, float(dropout_p), bool(is_causal), scale or 1.0 / math.sqrt(query.shape[-1]))


class Attending(TorchFunctionMode):
    """While it is on, attention is computed by `attend`. Raises InputError where the model would compute it again when it is off."""

    def __init__(self, attend: Callable[[Call], torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend

    def __enter__(self) -> Self:
        self._began = recording()
        super().__enter__()
        return self

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is F.scaled_dot_product_attention:
            if not torch.compiler.is_compiling() and recording() != self._began:
                raise InputError(
                    "cp: attention runs inside a checkpoint of the model's own, which would compute it again of this rank's piece alone: "
                    "turn that off and let the plan recompute (rc-full), or use cp1"
                )
            return self.attend(call_of(*args, **(kwargs or {})))
        return function(*args, **(kwargs or {}))


def attend_plainly(call: Call) -> torch.Tensor:
    """What torch computes."""
    grouped = call.query.shape[1] != call.key.shape[1]
    return F.scaled_dot_product_attention(
        call.query, call.key, call.value, call.mask, call.dropout, call.causal, scale=call.scale, enable_gqa=grouped
    )
