"""What one run of a model on the meta device showed: its products, shares and what met them (written by trace.py, read by regions.py)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from meshwright.anatomy.counted import Counted
from meshwright.anatomy.inflow import Inflow
from meshwright.anatomy.keeper import AGAIN
from meshwright.anatomy.places import Call, Share
from meshwright.anatomy.vocabulary import Vocabulary

OUTSIDE = "the model's own forward"
"""Where code runs that is in no module inside the blocks."""


@dataclass
class Product:
    """A product with a weight inside a block, or a table of a number for each head."""

    weight: str
    bias: str | None
    owner: str
    dim: int
    """Dimension of the weight that holds output features."""
    size: int
    source: torch.Tensor
    """What it reads: the input of the module that owns the weight, or the tensor itself."""
    columns: frozenset[str]
    """Weights of the column layers whose shares it reads; empty for a column layer."""
    is_table: bool = False
    keeps_sequence: bool = False
    """Its input is (batch, sequence, features), so that sequence parallelism can cut it."""
    comes_of: frozenset[str] = frozenset()
    """Layers that stay whole, of whose output alone its input is computed."""
    cuts: set[int] = field(default_factory=set)
    grains: dict[tuple[int, int], int] = field(default_factory=dict)
    """Of each part (start, stop): the fewest shares that it was seen laid out in."""

    @property
    def parts(self) -> tuple[int, ...]:
        """Sizes along the features; empty where it is one."""
        bounds = sorted({0, self.size, *self.cuts})
        return tuple(stop - start for start, stop in itertools.pairwise(bounds)) if len(bounds) > 2 else ()

    def ways(self) -> tuple[int, ...]:
        """Into how many shares each part can be cut."""
        bounds = sorted({0, self.size, *self.cuts})
        ways = []
        for start, stop in itertools.pairwise(bounds):
            seen = [grain for (first, last), grain in self.grains.items() if first <= start and stop <= last]
            ways.append(min(seen, default=stop - start))
        return tuple(ways)


@dataclass
class Attention:
    """Seen at the product of queries and keys."""

    columns: frozenset[str]
    heads: int


@dataclass(frozen=True)
class Given:
    """An argument of a module that holds a number for each head, along `dim`."""

    path: str
    argument: int | str
    dim: int
    size: int


class Handed(NamedTuple):
    """What a block does with the hidden state."""

    keeps: bool
    """It gives the form that it is given."""
    direct: bool
    """It is given what another block gave."""
    returns: int
    """Values that it returns; 0 for a bare tensor."""


@dataclass
class Trace:
    """What one run showed. Tensors are known by id; `alive` keeps them, so that an id is never used twice."""

    order: dict[str, int] = field(default_factory=dict)
    """Parameters in the order of their first use."""
    blocks: dict[str, int] = field(default_factory=dict)
    """Paths of the blocks in the order in which they ran, and how often each did."""
    products: dict[str, list[Product]] = field(default_factory=lambda: defaultdict(list))
    attentions: dict[str, list[Attention]] = field(default_factory=lambda: defaultdict(list))
    problems: dict[str, str] = field(default_factory=dict)
    times: dict[str, int] = field(default_factory=dict)
    """When each problem was met; several may be met at once."""
    inputs: dict[str, torch.Tensor] = field(default_factory=dict)
    """What each module inside the blocks was given first."""
    uses: dict[int, list[tuple[tuple[str, ...], str]]] = field(default_factory=lambda: defaultdict(list))
    """Of each tensor: the modules that were running, and the weight that read it ('' for any other operation)."""
    mixed: dict[str, frozenset[str]] = field(default_factory=dict)
    """Whole parameters that work on shares, with the columns that these come from."""
    follows: dict[str, tuple[int, Share]] = field(default_factory=dict)
    """Parameters and buffers with a number for each divided feature or head: the dimension, and the share that they met."""
    grouped: dict[tuple[str, str], tuple[int, frozenset[str]]] = field(default_factory=dict)
    """Modules that treat groups of a share's features apart: the name and the number of the groups."""
    slices: dict[Given, frozenset[str]] = field(default_factory=dict)
    """Whole arguments of which each rank takes its heads."""
    shares: dict[str, list[tuple[Given, frozenset[str]]]] = field(default_factory=lambda: defaultdict(list))
    """Of each block: arguments that are shares already."""
    beside: dict[str, str] = field(default_factory=dict)
    """Arguments of blocks, other than the hidden state and what blocks return, that have gradients: of the first block that is given each."""
    inflows: dict[str, Inflow] = field(default_factory=dict)
    """Layers that stay whole and whose output is entered."""
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    counted: Counted = field(default_factory=Counted)
    handed: dict[str, Handed] = field(default_factory=dict)
    """By block."""
    against: dict[str, str] = field(default_factory=dict)
    """'writes': a parameter that the forward itself writes to; 'apart': a block that runs where no gradient is recorded, as in a backward of the model's
    own; 'again': a block that a checkpoint of the model's own runs once more in backward."""
    alive: list[Any] = field(default_factory=list)

    def begin(self, block: str, kept: bool) -> None:
        """A block begins; `kept`: what it keeps for backward is in the hands of the model."""
        for what, found in (("apart", not torch.is_grad_enabled()), ("again", kept)):
            if found:
                self.against.setdefault(what, block)
        self.blocks[block] = self.blocks.get(block, 0) + 1

    @property
    def repeated(self) -> list[str]:
        """Blocks that run more than once."""
        return [block for block, times in self.blocks.items() if times > 1]

    def against_stages(self, stacks: Sequence[str]) -> str:
        """Why stages of these lists cannot be entered and left once in a pass, at the calls of their blocks."""
        if apart := self.against.get("apart"):
            return f"{apart} runs where torch records no gradient, in a function with a backward of its own"
        if again := self.against.get("again"):
            return f"{again} {AGAIN}"
        twice = next((block for block in self.repeated if block.rpartition(".")[0] in stacks), "")
        return f"{twice} runs more than once in a pass" if twice else ""

    def follow(self, call: Call, given: list[torch.Tensor], outputs: list[torch.Tensor], names: dict[int, str], stack: list[str]) -> None:
        """One operation, inside the modules of `stack`; outside of all blocks it is empty."""
        self.vocabulary.follow(call, given, outputs, names)
        where, block = (stack[-1], self.inputs[stack[0]]) if stack else (OUTSIDE, None)
        self.counted.follow(call, given, outputs, where, block)
