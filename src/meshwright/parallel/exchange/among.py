"""Groups beside the axes of the mesh: the ranks that agree in some key of their number.

Every rank makes all groups in the same order, also those that it is not in: torch asks for that. Ranks of one host need none of torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from meshwright.parallel.exchange.group import Group
from meshwright.parallel.exchange.join import joined
from meshwright.parallel.mesh import Mesh


def among(mesh: Mesh, name: str, key: Callable[[int], Hashable]) -> Group | None:
    """This rank's group among all ranks whose numbers have the same `key`; None for one rank. The mesh knows it by `name`. All ranks call it."""
    parts: dict[Hashable, list[int]] = {}
    for rank in range(mesh.plan.world):
        parts.setdefault(key(rank), []).append(rank)
    mine = joined(mesh, name, list(parts.values()))
    if mine is not None:
        mesh.groups[name] = mine
    return mine
