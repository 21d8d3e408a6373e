"""Applies to the copy of the model, which a proof runs as one device, what the user's code has changed in the model
since the copy was made: plain values of modules, of the user's loss, of configuration objects and of dicts, and
functions that modules store."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from meshwright.analysis.guarded_values import MODULE_ATTRIBUTES, nested_containers, plain_values
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.stage_placeholder import StagePlaceholder

StoredValues = dict[str, dict[Any, Any]]
"""The plain values (numbers, strings, None, and lists and tuples of these) that the user's code stores: by the path of
a module, of a dict or of an object with attributes, and by key."""
LOSS_PATH = "(loss)"
"""The path in StoredValues for the attributes of the user's loss object."""


def _owners(model: nn.Module, loss: Any, seen: set[int] | None) -> Iterator[tuple[str, Any]]:
    """Yields the dicts that store values, by path. With `seen`, each dict only once."""
    for path, module in model.named_modules():
        if not isinstance(module, StagePlaceholder):
            yield path, vars(module)
            yield from nested_containers(vars(module), path, seen)
    if isinstance(getattr(loss, "__dict__", None), dict):
        yield LOSS_PATH, vars(loss)
        yield from nested_containers(vars(loss), LOSS_PATH, seen)


def stored_values(model: nn.Module, loss: Any = None) -> StoredValues:
    """Returns the plain values that the modules and the user's loss store, without training modes."""
    return {path: plain_values(own) for path, own in _owners(model, loss, set())}


def changed_values(before: StoredValues, now: StoredValues) -> StoredValues:
    """Returns the values that have changed from `before` to `now` on any rank. If several ranks have changed a value,
    the value on the lowest of these ranks is returned. All ranks call it."""
    none = object()
    own = {
        path: {name: value for name, value in values.items() if before.get(path, {}).get(name, none) != value}
        for path, values in now.items()
    }
    everyone = gather_objects({path: values for path, values in own.items() if values})
    found: StoredValues = {}
    for changes in reversed(everyone):
        for path, values in changes.items():
            found.setdefault(path, {}).update(values)
    return found


def apply_changes(model: nn.Module, loss: Any, changes: StoredValues) -> None:
    """Sets the plain values `changes` in the copied model and the copied loss."""
    owners = dict(_owners(model, loss, None)) if changes else {}
    for path, values in changes.items():
        if path in owners:
            owners[path].update(values)


def stored_functions(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Returns the functions that modules store, and None where one may be stored, by path and attribute."""
    return {
        (path, key): value
        for path, module in model.named_modules()
        if not isinstance(module, StagePlaceholder)
        for key, value in vars(module).items()
        if key not in MODULE_ATTRIBUTES and (value is None or isinstance(value, types.FunctionType))
    }


def apply_functions(model: nn.Module, before: dict[tuple[str, str], Any], now: dict[tuple[str, str], Any]) -> None:
    """Sets the functions in the copied model that have changed from `before` to `now` on this rank."""
    modules = dict(model.named_modules())
    for (path, key), value in now.items():
        if value is not before.get((path, key), value) and path in modules:
            modules[path].__dict__[key] = value
