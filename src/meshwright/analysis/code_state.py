"""Finds the state that the code of a model shares outside of its modules: class attributes, global variables,
attributes of functions and global objects, and the closure variables and objects of the user's hooks.

A forward may change such a state, for example a call counter (`global CALLS`, `type(self).calls += 1`). Checks restore
it after their forwards (dry_run.py), so that they do not change the training. Code of several pipeline stages that
changes it is refused (value_changes.py). A state that is not found here, such as an iterator, is detected by two
forwards of the same rows (runtime/preflight/batch_separability.py).

The state of a class consists of what the functions of the class can name: its own attributes and those of its bases,
and the global variables in the code of its methods and of the functions that these call. Only functions of the same
package are followed, MAX_FUNCTIONS at most.
"""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from itertools import chain
from operator import is_
from types import CodeType, FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.analysis.guarded_values import (
    HOOK_ATTRIBUTES,
    MAX_DEPTH,
    MAX_ENTRIES,
    MODULE_ATTRIBUTES,
    PLAIN_TYPES,
    is_users_class,
    is_users_module,
    plain_values,
)

MAX_FUNCTIONS = 512
"""Number of functions that are followed from one class."""
CONTAINER_TYPES = (list, dict, set, deque, OrderedDict)
"""Objects of derived classes are left out, because their methods may do anything."""
CONFIGURATIONS = (SimpleNamespace, Namespace)
"""Classes of Python's library whose objects count as the user's."""


class StatePlace(NamedTuple):
    """A place of shared state. `name`: a description. `of`: a class, or the mapping that has the state. `keys`: the
    keys of the state in `of`, or None for all."""

    name: str
    of: Any
    keys: tuple[str, ...] | None

    def values(self) -> dict[str, Any]:
        """Returns the plain values and the containers at this place."""
        stored = vars(self.of) if isinstance(self.of, type) else self.of
        names = [key for key in stored if not key.startswith("__")] if self.keys is None else self.keys
        return {key: stored[key] for key in names if key in stored and _is_state(stored[key])}

    def plain(self) -> dict[str, Any]:
        """Returns the plain values at this place, also those in dicts."""
        values = self.values()
        found = plain_values(values)
        for key, value in values.items():
            if isinstance(value, dict):
                found |= {f"{key}.{inner}": each for inner, each in plain_values(value).items()}
        return found

    def write(self, key: str, value: Any) -> None:
        """Sets the value of `key`."""
        if isinstance(self.of, type):
            setattr(self.of, key, value)
        else:
            self.of[key] = value

    def delete(self, key: str) -> None:
        """Removes `key`."""
        if isinstance(self.of, type):
            delattr(self.of, key)
        else:
            del self.of[key]


class ClosureVariables(MutableMapping[str, Any]):
    """The closure variables of a function by name."""

    def __init__(self, function: FunctionType) -> None:
        self.cells = function.__closure__ or ()
        self._named = dict(zip(function.__code__.co_freevars, self.cells, strict=True))

    def __getitem__(self, name: str) -> Any:
        try:
            return self._named[name].cell_contents
        except ValueError:  # the variable has no value yet
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        self._named[name].cell_contents = value

    def __delitem__(self, name: str) -> None:
        del self._named[name].cell_contents

    def __iter__(self) -> Iterator[str]:
        for name, cell in self._named.items():
            with suppress(ValueError):
                _ = cell.cell_contents
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)


class ContainerSnapshot:
    """Stores the elements of the containers among `values` and the attributes of the user's objects, also of those
    inside them, down to MAX_DEPTH levels. Inner ones of more than MAX_ENTRIES entries are left out. `seen`: the ids of
    containers that other snapshots store."""

    def __init__(self, values: Iterable[Any], seen: set[int]) -> None:
        self._elements: list[tuple[Any, Any]] = []
        level: list[Any] = [*values]
        for depth in range(1, MAX_DEPTH + 1):
            inner: list[Any] = []
            for value in level:
                if type(value) in CONTAINER_TYPES:
                    entries = value
                elif _is_users_object(value):
                    entries = vars(value)
                else:
                    continue
                if id(entries) not in seen and (depth == 1 or len(entries) <= MAX_ENTRIES):
                    seen.add(id(entries))
                    self._elements.append((entries, entries.copy() if entries else ()))
                    if depth < MAX_DEPTH:
                        inner += entries.values() if isinstance(entries, dict) else entries
            level = inner

    @property
    def is_changed(self) -> bool:
        """Returns whether an element or an attribute is another object than before."""
        return not all(_has_same_elements(one, before) for one, before in self._elements)

    def restore(self) -> None:
        """Restores the elements and the attributes."""
        for container, elements in self._elements:
            if not _has_same_elements(container, elements):
                container.clear()
                (container.update if isinstance(container, dict | set) else container.extend)(elements)


class CodeStateSnapshot:
    """Stores the state at `places`, and restores it."""

    def __init__(self, places: Iterable[StatePlace]) -> None:
        self._before = [(place, place.values()) for place in places]
        self._elements = ContainerSnapshot((each for _, values in self._before for each in values.values()), set())

    def restore(self) -> None:
        """Restores the values, and the elements of the containers."""
        for place, before in self._before:
            now = place.values()
            for key in now.keys() - before.keys() if place.keys is None else ():
                place.delete(key)
            for key, value in before.items():
                if key not in now or now[key] is not value:
                    place.write(key, value)
        self._elements.restore()


