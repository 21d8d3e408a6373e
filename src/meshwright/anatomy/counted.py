"""Modules that give a token a place among all tokens that pass together: what a token gets then depends on which others pass with it.

Rule: a running sum, or a choice of the largest, along a dimension that holds all tokens of the run, whose result is compared with a number (the capacity of
an expert: GShard, arXiv 2006.16668, algorithm 1), or is the choice itself (tokens chosen by experts: arXiv 2202.09368). A sort that
only says where rows are kept meanwhile is undone, and is none. How many tokens there are says what the block was given: of (rows, places, features) the
rows times the places, of images the rows times their pixels. A dimension of that size behind ones that hold the tokens already is of something else.
Seen in the run without memory; whether it ever bites numbers must say.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from meshwright.anatomy.inputs import BATCH
from meshwright.anatomy.places import Call

PLACES, CHOICES = frozenset({"cumsum", "cumsum_", "cumprod", "logcumsumexp"}), frozenset({"topk", "kthvalue"})
COMPARED = frozenset({"lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal", "clamp", "clamp_", "minimum"})


@dataclass
class Counted:
    """`found`: the module that does it, '' where none was seen."""

    found: str = ""
    places: set[int] = field(default_factory=set)
    tokens: set[int] = field(default_factory=set)
    """How many tokens the inputs of the model may have."""

    def begin(self, inputs: Iterable[torch.Tensor]) -> None:
        """The model is called with `inputs`."""
        for tensor in inputs:
            self.tokens |= tokens_of(tensor.shape) if tensor.is_floating_point() else {tensor.numel()}

    def follow(self, call: Call, given: list[torch.Tensor], outputs: list[torch.Tensor], where: str, block: torch.Tensor | None) -> None:
        """One operation. `where`: the innermost module that runs; `block`: what the block that runs was given, None outside of all."""
        tokens = self.tokens if block is None else tokens_of(block.shape)
        name = call.name.strip("_")
        if name in PLACES | CHOICES and given and given[0].ndim:
            dim = call.argument(2 if name in CHOICES else 1, "dim", -1)
            if isinstance(dim, int) and over_all(given[0].shape, dim % given[0].ndim, tokens):
                if name in CHOICES:
                    self.found = self.found or where
                self.places.update(id(tensor) for tensor in outputs)
                return
        if any(id(tensor) in self.places for tensor in given):
            if name in COMPARED:
                self.found = self.found or where
            self.places.update(id(tensor) for tensor in outputs)


def tokens_of(shape: torch.Size | tuple[int, ...]) -> set[int]:
    """How many tokens there may be in a block's input: features stand last, or of images behind the rows.

    >>> tokens_of((2, 64, 16)), tokens_of((128, 16)), sorted(tokens_of((2, 8, 4, 4)))
    ({128}, {128}, [32, 64])
    """
    return {math.prod(shape) // shape[at] for at in (-1, *([1] if len(shape) > 3 else [])) if len(shape) > 1 and shape[at]}


def over_all(shape: torch.Size | tuple[int, ...], dim: int, tokens: set[int]) -> bool:
    """Whether a dimension holds all rows, or all tokens.

    >>> over_all((128, 8), 0, {128}), over_all((8, 128), 1, {128}), over_all((2, 64, 128), 2, {128}), over_all((128, 128), 1, {128})
    (True, True, False, False)
    >>> over_all((2, 8), 0, {128}), over_all((64, 2), 1, {128})
    (True, False)
    """
    if shape[dim] == BATCH:
        return dim == 0 and len(shape) > 1
    return any(shape[dim] == count and math.prod(shape[:dim]) % count for count in tokens)
