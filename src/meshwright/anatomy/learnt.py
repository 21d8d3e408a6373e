"""Which tensors have values that come from parameters, with or without a gradient: what a block is given of them no other stage can make.

Rule: what is computed from a parameter, or from such a tensor, is one; but where only a form is asked for (`zeros_like`, `x.to(y)`). A table that is read
without recording (RoFormer's positions), or a mask of what is zero in an embedding, has no gradient and depends on weights all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

FIRST = frozenset({"to", "type", "type_as", "expand_as", "view_as", "reshape_as"})
"""Functions that take values of the first tensor that they are given alone."""


class Learnt(TorchFunctionMode):
    """While it is entered, or told of each function, it notes of which parameters tensors are made. `names`: of parameters by id."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = list(names.values())
        self.marks = {id_: 1 << place for place, id_ in enumerate(names)}
        self.alive: list[torch.Tensor] = []  # so that an id is never used twice

    def __contains__(self, tensor: Any) -> bool:
        return id(tensor) in self.marks

    def made_of(self, tensor: torch.Tensor) -> set[str]:
        """Names of the parameters."""
        mark = self.marks.get(id(tensor), 0)
        return {name for place, name in enumerate(self.names) if mark >> place & 1}

    def follow(self, name: str, given: Sequence[torch.Tensor], outputs: Iterable[torch.Tensor]) -> None:
        """One function."""
        mark = 0
        for tensor in given[:1] if name in FIRST else given:
            mark |= self.marks.get(id(tensor), 0)
        if mark and not name.endswith("_like") and not name.startswith("new_"):
            found = given[:1] if name == "__setitem__" else list(outputs)
            self.marks |= {id(tensor): mark | self.marks.get(id(tensor), 0) for tensor in found}
            self.alive.extend(found)

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.follow(getattr(function, "__name__", ""), _tensors((args, kwargs)), _tensors(result))
        return result


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