def state_places(model: nn.Module) -> Iterator[StatePlace]:
    """Yields the places of shared state of all user classes and hooks of the modules of `model`, each once."""
    seen = set[tuple[int, tuple[str, ...] | None]]()
    kinds: dict[Any, None] = dict.fromkeys(type(module) for module in model.modules())
    hooks = [*user_hooks(model.modules())]
    functions = {one.__code__: one for one in map(_function_of, hooks) if one is not None}
    for place in chain(
        *map(class_state, kinds),
        *(_reachable_state([one], one.__module__) for one in functions.values()),
        *map(_state_of_hook, hooks),
    ):
        of = place.of.cells if isinstance(place.of, ClosureVariables) else place.of
        if (key := (id(of), place.keys)) not in seen:
            seen.add(key)
            yield place


def _state_of_hook(hook: Any) -> Iterator[StatePlace]:
    """Yields the closure variables of a hook, and the user's objects among them and to which it is bound."""
    function, objects = _function_of(hook), [getattr(hook, "__self__", hook)]
    if function is not None and function.__closure__:
        variables = ClosureVariables(function)
        yield StatePlace(function.__qualname__, variables, None)
        objects += variables.values()
    for each in objects:
        if _is_users_object(each):
            yield StatePlace(type(each).__name__, vars(each), None)


def attribute_containers(modules: Iterable[nn.Module]) -> Iterator[StatePlace]:
    """Yields the containers that attributes of `modules` store."""
    for module in modules:
        keys = [key for key, value in vars(module).items() if type(value) in CONTAINER_TYPES]
        if keys := [key for key in keys if key not in MODULE_ATTRIBUTES]:
            yield StatePlace(type(module).__name__, vars(module), tuple(keys))


def user_hooks(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """Yields the user's hooks on `modules`."""
    for module in modules:
        for hooks in HOOK_ATTRIBUTES:
            for hook in getattr(module, hooks).values():
                if is_users_module(getattr(_function_of(hook) or hook, "__module__", None)):
                    yield hook


@functools.cache
def class_state(kind: Any) -> tuple[StatePlace, ...]:
    """Returns the places of shared state that the functions of a class can name."""
    found: list[StatePlace] = []
    waiting: list[FunctionType] = []
    for base in kind.__mro__:
        if is_users_class(base):
            found.append(StatePlace(base.__name__, base, None))
            waiting += filter(None, map(_function_of, vars(base).values()))
    return (*found, *_reachable_state(waiting, kind.__module__))


def _reachable_state(functions: Iterable[FunctionType], module: str) -> list[StatePlace]:
    """Returns the places of shared state that `functions` can name, and those that the functions which they call can
    name. Follows only functions of the package of `module`."""
    found: list[StatePlace] = []
    waiting, seen = [*functions], set[int]()
    while waiting and len(seen) < MAX_FUNCTIONS:
        function = waiting.pop(0)
        if id(function) in seen:
            continue
        seen.add(id(function))
        found.append(StatePlace(function.__qualname__, vars(function), None))
        waiting += filter(None, [_function_of(vars(function).get("__wrapped__"))])
        around, keys = function.__globals__, []
        for key in _names(function.__code__):
            value = around.get(key)
            if key in around and _is_state(value):
                keys.append(key)
            elif (inner := _function_of(value)) is not None:
                waiting += [inner] if _package(inner.__module__) == _package(module) else []
            elif isinstance(value, type) and is_users_class(value) and not issubclass(value, nn.Module):
                found.append(StatePlace(value.__name__, value, None))
            elif _is_users_object(value):
                found.append(StatePlace(key, vars(value), None))
        if keys:
            found.append(StatePlace(function.__module__, around, tuple(sorted(keys))))
    return found


def _is_state(value: Any) -> bool:
    return isinstance(value, PLAIN_TYPES) or type(value) in CONTAINER_TYPES


def _has_same_elements(one: Any, other: Any) -> bool:
    """Returns whether two containers of one type have the same objects in the same order, dicts as keys and values."""
    if len(one) != len(other):
        return False
    if not one:  # most containers of a module are: those of its hooks
        return True
    return all(map(is_, one, other)) and (not isinstance(one, dict) or all(map(is_, one.values(), other.values())))


def _is_users_object(value: Any) -> bool:
    """Returns whether `value` is an object of a class of the user, such as a configuration, and no module."""
    kind: Any = type(value)
    return _is_users_kind(kind) and hasattr(value, "__dict__")


@functools.cache
def _is_users_kind(kind: Any) -> bool:
    if kind in CONFIGURATIONS:
        return True
    is_library = _package(kind.__module__) in sys.stdlib_module_names
    return is_users_class(kind) and not is_library and not issubclass(kind, nn.Module | type | torch.Tensor)


def _function_of(value: Any) -> FunctionType | None:
    """Returns the function in a method, property, partial or cached function, or None for any other value."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    if isinstance(value, functools._lru_cache_wrapper):
        value = value.__wrapped__
    return value if isinstance(value, FunctionType) else None


def _names(code: CodeType) -> set[str]:
    """Returns the global names in `code` and in the functions that it defines."""
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]
