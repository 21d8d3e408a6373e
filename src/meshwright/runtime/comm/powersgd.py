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
        self.matrices, self.numel, self.rank = held, numel, rank
        self.dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.uncompressed = torch.ones(numel, dtype=torch.bool, device=like.device)
        for matrix in held:
            self.uncompressed[matrix.start : matrix.start + matrix.rows * matrix.columns] = False
        drawn = torch.randn(
            sum(each.columns for each in held) * rank,
            generator=torch.Generator().manual_seed(numel),
            dtype=torch.float64,
        )
        self.initial_factors = drawn.to(like.device, self.dtype)
        self.residual = torch.cat([torch.zeros(numel, dtype=self.dtype, device=like.device), self.initial_factors])
        self.last_transfer: PowerSGDTransfer | None = None

    def matrix_views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        return [
            vector[each.start : each.start + each.rows * each.columns].view(each.rows, each.columns)
            for each in self.matrices
        ]

    def factor_views(self, joined: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
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
        self.reducer, self.out_slice, self.out, self.second_group = code, wanted, out, ways[1]
        self.second_reduce: CollectiveWork | None = None
        if code.last_transfer is not None:
            code.last_transfer.ensure_second()
        code.last_transfer = self
        self.residual, self.factors = code.residual[: code.numel], code.residual[code.numel :]
        self.residual.add_(flat)
        self.rows, self.columns = [each.rows for each in code.matrices], [each.columns for each in code.matrices]
        factors = code.factor_views(self.factors, self.columns)
        thin = [matrix @ factor for matrix, factor in zip(code.matrix_views(self.residual), factors, strict=True)]
        self.first_message = torch.cat([*(each.view(-1) for each in thin), self.residual[code.uncompressed]])
        self.first_reduce: CollectiveWork = all_reduce(self.first_message, ways[0])
        self.second_group.second_messages.append(self)

    def ensure_second(self) -> CollectiveWork:
        while self.second_reduce is None:
            self.second_group.second_messages.popleft().start_second()
        return self.second_reduce

    def start_second(self) -> None:
        """P of all hosts is there."""
        self.first_reduce.wait()
        thin = sum(self.rows) * self.reducer.rank
        self.p_factors = [
            _orthonormal_basis(each) for each in self.reducer.factor_views(self.first_message[:thin], self.rows)
        ]
        own = [
            matrix.T @ left
            for matrix, left in zip(self.reducer.matrix_views(self.residual), self.p_factors, strict=True)
        ]
        for matrix, left, right in zip(self.reducer.matrix_views(self.residual), self.p_factors, own, strict=True):
            matrix.sub_(left @ right.T)
        self.residual[self.reducer.uncompressed] = 0.0
        self.residual.nan_to_num_(0.0, 0.0, 0.0)  # of a step that all ranks skip
        self.q_factors = torch.cat([each.reshape(-1) for each in own]) if own else self.first_message[:0]
        self.second_reduce = all_reduce(self.q_factors, self.second_group)

    @property
    def is_done(self) -> bool:
        line = self.second_group.second_messages
        while line and line[0].first_reduce.is_done:
            line.popleft().start_second()
        return self.second_reduce is not None and self.second_reduce.is_done

    def wait(self) -> None:
        self.ensure_second().wait()
        total = torch.empty(self.reducer.numel, dtype=self.first_message.dtype, device=self.first_message.device)
        total[self.reducer.uncompressed] = self.first_message[sum(self.rows) * self.reducer.rank :]
        for matrix, left, right in zip(
            self.reducer.matrix_views(total),
            self.p_factors,
            self.reducer.factor_views(self.q_factors, self.columns),
            strict=True,
        ):
            torch.mm(left, right.T, out=matrix)
        self.out.copy_(total[self.out_slice])
        alive = torch.isfinite(self.q_factors).all() & (self.q_factors != 0).any()
        self.factors.copy_(self.q_factors if bool(alive) else self.reducer.initial_factors)


def _orthonormal_basis(thin: torch.Tensor) -> torch.Tensor:
    """Columns that span the same; of numbers that are none, numbers that are none."""
    return torch.linalg.qr(thin)[0] if bool(torch.isfinite(thin).all()) else torch.full_like(thin, torch.nan)
