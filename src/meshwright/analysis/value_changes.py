"""Finds the plain values (numbers, strings, None, lists of these) that a forward changes, such as a call counter, and
that code of several pipeline stages may read.

A pipeline stage runs the code of the model's forward up to its own last block. On this way the blocks of other stages
return their inputs. So a stage misses each change that later code or a block of another stage makes. A value that only
one block, or only one module outside of the blocks, can reach is left out, because it is read where it is changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import nn

from meshwright.analysis.code_state import StatePlace, state_places
from meshwright.analysis.guarded_values import nested_containers, plain_values

BETWEEN_BLOCKS = "between blocks"
"""The owner of the values of modules that contain blocks."""
MISSING = object()


class ValueChange(NamedTuple):
    """A change of the value `name` (such as `model.turn`) by a forward. `block`: the index of the block that began
    last, -1 before the first. `is_inside`: whether the code of this block has changed the value."""

    name: str
    block: int
    is_inside: bool


class ValueChangeRecorder:
    """Records the changes of shared values of `model` while its forward runs. `blocks` are the paths of its blocks."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        owners: dict[int, set[str]] = {}
        stored: dict[int, tuple[str, Any]] = {}
        for owner, name, of in _value_stores(model, blocks):
            owners.setdefault(id(of), set()).add(owner)
            stored.setdefault(id(of), (name, of))
        self._shared = [stored[at] for at, reached in owners.items() if len(reached) > 1 or BETWEEN_BLOCKS in reached]
        self._before = self._values()
        self.found: set[ValueChange] = set()

    def compare(self, block: int, is_inside: bool) -> None:
        """Records the values that have changed since the previous call as changed by the given code."""
        now = self._values()
        for (name, _), old, new in zip(self._shared, self._before, now, strict=True):
            if old != new:
                keys = [key for key in old.keys() | new.keys() if old.get(key, MISSING) != new.get(key, MISSING)]
                self.found.update(ValueChange(f"{name}.{key}", block, is_inside) for key in keys)
        self._before = now

    def _values(self) -> list[dict[Any, Any]]:
        return [of.plain() if isinstance(of, StatePlace) else plain_values(of) for _, of in self._shared]


def _value_stores(model: nn.Module, blocks: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Yields (owner, name, dict or StatePlace) for each place where modules and their code store values. The owner is
    the path of a block, the path of a module outside of the blocks, or BETWEEN_BLOCKS. A place that several owners
    reach is yielded for each of them."""
    around = {"", *(block[:at] for block in blocks for at, letter in enumerate(block) if letter == ".")}
    inside = {block: block for block in blocks}
    for path, module in model.named_modules():
        inside[path] = inside.get(path) or inside.get(path.rpartition(".")[0], "")
        owner, name = inside[path] or (BETWEEN_BLOCKS if path in around else path), path or "model"
        yield owner, name, vars(module)
        yield from ((owner, at, entries) for at, entries in nested_containers(vars(module), name))
    for place in state_places(model):
        yield BETWEEN_BLOCKS, place.name, place
