"""Builds the parallel context of a plan (`make_parallel_context`), and the engine of a model (`parallelize_model`).
train/ calls both.

`parallelize_model` runs an ordered list of build passes. The passes up to `check_shards` analyse the model, and raise
every error that the user's input can cause. They restore random state and configuration, and leave the model unchanged.
There is one exception: with context parallelism, a Hugging Face model is switched to torch's attention. The later
passes change the model in place: they shard tensors, drop the modules of other stages, flatten parameters, and wrap
blocks.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Unpack

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright.core.errors import InputError
from meshwright.core.gloo_exit import wait_for_gloo_at_exit
from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of, init_local_device
from meshwright.runtime.build.passes.analyze import analyze
from meshwright.runtime.build.passes.assemble import assemble
from meshwright.runtime.build.passes.check_plan import check_plan
from meshwright.runtime.build.passes.check_shards import check_shards
from meshwright.runtime.build.passes.create_groups import create_groups
from meshwright.runtime.build.passes.defer_weight_grads import defer_weight_grads
from meshwright.runtime.build.passes.describe_shards import describe_shards
from meshwright.runtime.build.passes.drop_other_stages import drop_other_stages
from meshwright.runtime.build.passes.flatten_parameters import flatten_parameters
from meshwright.runtime.build.passes.install_loss import install_loss
from meshwright.runtime.build.passes.low_precision_matmul import low_precision_matmul
from meshwright.runtime.build.passes.partition_stages import partition_stages
from meshwright.runtime.build.passes.prepare_model import prepare_model
from meshwright.runtime.build.passes.probe_optimizer import probe_optimizer
from meshwright.runtime.build.passes.record import Build, BuildPass, ModelHints
from meshwright.runtime.build.passes.reduce_gradients import reduce_gradients
from meshwright.runtime.build.passes.shard_tensors import shard_tensors
from meshwright.runtime.build.passes.wrap_blocks import wrap_blocks
from meshwright.runtime.comm import topology as topologies
from meshwright.runtime.comm.shm.memory import connect_shared_memory
from meshwright.runtime.comm.topology import GroupFactory, Topology
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import ErrorPropagator, gather_objects
from meshwright.runtime.host_process import host_id
from meshwright.runtime.offload.swap_file import make_activation_store
from meshwright.runtime.offload.swapper import make_state_swapper
from meshwright.runtime.optim.param_groups import OptimizerFactory, ParamGroups
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.spec.grid import RankGrid
from meshwright.spec.plan import Plan
from meshwright.spec.precision import Recipe


def make_parallel_context(
    plan: Plan,
    device: torch.device | None = None,
    timeout: float = 1800.0,
    offload_to: str | Path | None = None,
    error_propagator: ErrorPropagator | None = None,
) -> ParallelContext:
    """Returns the context of `plan` over the ranks of the default process group. All ranks call it.

    `device`: by default `init_local_device()`. `timeout`: seconds after which a wait in shared memory for another CPU
    rank fails. Process groups keep their own timeout. `offload_to`: the folder of weights, states and activations that
    are offloaded to disk, by default the system's temporary folder.

    Raises:
        InputError: The number of started ranks differs from that of the plan, several ranks were started without a
            process group, or the offload folder cannot be used.
    """
    device = device or init_local_device()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    started = int(os.environ.get("WORLD_SIZE", ranks))
    if started != ranks:
        raise InputError(
            Message(
                "{started} ranks were started but there is no process group: call "
                "torch.distributed.init_process_group() before parallelize",
                started=started,
            )
        )
    if ranks != plan.world:
        raise InputError(
            Message(
                "plan {plan}: pp({pp}) * dp({dp}) * cp({cp}) * tp({tp}) = {world} ranks, but {ranks} were started: "
                "start {world}, or name a plan of {ranks}",
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
        make_state_swapper(plan, device, offload_to),
        make_activation_store(plan, device, offload_to),
        error_propagator or ErrorPropagator(),
    )


def _connect_ranks(grid: RankGrid, device: torch.device, timeout: float) -> Topology:
    """Returns the topology. CPU ranks connect their shared memory, and ranks with accelerators exchange host ids."""
    if grid.plan.world == 1:
        return Topology(grid, dist.get_rank() if dist.is_initialized() else 0)
    wait_for_gloo_at_exit()
    if backend_of(device).memory_is_host:
        shared_memory, shm_host_ids = connect_shared_memory(timeout)
        return Topology(grid, dist.get_rank(), shared_memory, tuple(shm_host_ids))
    return Topology(grid, dist.get_rank(), host_ids=tuple(gather_objects(host_id())))


CHECKS: tuple[BuildPass, ...] = (
    analyze,
    check_plan,
    partition_stages,
    probe_optimizer,
    create_groups,
    describe_shards,
    check_shards,
)
"""Passes that check the user's input and leave the model unchanged (one exception: see the module docstring)."""

CHANGES: tuple[BuildPass, ...] = (
    prepare_model,
    shard_tensors,
    drop_other_stages,
    install_loss,
    flatten_parameters,
    low_precision_matmul,
    defer_weight_grads,
    reduce_gradients,
    wrap_blocks,
    assemble,
)
"""Passes that change the model in place."""

PASSES = (*CHECKS, *CHANGES)


def parallelize_model(
    model: nn.Module,
    context: ParallelContext,
    recipe: Recipe,
    make_optimizer: OptimizerFactory,
    **hints: Unpack[ModelHints],
) -> tuple[Engine, ParamGroups]:
    """Shards `model` in place. Returns its engine and the parameter groups of the optimizer.

    The parameters of `model` must be full and equal on every rank. All ranks call it.

    Raises:
        InputError: The model cannot be trained under the plan. The model is then unchanged, except that a Hugging Face
            model may have been switched to torch's attention (context parallelism).
    """
    build = Build()
    build.model, build.base, build.recipe, build.make_optimizer, build.hints = (
        model,
        context,
        recipe,
        make_optimizer,
        hints,
    )
    for step in PASSES:
        step(build)
    return build.engine, build.param_groups
