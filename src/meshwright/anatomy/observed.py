"""A model that is run only to be looked at, and is left as it was.

Rule: it runs in eval mode, or in the modes that it trains in, and what its modules keep beside their parameters is put back afterwards: modes (of each module: a part may be frozen in
eval mode), attributes that a forward writes (NLLB-MoE notes a capacity of its experts, RWKV in which form its weights are, caches of positions are
kept as plain tensors), hooks that it hangs up (transformers, where a class asks for hidden states), and the numbers of buffers. What stayed behind of a
look would be another model from the first step on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from meshwright.anatomy.attributes import Attributes, state_of
from meshwright.anatomy.written import Span, Writes, spans_of

OWN = frozenset({"_parameters", "_buffers", "_modules"})
"""What holds tensors and modules: put back by those who lend or replace them, but for what is written to them."""


@contextmanager
def observed(
    model: nn.Module, parameters: Mapping[str, Span] | None = None, as_it_trains: bool = False, loss: Callable[..., Any] | None = None
) -> Iterator[Writes]:
    """Runs `model` in eval mode, or in its own modes, and restores it and what the user's `loss` function holds on exit.

    Yields the writes to its `parameters`, which may be elsewhere than the model has them.
    """
    states = [*(Attributes(vars(module), OWN) for module in _modules(model, loss)), *state_of(loss)]
    buffers = [(module, name, buffer, _copy(buffer)) for module in _modules(model, loss) for name, buffer in module._buffers.items()]
    writes = Writes(spans_of(dict(model.named_parameters())) if parameters is None else parameters)
    if not as_it_trains:
        model.eval()
    try:
        with writes if writes.has_spans else nullcontext():  # each operation costs more while a dispatch mode is entered
            yield writes
    finally:
        writes.restore()
        for state in states:
            state.restore()
        for module, name, buffer, numbers in buffers:
            if buffer is not None and numbers is not None:
                with torch.no_grad():
                    buffer.copy_(numbers)
            module._buffers[name] = buffer


def _modules(model: nn.Module, loss: Any) -> list[nn.Module]:
    """Those of the model, and of a loss that is a module."""
    own = list(model.modules())
    return [*own, *(module for module in loss.modules() if module not in set(own))] if isinstance(loss, nn.Module) else own


def call_with(model: nn.Module, tensors: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run `model` with `tensors` in place of its parameters and buffers, by name, and return its output.

    torch's functional_call puts the tensors of a module that several modules hold in place once for each of its names, and leaves them there.
    """
    slots: list[dict[str, Any]] = [held for module in model.modules() for held in (module._parameters, module._buffers)]
    before = [held.copy() for held in slots]
    try:
        return functional_call(model, tensors, args, kwargs)
    finally:
        for held, own in zip(slots, before, strict=True):
            held.update(own)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Behind it every module has the mode of its own that it had: `model.train()` would train parts that somebody has frozen so."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _copy(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None or buffer.is_meta else buffer.detach().clone()
