"""Compresses the gradients that hosts send to each other, with error feedback. Each parameter group (`FlatParamGroup`)
has up to two reducers of this module.

Compression changes the result, so it is an option of the workload, which the planner never sets. Inside a host, ranks
sum gradients uncompressed. Each host adds its residual of the last step to this sum and sends the nearest value that
the codec can represent. The difference is the new residual (error feedback: Seide et al., 1-Bit Stochastic Gradient
Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, arXiv 1901.09847). Every host decodes the messages of
all hosts, including its own, and adds them in order of host. In a group that is not hierarchical (topology.py), "host"
means a rank in this module.

    bf16      2 bytes per element
    int8      1 byte per element, and one float32 scale per block, which maps the block's largest magnitude to 127
    low-rank  PowerSGD, see below

With h hosts, a host sends this multiple of a buffer's size (of its encoded size, if compressed):

                     uncompressed    compressed
    all-reduce       2 (h - 1) / h   h - 1
    reduce-scatter   (h - 1) / h     (h - 1) / h

Guarantees: the sum is bitwise equal on all hosts and in every run.

`PowerSGDReducer` sends two thin factors of each matrix instead of the matrix: PowerSGD (Vogels, Karimireddy, Jaggi,
arXiv 1905.13727, algorithm 1).

M is the gradient plus the residual of one host. Q is the factor from the previous step. A prime means the transpose:

    P = sum of M Q over hosts, made orthonormal
    Q = sum of M' P over hosts
    P Q' is the result, and M - P (M' P)' is the new residual of the host

This is one power iteration per step. Elements outside of matrices (biases, norms, rows cut at the border of a slice)
are sent uncompressed together with P. With h hosts, each host sends 2 (h - 1) / h (rows + columns) x rank elements per
matrix in an all-reduce.

[Note: second message] The first message of a reduction contains P, the second contains Q. Q can be computed only once P
of all hosts has arrived, which happens at different times on different hosts. So second messages have their own process
group and a queue. They start in the order of the first messages, which is equal on every host. Until the second message
starts, the residual contains the whole gradient. So before the next gradient of a buffer is added to the residual, the
second message of the buffer's previous reduction is started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.async_collectives import CollectiveWork, all_gather, all_reduce, all_to_all
from meshwright.runtime.comm.topology import HierarchicalGroup
from meshwright.spec.precision import INT8_BLOCK_NUMEL, GradientCompression

if TYPE_CHECKING:
    from meshwright.runtime.comm.group import CommGroup


class MatrixSlice(NamedTuple):
    """A matrix of `rows` x `columns` elements, stored in a vector from index `start` on."""

    start: int
    rows: int
    columns: int


def compressible_matrices(
    tensors: Sequence[tuple[int, tuple[int, ...]]], runs: Sequence[tuple[int, int]], rank: int
) -> list[MatrixSlice]:
    """Returns the matrices to compress in the segments `runs` (start, stop) of a buffer.

    `tensors`: offset in the buffer and shape of each tensor. `rank`: the number of columns of a factor. A matrix
    consists of those rows of a tensor that are completely inside a segment. It is returned if its two factors together
    have fewer elements than the matrix. `start` of a returned matrix is an index in the vector of the concatenated
    segments. In the example, the first segment cuts row 0 of the first tensor, and the second tensor is a vector.

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
    """Reduces the gradients of one buffer between hosts with PowerSGD.

    `matrices`: the matrices to compress, inside a vector of `numel` elements. `rank`: the number of columns of each
    factor. `like`: a tensor with the gradients' dtype and device. `residual`: the `numel` elements of gradients that
    this host has not sent yet, followed by the factors Q. The methods send first messages in `group`, and second
    messages in `second_group`.
    """

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
        """Splits the concatenated factors `joined` into matrices of `rank` columns. `sizes`: the number of rows of each
        factor."""
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
    """One PowerSGD reduction in flight. The constructor adds the gradient to the residual and sends the first message
    ([Note: second message])."""

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
        """Starts the second message of this reduction, after all messages that precede it in the queue. Returns its
        collective."""
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
        self.residual.nan_to_num_(0.0, 0.0, 0.0)  # all ranks skip this step, and the next one needs finite values
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


CPU_TILE_ELEMENTS = 1 << 18
"""Number of elements that a CPU encodes at a time, so that they stay in the cache. A multiple of INT8_BLOCK_NUMEL."""
ACCELERATOR_TILE_ELEMENTS = 1 << 24
"""Number of elements that an accelerator encodes at a time. Each tile costs a few kernel launches."""


def tile_elements(device: torch.device) -> int:
    """Returns the number of elements that `device` encodes at a time."""
    return CPU_TILE_ELEMENTS if backend_of(device).memory_is_host else ACCELERATOR_TILE_ELEMENTS


