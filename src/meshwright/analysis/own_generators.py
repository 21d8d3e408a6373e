"""Finds the `torch.Generator` objects of a model, and restores their states. torch's checkpoint restores only the
default generators, so recompute (runtime/activation_recompute.py), dry runs and proofs restore the others.

A generator that is an attribute of a module is found without a run (`own_generators`). `GeneratorRecorder` finds every
generator that a run draws from.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def own_generators(model: nn.Module) -> list[torch.Generator]:
    """Returns the generators that are attributes of modules, or elements of a list, tuple or dict that is one."""
    found: dict[int, torch.Generator] = {}
    for module in model.modules():
        for value in vars(module).values():
            kind = type(value)
            if kind is dict or kind is list or kind is tuple:
                for each in value.values() if kind is dict else value:
                    if issubclass(type(each), torch.Generator):
                        found[id(each)] = each
            elif issubclass(kind, torch.Generator):
                found[id(value)] = value
    return list(found.values())


class GeneratorStates:
    """Stores the present states of `generators`. Inside the context they have these states. On exit, the context
    restores their states from before it."""

    def __init__(self, generators: Collection[torch.Generator]) -> None:
        self.states = [(each, each.get_state()) for each in generators]
        self._now: list[torch.Tensor] = []

    def restore(self) -> None:
        """Restores the stored states."""
        for each, state in self.states:
            each.set_state(state)

    def __enter__(self) -> None:
        self._now = [each.get_state() for each, _ in self.states]
        self.restore()

    def __exit__(self, *raised: Any) -> None:
        for (each, _), now in zip(self.states, self._now, strict=True):
            each.set_state(now)


class UsedGenerators:
    """Generators that a run has drawn from. A generator that the code creates for one draw does not count: after the
    draw, only this object refers to it. It counts references because generators of torch 2.11 support no weak ones."""

    def __init__(self) -> None:
        self._found: dict[int, torch.Generator] = {}
        unused = {0: torch.Generator()}
        self._unused_count = sys.getrefcount(unused[0])
        """The number of references to a generator to which nothing but a dictionary refers."""

    def add(self, generator: torch.Generator) -> None:
        """Adds `generator`."""
        self._found[id(generator)] = generator

    def alive(self) -> list[torch.Generator]:
        """Returns the generators that other code refers to, and forgets the rest."""
        for key in list(self._found):
            if sys.getrefcount(self._found[key]) <= self._unused_count:
                del self._found[key]
        return list(self._found.values())


class GeneratorRecorder(TorchFunctionMode):
    """Adds to `found` each generator that a torch function gets as an argument. It runs for each function of a check,
    and `isinstance` of a generator is three times as slow as `issubclass`, since torch's metaclass looks for fake
    objects."""

    def __init__(self, found: UsedGenerators) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in (*args, *kwargs.values()) if kwargs else args:
            if issubclass(type(value), torch.Generator):
                self.found.add(value)
        return function(*args, **(kwargs or {}))
