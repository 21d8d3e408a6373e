"""The hosts and coordinates of ranks, and the communication groups of ranks. `make_parallel_context` (build/) creates
the groups of a plan with this module.

`Topology` contains the rank of this process, and which ranks share a host or memory. It contains no groups.
`GroupFactory` gets a partition of all ranks and creates the group that contains this rank. It chooses the fastest
available path: shared memory, a hierarchical group, or one process group.

Guarantees: every rank creates all process groups of torch in the same order, including groups that it does not belong
to. `torch.distributed.new_group` requires this.

`HierarchicalGroup` provides the collectives of CPU ranks on several hosts with the same number of ranks each. It uses
shared memory inside hosts and process groups between hosts. So data crosses the network once per host instead of once
per rank.

In an all-reduce, the ranks of a host first sum in shared memory (shm/collectives.py): rank l sums slice l. Then rank l
of every host reduces this slice with rank l of the other hosts over the network. Finally the ranks of a host read the
other slices from each other. With h hosts of m ranks and a tensor of n bytes, a host sends this number of bytes:

                      hierarchical       flat                     algorithm of the flat collective
    all-reduce        2 (h - 1) / h n    2 (h m - 1) / (h m) n    ring, in which the ranks of a host are neighbours
    reduce-scatter      (h - 1) / h n    m (h - 1) / h n          all-to-all
    all-gather          (h - 1) / h n    m (h - 1) / h n          all-to-all

Sums differ from those of a flat collective only in the order of addition. This order is fixed: first the ranks of a
host, then the hosts. Source: Thakur, Rabenseifner, Gropp, Optimization of Collective Communication Operations in MPICH
(2005), section 4. Horovod calls these collectives hierarchical. NCCL uses them automatically.

[Note: groups between hosts] A reduction sends to other hosts once all ranks of its host have contributed. An all-gather
sends immediately. So one rank may start, for example, a reduction before an all-gather, and another rank the all-gather
first. The same applies to second messages (compression.py). So reductions, all-gathers and second messages use separate
process groups, and in each of them all ranks start collectives in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.group import CommGroup, CommTimer, wrap_process_group, wrap_shm_collectives
from meshwright.runtime.comm.shm.collectives import (
    FIELD_POSTED,
    FIELD_REDUCED,
    FIELDS_PER_GROUP,
    InterHostReducer,
    ShmCollectives,
    copy_reduced_slices,
    rank_slice,
    reduce_inputs,
)
from meshwright.runtime.comm.shm.memory import SharedMemory
from meshwright.runtime.comm.shm.progress import AWAIT_TRANSFER, InterHostTransfer
from meshwright.runtime.comm.timers import WaitTimer
from meshwright.spec.grid import RankGrid

EXPERT_GROUPS = ("experts", "expert_tensor", "expert_joined", "expert_shards", "expert_copies")
GROUP_NAMES = ("world", "pp", "cp", "tp", "shards", "copies", "tie", "heads", "rings", *EXPERT_GROUPS)
"""Names of the groups that a rank can belong to. Each group has its own fields in shared memory."""

P2P_FIRST_FIELD = len(GROUP_NAMES) * FIELDS_PER_GROUP
"""Index of the first shared-memory field after the fields of all groups. The fields of messages between pipeline ranks
begin at this index."""

NON_HIERARCHICAL_GROUPS = ("pp",)
"""Groups that are never hierarchical. They have no reductions, so a hierarchy would have no advantage."""


@dataclass(frozen=True)
class Topology:
    """The ranks of a plan: their coordinates, their hosts, and which of them share memory."""

    grid: RankGrid
    rank: int
    shared_memory: SharedMemory | None = None
    """The memory that this rank shares with the other CPU ranks of its host."""
    shm_host_ids: tuple[str, ...] = ()
    """The host id of each CPU rank, '' for a rank that shares no memory. Empty if no rank shares memory."""
    host_ids: tuple[str, ...] = ()
    """The host id of each rank, if ranks have accelerators. Empty for CPU ranks."""

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.grid.plan.world

    def shares_memory(self, ranks: Sequence[int]) -> bool:
        """Returns whether all of `ranks` share the memory of one host. This rank need not be one of `ranks`."""
        names = {self.shm_host_ids[rank] for rank in ranks} if self.shm_host_ids else {""}
        return len(names) == 1 and "" not in names

    def is_one_host(self, ranks: Sequence[int]) -> bool:
        """Returns whether all of `ranks` have accelerators on one host."""
        return bool(self.host_ids) and len({self.host_ids[rank] for rank in ranks}) == 1


class GroupFactory:
    """Creates the groups of this rank and records them by name. All ranks call its methods in the same order."""

    def __init__(self, topology: Topology, device: torch.device, groups: Mapping[str, CommGroup] | None = None) -> None:
        self.topology, self.device = topology, device
        self.groups: dict[str, CommGroup] = dict(groups or {})

    def by_parts(
        self, name: str, parts: Sequence[Sequence[int]], process: dist.ProcessGroup | None = None
    ) -> CommGroup | None:
        """Creates a group called `name` for each of the disjoint `parts`. Returns the group of the part that contains
        this rank.

        Returns None if this part has one rank, or if no part contains this rank. `process`: torch's process group of
        the part that contains this rank, if it exists already.
        """
        topology = self.topology
        mine: CommGroup | None = None
        needs_process = not all(topology.shares_memory(part) for part in parts)
        for part in parts if max(map(len, parts)) > 1 else ():
            ranks, is_member = tuple(part), topology.rank in part
            created = dist.new_group(list(part)) if needs_process and process is None else process
            if topology.shares_memory(ranks):
                mine = wrap_shm_collectives(shm_collectives(topology, name, ranks)) if is_member else mine
                continue
            hierarchy = (
                build_hierarchical_group(topology, first_field(name), ranks)
                if topology.shm_host_ids and name not in NON_HIERARCHICAL_GROUPS
                else None
            )
            if is_member:
                flat = wrap_process_group(created)
                assert flat is not None
                timer = CommTimer(WaitTimer.of(self.device))
                mine = CommGroup(
                    flat.ranks, flat.index, flat.process_group, hierarchy, timer, intra_host=topology.is_one_host(ranks)
                )
        if mine is not None:
            self.groups[name] = mine
        return mine

    def by_key(self, name: str, key: Callable[[int], Hashable]) -> CommGroup | None:
        """Creates the group `name` of all ranks whose `key` equals the key of this rank. Returns None if no other rank
        has this key."""
        parts: dict[Hashable, list[int]] = {}
        for rank in range(self.topology.world):
            parts.setdefault(key(rank), []).append(rank)
        return self.by_parts(name, list(parts.values()))

    def embedding(self) -> CommGroup | None:
        """Creates the groups of the ranks of the first and the last stage, which both store tied weights. Returns the
        group that contains this rank. Returns None on ranks of other stages, and if one rank runs both stages."""
        grid, plan = self.topology.grid, self.topology.grid.plan
        last = plan.stage_to_rank(plan.stages - 1)
        if last == plan.stage_to_rank(0):
            return None
        return self.by_parts("tie", [[column[0], column[last]] for column in ranks_along(grid, "pp")])


def first_field(name: str) -> int:
    """Returns the index of the first shared-memory field of the group `name`."""
    return GROUP_NAMES.index(name) * FIELDS_PER_GROUP


def shm_collectives(topology: Topology, name: str, ranks: Sequence[int]) -> ShmCollectives:
    """Returns the shared-memory collectives of the group `name` of `ranks`."""
    assert topology.shared_memory is not None, "these ranks do not share memory"
    return ShmCollectives(topology.shared_memory, list(ranks), first_field(name))


def build_hierarchical_group(topology: Topology, first: int, ranks: Sequence[int]) -> HierarchicalGroup | None:
    """Creates the hierarchical group of `ranks`. All ranks call it, also those outside of the group. `first`: the index
    of the group's first shared-memory field.

    Returns None on ranks outside of the group. Returns None on all ranks if `ranks_by_host` returns None.
    """
    table = ranks_by_host([topology.shm_host_ids[rank] for rank in ranks])
    mine: HierarchicalGroup | None = None
    for column in zip(*table, strict=True) if table is not None else ():
        across = [ranks[place] for place in column]
        created = [dist.new_group(across) for _ in range(NUM_INTER_HOST_GROUPS)]
        if topology.rank in across:
            assert topology.shared_memory is not None and table is not None
            groups = [group for process in created if (group := wrap_process_group(process)) is not None]
            mine = HierarchicalGroup(topology.shared_memory, ranks, table, first, groups)
    return mine


def create_axis_groups(
    topology: Topology, device: torch.device
) -> tuple[DeviceMesh, dict[str, dist.ProcessGroup | None]]:
    """Creates the device mesh over the axes with more than one rank. Returns the mesh and its process groups by axis.

    The process groups also include 'world' and 'cp', which are not axes of the mesh: context ranks subdivide the shards
    or the replicas.
    """
    grid, plan = topology.grid, topology.grid.plan
    axes = {"pp": plan.pp, "copies": plan.state_replicas, "shards": plan.shards, "tp": plan.tp}
    sizes = {name: size for name, size in axes.items() if size > 1}
    ordered = torch.tensor(sorted(range(plan.world), key=grid.place)).view(*sizes.values())
    device_mesh = DeviceMesh(device.type, ordered, mesh_dim_names=tuple(sizes))
    groups: dict[str, dist.ProcessGroup | None] = {
        "world": dist.group.WORLD,
        **{name: device_mesh.get_group(name) for name in sizes},
    }
    for pieces in ranks_along(grid, "cp") if plan.cp > 1 else ():
        group = dist.new_group(pieces)
        if topology.rank in pieces:
            groups["cp"] = group
    return device_mesh, groups


def group_ranks(grid: RankGrid) -> dict[str, list[list[int]]]:
    """Returns the groups along each axis, as lists of ranks. Each rank is in exactly one of the groups along an axis.

    >>> from meshwright.spec.plan import parse_plan
    >>> found = group_ranks(RankGrid(parse_plan("dp2x2.z1")))
    >>> found["shards"], found["copies"], found["tp"]
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]])
    """
    return {
        "world": [list(range(grid.plan.world))],
        **{name: ranks_along(grid, name) for name in ("pp", "cp", "tp")},
        "shards": _partition(grid, grid.ranks_of_replica),
        "copies": _partition(grid, grid.ranks_of_shard),
    }


def ranks_along(grid: RankGrid, axis: str) -> list[list[int]]:
    """Returns the groups along `axis`, as lists of ranks in order of their coordinate."""
    return _partition(grid, lambda rank: grid.along(rank, axis))


def _partition(grid: RankGrid, part_of: Callable[[int], list[int]]) -> list[list[int]]:
    """Returns all parts, in order of their lowest rank. Calls `part_of`, which takes time in proportion to the part,
    once for each part: of 4,096 ranks, calls for each rank would take minutes."""
    found: list[list[int]] = []
    seen: set[int] = set()
    for rank in range(grid.plan.world):
        if rank not in seen:
            found.append(part_of(rank))
            seen.update(found[-1])
    return found


NUM_INTER_HOST_GROUPS = 3
"""Number of process groups between hosts: for reductions, for second messages of reductions, and for all-gathers."""

RanksByHost = Sequence[Sequence[int]]
"""For each host, the positions of the host's ranks in the list of the group's ranks."""


def ranks_by_host(hosts: Sequence[str]) -> RanksByHost | None:
    """Returns the positions of the ranks of each host. `hosts` has the host id of each rank, '' for a rank without
    shared memory.

    Returns None if a hierarchical group is impossible or useless: all ranks are on one host, a host has only one rank,
    hosts have different numbers of ranks, or a rank has no shared memory.

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
    """Collectives of this rank in a group that spans several hosts ([Note: groups between hosts]).

    `ranks`: all ranks of the group. `hosts`: by host, the positions of its ranks in `ranks`. `groups`: if this rank is
    the l-th of its host, the NUM_INTER_HOST_GROUPS process groups of the l-th ranks of all hosts.
    """

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
        """Starts the in-place sum (or maximum) of `flat` over all ranks of the group. Returns the function that
        finishes the collective. `inter_host` compresses the traffic between hosts."""
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
        """Starts to sum `full` over all ranks of the group. This rank's slice of the sum goes to `out`. Returns the
        function that finishes the collective. `inter_host` compresses the traffic between hosts. `sizes` must be
        None."""
        assert sizes is None, "unequal slices go through the process group"
        number, memory = self.begin(full)
        each = out.numel()

        def sum_own() -> InterHostTransfer:
            """Sums over the ranks of this host the slice of each rank in `sum_group`, which has one rank per host. Then
            starts the reduce-scatter of these sums over `sum_group`."""
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
        """Starts to gather the shards of all ranks into `full`. Returns the function that finishes the collective.
        `sizes` must be None."""
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
