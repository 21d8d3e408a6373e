"""Gradients in fewer bytes between hosts. It changes the result, so the workload asks for it; ranks of one host send
nothing and lose nothing.

Each host adds what it did not send last time to its sum, sends the nearest value that the code can say, and keeps the
rest (error feedback: Seide
et al., 1-Bit Stochastic Gradient Descent, 2014; Karimireddy et al., Error Feedback Fixes SignSGD, arXiv 1901.09847).
Every host decodes what
all sent, its own included, and adds in order of host: all hold the same sum, the same in every run.

    bf16     2 bytes an element
    int8     1 byte an element, and a float32 for each BLOCK of them: the largest of the block is 127
    low-rank (lowrank.py)

Of h hosts each sends h - 1 times its coded slice for an all-reduce, where a plain one sends 2 (h - 1) / h times the
slice; a reduce-scatter
sends (h - 1) / h times its coded buffer, as a plain one.
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
"""Elements that are coded at a time, so that they stay in the cache; a multiple of BLOCK."""
ACCELERATOR_TILE_ELEMENTS = 1 << 24
"""The same on an accelerator, where each tile is a few launches."""


def tile_elements(device: torch.device) -> int:
    return CPU_TILE_ELEMENTS if backend_of(device).memory_is_host else ACCELERATOR_TILE_ELEMENTS


class GradientCodec(Protocol):
    """A vector of at most a tile's elements as bytes and back."""

    def size(self, numel: int) -> int:
        """Bytes of so many elements."""

    def encode(self, values: torch.Tensor, said: torch.Tensor) -> None:
        """`said` becomes the bytes of `values`, and these become what they do not say; zero where they are no
        numbers."""

    def decode(self, said: torch.Tensor, values: torch.Tensor, add: bool) -> None:
        """`values` become what `said` says, or with `add` grow by it."""


class Bfloat16Codec:
    """
    >>> code, values, said = Bfloat16Codec(), torch.tensor([1.0, 1.0009765625]), torch.empty(4, dtype=torch.uint8)
    >>> code.say(values, said)
    >>> rest = values.tolist()
    >>> code.hear(said, values, add=False)
    >>> values.tolist(), rest
    ([1.0, 1.0], [0.0, 0.0009765625])
    """

    def size(self, numel: int) -> int:
        return 2 * numel

    def encode(self, values: torch.Tensor, said: torch.Tensor) -> None:
        coded = said.view(torch.bfloat16)
        coded.copy_(values)
        values.sub_(coded).nan_to_num_(0.0, 0.0, 0.0)

    def decode(self, said: torch.Tensor, values: torch.Tensor, add: bool) -> None:
        coded = said.view(torch.bfloat16)
        if add:
            values.add_(coded.to(values.dtype))
        else:
            values.copy_(coded)


