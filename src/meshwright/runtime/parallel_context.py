"""The parallel context of a run: the plan, the topology, the communication groups, the device, and the offload stores.

build/parallelize.py makes it once. It is immutable, and is passed as an argument and never stored in a global variable.
An axis with one rank has no group: code checks `group is None` and does nothing. Ranks that share memory have neither
process groups, which cost threads and sockets, nor a device mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
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
    """The parallel context of a rank. `device_mesh` has only axes with more than one rank."""

    plan: Plan
    topology: Topology
    device: torch.device
    groups: Mapping[str, CommGroup] = field(default_factory=dict)
    device_mesh: DeviceMesh | None = None
    p2p_groups: Mapping[tuple[int, int], dist.ProcessGroup] = field(default_factory=dict)
    state_swapper: StateSwapper | None = None
    """Swaps optimizer states and weights. None if the plan offloads neither."""
    activation_store: ActivationStore | None = None
    """Stores activations on disk. None if the plan does not offload them to disk."""
    error_propagator: ErrorPropagator = field(default_factory=ErrorPropagator)

    def group(self, axis: str) -> CommGroup | None:
        """Returns the group of the ranks along `axis` that have this rank's other coordinates, None for one rank."""
        return self.groups.get(axis)

    @property
    def grid(self) -> RankGrid:
        """Maps ranks to coordinates."""
        return self.topology.grid

    @property
    def rank(self) -> int:
        """The global rank of this process."""
        return self.topology.rank

    @property
    def coords(self) -> Coords:
        """The coordinates of this rank."""
        return self.grid.place(self.rank)

    @property
    def shared_memory(self) -> SharedMemory | None:
        """The memory that this rank shares with other ranks of its host."""
        return self.topology.shared_memory

    @property
    def tp(self) -> CommGroup | None:
        """The tensor-parallel group."""
        return self.groups.get("tp")

    @property
    def world(self) -> CommGroup | None:
        """The group of all ranks."""
        return self.groups.get("world")

    @property
    def replica(self) -> int:
        """The index of the part of the batch that this rank reads."""
        return self.grid.replica(self.rank)

    @property
    def sharing(self) -> ShardPlacement:
        """How the dense parameters are sharded and replicated over ranks."""
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
