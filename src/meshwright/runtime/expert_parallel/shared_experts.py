"""Overlaps the dispatch of tokens to expert ranks with shared experts, which process every token.

A mixture of DeepSeek's form calls its routed experts, and then a module of shared experts with its own input. The
shared experts do not depend on the dispatch. So `SharedExpertOverlap` computes them when the dispatch has started, and
returns the result when the mixture calls them. In backward the gradient of the dispatch is in flight while autograd
computes the gradients of the shared experts: autograd runs operations in the reverse order of the forward, so these lie
between the start and the end of the exchange (`start_exchange`, `end_exchange`).

`find_shared_experts` finds the module by a run of a copy on the meta device. It finds none if the mixture calls the
shared experts before the routed experts (Qwen2-MoE, Llama 4): in that order nothing is left to overlap with. It also
finds none if the shared experts have dropout, because they would draw their random numbers in another order.

Ranks that share memory exchange rows with the processors that compute, so they do not overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from meshwright.analysis.model_copy import copy_to_meta
from meshwright.runtime.comm.async_collectives import COMPLETED_WORK, CollectiveWork, all_to_all_rows
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.tensor_parallel.random import has_dropout


def find_shared_experts(mixture: nn.Module, experts: str) -> str:
    """Returns the name of the child of `mixture` that its forward calls once, after the child `experts`, with the input
    of `mixture` as its only argument. Returns '' if there is none."""
    names = [name for name, child in mixture.named_children() if name != experts and _input_features(child)]
    if not names or all(has_dropout(mixture.get_submodule(name)) for name in names):
        return ""
    try:
        copied = copy_to_meta(mixture).model.to("meta")
        calls: list[tuple[str, bool]] = []
        given = torch.zeros(1, 4, _input_features(mixture.get_submodule(names[-1])), device="meta")
        for name in (experts, *names):
            _record_calls(copied.get_submodule(name), name, given, calls)
        copied(given)
    except Exception:  # the mixture needs more than hidden states, or values
        return ""
    order = [name for name, _ in calls]
    if order.count(experts) != 1:
        return ""
    later = calls[order.index(experts) + 1 :]
    found = [name for name, reads_input in later if reads_input and order.count(name) == 1]
    return found[0] if len(found) == 1 and not has_dropout(mixture.get_submodule(found[0])) else ""


def _input_features(module: nn.Module) -> int:
    """Returns the input features of the first linear layer inside `module`, or 0 if there is none."""
    return next((layer.in_features for layer in module.modules() if isinstance(layer, nn.Linear)), 0)


def _record_calls(module: nn.Module, name: str, given: torch.Tensor, calls: list[tuple[str, bool]]) -> None:
    """Makes `module` append to `calls` its name, and whether its only argument is the unchanged tensor `given`, and
    return zeros."""

    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        calls.append((name, len(args) == 1 and not kwargs and args[0] is given and not given._version))
        return torch.zeros_like(args[0])

    module.forward = forward  # type: ignore[method-assign]


class SharedExpertOverlap:
    """Replaces the forward of `mixture`, and the calls of its child `shared`. Inside of the forward, `compute` computes
    the child ahead of its call."""

    def __init__(self, mixture: nn.Module, shared: nn.Module) -> None:
        self.shared, self.inner = shared, mixture.forward
        self.given: torch.Tensor | None = None
        self.early: tuple[torch.Tensor, int] | None = None
        mixture.forward = self.forward  # type: ignore[method-assign]
        # Module.__call__ calls this attribute, before hooks, which a tensor-parallel region has on `shared`.
        shared._compiled_call_impl = self.call  # type: ignore[assignment]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of the mixture."""
        self.given, self.early = args[0] if args else None, None
        try:
            return self.inner(*args, **kwargs)
        finally:
            self.given = self.early = None

    def compute(self) -> None:
        """Computes the shared experts for the input of the mixture, unless they were called already."""
        if self.given is not None and self.early is None:
            self.early = self.shared._call_impl(self.given), self.given._version

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of `compute` for the same input, or else computes the shared experts."""
        early, self.early = self.early, None
        if early is not None and len(args) == 1 and not kwargs and self.given is not None and args[0] is self.given:
            result, version = early
            if self.given._version == version:
                return result
        return self.shared._call_impl(*args, **kwargs)


class RowExchange:
    """An exchange of rows between expert ranks in forward, and of their gradients in backward. `rows`: as in
    `all_to_all_rows`. `buffer` has the rows that arrive, when `work` is complete."""

    def __init__(self, rows: Sequence[Sequence[int]], group: CommGroup) -> None:
        self.rows, self.group = rows, group
        self.buffer: torch.Tensor | None = None
        self.work: CollectiveWork = COMPLETED_WORK

    def start(self, sent: torch.Tensor, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Starts to send the rows `sent`. Returns the buffer of the rows that arrive."""
        buffer = sent.new_empty(sum(row[self.group.index] for row in rows), sent.shape[1])
        self.work = all_to_all_rows(buffer, sent.contiguous(), rows, self.group)
        self.buffer = buffer
        return buffer

    def end(self) -> torch.Tensor:
        """Returns the rows that have arrived."""
        self.work.wait()
        buffer, self.buffer = self.buffer, None
        assert buffer is not None
        return buffer


def start_exchange(sent: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """Starts `exchange` with the rows `sent` (P, C), sorted by destination rank. Returns a tensor without values for
    `end_exchange`."""
    result: torch.Tensor = _StartExchange.apply(sent, exchange)
    return result


def end_exchange(started: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
    """Returns the rows that all ranks have sent to this rank, sorted by source rank. `started`: the result of
    `start_exchange`. Backward starts to send the gradients in the reverse direction, and `start_exchange` ends it."""
    result: torch.Tensor = _EndExchange.apply(started, exchange)
    return result


class _StartExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sent: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        buffer = exchange.start(sent, exchange.rows)
        return torch.ops.aten._unsafe_view(buffer, buffer.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.exchange.end(), None


class _EndExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: torch.Tensor, exchange: RowExchange) -> torch.Tensor:
        ctx.exchange = exchange
        buffer = exchange.end()
        return torch.ops.aten._unsafe_view(buffer, buffer.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.exchange.start(gradient, tuple(zip(*ctx.exchange.rows, strict=True)))
        return gradient, None
