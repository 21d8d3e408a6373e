"""Gradients between hosts as two thin factors of each matrix (Vogels, Karimireddy, Jaggi, PowerSGD, arXiv 1905.13727,
algorithm 1).

With M the sum over hosts of what each has, its own kept back part included, and Q the factor of the step before:

    P = M Q, summed over hosts; P becomes orthogonal; Q = M' P, summed over hosts; M is taken as P Q'

One power iteration a step; a host keeps back what its own part of P Q' does not say. What is no matrix (biases, norms,
rows cut at the border
of a slice) crosses as it is, with P. Sent for an all-reduce: 2 (h - 1) / h (rows + columns) x rank elements of each
matrix.

[Note: second message] Q waits for P of all hosts. Hosts come to it in unlike moments, so the second messages have a
group of their own and a
line in which they begin in order: the first messages' order, which is the same on every host. Where a sum of the same
buffer is still on its way, its
second message begins before more is added to what is kept back, which holds all of it until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from meshwright.runtime.comm.async_collectives import CollectiveWork, all_reduce

if TYPE_CHECKING:
    from meshwright.runtime.comm.group import CommGroup


class MatrixSlice(NamedTuple):
    """Where a vector holds one: `rows` x `columns` elements from `start` on."""

    start: int
    rows: int
    columns: int


def compressible_matrices(
    tensors: Sequence[tuple[int, tuple[int, ...]]], runs: Sequence[tuple[int, int]], rank: int
) -> list[MatrixSlice]:
    """Whole rows of `tensors` (offset and shape each) in `runs` of a buffer, which lie one after the other in a vector;
    where factors are smaller.

    >>> compressible_matrices([(0, (4, 100)), (400, (7,))], [(50, 400), (400, 407)], 1)
    [MatrixSlice(start=50, rows=3, columns=100)]
    """
    found, before = [], 0
    for start, stop in runs:
        for offset, shape in tensors:
            numel = torch.Size(shape).numel()
            columns = numel // shape[0] if len(shape) > 1 else 0
            if not columns:
                continue
            first = max(-(-(start - offset) // columns), 0)
            rows = min((stop - offset) // columns, shape[0]) - first
            if rows > 0 and rank * (rows + columns) < rows * columns:
                found.append(MatrixSlice(before + offset + first * columns - start, rows, columns))
        before += stop - start
    return sorted(found)


class PowerSGDReducer:
    """How one buffer's sums go between hosts. `kept`: what this host has not sent yet, then the factors Q."""

    def __init__(self, held: Sequence[MatrixSlice], numel: int, rank: int, like: torch.Tensor) -> None:
        self.held, self.numel, self.rank = held, numel, rank
        self.type = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.plain = torch.ones(numel, dtype=torch.bool, device=like.device)
        for matrix in held:
            self.plain[matrix.start : matrix.start + matrix.rows * matrix.columns] = False
        drawn = torch.randn(
            sum(each.columns for each in held) * rank,
            generator=torch.Generator().manual_seed(numel),
            dtype=torch.float64,
        )
        self.first = drawn.to(like.device, self.type)
        self.kept = torch.cat([torch.zeros(numel, dtype=self.type, device=like.device), self.first])
        self.last: PowerSGDTransfer | None = None

    def parts(self, vector: torch.Tensor) -> list[torch.Tensor]:
        return [
            vector[each.start : each.start + each.rows * each.columns].view(each.rows, each.columns)
            for each in self.held
        ]

    def factors(self, joined: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        return [part.view(-1, self.rank) for part in joined.split([size * self.rank for size in sizes])]

    def all_reduce(self, flat: torch.Tensor, group: CommGroup, later: CommGroup) -> PowerSGDTransfer:
        return PowerSGDTransfer(self, flat, slice(None), flat, (group, later))

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, group: CommGroup, later: CommGroup
    ) -> PowerSGDTransfer:
        each = out.numel()
        return PowerSGDTransfer(self, full, slice(group.index * each, (group.index + 1) * each), out, (group, later))


class PowerSGDTransfer:
    """One sum on its way; see [Note: second message]."""

    def __init__(
        self,
        code: PowerSGDReducer,
        flat: torch.Tensor,
        wanted: slice,
        out: torch.Tensor,
        ways: tuple[CommGroup, CommGroup],
    ) -> None:
        self.code, self.wanted, self.out, self.later = code, wanted, out, ways[1]
        self.two: CollectiveWork | None = None
        if code.last is not None:
            code.last.reach_second()
        code.last = self
        self.whole, self.factors = code.kept[: code.numel], code.kept[code.numel :]
        self.whole.add_(flat)
        self.rows, self.columns = [each.rows for each in code.held], [each.columns for each in code.held]
        factors = code.factors(self.factors, self.columns)
        thin = [matrix @ factor for matrix, factor in zip(code.parts(self.whole), factors, strict=True)]
        self.said = torch.cat([*(each.view(-1) for each in thin), self.whole[code.plain]])
        self.one: CollectiveWork = all_reduce(self.said, ways[0])
        self.later.line.append(self)

    def reach_second(self) -> CollectiveWork:
        while self.two is None:
            self.later.line.popleft().begin_second()
        return self.two

    def begin_second(self) -> None:
        """P of all hosts is there."""
        self.one.wait()
        thin = sum(self.rows) * self.code.rank
        self.left = [_orthonormal_basis(each) for each in self.code.factors(self.said[:thin], self.rows)]
        own = [matrix.T @ left for matrix, left in zip(self.code.parts(self.whole), self.left, strict=True)]
        for matrix, left, right in zip(self.code.parts(self.whole), self.left, own, strict=True):
            matrix.sub_(left @ right.T)
        self.whole[self.code.plain] = 0.0
        self.whole.nan_to_num_(0.0, 0.0, 0.0)  # of a step that all ranks skip
        self.right = torch.cat([each.reshape(-1) for each in own]) if own else self.said[:0]
        self.two = all_reduce(self.right, self.later)

    @property
    def is_done(self) -> bool:
        line = self.later.line
        while line and line[0].one.is_done:
            line.popleft().begin_second()
        return self.two is not None and self.two.is_done

    def wait(self) -> None:
        self.reach_second().wait()
        total = torch.empty(self.code.numel, dtype=self.said.dtype, device=self.said.device)
        total[self.code.plain] = self.said[sum(self.rows) * self.code.rank :]
        for matrix, left, right in zip(
            self.code.parts(total), self.left, self.code.factors(self.right, self.columns), strict=True
        ):
            torch.mm(left, right.T, out=matrix)
        self.out.copy_(total[self.wanted])
        alive = torch.isfinite(self.right).all() & (self.right != 0).any()
        self.factors.copy_(self.right if bool(alive) else self.code.first)


def _orthonormal_basis(thin: torch.Tensor) -> torch.Tensor:
    """Columns that span the same; of numbers that are none, numbers that are none."""
    return torch.linalg.qr(thin)[0] if bool(torch.isfinite(thin).all()) else torch.full_like(thin, torch.nan)
