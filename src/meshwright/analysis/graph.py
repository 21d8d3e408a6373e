"""What is known of a model's structure: frozen data that the running wing shards, cuts and counts by."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class TpSplit:
    """A parameter is sharded along `dim`; a fused one in `parts`, sizes along `dim` of which each is sharded by itself.

    `ways`: into how many shares each part can be cut (heads of keys and values); 0 for any number. Where there are more
    ranks than ways,
    neighbouring ranks use the same share.
    """

    dim: int
    parts: tuple[int, ...] = ()
    ways: tuple[int, ...] = ()

    def has_replicas(self, ranks: int) -> bool:
        """Whether some ranks use the same: then every rank holds the whole parameter and uses its share of it."""
        return any(0 < ways < ranks for ways in self.ways)


@dataclass(frozen=True)
class HeadCount:
    """An integer that a forward method reads, `name` of the module at `path` ('config.n' of its configuration), and
    what it counts:
    'heads', 'kv_heads', 'groups' (heads to a key-value head), or 'share', anything that tp divides."""

    path: str
    name: str
    kind: str


@dataclass(frozen=True)
class PerHeadArg:
    """An argument of the module at `path` that holds a number for each head along `dim`, whole: every rank takes its
    heads.

    `argument` is a place or a name. `heads` of them; where `dim` is longer it is (rows x heads).
    """

    path: str
    argument: int | str
    dim: int
    heads: int


@dataclass(frozen=True)
class TpRegion:
    """A part of a block between a column layer and the row layer behind it. Paths are full.

    The input of `module` is what every tensor rank enters with, once; '' means that no module has exactly the column
    layers as readers
    of its input, so that the column layers themselves are entered, or `entries` instead of them. `inflows` are layers
    that stay whole and whose
    output is entered: nothing but this region uses it ([Note: inflow]); `inner` are the columns behind them, which need
    no entry.
    """

    module: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    heads: int = 0
    kv_heads: int = 0
    head_counts: tuple[HeadCount, ...] = ()
    per_head_args: tuple[PerHeadArg, ...] = ()
    entries: tuple[str, ...] = ()
    mla_inputs: tuple[str, ...] = ()
    inner_columns: tuple[str, ...] = ()

    def local_count(self, count: HeadCount, value: int, ranks: int) -> int:
        """What `count`, now `value`, is on each of `ranks` ranks."""
        heads, kv_heads = self.heads // ranks, max(self.kv_heads // ranks, 1)
        if count.kind == "groups":
            return heads // kv_heads
        return value * kv_heads // self.kv_heads if count.kind == "kv_heads" else value // ranks


@dataclass(frozen=True)
class StackedExperts:
    """A module of stacked experts, given (hidden, indices, weights), or rows of each expert (`by_rows`). `names` are
    its parameters; the rest is relative
    to it too.

    `counters`: integers (path, name) that count experts. `splits`: how tensor ranks share each expert; `once`: whole
    parameters of which each
    of them adds its part. `width`: inner features of an expert.
    """

    path: str
    count: int
    names: tuple[str, ...]
    count_attributes: tuple[tuple[str, str], ...] = ()
    splits: dict[str, TpSplit] = field(default_factory=dict)
    replicated: tuple[str, ...] = ()
    width: int = 0
    by_rows: bool = False


@dataclass(frozen=True)
class ModelGraph:
    """A model as the runtime sees it. Paths are dotted module paths, names full parameter names."""

    blocks: str | None = None
    count: int = 0
    embedding: str | None = None
    head: str | None = None
    tied: bool = False
    vocabulary: int = 0
    regions: tuple[TpRegion, ...] = ()
    splits: dict[str, TpSplit] = field(default_factory=dict)
    """Of parameters, and of buffers of norms that work on shares."""
    divisible: dict[str, int] = field(default_factory=dict)
    partial: tuple[str, ...] = ()
    """Replicated parameters that work on sharded features (a norm of each head): their gradient is a part on every
    tensor rank."""
    sequence_sliced: tuple[str, ...] = ()
    """Parameters between blocks: under sequence parallelism their gradient is a part on every tensor rank."""
    after_blocks: tuple[str, ...] = ()
    """Parameters outside blocks, embedding and head that are used after the blocks."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """'sequence': why sequence parallelism would be wrong; 'slices': what was seen to differ on a slice of the
    sequence; 'proof': why splits are
    taken without numbers; 'rows': the module that gives tokens a place among those of other rows (counted.py);
    'gathering': a parameter that the forward itself writes to; 'stages': why stages cannot be left and entered between
    blocks."""
    findings: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    stacks: tuple[tuple[str, int], ...] = ()
    """Every list of blocks with its length, in the order in which they run."""
    experts: tuple[StackedExperts, ...] = ()
    extra_block_args: tuple[str, ...] = ()
    """Arguments of blocks that are made of parameters outside of them, beside the hidden state: stages behind the first
    cannot make them."""
    between_stacks: tuple[tuple[str, ...], ...] = ()
    """Of each stack but the last, parameters outside of blocks that are first used behind it."""
    partly_used: dict[str, TpSplit] = field(default_factory=dict)
    """Parameters that every tensor rank holds whole and uses a share of; filled by `over`."""

    def block(self, index: int) -> str:
        """Path of one block."""
        return self.block_paths[index] if self.spans_stacks else f"{self.blocks}.{index}"

    def shards_vocabulary(self, path: str | None) -> bool:
        """Whether tensor ranks hold a share each of the vocabulary's layer at `path`."""
        return path is not None and f"{path}.weight" in self.splits

    @property
    def against_sequence(self) -> str:
        """Empty where it is right."""
        return self.unsupported.get("sequence", "")

    @property
    def block_paths(self) -> tuple[str, ...]:
        """Paths of all blocks of all stacks in the order in which they run."""
        return tuple(f"{path}.{index}" for path, count in self.stacks for index in range(count))

    @property
    def spans_stacks(self) -> bool:
        """Whether blocks are numbered over all stacks, as stages of a pipeline cut them."""
        return len(self.stacks) > 1 and self.count == len(self.block_paths)

    def across_stacks(self) -> ModelGraph:
        """The same with blocks numbered over all stacks."""
        return dataclasses.replace(self, count=len(self.block_paths))

    def for_tp(self, ranks: int) -> ModelGraph:
        """As `ranks` tensor ranks hold it: what they cannot hold apart, for there are fewer key-value heads, is whole
        and used in part."""
        used = {name: split for name, split in self.splits.items() if split.has_replicas(ranks)}
        if not used:
            return self
        splits = {name: split for name, split in self.splits.items() if name not in used}
        return dataclasses.replace(self, splits=splits, partly_used=used, partial=(*self.partial, *used))


