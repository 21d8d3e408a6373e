"""Compresses gradients between hosts, with error feedback.

Compression changes the result, so only the workload can enable it. The sum over the ranks of one host is exact. Each
host adds its residual of the last step to this sum and sends the nearest value that the codec can represent. The
difference is the new residual (error feedback: Seide et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et
al., Error Feedback Fixes SignSGD, arXiv 1901.09847). Every host decodes the messages of all hosts, including its own,
and adds them in order of host.

    bf16      2 bytes per element
    int8      1 byte per element and a float32 scale for each block, whose largest element is 127
    low-rank  PowerSGD (powersgd.py)

With h hosts, a host sends in a compressed all-reduce h - 1 times its encoded slice. In an uncompressed all-reduce it
sends 2 (h - 1) / h times the slice. In a reduce-scatter it sends (h - 1) / h times the buffer, encoded or not.

Guarantees: the sum is bitwise equal on all hosts and in every run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm.async_collectives import CollectiveWork, all_gather, all_to_all
from meshwright.runtime.comm.hierarchical import HierarchicalGroup
from meshwright.runtime.comm.powersgd import PowerSGDReducer, compressible_matrices
from meshwright.spec.precision import INT8_BLOCK_NUMEL, GradientCompression

if TYPE_CHECKING:
    from meshwright.runtime.comm.group import CommGroup


CPU_TILE_ELEMENTS = 1 << 18
"""Number of elements that a CPU encodes at a time, so that they stay in the cache. It is a multiple of the
block length."""
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
        """Writes the encoded `values` to `encoded`. On return `values` contains the encoding error, with zeros for
        non-finite elements."""

    def decode(self, encoded: torch.Tensor, values: torch.Tensor, add: bool) -> None:
        """Sets `values` to the decoded elements, or adds these to `values` if `add`."""


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
        """Sets `values` to the decoded elements, or adds these to `values` if `add`."""
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
        # All ranks skip a step with non-finite values. On an accelerator the check is omitted, because it would
        # synchronise.
        if not backend_of(blocks.device).memory_is_host or not bool(torch.isfinite(scales).all()):
            blocks.nan_to_num_(0.0, 0.0, 0.0)
        _copy_back(values, blocks)

    def decode(self, encoded: torch.Tensor, values: torch.Tensor, add: bool) -> None:
        """Sets `values` to the decoded elements, or adds these to `values` if `add`."""
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
    """Reduces the gradients of one buffer between hosts. `residual` contains the encoding errors that this host has not
    sent yet."""

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
        """Encodes each row of `rows` plus its residual. The encoding error becomes the new residual."""
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
    """Elements [start, stop) of a buffer. `tensors` are the offset and shape of each tensor in the buffer."""

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
    """Returns the reducer of `vector` over `group`, or of its slices if `scattered`. Returns None if the group is on
    one host or compression is off."""
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
    """Returns the ranges of the buffer that this rank sends to other hosts, in the order of the buffer."""
    tiers = group.shm
    if not isinstance(tiers, HierarchicalGroup):
        return [(start, stop)]
    if scattered:
        each = (stop - start) // group.size
        return [(start + row[tiers.index] * each, start + (row[tiers.index] + 1) * each) for row in tiers.ranks_by_host]
    length, ranks = stop - start, len(tiers.ranks)
    return [(start + length * tiers.index // ranks, start + length * (tiers.index + 1) // ranks)]
