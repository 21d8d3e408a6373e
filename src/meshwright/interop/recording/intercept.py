"""Observes torch functions while a recording is open: backward, cross entropy, dropout and gradient clipping.

Each function is replaced where torch itself looks it up, so that it is observed however a loop has imported it. The
originals are restored when the recording closes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.core.errors import InputError
from meshwright.core.messages import Message


class TrainingObserver(Protocol):
    """Receives the observed calls."""

    def backward(self, root: torch.Tensor) -> None:
        """A backward begins from the scalar `root`."""

    def cross_entropy(self, loss: torch.Tensor, call: dict[str, Any]) -> None:
        """Cross entropy was computed; `call` has its arguments by name."""

    def dropout(self, given: torch.Tensor, output: torch.Tensor, rate: float) -> torch.Tensor:
        """Dropout was applied to `given`. The result replaces its output."""

    def clip(self, max_norm: float, before: bool) -> None:
        """Gradients will be clipped (`before`), or have been clipped."""

    def pause(self, paused: bool) -> None:
        """A forward that only finds shapes begins or has ended."""

    def optimizer_step(self, optimizer: torch.optim.Optimizer, before: bool) -> None:
        """An optimizer step begins (`before`) or has ended."""


CROSS_ENTROPY_ARGUMENTS = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
SHAPE_INFERENCE = ("_forward_metadata_inference", "_backward_metadata_inference", "_shape_inference")
"""Methods of a stage of torch.distributed.pipelining that run the model only to find shapes."""
REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


@contextmanager
def observe(observer: TrainingObserver) -> Iterator[None]:
    """A context in which `observer` receives the calls. Raises InputError inside another such context."""
    if hasattr(torch.autograd.backward, "observer"):
        raise InputError(Message("a recording is open already: give all models to one recording, as a list"))
    with ExitStack() as stack:
        _replace(stack, torch.autograd, "backward", _backward(observer))
        _replace(stack, torch._C._nn, "cross_entropy_loss", _cross_entropy(observer))
        for name in ("dropout", "dropout_"):
            _replace(stack, torch._VF, name, _dropout(observer))
        for owner, name in (
            (clip_grad, "_clip_grads_with_norm_"),
            (clip_grad, "clip_grads_with_norm_"),
            (torch.nn.utils, "clip_grads_with_norm_"),
        ):
            if hasattr(owner, name):
                _replace(stack, owner, name, _clip(observer, 1))
        if torch.distributed.is_available():
            from torch.distributed.fsdp import FullyShardedDataParallel

            _replace(stack, FullyShardedDataParallel, "clip_grad_norm_", _clip(observer, 1))
        if (pipelining := sys.modules.get("torch.distributed.pipelining.stage")) is not None:
            for name in SHAPE_INFERENCE:
                if hasattr(pipelining.PipelineStage, name):
                    _replace(stack, pipelining.PipelineStage, name, _shape_inference(observer))
        for register, before in (
            (register_optimizer_step_pre_hook, True),
            (register_optimizer_step_post_hook, False),
        ):
            stack.callback(register(partial(_optimizer_step, observer, before)).remove)
        yield


def _optimizer_step(
    observer: TrainingObserver, before: bool, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any
) -> None:
    observer.optimizer_step(optimizer, before)


def _replace(stack: ExitStack, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
    inner = getattr(owner, name)
    own = name in vars(owner)
    setattr(owner, name, wrap(inner))
    stack.callback(setattr, owner, name, inner) if own else stack.callback(delattr, owner, name)


def _backward(observer: TrainingObserver) -> Callable[[Any], Any]:
    def wrap(inner: Any) -> Any:
        def backward(tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
            roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
            given = [None] * len(roots) if grad_tensors is None else grad_tensors
            given = [given] if isinstance(given, torch.Tensor) else list(given)
            for root, gradient in zip(roots, given, strict=False):
                if root.numel() == 1 and gradient is None:
                    observer.backward(root)
            return inner(tensors, grad_tensors, *args, **kwargs)

        backward.observer = observer  # type: ignore[attr-defined]
        return backward

    return wrap


def _cross_entropy(observer: TrainingObserver) -> Callable[[Any], Any]:
    def wrap(inner: Any) -> Any:
        def cross_entropy_loss(*args: Any, **kwargs: Any) -> Any:
            found = inner(*args, **kwargs)
            call = dict(zip(CROSS_ENTROPY_ARGUMENTS, args, strict=False)) | kwargs
            call["reduction"] = REDUCTIONS.get(call.get("reduction", 1), "mean")
            observer.cross_entropy(found, call)
            return found

        return cross_entropy_loss

    return wrap


def _dropout(observer: TrainingObserver) -> Callable[[Any], Any]:
    def wrap(inner: Any) -> Any:
        def dropout(input: torch.Tensor, p: float, train: bool) -> Any:
            found = inner(input, p, train)
            return observer.dropout(input, found, p) if train and 0.0 < p < 1.0 else found

        return dropout

    return wrap


def _shape_inference(observer: TrainingObserver) -> Callable[[Any], Any]:
    def wrap(inner: Any) -> Any:
        def infer(*args: Any, **kwargs: Any) -> Any:
            observer.pause(True)
            try:
                return inner(*args, **kwargs)
            finally:
                observer.pause(False)

        return infer

    return wrap


def _clip(observer: TrainingObserver, position: int) -> Callable[[Any], Any]:
    def wrap(inner: Any) -> Any:
        def clip(*args: Any, **kwargs: Any) -> Any:
            limit = float(kwargs["max_norm"] if "max_norm" in kwargs else args[position])
            observer.clip(limit, True)
            found = inner(*args, **kwargs)
            observer.clip(limit, False)
            return found

        return clip

    return wrap
