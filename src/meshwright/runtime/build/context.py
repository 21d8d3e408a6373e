"""Builds the parallel context of a run from the ranks of the default process group."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of
from meshwright.runtime.comm import topology as topologies
from meshwright.runtime.comm.shm.memory import connect_shared_memory
from meshwright.runtime.comm.topology import GroupFactory, Topology
from meshwright.runtime.device import host_id, init_local_device
from meshwright.runtime.error_propagation import ErrorPropagator, gather_objects
from meshwright.runtime.offload.activation_store import make_activation_store
from meshwright.runtime.offload.swapper import make_state_swapper
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.spec.grid import RankGrid
from meshwright.spec.plan import Plan


def make_parallel_context(
    plan: Plan,
    device: torch.device | None = None,
    timeout: float = 1800.0,
    offload_to: str | Path | None = None,
    error_propagator: ErrorPropagator | None = None,
) -> ParallelContext:
    """Returns the context of `plan` over the ranks of the default process group. All ranks call it.

    `timeout`: seconds after which a wait for another rank fails. `offload_to`: the folder of offloaded states and
    activations.

    Raises:
        InputError: The number of started ranks is not that of the plan.
    """
    device = device or init_local_device()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    started = int(os.environ.get("WORLD_SIZE", ranks))
    if started != ranks:
        raise InputError(
            Message(
                "{started} ranks were started but are not joined: call torch.distributed.init_process_group() before "
                "parallelize",
                started=started,
            )
        )
    if ranks != plan.world:
        raise InputError(
            Message(
                "plan {plan}: pp({pp}) * dp({dp}) * cp({cp}) * tp({tp}) = {world} ranks, but {ranks} were started",
                plan=plan.name,
                pp=plan.pp,
                dp=plan.dp,
                cp=plan.cp,
                tp=plan.tp,
                world=plan.world,
                ranks=ranks,
            )
        )
    topology = _connect_ranks(RankGrid(plan), device, timeout)
    factory = GroupFactory(topology, device)
    device_mesh: DeviceMesh | None = None
    processes: dict[str, dist.ProcessGroup | None] = {}
    if ranks > 1 and not topology.shares_memory(range(ranks)):
        device_mesh, processes = topologies.create_axis_groups(topology, device)
    for name, parts in topologies.group_ranks(topology.grid).items() if ranks > 1 else ():
        factory.by_parts(name, parts, processes.get(name))
    return ParallelContext(
        plan,
        topology,
        device,
        factory.groups,
        device_mesh,
        {} if backend_of(device).memory_is_host else topologies.create_p2p_groups(topology),
        make_state_swapper(plan, device, offload_to),
        make_activation_store(plan, device, offload_to),
        error_propagator or ErrorPropagator(),
    )


def _connect_ranks(grid: RankGrid, device: torch.device, timeout: float) -> Topology:
    """Connects the shared memory of CPU ranks. For ranks with accelerators exchanges their hosts. Returns the
    topology."""
    if grid.plan.world == 1:
        return Topology(grid, dist.get_rank() if dist.is_initialized() else 0)
    if backend_of(device).memory_is_host:
        shared_memory, shm_host_ids = connect_shared_memory(timeout)
        return Topology(grid, dist.get_rank(), shared_memory, tuple(shm_host_ids))
    return Topology(grid, dist.get_rank(), host_ids=tuple(gather_objects(host_id())))
