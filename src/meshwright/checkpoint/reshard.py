"""Computes which elements of saved shards fill a wanted shard, so that a checkpoint can be loaded under any layout.
load.py and hf_weights.py use this file. The copies are planned from `ShardMetadata` alone, without the tensors.

[Note: flat ranges] A tensor rank has a local tensor: the full tensor, or some intervals of one of its dimensions. A
shard is a range of the flattened local tensor. If the saved and the wanted shard are ranges of the same flat tensor,
the elements to copy are the overlap of the two ranges. There are two such cases:

- The local tensors of both shards have equal intervals. Both shards are ranges of the flattened local tensor.
- Each local tensor is the full tensor or is split along dimension 0. Both shards consist of ranges of the flattened
  full tensor, in which rows are contiguous.

In all other cases the full tensor is assembled, one tensor at a time. Local tensors are filled from their saved ranges
and copied into the full tensor. Then the wanted shard is extracted from the full tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshwright.spec.layout import ShardMetadata


class CopyRange(NamedTuple):
    """A copy of `length` elements from offset `start` of the saved shard `source` to offset `to` of the wanted
    shard.
    """

    source: int
    start: int
    to: int
    length: int


def normalize_shard(piece: ShardMetadata) -> ShardMetadata:
    """Returns the metadata `piece` in canonical form: adjacent intervals are merged, and if the local tensor is the
    full tensor, there is no split.

    >>> normalize_shard(ShardMetadata("w", (8, 4), "float32", 0, ((0, 3), (3, 8)), 0, 16)).split is None
    True
    """
    if piece.split is None:
        return piece
    merged: list[tuple[int, int]] = []
    for first, last in piece.intervals:
        if merged and merged[-1][1] == first:
            first = merged.pop()[0]
        merged.append((first, last))
    if merged == [(0, piece.shape[piece.split])]:
        return piece._replace(split=None, intervals=())
    return piece._replace(intervals=tuple(merged))


def plan_copies(wanted: ShardMetadata, saved: Sequence[ShardMetadata]) -> list[CopyRange] | None:
    """Returns the copies from the shards `saved` that fill every element of `wanted` once. Returns None if the full
    tensor must be assembled ([Note: flat ranges]).
    """
    wanted = normalize_shard(wanted)
    saved = [normalize_shard(piece) for piece in saved]
    count = wanted.stop - wanted.start
    if wanted in saved:
        return [CopyRange(saved.index(wanted), 0, 0, count)]
    same = {
        index: [(piece.start, piece.stop, 0)]
        for index, piece in enumerate(saved)
        if (piece.split, piece.intervals) == wanted[3:5]
    }
    found = _covering_copies([(wanted.start, wanted.stop, 0)], same)
    if found is not None:
        return found
    if wanted.split in (None, 0) and all(piece.split in (None, 0) for piece in saved):
        return _covering_copies(
            contiguous_runs(wanted), {index: contiguous_runs(piece) for index, piece in enumerate(saved)}
        )
    return None


def contiguous_runs(piece: ShardMetadata) -> list[tuple[int, int, int]]:
    """Returns the ranges of the flattened full tensor that the shard `piece` contains, as (start, stop, offset in the
    shard). The local tensor must be the full tensor or split along dimension 0.
    """
    if piece.split is None:
        return [(piece.start, piece.stop, 0)]
    inner = math.prod(piece.shape[1:])
    runs = []
    at = 0
    for first, last in piece.intervals:
        begin, end = at * inner, (at + last - first) * inner
        start, stop = max(begin, piece.start), min(end, piece.stop)
        if start < stop:
            runs.append((first * inner + start - begin, first * inner + stop - begin, start - piece.start))
        at += last - first
    return runs


def _covering_copies(
    wanted: list[tuple[int, int, int]], saved: dict[int, list[tuple[int, int, int]]]
) -> list[CopyRange] | None:
    """Returns copies that fill all elements of the ranges `wanted` from the ranges `saved` (by index of the saved
    shard). Returns None if the saved ranges do not contain all these elements. Ranges have the form of the results of
    `contiguous_runs`.
    """
    runs = sorted((start, stop, at, index) for index, spans in saved.items() for start, stop, at in spans)
    result = []
    for start, stop, at in wanted:
        reached = start
        for first, last, source_at, index in runs:
            if first > reached:
                break
            if last > reached and reached < stop:
                end = min(last, stop)
                result.append(CopyRange(index, source_at + reached - first, at + reached - start, end - reached))
                reached = end
        if reached < stop:
            return None
    return result


def overlapping_shards(wanted: Sequence[ShardMetadata], saved: Sequence[ShardMetadata]) -> list[int]:
    """Returns the indices of the saved shards that are needed to extract the wanted shards. A saved shard is included
    if a wanted shard has no split, is split along a different dimension, or overlaps the saved shard along the split
    dimension.
    """
    result = []
    for index, piece in enumerate(saved):
        ours = piece.intervals
        if any(
            want.split is None
            or piece.split != want.split
            or any(a < d and c < b for a, b in ours for c, d in want.intervals)
            for want in wanted
        ):
            result.append(index)
    return result


class FullTensor:
    """A full tensor that is assembled from the local tensors of tensor ranks."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.tensor = torch.empty(shape, dtype=dtype)

    def part_buffer(self, piece: ShardMetadata) -> torch.Tensor:
        """Returns a flat buffer for the local tensor to which `piece` belongs. If the local tensor is the full tensor,
        the buffer is a view of the full tensor."""
        if piece.split is None:
            return self.tensor.view(-1)
        return torch.empty(math.prod(piece.local_shape), dtype=self.tensor.dtype)

    def place_part(self, piece: ShardMetadata, part: torch.Tensor) -> None:
        """Copies `part`, the filled local tensor of `piece`, to its intervals of the full tensor."""
        if piece.split is None:
            return
        local = part.view(piece.local_shape)
        at = 0
        for first, last in piece.intervals:
            self.tensor.narrow(piece.split, first, last - first).copy_(local.narrow(piece.split, at, last - first))
            at += last - first

    def extract(self, wanted: ShardMetadata) -> torch.Tensor:
        """Returns the elements of the shard `wanted` as a flat tensor."""
        if wanted.split is None:
            return self.tensor.view(-1)[wanted.start : wanted.stop]
        return slice_shard(self.tensor, wanted)


def slice_shard(full: torch.Tensor, wanted: ShardMetadata) -> torch.Tensor:
    """Returns the elements of the shard `wanted`, sliced from the full tensor, as a flat tensor.

    >>> slice_shard(torch.arange(8).view(2, 4), ShardMetadata("w", (2, 4), "int64", 1, ((0, 1), (2, 3)), 1, 4))
    tensor([2, 4, 6])
    """
    if wanted.split is None:
        return full.reshape(-1)[wanted.start : wanted.stop]
    parts = [full.narrow(wanted.split, first, last - first) for first, last in wanted.intervals]
    return torch.cat(parts, wanted.split).reshape(-1)[wanted.start : wanted.stop]
