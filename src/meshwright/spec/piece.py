"""A piece of a logical tensor: what one rank holds of it. Checkpoints are written and read in pieces, whatever the layout.

[Note: pieces] A tensor rank holds, along dimension `split`, the intervals `intervals` of the full tensor (several for a fused projection),
laid one after the other: the local tensor. A shard of a flat buffer holds the run [start, stop) of that local tensor, flattened.
`split` None: the local tensor is the full one.
"""

from __future__ import annotations

from typing import NamedTuple


class Piece(NamedTuple):
    """`name` is the model's own parameter name behind a kind: 'model/lm_head.weight', 'optimizer/exp_avg/lm_head.weight'."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: int | None
    intervals: tuple[tuple[int, int], ...]
    start: int
    stop: int

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the tensor rank's part.

        >>> Piece("w", (8, 4), "float32", 0, ((0, 2), (4, 6)), 0, 16).local_shape
        (4, 4)
        """
        if self.split is None:
            return self.shape
        size = sum(stop - start for start, stop in self.intervals)
        return (*self.shape[: self.split], size, *self.shape[self.split + 1 :])
