"""Context parallelism in a recording: ranks that divide the sequence of each micro-batch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.interop.recording.trace_format import RankTrace
from meshwright.interop.recording.tree import decode_tree


class SequenceShard(NamedTuple):
    """The part of the sequence that this rank has. `dim` is the dimension of the sequence in the inputs; inputs with
    fewer dimensions have it first. `group` are the ranks that divide it (default: all). `positions`, of shape (local
    length,), are the places of this rank's elements in the full sequence; by default, the ranks have equal consecutive
    parts."""

    dim: int = 1
    group: Any = None
    positions: torch.Tensor | None = None


def recorded_sequence(shard: SequenceShard | None) -> dict[str, Any] | None:
    """Returns the part of this rank as plain data. Raises InputError without a process group."""
    if shard is None:
        return None
    if not dist.is_initialized():
        raise InputError(Message("recording: sequence= needs a process group, whose ranks divide the sequence"))
    ranks = tuple(dist.get_process_group_ranks(shard.group or dist.group.WORLD))
    places = None if shard.positions is None else tuple(shard.positions.tolist())
    return {"dim": shard.dim, "ranks": ranks, "positions": places}


def refuse_context_parallel(described: bool) -> None:
    """Raises InputError in a forward inside `torch.distributed.tensor.experimental.context_parallel`, unless the parts
    of the sequence are described."""
    module = sys.modules.get("torch.distributed.tensor.experimental._context_parallel._attention")
    replaced = getattr(module, "_replaced_functions", {})
    if not described and torch.nn.functional.scaled_dot_product_attention in replaced:
        raise InputError(
            Message(
                "recording: the loop is inside of context_parallel of torch, so that this rank has a part of each "
                "sequence; give sequence=SequenceShard(dim, group, positions)"
            )
        )


class DividedSequences:
    """The parts of the sequence that the ranks of a recording have. Every micro-batch has the length of the first."""

    def __init__(self, traces: Sequence[RankTrace]) -> None:
        self.traces = traces

    def ranks(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that divide the sequence with `rank`, in order of their parts; (rank,) if none do."""
        part = self.traces[rank].header.sequence
        return (rank,) if part is None else part.ranks

    @cached_property
    def places(self) -> dict[int, tuple[tuple[int, ...], int]]:
        """Returns, for each rank that has a part of the sequence, the places of its elements and the full length."""
        found = {}
        for rank, trace in enumerate(self.traces):
            if (part := trace.header.sequence) is not None:
                lengths = [self._length(each, part.dim) for each in part.ranks]
                end = sum(lengths[: part.ranks.index(rank) + 1])
                usual = tuple(range(end - lengths[part.ranks.index(rank)], end))
                found[rank] = (usual if part.positions is None else part.positions, sum(lengths))
        return found

    def _length(self, rank: int, dim: int) -> int:
        micro = self.traces[rank].header.steps[0].micro_batches[0]
        leaves = tree_leaves(decode_tree(micro.inputs, self.traces[rank].tensor))
        return next((each.shape[dim] for each in leaves if isinstance(each, torch.Tensor) and each.ndim > dim), 0)

    def join(self, rank: int, read: Callable[[int], Any]) -> Any:
        """Returns the value of the full sequence. `read(rank)` is that of a rank."""
        ranks, part = self.ranks(rank), self.traces[rank].header.sequence
        if part is None:
            return read(rank)
        return _joined([read(each) for each in ranks], part.dim, self._order(ranks))

    def _order(self, ranks: Sequence[int]) -> torch.Tensor:
        """Returns the indices that bring the concatenated parts of ranks into the order of the sequence."""
        return torch.tensor([place for rank in ranks for place in self.places[rank][0]]).argsort()

    def sort(self, ranks: Sequence[int], joined: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns concatenated local tensors of ranks in the order of the sequence, if they divide it along `dim`."""
        if not all(rank in self.places for rank in ranks) or len(order := self._order(ranks)) != joined.shape[dim]:
            return joined
        return joined.index_select(dim, order)

    def local_part(self, rank: int, full: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Returns the elements of a full output that a rank has, for a local output of `shape`. Returns `full` if no
        dimension, or more than one, may be the sequence."""
        places, total = self.places.get(rank, ((), 0))
        if full.ndim != len(shape):
            return full
        dims = [dim for dim, size in enumerate(full.shape) if size == total != shape[dim] == len(places)]
        return full.index_select(dims[0], torch.tensor(places)) if len(dims) == 1 else full


def _joined(values: list[Any], dim: int, order: torch.Tensor) -> Any:
    """Returns the arguments of the full sequence from those of each rank. A tensor is divided if it differs between
    ranks; other values are those of the first rank."""
    first = values[0]
    if isinstance(first, dict):
        return {key: _joined([each[key] for each in values], dim, order) for key in first}
    if isinstance(first, tuple | list):
        return type(first)(_joined(list(items), dim, order) for items in zip(*values, strict=True))
    if not isinstance(first, torch.Tensor) or not first.ndim or all(torch.equal(first, each) for each in values[1:]):
        return first
    along = dim if first.ndim > dim else 0
    joined = torch.cat(values, along)
    return joined.index_select(along, order) if joined.shape[along] == len(order) else first
