"""Reduces gradients between hosts as two thin factors of each matrix: PowerSGD (Vogels, Karimireddy, Jaggi, arXiv
1905.13727, algorithm 1).

M is the sum over hosts of each host's gradient and residual. Q is a factor from the previous step. A prime means the
transpose:

    P = M Q, summed over hosts; P is made orthonormal; Q = M' P, summed over hosts; the result is P Q'

This is one power iteration per step. The new residual of a host is the part of its gradient and residual that P Q' does
not represent. Elements outside of matrices (biases, norms, rows cut at the border of a slice) are sent uncompressed
together with P. With h hosts, an all-reduce sends 2 (h - 1) / h (rows + columns) x rank elements per matrix.

[Note: second message] Q can be computed only once P of all hosts has arrived, which happens at different times on
different hosts. So second messages have their own process group and a queue. They start in the order of the first
messages, which is equal on every host. Until the second message starts, the residual contains the whole gradient. So
before the next gradient of a buffer is added to the residual, the second message of an earlier reduction of this buffer
is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from meshwright.runtime.comm.async_collectives import CollectiveWork, all_reduce

if TYPE_CHECKING:
    from meshwright.runtime.comm.group import CommGroup


class MatrixSlice(NamedTuple):
    """A matrix of `rows` x `columns` elements in a vector, from `start` on."""

    start: int
    rows: int
    columns: int


def compressible_matrices(
    tensors: Sequence[tuple[int, tuple[int, ...]]], runs: Sequence[tuple[int, int]], rank: int
) -> list[MatrixSlice]:
    """Returns the matrices to compress: the complete rows of `tensors` (offset and shape) inside the segments `runs` of
    a buffer, if their factors are smaller than the rows. The segments are concatenated into a vector. `start` of a
    returned matrix is a position in this vector.

    >>> compressible_matrices([(0, (4, 100)), (400, (7,))], [(50, 400), (400, 407)], 1)
    [MatrixSlice(start=50, rows=3, columns=100)]
    """
    matrices, before = [], 0
    for start, stop in runs:
        for offset, shape in tensors:
            numel = torch.Size(shape).numel()
            columns = numel // shape[0] if len(shape) > 1 else 0
            if not columns:
                continue
            first = max(-(-(start - offset) // columns), 0)
            rows = min((stop - offset) // columns, shape[0]) - first
            if rows > 0 and rank * (rows + columns) < rows * columns:
                matrices.append(MatrixSlice(before + offset + first * columns - start, rows, columns))
        before += stop - start
    return sorted(matrices)


class PowerSGDReducer:
    """Reduces the gradients of one buffer between hosts. `residual` contains the parts of gradients that this host has
    not sent yet, followed by the factors Q."""

    def __init__(self, matrices: Sequence[MatrixSlice], numel: int, rank: int, like: torch.Tensor) -> None:
        self.matrices, self.numel, self.rank = matrices, numel, rank
        self.dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.uncompressed = torch.ones(numel, dtype=torch.bool, device=like.device)
        for matrix in matrices:
            self.uncompressed[matrix.start : matrix.start + matrix.rows * matrix.columns] = False
        initial = torch.randn(
            sum(each.columns for each in matrices) * rank,
            generator=torch.Generator().manual_seed(numel),
            dtype=torch.float64,
        )
        self.initial_factors = initial.to(like.device, self.dtype)
        self.residual = torch.cat([torch.zeros(numel, dtype=self.dtype, device=like.device), self.initial_factors])
        self.last_transfer: PowerSGDTransfer | None = None

    def matrix_views(self, vector: torch.Tensor) -> list[torch.Tensor]:
        """Returns views of the matrices inside `vector`."""
        return [
            vector[each.start : each.start + each.rows * each.columns].view(each.rows, each.columns)
            for each in self.matrices
        ]

    def factor_views(self, joined: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Splits the concatenated factors `joined` into matrices of `rank` columns. `sizes` are their numbers
        of rows."""
        return [part.view(-1, self.rank) for part in joined.split([size * self.rank for size in sizes])]

    def all_reduce(self, flat: torch.Tensor, group: CommGroup, second_group: CommGroup) -> PowerSGDTransfer:
        """Starts the in-place sum of `flat` over `group`. Returns the transfer."""
        return PowerSGDTransfer(self, flat, slice(None), flat, (group, second_group))

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, group: CommGroup, second_group: CommGroup
    ) -> PowerSGDTransfer:
        """Starts the sum of `full` over `group` and writes this rank's slice of the sum to `out`. Returns the
        transfer."""
        each = out.numel()
        return PowerSGDTransfer(
            self, full, slice(group.index * each, (group.index + 1) * each), out, (group, second_group)
        )


