"""What is found of a model on the way to its anatomy (filled in by read.py and accept.py)."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

from meshwright.anatomy.inputs import Example
from meshwright.anatomy.nouns import Split
from meshwright.anatomy.regions import Found
from meshwright.anatomy.seen import Trace


@dataclass
class Reading:
    """What is found on the way."""

    model: nn.Module
    lists: list[str]
    said: list[str]
    example: Example
    modes: dict[nn.Module, bool]
    """In which the model is trained (conditions.py)."""
    seen: Trace | None = None
    found: dict[str, list[Found]] = field(default_factory=dict)
    """By block, in the order in which they run."""
    whole: dict[str, str] = field(default_factory=dict)
    """Column weights that stay whole, and why."""
    stacks: list[str] = field(default_factory=list)
    """Those of the lists that stages cut (stacks.py)."""
    along: str = ""
    """Why the hidden state cannot be cut along the sequence, as the numbers say."""
    sliced: tuple[str, ...] = ()
    """Parameters between blocks, whose gradient is a part on each rank that holds a slice of the sequence."""
    unproven: str = ""
    """Why splits are taken without numbers."""


@dataclass(frozen=True)
class Outline:
    """What lies around the blocks: paths of the embedding and the head, names of the parameters behind the blocks; how each of them that
    has a number for each word is cut, and why others are not."""

    embedding: str | None
    head: str | None
    back: tuple[str, ...]
    splits: dict[str, Split] = field(default_factory=dict)
    whole: dict[str, str] = field(default_factory=dict)
