"""Hierarchical collectives of ranks on several hosts with the same number of ranks each. Data crosses the network once
per host instead of once per rank.

First the ranks of a host sum in shared memory (shm/collectives.py). Then rank l of every host reduces its slice with
rank l of the other hosts over the network. Finally the ranks of a host read the other slices from each other. With h
hosts of m ranks and a tensor of n bytes, a host sends

    all-reduce        2 (h - 1) / h n    (a ring over all ranks: 2 (h m - 1) / (h m) n, if hosts are contiguous in it)
    reduce-scatter      (h - 1) / h n    (an all-to-all of all ranks: m times that)
    all-gather          (h - 1) / h n    (the same)

Sums differ from those of a flat collective only in the order of addition. This order is fixed: first the ranks of a
host, then the hosts. Source: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH
(2005), section 4. Horovod calls these collectives hierarchical. NCCL uses them automatically.

[Note: ways across] A reduction sends to other hosts once the ranks of its host have contributed. An all-gather sends
immediately. So the order of reductions, all-gathers and second messages differs between ranks. So each of these three
kinds has its own process group, in which all ranks use one order.
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
"""Number of process groups between hosts: for reductions, for second messages of reductions, and for all-gathers."""

RanksByHost = Sequence[Sequence[int]]
"""For each host, the positions of its ranks in the group."""


def ranks_by_host(hosts: Sequence[str]) -> RanksByHost | None:
    """Returns the positions of the ranks of each host. `hosts` has the host id of each rank. Returns None if all ranks
    are on one host, or if hosts have different numbers of ranks.

    >>> ranks_by_host(["a", "b", "a", "b"]), ranks_by_host(["a", "a"])
    ([[0, 2], [1, 3]], None)
    >>> ranks_by_host(["a", "a", "b"]), ranks_by_host(["a", "b"])
    (None, None)
    """
    by_host = [[index for index, name in enumerate(hosts) if name == host] for host in dict.fromkeys(hosts)]
    is_hierarchical = (
        len(by_host) > 1 and len(by_host[0]) > 1 and len({len(row) for row in by_host}) == 1 and "" not in hosts
    )
    return by_host if is_hierarchical else None


class HierarchicalGroup(ShmCollectives):
    """Collectives of this rank in a group that spans several hosts. `ranks` are all ranks of the group, and `hosts`
    their positions by host. `groups` are the NUM_INTER_HOST_GROUPS process groups of the ranks that have this rank's
    position in their hosts."""

    def __init__(
        self, host: SharedMemory, ranks: Sequence[int], hosts: RanksByHost, first: int, groups: Sequence[CommGroup]
    ) -> None:
        self.ranks_by_host = hosts
        self.sum_group, self.second_group, self.gather_group = groups
        own = next(row for row in hosts if host.rank in (ranks[place] for place in row))
        super().__init__(host, [ranks[place] for place in own], first)
        self.inter_host_groups = tuple(groups)

    def all_reduce(
        self, flat: torch.Tensor, use_max: bool = False, inter_host: InterHostReducer | None = None
    ) -> Callable[[], None]:
        """Starts the in-place sum of `flat` over all hosts. Returns the function that finishes it."""
        number, memory = self.begin(flat)

        def sum_own() -> InterHostTransfer | None:
            own_slice = rank_slice(flat, self.index, len(self.ranks))
            own = memory[own_slice]
            reduce_inputs(self.inputs(number, memory), own_slice, own, use_max)
            if not own.numel():
                return None
            return (
                inter_host.all_reduce(own, self.sum_group, self.second_group)
                if inter_host is not None
                else async_collectives.all_reduce(own, self.sum_group, use_max)
            )

        def announce() -> None:
            self.host.set_field(self.field_index(number, FIELD_REDUCED), number)

        last = (FIELD_REDUCED, lambda: copy_reduced_slices(self, number, memory, flat))
        return self.progress_queue.add(number, (FIELD_POSTED, sum_own), (AWAIT_TRANSFER, announce), last)

    def reduce_scatter(
        self,
        full: torch.Tensor,
        out: torch.Tensor,
        inter_host: InterHostReducer | None = None,
        sizes: Sequence[int] | None = None,
    ) -> Callable[[], None]:
        """Starts to sum `full` over all hosts. This rank's slice of the sum goes to `out`. Returns the function that
        finishes the collective."""
        assert sizes is None, "unequal slices go through the process group"
        number, memory = self.begin(full)
        each = out.numel()

        def sum_own() -> InterHostTransfer:
            """Sums, over the ranks of this host, the slices that the ranks at this position in all hosts need. Then
            sends the sums."""
            sums = torch.empty(len(self.ranks_by_host) * each, dtype=full.dtype)
            for row, into in zip(self.ranks_by_host, sums.split(each), strict=True):
                start = row[self.index] * each
                reduce_inputs(self.inputs(number, memory), slice(start, start + each), into)
            self.mark_read(number)
            return (
                inter_host.reduce_scatter(sums, out, self.sum_group, self.second_group)
                if inter_host is not None
                else async_collectives.reduce_scatter(sums, out, self.sum_group)
            )

        return self.progress_queue.add(number, (FIELD_POSTED, sum_own), (AWAIT_TRANSFER, _no_op))

    def all_gather(
        self, full: torch.Tensor, shard: torch.Tensor, sizes: Sequence[int] | None = None
    ) -> Callable[[], None]:
        """Starts to gather the shards of all ranks into `full`. Returns the function that finishes it."""
        assert sizes is None, "unequal slices go through the process group"
        number, each = self.next_number(), shard.numel()
        gathered = self.staging_buffer(len(self.ranks_by_host) * each, shard.dtype)
        transfer = async_collectives.all_gather(gathered, shard, self.gather_group)

        def announce() -> None:
            self.post(number, gathered)

        def gather() -> None:
            into = full.view(-1, each)
            for rank, part in enumerate(self.inputs(number, gathered)):
                for row, shard in zip(self.ranks_by_host, part.split(each), strict=True):
                    into[row[rank]].copy_(shard)
            self.mark_read(number)

        return self.progress_queue.add(number, (AWAIT_TRANSFER, announce), (FIELD_POSTED, gather), transfer=transfer)


def _no_op() -> None:
    """Does nothing, because the transfer has already written its result."""