class PowerSGDTransfer:
    """One reduction in flight ([Note: second message])."""

    def __init__(
        self,
        reducer: PowerSGDReducer,
        flat: torch.Tensor,
        out_slice: slice,
        out: torch.Tensor,
        groups: tuple[CommGroup, CommGroup],
    ) -> None:
        self.reducer, self.out_slice, self.out, self.second_group = reducer, out_slice, out, groups[1]
        self.second_reduce: CollectiveWork | None = None
        if reducer.last_transfer is not None:
            reducer.last_transfer.ensure_second()
        reducer.last_transfer = self
        self.residual, self.factors = reducer.residual[: reducer.numel], reducer.residual[reducer.numel :]
        self.residual.add_(flat)
        self.rows, self.columns = [each.rows for each in reducer.matrices], [each.columns for each in reducer.matrices]
        factors = reducer.factor_views(self.factors, self.columns)
        p_factors = [
            matrix @ factor for matrix, factor in zip(reducer.matrix_views(self.residual), factors, strict=True)
        ]
        self.first_message = torch.cat([*(each.view(-1) for each in p_factors), self.residual[reducer.uncompressed]])
        self.first_reduce: CollectiveWork = all_reduce(self.first_message, groups[0])
        self.second_group.second_messages.append(self)

    def ensure_second(self) -> CollectiveWork:
        """Starts this second message, after those that are queued before it. Returns its collective."""
        while self.second_reduce is None:
            self.second_group.second_messages.popleft().start_second()
        return self.second_reduce

    def start_second(self) -> None:
        """Waits for P of all hosts. Then starts the reduction of Q."""
        self.first_reduce.wait()
        p_factors = sum(self.rows) * self.reducer.rank
        self.p_factors = [
            _orthonormal_basis(each) for each in self.reducer.factor_views(self.first_message[:p_factors], self.rows)
        ]
        q_factors = [
            matrix.T @ p for matrix, p in zip(self.reducer.matrix_views(self.residual), self.p_factors, strict=True)
        ]
        for matrix, p, q in zip(self.reducer.matrix_views(self.residual), self.p_factors, q_factors, strict=True):
            matrix.sub_(p @ q.T)
        self.residual[self.reducer.uncompressed] = 0.0
        self.residual.nan_to_num_(0.0, 0.0, 0.0)  # all ranks skip a step with non-finite values
        self.q_factors = torch.cat([each.reshape(-1) for each in q_factors]) if q_factors else self.first_message[:0]
        self.second_reduce = all_reduce(self.q_factors, self.second_group)

    @property
    def is_done(self) -> bool:
        """Returns whether `wait` returns immediately. Also starts second messages whose first message is complete."""
        queue = self.second_group.second_messages
        while queue and queue[0].first_reduce.is_done:
            queue.popleft().start_second()
        return self.second_reduce is not None and self.second_reduce.is_done

    def wait(self) -> None:
        """Waits for both messages and writes the sum to the output."""
        self.ensure_second().wait()
        total = torch.empty(self.reducer.numel, dtype=self.first_message.dtype, device=self.first_message.device)
        total[self.reducer.uncompressed] = self.first_message[sum(self.rows) * self.reducer.rank :]
        for matrix, p, q in zip(
            self.reducer.matrix_views(total),
            self.p_factors,
            self.reducer.factor_views(self.q_factors, self.columns),
            strict=True,
        ):
            torch.mm(p, q.T, out=matrix)
        self.out.copy_(total[self.out_slice])
        is_usable = torch.isfinite(self.q_factors).all() & (self.q_factors != 0).any()
        self.factors.copy_(self.q_factors if bool(is_usable) else self.reducer.initial_factors)


def _orthonormal_basis(thin: torch.Tensor) -> torch.Tensor:
    """Returns orthonormal columns with the span of the columns of `thin`; NaN if `thin` is not finite."""
    return torch.linalg.qr(thin)[0] if bool(torch.isfinite(thin).all()) else torch.full_like(thin, torch.nan)