class GradientCodec(Protocol):
    """Encodes a vector of at most one tile as bytes, and decodes the bytes."""

    def size(self, numel: int) -> int:
        """Returns the number of bytes of `numel` encoded elements."""

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Writes the encoded `values` to the uint8 tensor `encoded`. On return `values` contains the encoding error,
        with zeros for non-finite elements."""

    def decode(self, encoded: torch.Tensor, values: torch.Tensor, add: bool) -> None:
        """Sets `values` to the decoded elements. `add`: whether to add them to `values` instead."""


class Bfloat16Codec:
    """Rounds each element to bfloat16.

    >>> codec, values, encoded = Bfloat16Codec(), torch.tensor([1.0, 1.0009765625]), torch.empty(4, dtype=torch.uint8)
    >>> codec.encode(values, encoded)
    >>> rest = values.tolist()
    >>> codec.decode(encoded, values, add=False)
    >>> values.tolist(), rest
    ([1.0, 1.0], [0.0, 0.0009765625])
    """

    def size(self, numel: int) -> int:
        """Returns the number of bytes of `numel` encoded elements."""
        return 2 * numel

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Writes the encoded `values` to `encoded`. On return `values` contains the encoding error."""
        codes = encoded.view(torch.bfloat16)
        codes.copy_(values)
        values.sub_(codes).nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, encoded: torch.Tensor, values: torch.Tensor, add: bool) -> None:
        """Sets `values` to the decoded elements. `add`: whether to add them to `values` instead."""
        codes = encoded.view(torch.bfloat16)
        if add:
            values.add_(codes.to(values.dtype))
        else:
            values.copy_(codes)


