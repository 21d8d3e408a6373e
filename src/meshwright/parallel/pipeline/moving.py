"""Buffers that a block's own forward moves on, such as running means: what is made again reads them as they were in its pass, and leaves them as they are.

[Note: of its own pass] A pass that moves a buffer and reads it has its own value of it, while backward may come when later passes have moved it on
(pipelines, a block that is called twice). So a block that runs again is given copies of what it began with in place of its buffers, and what is made
again by operation reads copies of what it read. Which buffers move is seen in the first pass; all others are neither copied nor replaced.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.base.errors import InputError


class Before(NamedTuple):
    """A buffer before a pass: where it is registered, and its value, where it is known to move."""

    holder: dict[str, torch.Tensor | None]
    name: str
    buffer: torch.Tensor
    version: int
    value: torch.Tensor | None

    @property
    def has_moved(self) -> bool:
        """Batch norms write their means past the version."""
        written = self.holder.get(self.name) is not self.buffer or self.buffer._version != self.version
        return written or (self.value is not None and not torch.equal(self.buffer, self.value))


class Moving:
    """The buffers of one block."""

    def __init__(self, module: nn.Module) -> None:
        self._modules = [each for each in module.modules() if each._buffers]
        self._moved: set[tuple[int, str]] | None = None
        """Those that move; None before the first pass."""

    def before(self) -> list[Before]:
        """All of them; values of those that move, as far as that is known."""
        found = [(each._buffers, name, buffer) for each in self._modules for name, buffer in each._buffers.items() if buffer is not None]
        return [
            Before(holder, name, buffer, buffer._version, buffer.detach().clone() if self._may_move(holder, name) else None)
            for holder, name, buffer in found
        ]

    def _may_move(self, holder: dict[str, torch.Tensor | None], name: str) -> bool:
        return self._moved is None or (id(holder), name) in self._moved

    def moved(self, before: list[Before]) -> list[Before]:
        """Those that the pass has moved, or that an earlier one did. Raises InputError for one that did not before."""
        if self._moved is None:
            self._moved = {(id(each.holder), each.name) for each in before if each.has_moved}
        late = next((each.name for each in before if each.value is None and each.has_moved), None)
        if late is not None:
            raise InputError(
                f"the buffer {late} of a block is moved on in some passes and was not in the first one, so that what is recomputed would read another value: "
                "leave recompute out"
            )
        return [each for each in before if self._may_move(each.holder, each.name)]


class AsBefore:
    """A context in which buffers are as they were before a pass. Behind it they are what they are now."""

    def __init__(self, moved: list[Before]) -> None:
        self.moved = moved
        self._now: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        self._now = [each.holder.get(each.name) for each in self.moved]
        for each in self.moved:
            assert each.value is not None
            each.holder[each.name] = each.value.clone()

    def __exit__(self, *raised: Any) -> None:
        for each, now in zip(self.moved, self._now, strict=True):
            each.holder[each.name] = now
