"""What the analysis run of a model showed (written by run.py, read by flow.py, parallel/pipeline/carry.py, holding.py and gating.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.anatomy.inputs import QUESTIONS
from meshwright.anatomy.readers import Reads

EXTRACTS = QUESTIONS | {
    "tolist",
    "numpy",
    "__array__",
    "__dlpack__",
    "nonzero",
    "argwhere",
    "unique",
    "unique_consecutive",
    "masked_select",
}
"""Functions whose result takes values of tensors to Python, or has a shape that depends on values."""


class Op(NamedTuple):
    """One torch function. `reads`, `writes`: storages, of which it had `changed` some in place. `block`: the block that called it, -1 outside of all;
    `begun`: blocks that had begun; `path`: the innermost module."""

    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    block: int
    begun: int
    path: str
    changed: tuple[int, ...] = ()
    is_unknown: bool = False
    """What it writes appeared without a function that was seen."""


class Leaf(NamedTuple):
    """An argument of a block that is made of parameters, or by another block. `tensor`: its identity; `copied`: the storage of the copy that the block was given; `made`: a
    bit for each parameter that it comes from; `is_sent`: messages between stages carry its type."""

    tensor: int
    storage: int
    copied: int
    made: int
    is_sent: bool


class Entry(NamedTuple):
    """A block is called with `leaves`, by their places among its flattened arguments."""

    block: int
    leaves: Mapping[int, Leaf]


class Exit(NamedTuple):
    """A block returns. `values`: how many, 0 for a bare tensor."""

    block: int
    writes: tuple[int, ...]
    values: int


@dataclass
class Record:
    """What one run showed."""

    keys: tuple[str, ...]
    """Names of the inputs that the model was called with."""
    is_training: bool
    names: tuple[str, ...]
    """Parameters by number; storage `n` below their number is that of parameter `n`."""
    events: list[Op | Entry | Exit] = field(default_factory=list)
    reads: Reads = field(default_factory=dict)
    written: dict[int, str] = field(default_factory=dict)
    """Buffers by storage."""
    outputs: tuple[int, ...] = ()
    """Storages of what the model returned, the one of logits first."""
    made: dict[int, int] = field(default_factory=dict)
    """By storage the parameters that its values come from, a bit for each."""
    idle: frozenset[str] = frozenset()
    """Parameters that no gradient comes to."""
    against: tuple[str, int] | None = None
    """Why blocks cannot be left and entered, and the block where it was seen: 'again', a checkpoint of the model's own; 'apart', no gradient is
    recorded; 'random', other seeds call other blocks."""

    @property
    def calls(self) -> tuple[int, ...]:
        """Blocks in the order of their calls."""
        return tuple(event.block for event in self.events if isinstance(event, Entry))

    replaced: frozenset[str] = frozenset()
    """Buffers in whose place the forward put another tensor."""

    @property
    def updated(self) -> dict[str, set[int]]:
        """Returns the buffers that the forward writes to in place and at which blocks: inside of the block, or after it; -1 before the first."""
        found: dict[str, set[int]] = {}
        last = -1
        for event in self.events:
            if isinstance(event, Entry):
                last = event.block
            elif isinstance(event, Op):
                for at in self.written.keys() & event.changed:
                    found.setdefault(self.written[at], set()).add(last)
        return found

    @property
    def rewritten(self) -> set[str]:
        """Returns the names of the parameters that the forward writes to."""
        return {self.names[at] for event in self.events if isinstance(event, Op) for at in event.changed if at < len(self.names)}


def named(names: Sequence[str], made: int) -> set[str]:
    """The names whose bits are set.

    >>> sorted(named(["a", "b", "c"], 0b101))
    ['a', 'c']
    """
    return {name for number, name in enumerate(names) if made >> number & 1}
