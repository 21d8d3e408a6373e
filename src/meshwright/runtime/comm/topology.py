"""Process groups of torch, for ranks that do not share memory: the device mesh over the axes of a plan, and what lies
beside it.

Every rank makes all of them in the same order, also those that it is not in: torch asks for that.

The group of this rank among equal parts of all ranks, by the way that is there: shared memory, memory inside of hosts
and a process group
between (tiers.py), or a process group alone.

Every rank makes all process groups in the same order, also those that it is not in: torch asks for that.

Groups beside the axes of the mesh: the ranks that agree in some key of their number.

Every rank makes all groups in the same order, also those that it is not in: torch asks for that. Ranks of one host need
none of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright.runtime.comm.group import CommGroup, CommTimer, wrap_process_group, wrap_shm_collectives
from meshwright.runtime.comm.hierarchical import NUM_INTER_HOST_GROUPS, HierarchicalGroup, ranks_by_host
from meshwright.runtime.comm.timers import WaitTimer
from meshwright.spec.grid import RankGrid

if TYPE_CHECKING:
    from meshwright.runtime.parallel_context import ParallelContext


def create_axis_groups(
    grid: RankGrid, rank: int, device: torch.device
) -> tuple[DeviceMesh, dict[str, dist.ProcessGroup | None]]:
    """The device mesh over the axes of more than one rank, and its process groups; context ranks lie inside of shards
    or copies."""
    plan = grid.plan
    sizes = {name: size for name in ("pp", "copies", "shards", "tp") if (size := getattr(plan, name)) > 1}
    ordered = torch.tensor(sorted(range(plan.world), key=grid.place)).view(*sizes.values())
    device_mesh = DeviceMesh(device.type, ordered, mesh_dim_names=tuple(sizes))
    groups: dict[str, dist.ProcessGroup | None] = {
        "world": dist.group.WORLD,
        **{name: device_mesh.get_group(name) for name in sizes},
    }
    for first in range(plan.world) if plan.cp > 1 else ():
        pieces = grid.along(first, "cp")
        group = dist.new_group(pieces) if pieces[0] == first else None
        if group is not None and rank in pieces:
            groups["cp"] = group
    return device_mesh, groups


def group_ranks(grid: RankGrid) -> dict[str, list[list[int]]]:
    """For each kind of group all of its groups, which together hold every rank once.

    >>> from meshwright.spec.plan import parse_plan
    >>> found = group_ranks(RankGrid(parse_plan("dp2x2.z1")))
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


def create_p2p_groups(grid: RankGrid, rank: int) -> dict[tuple[int, int], dist.ProcessGroup]:
    """One group per ordered pair of neighbouring pipeline ranks: NCCL runs the messages of a group one after the other,
    and with one for both
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


NON_HIERARCHICAL_GROUPS = ("pp",)
"""Groups that nothing is summed over."""


def build_group(
    mesh: ParallelContext, name: str, parts: Sequence[Sequence[int]], process: dist.ProcessGroup | None = None
) -> CommGroup | None:
    """None for a part of one rank. `process`: this rank's process group, where there is one already. All ranks call
    it."""
    mine: CommGroup | None = None
    apart = not all(mesh.shares_memory(list(part)) for part in parts)
    for part in parts if max(map(len, parts)) > 1 else ():
        ranks, own = tuple(part), mesh.rank in part
        made = dist.new_group(list(part)) if apart and process is None else process
        if mesh.shares_memory(list(part)):
            mine = wrap_shm_collectives(mesh.lanes(name, list(part))) if own else mine
            continue
        tiers = (
            build_hierarchical_group(mesh, mesh.words(name), ranks)
            if mesh.identities and name not in NON_HIERARCHICAL_GROUPS
            else None
        )
        if own:
            flat = wrap_process_group(made)
            assert flat is not None
            mine = CommGroup(
                flat.ranks,
                flat.index,
                flat.process,
                tiers,
                CommTimer(WaitTimer.of(mesh.device)),
                inside=mesh.is_inside(ranks),
            )
    return mine


def build_hierarchical_group(mesh: ParallelContext, first: int, ranks: Sequence[int]) -> HierarchicalGroup | None:
    """The tiers of `ranks`, where they have any and this rank is one of them; `first`: the word where their lanes
    begin. All ranks call it."""
    table = ranks_by_host([mesh.identities[rank] for rank in ranks])
    mine: HierarchicalGroup | None = None
    for column in zip(*table, strict=True) if table is not None else ():
        across = [ranks[place] for place in column]
        made = [dist.new_group(across) for _ in range(NUM_INTER_HOST_GROUPS)]
        if mesh.rank in across:
            assert mesh.host is not None and table is not None
            ways = [group for process in made if (group := wrap_process_group(process)) is not None]
            mine = HierarchicalGroup(mesh.host, ranks, table, first, ways)
    return mine


def new_group(mesh: ParallelContext, name: str, key: Callable[[int], Hashable]) -> CommGroup | None:
    """This rank's group among all ranks whose numbers have the same `key`; None for one rank. The mesh knows it by
    `name`. All ranks call it."""
    parts: dict[Hashable, list[int]] = {}
    for rank in range(mesh.plan.world):
        parts.setdefault(key(rank), []).append(rank)
    mine = build_group(mesh, name, list(parts.values()))
    if mine is not None:
        mesh.groups[name] = mine
    return mine