class Int8Codec:
    """Scales of all blocks, then their elements.

    >>> code, values, said = Int8Codec(), torch.tensor([127.0, -3.5, 0.75]), torch.empty(4 + INT8_BLOCK_NUMEL, dtype=torch.uint8)
    >>> code.say(values, said)
    >>> rest = values.tolist()
    >>> code.hear(said, values, add=False)
    >>> values.tolist(), rest
    ([127.0, -4.0, 1.0], [0.0, 0.5, -0.25])
    """

    def size(self, numel: int) -> int:
        return -(-numel // INT8_BLOCK_NUMEL) * (4 + INT8_BLOCK_NUMEL)

    def encode(self, values: torch.Tensor, said: torch.Tensor) -> None:
        scales, coded = self._views(said, values.numel())
        blocks = self._blocks(values)
        whole = blocks.float().abs()
        torch.amax(whole, 1, keepdim=True, out=scales).div_(127)
        torch.div(blocks, scales.clamp_min(torch.finfo(torch.float32).tiny), out=whole).round_()
        coded.copy_(whole)
        blocks.addcmul_(whole.to(blocks.dtype), scales.to(blocks.dtype), value=-1)
        if not backend_of(blocks.device).memory_is_host or not bool(
            torch.isfinite(scales).all()
        ):  # of a step that all ranks skip; a device is not asked: it changes nothing else
            blocks.nan_to_num_(0.0, 0.0, 0.0)
        _copy_back(values, blocks)

    def decode(self, said: torch.Tensor, values: torch.Tensor, add: bool) -> None:
        scales, coded = self._views(said, values.numel())
        blocks = self._blocks(values)
        if add:
            blocks.addcmul_(coded.to(blocks.dtype), scales.to(blocks.dtype))
        else:
            blocks.copy_(coded).mul_(scales)
        _copy_back(values, blocks)

    def _blocks(self, values: torch.Tensor) -> torch.Tensor:
        """A block a row: where they lie, or padded with zeros."""
        short = -values.numel() % INT8_BLOCK_NUMEL
        return (torch.nn.functional.pad(values, (0, short)) if short else values).view(-1, INT8_BLOCK_NUMEL)

    def _views(self, said: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        ends = 4 * -(-numel // INT8_BLOCK_NUMEL)
        return said[:ends].view(torch.float32).view(-1, 1), said[ends:].view(torch.int8).view(-1, INT8_BLOCK_NUMEL)


def _copy_back(values: torch.Tensor, blocks: torch.Tensor) -> None:
    """What was done to a padded copy."""
    if blocks.data_ptr() != values.data_ptr():
        values.copy_(blocks.view(-1)[: values.numel()])


CODECS: dict[str, Callable[[], GradientCodec]] = {"bf16": Bfloat16Codec, "int8": Int8Codec}


class CompressedReducer:
    """How one buffer's sums go between hosts; `kept` is what this host has not sent yet."""

    def __init__(self, code: GradientCodec, kept: torch.Tensor) -> None:
        self.codec, self.residual, self.tile = code, kept, tile_elements(kept.device)

    def all_reduce(self, flat: torch.Tensor, group: CommGroup, later: CommGroup) -> CollectiveWork:
        said = self._encode(flat.view(1, -1)).view(-1)
        heard = said.new_empty(group.size * said.numel())
        return self._decode_after(all_gather(heard, said, group), heard, flat, group)

    def reduce_scatter(
        self, full: torch.Tensor, out: torch.Tensor, group: CommGroup, later: CommGroup
    ) -> CollectiveWork:
        said = self._encode(full.view(group.size, -1)).view(-1)
        heard = torch.empty_like(said)
        return self._decode_after(all_to_all(heard, said, group), heard, out, group)

    def _sizes(self, numel: int) -> list[int]:
        """Bytes of the tiles of so many elements."""
        return [self.codec.size(min(self.tile, numel - first)) for first in range(0, numel, self.tile)]

    def _encode(self, rows: torch.Tensor) -> torch.Tensor:
        """Each row of `rows` and what was kept of it, as bytes; what they do not say is kept."""
        sizes = self._sizes(rows.shape[1])
        said = torch.empty(len(rows), sum(sizes), dtype=torch.uint8, device=rows.device)
        for row, kept, into in zip(rows, self.residual.view(rows.shape), said, strict=True):
            for more, values, tile in zip(row.split(self.tile), kept.split(self.tile), into.split(sizes), strict=True):
                self.codec.encode(values.add_(more), tile)
        return said

    def _decode_after(
        self, work: CollectiveWork, heard: torch.Tensor, out: torch.Tensor, group: CommGroup
    ) -> CollectiveWork:
        sizes = self._sizes(out.numel())

        def add() -> None:
            work.wait()
            parts = (part.split(sizes) for part in heard.view(group.size, -1))
            for into, *all_said in zip(out.split(self.tile), *parts, strict=True):
                for place, said in enumerate(all_said):
                    self.codec.decode(said, into, add=place > 0)

        return work.then(add)


class FlatSlice(NamedTuple):
    """What is summed: elements `start` to `stop` of a buffer that holds `tensors` (offset and shape each)."""

    start: int
    stop: int
    like: torch.Tensor
    tensors: Sequence[tuple[int, tuple[int, ...]]]


class ReducerPair(NamedTuple):
    """Of the sums of a flat unit over its shard group and over its copies; None where plainly."""

    shards: CompressedReducer | PowerSGDReducer | None
    replicas: CompressedReducer | PowerSGDReducer | None


def make_compressed_reducer(
    asked: GradientCompression | None, group: CommGroup | None, vector: FlatSlice, scattered: bool
) -> CompressedReducer | PowerSGDReducer | None:
    """How sums of `vector`, or of slices of it, go over `group`: None where plainly, also because nothing leaves the
    host."""
    if asked is None or group is None or group.process_group is None or group.intra_host:
        return None
    runs = _inter_host_ranges(group, vector.start, vector.stop, scattered)
    numel = sum(stop - start for start, stop in runs)
    if asked.kind == "low-rank":
        return PowerSGDReducer(compressible_matrices(vector.tensors, runs, asked.rank), numel, asked.rank, vector.like)
    return CompressedReducer(
        CODECS[asked.kind](), torch.zeros(numel, dtype=vector.like.dtype, device=vector.like.device)
    )


def _inter_host_ranges(group: CommGroup, start: int, stop: int, scattered: bool) -> list[tuple[int, int]]:
    """What of it this rank hands to other hosts, in the order in which it lies there."""
    tiers = group.shm
    if not isinstance(tiers, HierarchicalGroup):
        return [(start, stop)]
    if scattered:
        each = (stop - start) // group.size
        return [(start + row[tiers.index] * each, start + (row[tiers.index] + 1) * each) for row in tiers.ranks_by_host]
    length, ranks = stop - start, len(tiers.ranks)
    return [(start + length * tiers.index // ranks, start + length * (tiers.index + 1) // ranks)]
