"""Blocks that give a token a place among all tokens that pass together: what a token gets then depends on which others pass with it.

Rule: a running sum, or a choice of the largest, along a dimension that holds all tokens of the run, whose result is compared with a number (the capacity of
an expert: GShard, arXiv 2006.16668, algorithm 1), or is the choice itself (tokens chosen by experts: arXiv 2202.09368). A sort that
only says where rows are kept meanwhile is undone, and is none. Seen in the run without memory; whether it ever bites numbers must say.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from meshwright.anatomy.inputs import BATCH, LENGTH
from meshwright.anatomy.places import Call

PLACES, CHOICES = frozenset({"cumsum", "cumsum_", "cumprod", "logcumsumexp"}), frozenset({"topk", "kthvalue"})
COMPARED = frozenset({"lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal", "clamp", "clamp_", "minimum"})
TOGETHER = (BATCH, BATCH * LENGTH)
"""Sizes of a dimension that holds rows, or all tokens."""


@dataclass
class Counted:
    """`found`: the module that does it, '' where none was seen."""

    found: str = ""
    places: set[int] = field(default_factory=set)

    def follow(self, call: Call, given: list[torch.Tensor], outputs: list[torch.Tensor], where: str) -> None:
        """One operation inside a block; `where` is the innermost module that runs."""
        name = call.name.strip("_")
        if name in PLACES | CHOICES and given and given[0].ndim:
            dim = call.argument(2 if name in CHOICES else 1, "dim", -1)
            size = given[0].shape[dim] if isinstance(dim, int) else 0
            if size == TOGETHER[1] or (size == TOGETHER[0] and dim % given[0].ndim == 0 and given[0].ndim > 1):
                if name in CHOICES:
                    self.found = self.found or where
                self.places.update(id(tensor) for tensor in outputs)
                return
        if any(id(tensor) in self.places for tensor in given):
            if name in COMPARED:
                self.found = self.found or where
            self.places.update(id(tensor) for tensor in outputs)
