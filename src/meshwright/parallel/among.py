"""Groups beside the axes of the mesh: the ranks that agree in some key of their number.

Every rank makes all groups in the same order, also those that it is not in: torch asks for that. Ranks of one host need none of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch.distributed as dist

from meshwright.parallel.group import Group, of_lanes, of_process
from meshwright.parallel.mesh import Mesh


def among(mesh: Mesh, name: str, key: Callable[[int], Hashable]) -> Group | None:
    """This rank's group among all ranks whose numbers have the same `key`; None for one rank. The mesh knows it by `name`. All ranks call it."""
    parts: dict[Hashable, list[int]] = {}
    for rank in range(mesh.plan.world):
        parts.setdefault(key(rank), []).append(rank)
    mine: Group | None = None
    together = all(map(mesh.shares_memory, parts.values()))
    for ranks in parts.values() if len(next(iter(parts.values()))) > 1 else ():
        process = None if together else dist.new_group(ranks)
        if mesh.rank in ranks:
            mine = of_lanes(mesh.lanes(name, ranks)) if mesh.shares_memory(ranks) else of_process(process)
    if mine is not None:
        mesh.groups[name] = mine
    return mine
