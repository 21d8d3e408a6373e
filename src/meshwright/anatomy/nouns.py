"""What is known of a model's structure: frozen data that the running wing shards, cuts and counts by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Split:
    """A parameter is sharded along `dim`; a fused one in `parts`, sizes along `dim` of which each is sharded by itself."""

    dim: int
    parts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Region:
    """A part of a block between a column layer and the row layer behind it. Paths are relative to the block.

    The input of `module` is what every tensor rank enters with, once; '' means that no module has exactly the column layers as readers
    of its input, so that the column layers themselves are entered. `attributes` are (path, name) of integers that tp divides.
    """

    module: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    attributes: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Anatomy:
    """A model as the runtime sees it. Paths are dotted module paths, names full parameter names."""

    blocks: str | None = None
    count: int = 0
    embedding: str | None = None
    head: str | None = None
    tied: bool = False
    vocabulary: int = 0
    regions: tuple[Region, ...] = ()
    splits: dict[str, Split] = field(default_factory=dict)
    divisible: dict[str, int] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    """Replicated parameters that work on sharded features (a norm of each head): their gradient is a part on every tensor rank."""
    back: tuple[str, ...] = ()
    """Parameters outside blocks, embedding and head that are used after the blocks."""
    against_sequence: str = ""
    """Why sequence parallelism would be wrong; empty where it is right."""
    understood: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()

    def block(self, index: int) -> str:
        """Path of one block."""
        return f"{self.blocks}.{index}"


def intervals(size: int | Sequence[int], index: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """What tensor rank `index` of `ranks` holds of a dimension of `size`: one (start, stop) for each part. Chunks are ceil(part / ranks).

    >>> intervals(10, 1, 4), intervals(10, 3, 4)
    (((3, 6),), ((9, 10),))
    >>> intervals((8, 4, 4), 1, 2)
    ((4, 8), (10, 12), (14, 16))
    """
    result = []
    begin = 0
    for part in (size,) if isinstance(size, int) else size:
        chunk = -(-part // ranks)
        result.append((begin + min(index * chunk, part), begin + min((index + 1) * chunk, part)))
        begin += part
    return tuple(result)


def local_slice(full: torch.Tensor, split: Split, index: int, ranks: int) -> torch.Tensor:
    """A copy of what tensor rank `index` of `ranks` holds of `full`."""
    pieces = [full.narrow(split.dim, start, stop - start) for start, stop in intervals(split.parts or full.shape[split.dim], index, ranks)]
    return torch.cat(pieces, dim=split.dim) if len(pieces) > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
