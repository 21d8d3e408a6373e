"""Defines the parallel context of a rank: the plan, the topology, the communication groups, the device, and the offload
stores. All distributed code of the runtime reads them from here.

build/parallelize.py creates the context once. The context is immutable. It is passed as an argument and never stored in
a global variable. An axis with one rank has no group: if `group is None`, a collective along this axis does nothing.
Ranks that share memory have no device mesh and no process groups, because process groups cost threads and sockets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright.runtime.comm.group import CommGroup, ShardPlacement
from meshwright.runtime.comm.shm.memory import SharedMemory
from meshwright.runtime.comm.topology import Topology
from meshwright.runtime.error_propagation import ErrorPropagator
from meshwright.runtime.offload.swap_file import ActivationStore
from meshwright.runtime.offload.swapper import StateSwapper
from meshwright.spec.grid import Coords, RankGrid
from meshwright.spec.plan import Plan


@dataclass(frozen=True)
class ParallelContext:
    """The parallel context of a rank. `groups`: the communication groups of this rank by name, except groups of one
    rank. `device_mesh`: the axes with more than one rank."""

    plan: Plan
    topology: Topology
    device: torch.device
    groups: Mapping[str, CommGroup] = field(default_factory=dict)
    device_mesh: DeviceMesh | None = None
    state_swapper: StateSwapper | None = None
    """Swaps optimizer states and weights; None if the plan offloads neither of them."""
    activation_store: ActivationStore | None = None
    """Stores activations on disk. None if the plan does not offload them to disk."""
    error_propagator: ErrorPropagator = field(default_factory=ErrorPropagator)

    def group(self, axis: str) -> CommGroup | None:
        """Returns the group of the ranks that differ from this rank only in the coordinate `axis`. Returns None if the
        axis has one rank."""
        return self.groups.get(axis)

    @property
    def grid(self) -> RankGrid:
        """Returns the grid, which maps ranks to coordinates."""
        return self.topology.grid

    @property
    def rank(self) -> int:
        """Returns the global rank of this process."""
        return self.topology.rank

    @property
    def coords(self) -> Coords:
        """Returns the coordinates of this rank on all axes."""
        return self.grid.place(self.rank)

    @property
    def shared_memory(self) -> SharedMemory | None:
        """Returns the memory that this rank shares with other CPU ranks of its host, or None if it shares none."""
        return self.topology.shared_memory

    @property
    def tp(self) -> CommGroup | None:
        """Returns the tensor-parallel group, or None if there is one tensor rank."""
        return self.groups.get("tp")

    @property
    def world(self) -> CommGroup | None:
        """Returns the group of all ranks, or None if there is one rank."""
        return self.groups.get("world")

    @property
    def replica(self) -> int:
        """Returns the index of this rank's data-parallel replica, which determines the part of the batch that this rank
        reads."""
        return self.grid.replica(self.rank)

    @property
    def sharing(self) -> ShardPlacement:
        """Returns how the dense parameters are sharded and replicated over ranks."""
        copy, shard = self.grid.holding(self.rank)
        return ShardPlacement(
            self.plan.shards,
            shard,
            self.plan.state_replicas,
            copy,
            self.group("shards"),
            self.group("copies"),
            self.tp,
            self.plan.shard_weights,
        )

    def pipeline_rank(self, pp: int) -> int:
        """Returns the global rank with pipeline coordinate `pp` and this rank's other coordinates."""
        return self.grid.rank(self.coords._replace(pp=pp))
