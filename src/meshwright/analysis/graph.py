"""Defines `ModelGraph`, the structure of a model as frozen data. The runtime derives sharding, stages and head counts
from it.

A region is a group of column-parallel layers and the row-parallel layers that read their outputs. A stack is a list of
blocks that pipeline stages cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class TpSplit:
    """The split of a parameter over tensor ranks along `dim`. If the parameter is fused (such as Q, K and V in one
    matrix), `parts` are the sizes of the fused matrices along `dim`. Each of them is sharded separately.

    `ways` has the maximum number of shards of each part: the number of key-value heads, or 0 if there is no maximum. If
    there are more ranks than shards, neighbouring ranks use the same shard.
    """

    dim: int
    parts: tuple[int, ...] = ()
    ways: tuple[int, ...] = ()

    def has_replicas(self, ranks: int) -> bool:
        """Returns whether some of `ranks` tensor ranks use the same shard. If so, every rank stores the full parameter,
        and uses only one shard of it.
        """
        return any(0 < ways < ranks for ways in self.ways)


@dataclass(frozen=True)
class HeadCount:
    """Describes an integer attribute that a forward reads and that each rank must change to its local count.

    The attribute `name` belongs to the module at `path`. A name 'config.n' refers to the module's configuration. `kind`
    is what the attribute counts: 'kv_heads', 'groups' (query heads per key-value head), or 'share' (the number of heads
    or any other size that tp divides).
    """

    path: str
    name: str
    kind: str


@dataclass(frozen=True)
class PerHeadArg:
    """An argument of the module at `path` with one entry for each head along `dim`. Every rank has the full argument
    and slices out the entries of its heads.

    `argument` is a position or a name. `heads` is the number of heads. If dimension `dim` has more than `heads`
    entries, it combines batch and heads (batch size x heads).
    """

    path: str
    argument: int | str
    dim: int
    heads: int


@dataclass(frozen=True)
class TpRegion:
    """A region of a block: column-parallel layers, and the row-parallel layers that read their outputs. Paths are full
    module paths.

    At the entry of a region every tensor rank has the full input. The entry is the identity in forward and sums the
    gradient over ranks in backward. Usually the entry is the input of `module`. If no module has an input that only the
    column layers read, `module` is ''. Then the entries are the inputs of the layers `entries`, or of all column layers
    if `entries` is empty. The outputs of the unsharded layers `mla_inputs` are further entries, because only this
    region uses them ([Note: MLA inputs] in trace_log.py). `inner_columns` are the column layers whose inputs are
    computed from the outputs of `mla_inputs`. They need no entry.
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
        """Returns the value of `count` on each of `ranks` tensor ranks. `value` is the value in the full model."""
        heads, kv_heads = self.heads // ranks, max(self.kv_heads // ranks, 1)
        if count.kind == "groups":
            return heads // kv_heads
        return value * kv_heads // self.kv_heads if count.kind == "kv_heads" else value // ranks


