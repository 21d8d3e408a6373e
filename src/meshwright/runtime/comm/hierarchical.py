"""Collectives of ranks on several hosts, equally many on each: what crosses between hosts crosses once for each host,
not once for each rank.

Ranks of a host sum in shared memory (lanes.py); rank number l of every host then meets rank number l of the others,
over the network, with its
slice only; and the ranks of a host read the rest from each other. With h hosts of m ranks and n bytes a host sends

    all-reduce        2 (h - 1) / h n    (a ring over all ranks: 2 (h m - 1) / (h m) n, if hosts lie one after the other in it)
    reduce-scatter      (h - 1) / h n    (an all-to-all of all ranks: m times that)
    all-gather          (h - 1) / h n    (the same)

Sums are those of a flat collective up to their order, which is fixed: ranks of a host first, then hosts. Source:
Thakur, Rabenseifner, Gropp,
Optimization of Collective Communication Operations in MPICH (2005), section 4; NCCL and Horovod call it hierarchical.
NCCL finds tiers itself.

[Note: ways across] A reduction crosses when the ranks of its host have come as far, a gathering at once, so that their
order among each
other differs from rank to rank; so does that of a second message of a reduction. Each kind has a process group of its
own, in which the order is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.shm.collectives import (
    FIELD_POSTED,
    FIELD_REDUCED,
    InterHostReducer,
    ShmCollectives,
    copy_reduced_slices,
    rank_slice,
    reduce_inputs,
)
from meshwright.runtime.comm.shm.progress import AWAIT_TRANSFER, InterHostTransfer

if TYPE_CHECKING:
    from meshwright.runtime.comm.group import CommGroup
    from meshwright.runtime.comm.shm.memory import SharedMemory

NUM_INTER_HOST_GROUPS = 3
"""Sums, what of them waits for something to have crossed, and gatherings."""

RanksByHost = Sequence[Sequence[int]]
"""Of each host, the places of its ranks in the group."""


def ranks_by_host(hosts: Sequence[str]) -> RanksByHost | None:
    """`hosts`: the identity of the host of each rank of a group. None where they lie on one host, or unlike numbers of
    them on each.

    >>> ranks_by_host(["a", "b", "a", "b"]), ranks_by_host(["a", "a"]), ranks_by_host(["a", "a", "b"]), ranks_by_host(["a", "b"])
    ([[0, 2], [1, 3]], None, None, None)
    """
    rows = [[place for place, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)]
    together = len(rows) > 1 and len(rows[0]) > 1 and len({len(row) for row in rows}) == 1 and "" not in hosts
    return rows if together else None


class HierarchicalGroup(ShmCollectives):
    """This rank's host in a group that `table` lays over hosts; `ranks` are all ranks of the group. `ways`: the ranks
    of other hosts
    that stand where this one stands in its own, in WAYS groups."""

    def __init__(
        self, host: SharedMemory, ranks: Sequence[int], table: RanksByHost, first: int, ways: Sequence[CommGroup]
    ) -> None:
        self.ranks_by_host = table
        self.sum_group, self.second_group, self.gather_group = ways
        own = next(row for row in table if host.rank in (ranks[place] for place in row))
        super().__init__(host, [ranks[place] for place in own], first)
        self.inter_host_groups = tuple(ways)

    def all_reduce(
        self, flat: torch.Tensor, use_max: bool = False, inter_host: InterHostReducer | None = None
    ) -> Callable[[], None]:
        number, memory = self.begin(flat)

        def sum_own() -> InterHostTransfer | None:
            taken = rank_slice(flat, self.index, len(self.ranks))
            own = memory[taken]
            reduce_inputs(self.inputs(number, memory), taken, own, use_max)
            if not own.numel():
                return None
            return (
                inter_host.all_reduce(own, self.sum_group, self.second_group)
                if inter_host is not None
                else async_collectives.all_reduce(own, self.sum_group, use_max)
            )

        def show() -> None:
            self.host.set_field(self.field_index(number, FIELD_REDUCED), number)

        last = (FIELD_REDUCED, lambda: copy_reduced_slices(self, number, memory, flat))
        return self.progress_queue.add(number, (FIELD_POSTED, sum_own), (AWAIT_TRANSFER, show), last)

    def reduce_scatter(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        inter_host: InterHostReducer | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Callable[[], None]:
        assert sizes is None, "unequal slices go through the process group"
        number, memory = self.begin(full)
        each = out.numel()

        def sum_own() -> InterHostTransfer:
            """The slices of all ranks that stand here in their hosts."""
            ours = torch.empty(len(self.ranks_by_host) * each, dtype=full.dtype)
            for row, into in zip(self.ranks_by_host, ours.split(each), strict=True):
                start = row[self.index] * each
                reduce_inputs(self.inputs(number, memory), slice(start, start + each), into)
            self.mark_read(number)
            return (
                inter_host.reduce_scatter(ours, out, self.sum_group, self.second_group)
                if inter_host is not None
                else async_collectives.reduce_scatter(ours, out, self.sum_group)
            )

        return self.progress_queue.add(number, (FIELD_POSTED, sum_own), (AWAIT_TRANSFER, _no_op))

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, sizes: Sequence[int] | None = None
    ) -> Callable[[], None]:
        assert sizes is None, "unequal slices go through the process group"
        number, each = self.next_number(), shard.numel()
        theirs = self.staging_buffer(len(self.ranks_by_host) * each, shard.dtype)
        crossing = async_collectives.all_gather(theirs, shard, self.gather_group)

        def show() -> None:
            self.post(number, theirs)

        def gather() -> None:
            into = full.view(-1, each)
            for rank, part in enumerate(self.inputs(number, theirs)):
                for row, shard in zip(self.ranks_by_host, part.split(each), strict=True):
                    into[row[rank]].copy_(shard)
            self.mark_read(number)

        return self.progress_queue.add(number, (AWAIT_TRANSFER, show), (FIELD_POSTED, gather), crossing=crossing)


def _no_op() -> None:
    """What crossed is where it belongs."""
