"""The mesh: torch's DeviceMesh over the axes of a plan, this rank's place on it, and the group of ranks along each
axis.

Passed as an argument everywhere, never a global. An axis of one rank has no group: code asks `group is None` and does
nothing. Ranks that
share memory (shared.py) form groups without process groups, which cost threads and sockets; the device mesh is made
where some do not.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.errors import InputError
from meshwright.runtime.comm import topology
from meshwright.runtime.comm.error_propagation import ErrorPropagator, gather_objects
from meshwright.runtime.comm.group import CommGroup, ShardPlacement
from meshwright.runtime.comm.shm.collectives import FIELDS_PER_GROUP, ShmCollectives
from meshwright.runtime.comm.shm.memory import SharedMemory, connect_shared_memory
from meshwright.runtime.comm.topology import build_group
from meshwright.runtime.device import host_id, init_local_device
from meshwright.runtime.offload.activation_store import ActivationStore
from meshwright.runtime.offload.swapper import StateSwapper
from meshwright.spec.grid import Coords, RankGrid
from meshwright.spec.plan import Plan

EXPERT_GROUPS = ("experts", "expert_tensor", "expert_joined", "expert_shards", "expert_copies")
GROUP_NAMES = ("world", "pp", "cp", "tp", "shards", "copies", "tie", "heads", "rings", *EXPERT_GROUPS)
"""Groups that a rank can be in; each has its lanes."""

P2P_FIRST_FIELD = len(GROUP_NAMES) * FIELDS_PER_GROUP
"""The first word behind all lanes: messages between pipeline ranks begin there."""


@dataclass(frozen=True)
class ParallelContext:
    """Where this rank stands. Only axes of more than one rank are in the device mesh."""

    plan: Plan
    grid: RankGrid
    rank: int
    place: Coords
    device: torch.device
    groups: dict[str, CommGroup] = field(default_factory=dict)
    device_mesh: DeviceMesh | None = None
    host: SharedMemory | None = None
    identities: tuple[str, ...] = ()
    channels: dict[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    away: StateSwapper | None = None
    depot: ActivationStore | None = None
    calls: ErrorPropagator = field(default_factory=ErrorPropagator)
    hosts: tuple[str, ...] = ()
    """Of each rank, where accelerators meet whose memory is not shared."""

    def group(self, axis: str) -> CommGroup | None:
        """The ranks along `axis` that share this rank's other coordinates; None when it is alone."""
        return self.groups.get(axis)

    @property
    def tp(self) -> CommGroup | None:
        return self.groups.get("tp")

    @property
    def world(self) -> CommGroup | None:
        return self.groups.get("world")

    @property
    def replica(self) -> int:
        return self.grid.replica(self.rank)

    @property
    def sharing(self) -> ShardPlacement:
        copy, shard = self.grid.holding(self.rank)
        return ShardPlacement(
            self.plan.shards,
            shard,
            self.plan.copies,
            copy,
            self.group("shards"),
            self.group("copies"),
            self.tp,
            self.plan.shard_weights,
        )

    def pipeline_rank(self, pp: int) -> int:  # the global rank at pipeline position `pp` beside this one
        return self.grid.rank(self.place._replace(pp=pp))

    def shares_memory(self, ranks: list[int]) -> bool:
        """Whether all of `ranks` are on one host, with or without this one."""
        names = {self.identities[rank] for rank in ranks} if self.identities else {""}
        return len(names) == 1 and "" not in names

    def is_inside(self, ranks: Sequence[int]) -> bool:
        """Whether all of `ranks` are known to be on one host."""
        return bool(self.hosts) and len({self.hosts[rank] for rank in ranks}) == 1

    def lanes(self, name: str, ranks: list[int]) -> ShmCollectives:
        assert self.host is not None, "these ranks do not share memory"
        return ShmCollectives(self.host, ranks, self.words(name))

    def words(self, name: str) -> int:  # the first word of the group's lanes
        return GROUP_NAMES.index(name) * FIELDS_PER_GROUP


def make_parallel_context(plan: Plan, device: torch.device | None = None, timeout: float = 1800.0) -> ParallelContext:
    """The mesh of `plan` over the ranks of the default process group. `timeout`: seconds that a rank waits for another.
    Raises InputError when the plan's world is not the number of ranks: nothing is ever silently left out."""
    device = device or init_local_device()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    started = int(os.environ.get("WORLD_SIZE", ranks))
    if started != ranks:
        raise InputError(
            f"{started} ranks were started but are not joined: call torch.distributed.init_process_group() before parallelize"
        )
    if ranks != plan.world:
        raise InputError(
            f"plan {plan.name}: pp({plan.pp}) * dp({plan.dp}) * cp({plan.cp}) * tp({plan.tp}) = {plan.world} ranks, but {ranks} were started"
        )
    grid = RankGrid(plan)
    rank = dist.get_rank() if dist.is_initialized() else 0
    if ranks == 1:
        return ParallelContext(plan, grid, rank, grid.place(rank), device)
    host, identities = connect_shared_memory(timeout) if device.type == "cpu" else (None, ())
    hosts = gather_objects(host_id()) if device.type != "cpu" else []
    mesh = ParallelContext(
        plan, grid, rank, grid.place(rank), device, {}, None, host, tuple(identities), {}, hosts=tuple(hosts)
    )
    return _with_groups(mesh)


def _with_groups(bare: ParallelContext) -> ParallelContext:
    """`bare` with its groups; all ranks call it."""
    grid, everyone = bare.grid, list(range(bare.plan.world))
    device_mesh, torchs = (
        (None, {}) if bare.shares_memory(everyone) else topology.create_axis_groups(grid, bare.rank, bare.device)
    )
    groups = {}
    for name, parts in topology.group_ranks(grid).items():
        if (group := build_group(bare, name, parts, torchs.get(name))) is not None:
            groups[name] = group
    channels = {} if bare.device.type == "cpu" else topology.create_p2p_groups(grid, bare.rank)
    return replace(bare, groups=groups, device_mesh=device_mesh, channels=channels)


def embedding_group(mesh: ParallelContext) -> CommGroup | None:
    """The pipeline ranks of the first and the last stage beside this one, which share tied weights; None elsewhere.
    Every rank calls it."""
    grid, last = mesh.grid, mesh.plan.rank_of(mesh.plan.stages - 1)
    if last == mesh.plan.rank_of(0):
        return None
    pairs = [
        [column[0], column[last]] for rank in range(mesh.plan.world) if (column := grid.along(rank, "pp"))[0] == rank
    ]
    if (found := build_group(mesh, "tie", pairs)) is not None:
        mesh.groups["tie"] = found
    return found