class Int8Codec:
    """Encodes a vector as the float32 scales of all blocks, followed by one byte per element.

    >>> codec, values = Int8Codec(), torch.tensor([127.0, -3.5, 0.75])
    >>> encoded = torch.empty(4 + INT8_BLOCK_NUMEL, dtype=torch.uint8)
    >>> codec.encode(values, encoded)
    >>> rest = values.tolist()
    >>> codec.decode(encoded, values, add=False)
    >>> values.tolist(), rest
    ([127.0, -4.0, 1.0], [0.0, 0.5, -0.25])
    """

    def size(self, numel: int) -> int:
        """Returns the number of bytes of `numel` encoded elements."""
        return -(-numel // INT8_BLOCK_NUMEL) * (4 + INT8_BLOCK_NUMEL)

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        """Writes the encoded `values` to `encoded`. On return `values` contains the encoding error."""
        scales, codes = self._views(encoded, values.numel())
        blocks = self._blocks(values)
        whole = blocks.float().abs()
        torch.amax(whole, 1, keepdim=True, out=scales).div_(127)
        torch.div(blocks, scales.clamp_min(torch.finfo(torch.float32).tiny), out=whole).round_()
        codes.copy_(whole)
        blocks.addcmul_(whole.to(blocks.dtype), scales.to(blocks.dtype), value=-1)
        # All ranks skip a step with non-finite values, and the errors of this step are replaced by zeros. An
        # accelerator does so without checking for such values, because the check would synchronise with the host.
        if not backend_of(blocks.device).memory_is_host or not bool(torch.isfinite(scales).all()):
            blocks.nan_to_num_(0.0, 0.0, 0.0)
        _copy_back(values, blocks)

    def decode(self, encoded: torch.Tensor, values: torch.Tensor, add: bool) -> None:
        """Sets `values` to the decoded elements. `add`: whether to add them to `values` instead."""
        scales, codes = self._views(encoded, values.numel())
        blocks = self._blocks(values)
        if add:
            blocks.addcmul_(codes.to(blocks.dtype), scales.to(blocks.dtype))
        else:
            blocks.copy_(codes).mul_(scales)
        _copy_back(values, blocks)

    def _blocks(self, values: torch.Tensor) -> torch.Tensor:
        """Returns `values` with one block per row: a view, or a copy padded with zeros."""
        short = -values.numel() % INT8_BLOCK_NUMEL
        return (torch.nn.functional.pad(values, (0, short)) if short else values).view(-1, INT8_BLOCK_NUMEL)

    def _views(self, encoded: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        ends = 4 * -(-numel // INT8_BLOCK_NUMEL)
        return encoded[:ends].view(torch.float32).view(-1, 1), encoded[ends:].view(torch.int8).view(
            -1, INT8_BLOCK_NUMEL
        )


def _copy_back(values: torch.Tensor, blocks: torch.Tensor) -> None:
    """Copies the elements from `blocks` back to `values`, if `blocks` is a padded copy."""
    if blocks.data_ptr() != values.data_ptr():
        values.copy_(blocks.view(-1)[: values.numel()])


CODECS: dict[str, Callable[[], GradientCodec]] = {"bf16": Bfloat16Codec, "int8": Int8Codec}


class CompressedReducer:
    """Reduces the gradients of one buffer between hosts with a codec. `residual` contains the encoding errors that this
    host has not sent yet. Only `PowerSGDReducer` uses `second_group`."""

    def __init__(self, codec: GradientCodec, residual: torch.Tensor) -> None:
        self.codec, self.residual, self.tile = codec, residual, tile_elements(residual.device)

    def all_reduce(self, flat: torch.Tensor, group: CommGroup, second_group: CommGroup) -> CollectiveWork:
        """Starts the in-place sum of `flat` over `group`. Returns the work."""
        encoded = self._encode(flat.view(1, -1)).view(-1)
        received = encoded.new_empty(group.size * encoded.numel())
        return self._decode_after(all_gather(received, encoded, group), received, flat, group)

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, group: CommGroup, second_group: CommGroup
    ) -> CollectiveWork:
        """Starts the sum of `full` over `group` and writes this rank's slice of the sum to `out`. Returns the work."""
        encoded = self._encode(full.view(group.size, -1)).view(-1)
        received = torch.empty_like(encoded)
        return self._decode_after(all_to_all(received, encoded, group), received, out, group)

    def _sizes(self, numel: int) -> list[int]:
        """Returns the number of encoded bytes of each tile of `numel` elements."""
        return [self.codec.size(min(self.tile, numel - first)) for first in range(0, numel, self.tile)]

    def _encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the encoded bytes of each row of `rows` plus the residual of the row: uint8 (rows, bytes). The
        encoding error becomes the new residual."""
        sizes = self._sizes(rows.shape[1])
        encoded = torch.empty(len(rows), sum(sizes), dtype=torch.uint8, device=rows.device)
        for row, residual, into in zip(rows, self.residual.view(rows.shape), encoded, strict=True):
            for more, values, tile in zip(
                row.split(self.tile), residual.split(self.tile), into.split(sizes), strict=True
            ):
                self.codec.encode(values.add_(more), tile)
        return encoded

    def _decode_after(
        self, work: CollectiveWork, received: torch.Tensor, out: torch.Tensor, group: CommGroup
    ) -> CollectiveWork:
        sizes = self._sizes(out.numel())

        def add() -> None:
            work.wait()
            parts = (part.split(sizes) for part in received.view(group.size, -1))
            for into, *parts_of_hosts in zip(out.split(self.tile), *parts, strict=True):
                for place, encoded in enumerate(parts_of_hosts):
                    self.codec.decode(encoded, into, add=place > 0)

        return work.then(add)


class FlatSlice(NamedTuple):
    """Elements [start, stop) of a buffer. `like`: a tensor with the dtype and device of the gradients. `tensors`: the
    offset and shape of each tensor in the buffer."""

    start: int
    stop: int
    like: torch.Tensor
    tensors: Sequence[tuple[int, tuple[int, ...]]]


class ReducerPair(NamedTuple):
    """The compressed reducers of a parameter group: over its shard group and over its replicas. None means no
    compression."""

    shards: CompressedReducer | PowerSGDReducer | None
    replicas: CompressedReducer | PowerSGDReducer | None


def make_compressed_reducer(
    compression: GradientCompression | None, group: CommGroup | None, vector: FlatSlice, scattered: bool
) -> CompressedReducer | PowerSGDReducer | None:
    """Returns the reducer of `vector` over `group`. `scattered`: whether it is for a reduce-scatter instead of an
    all-reduce. Returns None if compression is off, or if all ranks are on one host."""
    if compression is None or group is None or group.process_group is None or group.intra_host:
        return None
    runs = _inter_host_ranges(group, vector.start, vector.stop, scattered)
    numel = sum(stop - start for start, stop in runs)
    if compression.kind == "low-rank":
        return PowerSGDReducer(
            compressible_matrices(vector.tensors, runs, compression.rank), numel, compression.rank, vector.like
        )
    return CompressedReducer(
        CODECS[compression.kind](), torch.zeros(numel, dtype=vector.like.dtype, device=vector.like.device)
    )


def _inter_host_ranges(group: CommGroup, start: int, stop: int, scattered: bool) -> list[tuple[int, int]]:
    """Returns the ranges (start, stop) of the buffer that this rank sends to other hosts, in ascending order."""
    tiers = group.shm
    if not isinstance(tiers, HierarchicalGroup):
        return [(start, stop)]
    if scattered:
        each = (stop - start) // group.size
        return [(start + row[tiers.index] * each, start + (row[tiers.index] + 1) * each) for row in tiers.ranks_by_host]
    length, ranks = stop - start, len(tiers.ranks)
    return [(start + length * tiers.index // ranks, start + length * (tiers.index + 1) // ranks)]