@dataclass(frozen=True)
class StackedExperts:
    """A module of stacked experts. Its forward takes (hidden, indices, weights), or rows grouped by expert (`by_rows`).

    `names` are the names of its parameters. All names are relative to the module. `count_attributes` are the (path,
    name) of integer attributes that count experts. `splits` shard each expert over tensor ranks. `replicated` are
    biases that every tensor rank stores in full. Each of tp ranks adds 1 / tp of them. `width` is the number of inner
    features of an expert.
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
    """The structure of a model for the runtime. Paths are dotted module paths, and names are full parameter names.

    `blocks` is the path of the main list of blocks, None if the model has no blocks. `count` is the number of blocks in
    this list, or in all stacks (see `spans_stacks`). `embedding` and `head` are the paths of the vocabulary layers,
    None if there are none. `tied`: whether `embedding` and `head` have the same weight. `vocabulary` is the number of
    rows of the embedding table.
    """

    blocks: str | None = None
    count: int = 0
    embedding: str | None = None
    head: str | None = None
    tied: bool = False
    vocabulary: int = 0
    regions: tuple[TpRegion, ...] = ()
    splits: dict[str, TpSplit] = field(default_factory=dict)
    """Splits of parameters, and of buffers of norms that are applied to sharded features."""
    divisible: dict[str, int] = field(default_factory=dict)
    """Sizes that tp must divide, by name, such as 'heads', 'kv_heads' and 'ffn'."""
    partial: tuple[str, ...] = ()
    """Names of replicated parameters that are applied to sharded features, such as a norm of each head. Their gradient
    is partial on each tensor rank.
    """
    sequence_sliced: tuple[str, ...] = ()
    """Names of parameters between blocks. Under sequence parallelism their gradient is partial on each tensor rank."""
    after_blocks: tuple[str, ...] = ()
    """Names of parameters that are used after the blocks, except those of blocks, embedding and head."""
    unsupported: dict[str, str] = field(default_factory=dict)
    """Reasons why a feature is unsupported. The keys are:

    - 'sequence': why sequence parallelism would compute wrong results;
    - 'matrix': the unsharded matrix inside the blocks that rules out sequence parallelism, if it is the only reason;
    - 'slices': the first difference between a run on a slice of the sequence and the full run;
    - 'proof': why splits are unverified;
    - 'run': why the model does not run with the example;
    - 'remedy': what the user can do if the model fails to read a file or the network;
    - 'tensors': the layers that stay unsharded on tensor ranks, with the reasons;
    - 'rows': the module that couples samples of the batch (batch_coupling.py);
    - 'gathering': a parameter that the forward writes to, which rules out ZeRO 3;
    - 'stages': why stages cannot begin between blocks;
    - 'experts': why experts are not distributed.
    """
    findings: tuple[str, ...] = ()
    replicated: tuple[str, ...] = ()
    stacks: tuple[tuple[str, int], ...] = ()
    """Every stack of blocks as (path, number of blocks), in the order in which they run."""
    experts: tuple[StackedExperts, ...] = ()
    extra_block_args: tuple[str, ...] = ()
    """Block arguments, other than the hidden state, that depend on parameters outside of the blocks. Later stages
    cannot compute them.
    """
    between_stacks: tuple[tuple[str, ...], ...] = ()
    """For each stack except the last: names of the parameters outside of blocks that are first used between this stack
    and the next.
    """
    partly_used: dict[str, TpSplit] = field(default_factory=dict)
    """Splits of the parameters that every tensor rank stores in full although it uses only a shard. `for_tp` sets this
    field.
    """

    def block(self, index: int) -> str:
        """Returns the path of block `index`, counted over all stacks if the graph spans them."""
        return self.block_paths[index] if self.spans_stacks else f"{self.blocks}.{index}"

    def shards_vocabulary(self, path: str | None) -> bool:
        """Returns whether the vocabulary layer at `path` is sharded."""
        return path is not None and f"{path}.weight" in self.splits

    @property
    def against_sequence(self) -> str:
        """Returns the reason why sequence parallelism would be wrong, '' if it is correct."""
        return self.unsupported.get("sequence", "")

    @property
    def block_paths(self) -> tuple[str, ...]:
        """Returns the paths of all blocks of all stacks, in the order in which they run."""
        return tuple(f"{path}.{index}" for path, count in self.stacks for index in range(count))

    @property
    def spans_stacks(self) -> bool:
        """Returns whether blocks are numbered over several stacks, as pipeline stages number them."""
        return len(self.stacks) > 1 and self.count == len(self.block_paths)

    def across_stacks(self) -> ModelGraph:
        """Returns this graph with blocks numbered over all stacks."""
        return dataclasses.replace(self, count=len(self.block_paths))

    def for_tp(self, ranks: int) -> ModelGraph:
        """Returns the graph for `ranks` tensor ranks. Parameters with fewer key-value heads than ranks move from
        `splits` to `partly_used`, because every rank stores them in full. They are also added to `partial`, because
        each rank has only a partial gradient.
        """
        used = {name: split for name, split in self.splits.items() if split.has_replicas(ranks)}
        if not used:
            return self
        splits = {name: split for name, split in self.splits.items() if name not in used}
        return dataclasses.replace(self, splits=splits, partly_used=used, partial=(*self.partial, *used))


def shard_intervals(
    size: int | Sequence[int], index: int, ranks: int, ways: Sequence[int] = ()
) -> tuple[tuple[int, int], ...]:
    """Returns the interval (start, stop) that tensor rank `index` of `ranks` has in each part of a dimension. `size` is
    the size of the dimension, or the sizes of its parts.

    A shard has ceil(part / ranks) elements, fewer on the last ranks. If `ways` of a part is smaller than `ranks` and
    not 0, the part has only `ways` shards, and several ranks have the same shard.

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
    """Returns the shard of `full` that tensor rank `index` of `ranks` uses. The result is a view, unless the split has
    several parts, which are concatenated into a copy.
    """
    bounds = shard_intervals(split.parts or full.shape[split.dim], index, ranks, split.ways)
    pieces = [full.narrow(split.dim, start, stop - start) for start, stop in bounds]
    return torch.cat(pieces, dim=split.dim) if len(pieces) > 1 else pieces[0]


def local_shard(full: torch.Tensor, split: TpSplit, index: int, ranks: int) -> torch.Tensor:
    """Returns a copy of the shard of tensor rank `index` of `ranks`."""
    share = shard_view(full, split, index, ranks)
    return share if len(split.parts) > 1 else share.clone(memory_format=torch.contiguous_format)
