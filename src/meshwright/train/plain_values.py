"""Plain values that modules hold, such as counters of steps: what of them has changed since a copy of the model was made."""

from __future__ import annotations

from typing import Any

from torch import nn

from meshwright.parallel.exchange.calls import gather_objects
from meshwright.parallel.pipeline.absent import Absent

Plain = dict[str, dict[str, Any]]
"""Plain values of modules, by path and name."""
PLAIN = (bool, int, float, str, type(None))


LOSS = "(loss)"
"""Stands for the path of a loss that is an object with attributes."""


def plain_of(model: nn.Module, loss: Any = None) -> Plain:
    """Returns the numbers, strings and tuples of these that modules and the user's loss hold, such as counters of steps; not modes."""

    def is_plain(value: Any) -> bool:
        return isinstance(value, PLAIN) or (type(value) is tuple and all(map(is_plain, value)))

    owners: list[tuple[str, Any]] = [(path, module) for path, module in model.named_modules() if not isinstance(module, Absent)]
    owners += [(LOSS, loss)] if isinstance(getattr(loss, "__dict__", None), dict) else []
    return {path: {name: value for name, value in vars(owner).items() if name != "training" and is_plain(value)} for path, owner in owners}


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


def follow(model: nn.Module, loss: Any, changes: Plain) -> None:
    """Gives the copies `model` and `loss` the plain values that the trained model and its loss have now."""
    owners: dict[str, Any] = {**dict(model.named_modules()), LOSS: loss}
    for path, values in changes.items():
        if hasattr(owners.get(path), "__dict__"):
            owners[path].__dict__.update(values)
