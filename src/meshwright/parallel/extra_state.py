"""What modules give to a state dict themselves (`get_extra_state`): part of the plain model's state, and of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from meshwright.base.errors import InputError

if TYPE_CHECKING:
    from meshwright.parallel.engine import Parallel

LEAF = "_extra_state"


def extra_states(engine: Parallel) -> dict[str, Any]:
    """Of the modules that this rank holds, by the keys of the plain model's state dict; replicas hold the same."""
    return {name: module.get_extra_state() for name, module in _modules(engine).items()}


def saved_extra_states(engine: Parallel) -> dict[str, Any]:
    """The same for a checkpoint. Raises InputError where one is not made of numbers, words, lists and dicts of these."""
    found = extra_states(engine)
    for name, value in found.items():
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise InputError(
                f"a checkpoint cannot hold {name}, which is a {type(value).__name__}: let get_extra_state give numbers, words, and lists and dicts of them, "
                "or keep tensors as buffers"
            )
    return found


def load_extra_states(engine: Parallel, saved: Mapping[str, Any]) -> None:
    """Give the modules of this rank what was saved of them."""
    for name, module in _modules(engine).items():
        if name in saved:
            module.set_extra_state(saved[name])


def _modules(engine: Parallel) -> dict[str, nn.Module]:
    wanted = {name: name.removesuffix(LEAF).removesuffix(".") for name in engine.beside.extra}
    held = dict(engine.model.named_modules(remove_duplicate=False)) if wanted else {}
    has = nn.Module.get_extra_state
    return {name: held[path] for name, path in wanted.items() if path in held and type(held[path]).get_extra_state is not has}
