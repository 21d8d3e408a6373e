"""Process groups of torch, for ranks that do not share memory: the device mesh over the axes of a plan, and what lies beside it.

Every rank makes all of them in the same order, also those that it is not in: torch asks for that.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.spec.grid import Grid


def of_axes(grid: Grid, rank: int, device: torch.device) -> tuple[DeviceMesh, dict[str, dist.ProcessGroup | None]]:
    """The device mesh over the axes of more than one rank, and its process groups; context ranks lie inside of shards or copies."""
    plan = grid.plan
    sizes = {name: size for name in ("pp", "copies", "shards", "tp") if (size := getattr(plan, name)) > 1}
    ordered = torch.tensor(sorted(range(plan.world), key=grid.place)).view(*sizes.values())
    device_mesh = DeviceMesh(device.type, ordered, mesh_dim_names=tuple(sizes))
    groups: dict[str, dist.ProcessGroup | None] = {"world": dist.group.WORLD, **{name: device_mesh.get_group(name) for name in sizes}}
    for first in range(plan.world) if plan.cp > 1 else ():
        pieces = grid.along(first, "cp")
        group = dist.new_group(pieces) if pieces[0] == first else None
        if group is not None and rank in pieces:
            groups["cp"] = group
    return device_mesh, groups


def parts(grid: Grid) -> dict[str, list[list[int]]]:
    """For each kind of group all of its groups, which together hold every rank once.

    >>> from meshwright.spec.plan import parse_plan
    >>> found = parts(Grid(parse_plan("dp2x2.z1")))
    >>> found["shards"], found["copies"], found["tp"]
    ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]])
    """
    every = range(grid.plan.world)
    found = {"world": [list(every)]}
    for name in ("pp", "cp", "tp"):
        found[name] = [ranks for first in every if (ranks := grid.along(first, name))[0] == first]
    for at, name in enumerate(("shards", "copies")):
        found[name] = [ranks for first in every if (ranks := grid.sharing(first)[at])[0] == first]
    return found


def channels(grid: Grid, rank: int) -> dict[tuple[int, int], dist.ProcessGroup]:
    """One group per ordered pair of neighbouring pipeline ranks: NCCL runs the messages of a group one after the other, and with one for both
    directions two ranks that send first would wait for each other. gloo matches messages by tag and needs none."""
    mine: dict[tuple[int, int], dist.ProcessGroup] = {}
    stages = grid.plan.pp
    for first in range(grid.plan.world) if stages > 1 else ():
        column = grid.along(first, "pp")
        for source in range(stages) if column[0] == first else ():
            for target in {(source + 1) % stages, (source - 1) % stages} - {source}:
                group = dist.new_group([column[source], column[target]])
                if rank in column:
                    mine[source, target] = group
    return mine
