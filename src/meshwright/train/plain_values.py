"""Plain values that modules hold, such as counters of steps: what of them has changed since a copy of the model was made."""

from __future__ import annotations

from typing import Any

from torch import nn

from meshwright.parallel.exchange.calls import gather_objects
from meshwright.parallel.pipeline.absent import Absent

Plain = dict[str, dict[str, Any]]
"""Plain values of modules, by path and name."""
PLAIN = (bool, int, float, str, type(None))


def plain_of(model: nn.Module) -> Plain:
    """Numbers, words and tuples of these that modules hold, such as counters of steps; not modes."""

    def is_plain(value: Any) -> bool:
        return isinstance(value, PLAIN) or (type(value) is tuple and all(map(is_plain, value)))

    return {
        path: {name: value for name, value in vars(module).items() if name != "training" and is_plain(value)}
        for path, module in model.named_modules()
        if not isinstance(module, Absent)
    }


def changes_of(before: Plain, now: Plain) -> Plain:
    """What of `now` is not in `before`, on any rank; the first rank that has changed a value counts. All ranks call it."""
    none = object()
    own = {
        path: {name: value for name, value in values.items() if before.get(path, {}).get(name, none) != value}
        for path, values in now.items()
    }
    everyone = gather_objects({path: values for path, values in own.items() if values})
    found: Plain = {}
    for changes in reversed(everyone):
        for path, values in changes.items():
            found.setdefault(path, {}).update(values)
    return found


def follow(model: nn.Module, changes: Plain) -> None:
    """Give the copy `model` the plain values that the model which is trained has now."""
    modules = dict(model.named_modules())
    for path, values in changes.items():
        if path in modules:
            modules[path].__dict__.update(values)
