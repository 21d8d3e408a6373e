"""The mesh: torch's DeviceMesh over the axes of a plan, this rank's place on it, and one process group per axis.

Passed as an argument everywhere, never a global. An axis of one rank has no group: code asks `group is None` and does nothing.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from meshwright.base.errors import InputError
from meshwright.spec.grid import AXES, Grid, Place
from meshwright.spec.plan import Plan

Group = dist.ProcessGroup | None


@dataclass(frozen=True)
class Mesh:
    """Where this rank stands. Only axes of more than one rank are in the device mesh: a group costs threads and sockets."""

    plan: Plan
    grid: Grid
    rank: int
    place: Place
    device: torch.device
    device_mesh: DeviceMesh | None
    channels: dict[tuple[int, int], Group] = field(default_factory=dict)

    def group(self, axis: str) -> Group:
        """The ranks along `axis` that share this rank's other coordinates; None when it is alone."""
        if self.device_mesh is None or getattr(self.grid.sizes, axis) == 1:
            return None
        return self.device_mesh.get_group(axis)

    @property
    def tp(self) -> Group:
        return self.group("tp")

    @property
    def world(self) -> Group:
        return None if self.device_mesh is None else dist.group.WORLD

    @property
    def replica(self) -> int:
        return self.grid.replica(self.rank)

    def pipeline_rank(self, pp: int) -> int:
        """The global rank at pipeline position `pp` beside this one."""
        return self.grid.rank(self.place._replace(pp=pp))


def local_device() -> torch.device:
    """The accelerator of this rank (LOCAL_RANK), or the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
    return torch.device("cpu")


def make_mesh(plan: Plan, device: torch.device | None = None) -> Mesh:
    """The mesh of `plan` over the ranks of the default process group.

    Raises InputError when the plan's world is not the number of ranks: nothing is ever silently left out.
    """
    device = device or local_device()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    started = int(os.environ.get("WORLD_SIZE", ranks))
    if started != ranks:
        raise InputError(f"{started} ranks were started but are not joined: call torch.distributed.init_process_group() before parallelize")
    if ranks != plan.world:
        raise InputError(
            f"plan {plan.name}: pp({plan.pp}) * dp({plan.dp}) * cp({plan.cp}) * tp({plan.tp}) = {plan.world} ranks, but {ranks} were started"
        )
    grid = Grid(plan)
    rank = dist.get_rank() if dist.is_initialized() else 0
    place = grid.place(rank)
    if not dist.is_initialized():
        return Mesh(plan, grid, rank, place, device, None)
    axes = [axis for axis in AXES if getattr(grid.sizes, axis) > 1]
    device_mesh = None
    if axes:
        sizes = tuple(getattr(grid.sizes, axis) for axis in axes)
        device_mesh = init_device_mesh(device.type, sizes, mesh_dim_names=tuple(axes))
    return Mesh(plan, grid, rank, place, device, device_mesh, _channels(grid, place, device))


def _columns(grid: Grid) -> list[Place]:
    """The places of pipeline rank 0: one for each column of pipeline ranks."""
    return [place for rank in range(_size(grid)) if (place := grid.place(rank)).pp == 0]


def _size(grid: Grid) -> int:
    size = 1
    for count in grid.sizes:
        size *= count
    return size


def tie_group(mesh: Mesh) -> Group:
    """The first and the last pipeline rank beside this one, which share tied weights; None elsewhere. Every rank calls it."""
    grid, here = mesh.grid, mesh.place
    last = grid.sizes.pp - 1
    mine: Group = None
    if last == 0:
        return None
    for column in _columns(grid):
        group = dist.new_group([grid.rank(column), grid.rank(column._replace(pp=last))])
        if column == here._replace(pp=0) and here.pp in (0, last):
            mine = group
    return mine


def _channels(grid: Grid, here: Place, device: torch.device) -> dict[tuple[int, int], Group]:
    """One group per ordered pair of neighbouring pipeline ranks.

    NCCL runs the messages of a group one after the other: with one group for both directions two ranks that send first would wait for
    each other. gloo matches messages by tag and needs none.
    """
    mine: dict[tuple[int, int], Group] = {}
    stages = grid.sizes.pp
    if stages == 1 or device.type == "cpu":
        return mine
    for column in _columns(grid):
        for source in range(stages):
            for target in {(source + 1) % stages, (source - 1) % stages} - {source}:
                ranks = [grid.rank(column._replace(pp=source)), grid.rank(column._replace(pp=target))]
                group = dist.new_group(ranks)
                if column == here._replace(pp=0):
                    mine[source, target] = group
    return mine
