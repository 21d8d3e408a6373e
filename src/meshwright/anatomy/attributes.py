"""Restores what Python objects hold beside tensors: attributes of modules, and the state of a loss function that the user wrote.

A run that only looks at a model must leave no trace: a counter that a forward or a loss increments would be ahead by one from the first step on.
Saved are attributes, and the elements of lists, dictionaries and sets among them; what is nested deeper is not.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import nn

CONTAINERS = (list, dict, set, deque, OrderedDict)


class Attributes:
    """The items of `state` (an object's `__dict__`) except `others`; `restore` gives them the values that they have now."""

    def __init__(self, state: dict[str, Any], others: Collection[str] = ()) -> None:
        self.state, self.others = state, frozenset(others)
        self.before = {name: value for name, value in state.items() if name not in self.others}
        self.elements = [(value, value.copy()) for value in self.before.values() if type(value) in CONTAINERS]

    def restore(self) -> None:
        for name in self.state.keys() - self.before.keys() - self.others:
            del self.state[name]
        self.state.update(self.before)
        for held, elements in self.elements:
            held.clear()
            (held.update if hasattr(held, "update") else held.extend)(elements)


class Cells:
    """The variables of enclosing functions that a function reads or writes."""

    def __init__(self, cells: Collection[CellType]) -> None:
        self.before: list[tuple[CellType, Any]] = []
        for cell in cells:
            with suppress(ValueError):  # it has no value yet
                self.before.append((cell, cell.cell_contents))
        self.inside = Attributes({str(number): value for number, (_, value) in enumerate(self.before)})

    def restore(self) -> None:
        for cell, value in self.before:
            cell.cell_contents = value
        self.inside.restore()


def state_of(function: Callable[..., Any] | None) -> Iterator[Attributes | Cells]:
    """Yields what `function` holds: attributes, enclosing variables, mutable defaults, and those of the object it is bound to. Modules are left out."""
    if isinstance(function, partial):
        yield from state_of(function.func)
        yield Attributes({str(number): value for number, value in enumerate((*function.args, *function.keywords.values()))})
    elif isinstance(function, MethodType):
        yield from state_of(function.__func__)
        if not isinstance(function.__self__, nn.Module) and isinstance(getattr(function.__self__, "__dict__", None), dict):
            yield Attributes(vars(function.__self__))
    elif isinstance(function, FunctionType):
        yield Attributes(vars(function))
        yield Cells(function.__closure__ or ())
        defaults = enumerate((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
        yield Attributes({str(number): value for number, value in defaults})
    elif function is not None and not isinstance(function, nn.Module) and isinstance(getattr(function, "__dict__", None), dict):
        yield Attributes(vars(function))
