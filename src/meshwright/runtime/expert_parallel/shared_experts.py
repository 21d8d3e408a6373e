"""Overlaps the dispatch of tokens to expert ranks with shared experts, which process every token.

The shared experts of a mixture do not depend on the dispatch. So `SharedExpertOverlap` computes them when the dispatch
has started. In backward the gradient of the dispatch is in flight while autograd computes the gradients of the shared
experts: autograd runs operations in the reverse order of the forward, so these lie between the start and the end of the
exchange (`start_exchange`, `end_exchange`).

    called last    A mixture of the form of DeepSeek and Llama 4 calls the shared experts after the routed experts, with
                   its own input. They are computed ahead of this call, and the call returns the result.
    called first   A mixture of the form of Qwen2-MoE calls them before the routed experts. The call returns a
                   `DeferredTensor`. Its values are computed during the dispatch, or at their first use.

`find_shared_experts` finds the module by a run of a copy on the meta device. It finds none if this run does not prove
that the order makes no difference. This is so if the mixture reads the result before it calls the routed experts or
changes the input of the shared experts in place, or if the shared experts draw random numbers.

Ranks that share memory exchange rows with the processors that compute, so they do not overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.analysis.model_copy import copy_to_meta
from meshwright.runtime.comm.async_collectives import COMPLETED_WORK, CollectiveWork, all_to_all_rows
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.weight_gradients import is_functorch_tensor


class SharedExperts(NamedTuple):
    """The shared experts of a mixture: the name of the child, and whether it is called before the routed experts.
    `reads_rows`: the argument of the child is not the input (..., C) of the mixture, but a view (N, C) of it."""

    name: str
    is_called_first: bool
    reads_rows: bool = False


def find_shared_experts(mixture: nn.Module, experts: str) -> SharedExperts | None:
    """Returns the shared experts of `mixture`: the only child that its forward calls once, and that could be computed
    when the child `experts` is called, with the same result. Returns None if there is no such child, or if training and
    evaluation differ."""
    found = {_run_on_meta(mixture, experts, is_training) for is_training in (True, False)}
    return found.pop() if len(found) == 1 else None


def _run_on_meta(mixture: nn.Module, experts: str, is_training: bool) -> SharedExperts | None:
    names = [name for name, child in mixture.named_children() if name != experts and _first_weight(child) is not None]
    if not names:
        return None
    try:
        copied = copy_to_meta(mixture).model.to("meta").train(is_training)
        weight = _first_weight(copied.get_submodule(names[-1]))
        assert weight is not None
        given = torch.zeros(1, 4, weight.shape[1], device="meta", dtype=weight.dtype, requires_grad=True).clone()
        recorder = MixtureRecorder(given)
        for name in (experts, *names):
            recorder.record(copied.get_submodule(name), "" if name == experts else name)
        copied(given)
    except Exception:  # the mixture needs more than hidden states, or values
        return None
    found = [each for each in recorder.found if recorder.names.count(each.name) == 1]
    return found[0] if len(found) == 1 and recorder.names.count("") == 1 else None


def _first_weight(module: nn.Module) -> torch.Tensor | None:
    """Returns the weight of the first linear layer inside `module`, or None if there is none."""
    return next((layer.weight for layer in module.modules() if isinstance(layer, nn.Linear)), None)


class MixtureRecorder:
    """Records the calls of the children of a mixture that runs on the meta device with the input `given`. `names`: the
    children in the order of their calls, '' for the routed experts. `found`: the children that could be computed when
    the routed experts are called."""

    def __init__(self, given: torch.Tensor) -> None:
        self.given, self.names = given, list[str]()
        self.found: list[SharedExperts] = []
        self._pending: list[tuple[str, torch.Tensor, torch.Tensor, int]] = []

    def record(self, child: nn.Module, name: str) -> None:
        """Makes this object record the calls of `child`."""
        inner = partial(self._call, child.forward, name) if name else self._call_experts
        child.forward = inner  # type: ignore[method-assign]

    def _call(self, inner: Callable[..., Any], name: str, *args: Any, **kwargs: Any) -> Any:
        self.names.append(name)
        with RandomOps() as random:
            result = inner(*args, **kwargs)
        x = args[0] if len(args) == 1 and not kwargs else None
        if random.are_used or not (isinstance(x, torch.Tensor) and isinstance(result, torch.Tensor)):
            return result
        if (x.shape, x.dtype) != (result.shape, result.dtype):
            return result
        if "" not in self.names:
            deferred = DeferredTensor.make(x, lambda: result)
            self._pending.append((name, deferred, x, x._version))
            return deferred
        reads_rows = x is not self.given and self._is_view_as_rows(x)
        if (x is self.given or reads_rows) and not x._version:
            self.found.append(SharedExperts(name, False, reads_rows))
        return result

    def _is_view_as_rows(self, x: torch.Tensor) -> bool:
        """Returns whether autograd computes the gradient of the input from that of `x` (N, C) by a reshape only."""
        node = x.grad_fn
        if node is None or node.name() != "ViewBackward0":
            return False
        return node.next_functions[0][0] is self.given.grad_fn and x.shape == self.given.flatten(0, -2).shape

    def _call_experts(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.names.append("")
        read = {id(value) for value in tree_leaves((args, kwargs))}
        for name, result, x, version in self._pending:
            if isinstance(result, DeferredTensor) and id(result) not in read and x._version == version:
                self.found.append(SharedExperts(name, True))
        return torch.zeros_like(args[0])


class RandomOps(TorchDispatchMode):
    """Records whether an operation inside the context draws random numbers."""

    are_used = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.are_used = self.are_used or torch.Tag.nondeterministic_seeded in function.tags
        return function(*args, **(kwargs or {}))


class DeferredTensor(torch.Tensor):
    """A tensor whose values are computed when `fill` is called, or else when a function of torch first reads it. From
    then on it is an ordinary tensor."""

    compute: Callable[[], torch.Tensor]

    @classmethod
    def make(cls, like: torch.Tensor, compute: Callable[[], torch.Tensor]) -> DeferredTensor:
        """Returns a tensor with the shape and dtype of `like` whose values are the result of `compute`."""
        made: Any = torch.empty_like(like, requires_grad=False, memory_format=torch.contiguous_format)
        made.__class__ = cls  # as torch does for lazy parameters
        made.compute = compute
        return made  # type: ignore[no-any-return]

    def fill(self) -> None:
        """Computes the values. Autograd attaches the graph of the computation to this tensor."""
        values: dict[str, Any] = vars(self)
        compute = values.pop("compute")
        self.__class__ = torch.Tensor  # type: ignore[assignment]
        computed = compute()
        assert (computed.shape, computed.dtype) == (self.shape, self.dtype)
        self.copy_(computed)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, cls):
                value.fill()
        return function(*args, **(kwargs or {}))


class SharedExpertOverlap:
    """Replaces the forward of `mixture`, and the calls of its child `found`. Inside of the forward, `compute` computes
    the child ahead of its call, or after it if it is called first."""

    def __init__(self, mixture: nn.Module, found: SharedExperts) -> None:
        self.found, self.inner = found, mixture.forward
        self.shared = shared = mixture.get_submodule(found.name)
        self.given: torch.Tensor | None = None
        self.early: tuple[torch.Tensor, torch.Tensor, int] | None = None
        self.deferred: DeferredTensor | None = None
        mixture.forward = self.forward  # type: ignore[method-assign]
        # Module.__call__ calls this attribute, before hooks, which a tensor-parallel region has on `shared`.
        shared._compiled_call_impl = self.call  # type: ignore[assignment]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the forward of the mixture."""
        self.given, self.early, self.deferred = args[0] if args else None, None, None
        try:
            result = self.inner(*args, **kwargs)
            self._fill()
            return result
        finally:
            self.given = self.early = self.deferred = None

    def compute(self) -> None:
        """Computes the shared experts, unless they have been computed."""
        self._fill()
        if self.given is not None and self.early is None and not self.found.is_called_first:
            x = self.given.flatten(0, -2) if self.found.reads_rows else self.given
            self.early = x, self.shared._call_impl(x), x._version

    def _fill(self) -> None:
        if isinstance(self.deferred, DeferredTensor):  # nothing has read it
            self.deferred.fill()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result of `compute` for the same input, or a tensor that `compute` fills, or else computes the
        shared experts."""
        early, self.early = self.early, None
        if self.given is None or len(args) != 1 or kwargs:
            return self.shared._call_impl(*args, **kwargs)
        if early is not None and _is_same_tensor(early[0], args[0]) and args[0]._version == early[2]:
            return early[1]
        if self.found.is_called_first and self.deferred is None and _can_defer(args[0]):
            compute = partial(self._compute_deferred, args[0], args[0]._version, torch.is_grad_enabled())
            self.deferred = DeferredTensor.make(args[0], compute)
            return self.deferred
        return self.shared._call_impl(*args)

    def _compute_deferred(self, x: torch.Tensor, version: int, enabled: bool) -> torch.Tensor:
        assert x._version == version, "the mixture changes the input of its shared experts in place, but not always"
        with torch.set_grad_enabled(enabled):
            result: torch.Tensor = self.shared._call_impl(x)
        return result


def _can_defer(x: torch.Tensor) -> bool:
    """Returns whether the result of a call with `x` has the dtype of `x`, as in the run on the meta device."""
    return not torch.is_autocast_enabled(x.device.type) and not is_functorch_tensor(x)


def _is_same_tensor(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Returns whether `x` and `y` have the same elements in memory."""
    if x is y:
        return True
    same = (x.shape, x.stride(), x.storage_offset()) == (y.shape, y.stride(), y.storage_offset())
    return same and x.requires_grad == y.requires_grad and x.is_set_to(y)


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
