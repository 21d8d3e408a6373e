"""Assigns the positions of a sequence to context ranks. Each rank has one chunk from the front and one from the back,
so that all ranks have equal work under a causal mask.

Rule: for c context ranks the sequence is cut into 2c chunks. Rank r has the chunks r and 2c - 1 - r. A causal query
sees the keys before it, so the work of chunk i is proportional to i + 1/2. For every rank the sum over its two chunks
is 2c. Source: Llama 3 (arXiv 2407.21783), section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright.core.errors import InputError
from meshwright.core.messages import Message


@dataclass(frozen=True)
class HeadTailSplit:
    """The cut of a sequence over `ranks` context ranks, for the rank with index `index`."""

    ranks: int
    index: int

    def chunk(self, length: int) -> int:
        """Returns the number of positions in one chunk of a sequence of `length` positions.

        Raises:
            InputError: the chunks would be unequal.
        """
        chunk, rest = divmod(length, 2 * self.ranks)
        if rest or not chunk:
            raise InputError(
                Message(
                    "2 * cp({ranks}) = {parts} does not divide sequence({length}): pad to {chunk} with labels of "
                    "-100, or choose another cp",
                    ranks=self.ranks,
                    parts=2 * self.ranks,
                    length=length,
                    chunk=(chunk + 1) * 2 * self.ranks,
                )
            )
        return chunk

    def chunks(self, length: int) -> list[slice]:
        """Returns this rank's two ranges of positions, in order.

        >>> HeadTailSplit(2, 0).chunks(8), HeadTailSplit(2, 1).chunks(8)
        ([slice(0, 2, None), slice(6, 8, None)], [slice(2, 4, None), slice(4, 6, None)])
        """
        chunk = self.chunk(length)
        return [slice(at * chunk, (at + 1) * chunk) for at in (self.index, 2 * self.ranks - 1 - self.index)]

    def of(self, rank: int) -> HeadTailSplit:
        """Returns the split for the rank with index `rank`."""
        return HeadTailSplit(self.ranks, rank)

    def cut(self, whole: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's positions of `whole` along `dim`."""
        return torch.cat(
            [whole.narrow(dim, run.start, run.stop - run.start) for run in self.chunks(whole.shape[dim])], dim
        )

    def place(self, piece: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns a tensor of the full length, with `piece` at this rank's positions and zeros at all others."""
        length = piece.shape[dim] * self.ranks
        parts, end = [], 0
        for run, chunk in zip((*self.chunks(length), slice(length, length)), (*piece.chunk(2, dim), None), strict=True):
            shape = (*piece.shape[:dim], run.start - end, *piece.shape[dim + 1 :])
            parts += [piece.new_zeros(shape)] + ([] if chunk is None else [chunk])
            end = run.stop
        return torch.cat(parts, dim)

    def in_order(self, stacked: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns `stacked` (piece of rank 0, of rank 1, ... along `dim`) with its positions in sequence order."""
        first, second = stacked.unflatten(dim, (self.ranks, 2, -1)).unbind(dim + 1)
        return torch.cat([first.flatten(dim, dim + 1), second.flip(dim).flatten(dim, dim + 1)], dim)

    def stacked(self, ordered: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns the pieces of all ranks in order of rank along `dim`. Inverts `in_order`."""
        first, second = ordered.unflatten(dim, (2, self.ranks, -1)).unbind(dim)
        return torch.stack([first, second.flip(dim)], dim + 1).flatten(dim, dim + 2)
