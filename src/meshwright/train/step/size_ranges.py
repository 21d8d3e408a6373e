"""The known sizes of batches: for each dimension, the range from the smallest to the largest size that a check or a
proof covered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from meshwright.runtime.loss.objective import Batch

Range = tuple[int, int]
Ranges = dict[str, tuple[Range, ...]]
"""The smallest and the largest size of each dimension except the rows, by a text with the keys of a batch and their
dimensions."""


class FirstOutside(NamedTuple):
    """The first micro-batch with unknown sizes: a description ('' if all sizes are known), and its index in the
    step."""

    said: str = ""
    at: int = -1


class SizeRanges:
    """Collects the sizes of batches and finds batches whose sizes are not known.

    >>> known = SizeRanges()
    >>> known.add([{"ids": torch.zeros(2, 8)}, {"ids": torch.zeros(2, 4)}])
    >>> (
    ...     known.first_outside([{"ids": torch.zeros(2, 5)}]),
    ...     known.first_outside([{"ids": torch.zeros(2, 5)}, {"ids": torch.zeros(2, 12)}]),
    ... )
    (FirstOutside(said='', at=-1), FirstOutside(said='the batch has other sizes: ids (12), known are 4 to 8', at=1))
    """

    def __init__(self, known: Mapping[str, Sequence[Sequence[int]]] | None = None) -> None:
        self.known: Ranges = {
            form: tuple((low, high) for low, high in ranges) for form, ranges in (known or {}).items()
        }

    def add(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Adds the sizes of `batches`."""
        for form, sizes in map(sizes_of, batches):
            before = self.known.get(form, tuple((size, size) for size in sizes))
            self.known[form] = tuple(
                (min(low, size), max(high, size)) for (low, high), size in zip(before, sizes, strict=True)
            )

    def first_outside(self, batches: Sequence[Batch]) -> FirstOutside:
        """Returns the largest of the micro-batches with unknown sizes. Before the first `add`, all sizes count as
        known."""
        outside = [at for at, batch in enumerate(batches) if self.known and not self._covers(batch)]
        if not outside:
            return FirstOutside()
        at = max(outside, key=lambda each: sizes_of(batches[each])[1])
        ranges = self.known.get(sizes_of(batches[at])[0])
        known = f", known are {', '.join(f'{low} to {high}' for low, high in dict.fromkeys(ranges))}" if ranges else ""
        return FirstOutside(f"the batch has other sizes: {', '.join(_shown(batches[at]))}{known}", at)

    def _covers(self, batch: Mapping[str, Any]) -> bool:
        form, sizes = sizes_of(batch)
        return form in self.known and all(
            low <= size <= high for size, (low, high) in zip(sizes, self.known[form], strict=True)
        )


def sizes_of(batch: Mapping[str, Any]) -> tuple[str, tuple[int, ...]]:
    """Returns the keys and numbers of dimensions of a batch's tensors as text, and all sizes except the rows."""
    tensors = [(name, value) for name, value in sorted(batch.items()) if isinstance(value, torch.Tensor)]
    return ", ".join(f"{name} {value.ndim}" for name, value in tensors), tuple(
        size for _, value in tensors for size in value.shape[1:]
    )


def _shown(batch: Mapping[str, Any]) -> list[str]:
    tensors = [
        (name, value) for name, value in sorted(batch.items()) if isinstance(value, torch.Tensor) and value.ndim > 1
    ]
    return [f"{name} ({', '.join(map(str, value.shape[1:]))})" for name, value in tensors]