def shard_intervals(
    size: int | Sequence[int], index: int, ranks: int, ways: Sequence[int] = ()
) -> tuple[tuple[int, int], ...]:
    """What tensor rank `index` of `ranks` holds of a dimension of `size`: one (start, stop) for each part. Chunks are
    ceil(part / ranks),
    or one of `ways` equal ones where there are fewer ways than ranks.

    >>> shard_intervals(10, 1, 4), shard_intervals(10, 3, 4)
    (((3, 6),), ((9, 10),))
    >>> shard_intervals((8, 4, 4), 1, 2)
    ((4, 8), (10, 12), (14, 16))
    >>> shard_intervals((8, 4), 2, 4, (8, 2))
    ((4, 6), (10, 12))
    """
    result = []
    begin = 0
    parts = (size,) if isinstance(size, int) else size
    for part, way in zip(parts, ways or (0,) * len(parts), strict=True):
        shares, mine = (way, index * way // ranks) if 0 < way < ranks else (ranks, index)
        chunk = -(-part // shares)
        result.append((begin + min(mine * chunk, part), begin + min((mine + 1) * chunk, part)))
        begin += part
    return tuple(result)


def shard_view(full: torch.Tensor, split: TpSplit, index: int, ranks: int) -> torch.Tensor:
    """What tensor rank `index` of `ranks` uses of `full`: a view where it is one piece."""
    bounds = shard_intervals(split.parts or full.shape[split.dim], index, ranks, split.ways)
    pieces = [full.narrow(split.dim, start, stop - start) for start, stop in bounds]
    return torch.cat(pieces, dim=split.dim) if len(pieces) > 1 else pieces[0]


def local_shard(full: torch.Tensor, split: TpSplit, index: int, ranks: int) -> torch.Tensor:
    """A copy of what tensor rank `index` of `ranks` holds of `full`."""
    share = shard_view(full, split, index, ranks)
    return share if len(split.parts) > 1 else share.clone(memory_format=torch.contiguous_format)
