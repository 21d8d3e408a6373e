"""Replaces modules of other pipeline stages by placeholders, so that a rank can run the model's whole forward
(pipeline/block_wrapper.py). A placeholder returns NaN with the shapes, dtypes and nesting of the module's output.

[Note: form] Before the blocks of the stage run, the model's own code reads dtypes, shapes and tuple positions of the
outputs of other modules, and computes masks, positions and rotary tables from them. So a placeholder runs a copy of its
module on the meta device to determine these properties of the output. If the copy cannot run, the placeholder of an
embedding returns NaN of the right width, and any other placeholder returns its input. The placeholder of a block runs
no copy: it returns its input, or NaN in a dry run (preflight/step_checks.py). The values do not matter, because the
first block of the stage replaces them by the received tensors. If code reads a NaN nevertheless, the loss becomes NaN
instead of slightly wrong.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.analysis.block_lists import hidden_of


class StagePlaceholder(nn.Module):
    """Replaces `original`, so that its memory can be freed. `kind`: the device and dtype of the computation.
    `is_block`: whether `original` is a block or inside of a block."""

    def __init__(self, original: nn.Module, kind: tuple[torch.device, torch.dtype], is_block: bool = False) -> None:
        super().__init__()
        self.width = original.embedding_dim if isinstance(original, nn.Embedding) else None
        (device, self.dtype), self.is_block, self.kind = kind, is_block, type(original)
        self.tried = False
        """Whether a dry run is in progress (preflight/step_checks.py). During a dry run, blocks of other stages return
        NaN, so that the check detects code that reads their output."""
        for name, value in vars(original).items():
            if (
                not name.startswith("_")
                and isinstance(value, str | int | float | bool | tuple)
                and not hasattr(self, name)
            ):
                setattr(self, name, value)
        for name, child in original.named_children():  # models read dtypes and devices of nested modules
            self.add_module(name, StagePlaceholder(child, kind, is_block))
        # Parameters of a placeholder are NaN, so that the loss becomes NaN if code reads their values.
        for name, parameter in original._parameters.items():
            if parameter is not None:
                setattr(self, name, torch.full((), torch.nan, dtype=self.dtype, device=device).expand(parameter.shape))
        self._original = (None if is_block else _meta_copy(original),)  # nn.Module registers no modules in tuples

    def take_over(self, original: nn.Module, remaining: Collection[int]) -> None:
        """Turns `original` into this placeholder, because a loss may hold a reference to it. The attributes of the
        original would keep their first values. `remaining`: the ids of the modules that the model still contains."""
        has_parameters = next(original.parameters(), None) is not None
        for name, child in original.named_children():
            if isinstance(own := self._modules.get(name), StagePlaceholder):
                own.take_over(child, remaining)
        if id(original) not in remaining and has_parameters:
            with suppress(TypeError):  # a class with slots
                original.__class__ = StagePlaceholder
                original.__dict__ = self.__dict__

    def __getattr__(self, name: str) -> Any:
        """Returns a function that does nothing, if `original` has a method of this name. Models call methods of their
        modules, for example to change the attention implementation."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not callable(getattr(self.__dict__["kind"], name, None)):
                raise
            return lambda *args, **kwargs: None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
        device = given[0].device if given else None
        if self.is_block:
            return skipped_block_output(hidden_of(args, kwargs), self.tried)
        try:
            form = self._form(args, kwargs)
        except Exception:
            first = hidden_of(args, kwargs)
            return first if self.width is None else _nan_tensor((*first.shape, self.width), self.dtype, first.device)
        return tree_map(lambda value: self._stand_in(value, device) if isinstance(value, torch.Tensor) else value, form)

    def _form(self, args: Any, kwargs: Any) -> Any:
        assert self._original[0] is not None
        args, kwargs = tree_map(
            lambda value: value.to("meta") if isinstance(value, torch.Tensor) else value, (args, kwargs)
        )
        with torch.no_grad(), torch.device("meta"):
            return self._original[0](*args, **kwargs)

    def _stand_in(self, form: torch.Tensor, device: torch.device | None) -> torch.Tensor:
        return _nan_tensor(form.shape, self.dtype if form.is_floating_point() else form.dtype, device)


def _meta_copy(module: nn.Module) -> nn.Module | None:
    """Returns a copy of `module` on the meta device in eval mode, with no hooks and with the forward of its class.
    Returns None if the module cannot be copied."""
    memo: dict[int, Any] = {}
    for part in module.modules():
        for tensor in (*part._parameters.values(), *part._buffers.values()):
            if tensor is not None:
                twin = torch.empty_like(tensor, device="meta", requires_grad=False)
                memo[id(tensor)] = nn.Parameter(twin, requires_grad=False) if isinstance(tensor, nn.Parameter) else twin
        memo |= {id(hooks): OrderedDict() for hooks in (part._forward_hooks, part._forward_pre_hooks)}
        memo[id(vars(part).get("forward"))] = None
    memo.pop(id(None), None)
    try:
        copied = copy.deepcopy(module, memo)
    except Exception:
        return None
    for part in copied.modules():
        vars(part).pop("forward", None)
    return copied.eval()


def skipped_block_output(hidden: Any, tried: bool) -> Any:
    """Returns the output of a block of another stage: its input `hidden`, or NaN if a dry run is in progress
    (`tried`)."""
    return (
        _nan_tensor(hidden.shape, hidden.dtype, hidden.device) if tried and isinstance(hidden, torch.Tensor) else hidden
    )


def _nan_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> torch.Tensor:
    """Returns a new tensor of NaN, or of zeros for integer dtypes. Each call makes a new tensor, because models may
    scale it in place."""
    return torch.full(tuple(shape), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
