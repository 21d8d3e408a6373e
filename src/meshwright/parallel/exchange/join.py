"""The group of this rank among equal parts of all ranks, by the way that is there: shared memory, memory inside of hosts and a process group
between (tiers.py), or a process group alone.

Every rank makes all process groups in the same order, also those that it is not in: torch asks for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.distributed as dist

from meshwright.parallel.exchange.clock import Clock
from meshwright.parallel.exchange.group import Group, Meter, of_lanes, of_process
from meshwright.parallel.exchange.tiers import WAYS, Tiers, table_of

if TYPE_CHECKING:
    from meshwright.parallel.mesh import Mesh

FLAT = ("pp",)
"""Groups that nothing is summed over."""


def joined(mesh: Mesh, name: str, parts: Sequence[Sequence[int]], process: dist.ProcessGroup | None = None) -> Group | None:
    """None for a part of one rank. `process`: this rank's process group, where there is one already. All ranks call it."""
    mine: Group | None = None
    apart = not all(mesh.shares_memory(list(part)) for part in parts)
    for part in parts if max(map(len, parts)) > 1 else ():
        ranks, own = tuple(part), mesh.rank in part
        made = dist.new_group(list(part)) if apart and process is None else process
        if mesh.shares_memory(list(part)):
            mine = of_lanes(mesh.lanes(name, list(part))) if own else mine
            continue
        tiers = tiers_of(mesh, mesh.words(name), ranks) if mesh.identities and name not in FLAT else None
        if own:
            flat = of_process(made)
            assert flat is not None
            mine = Group(flat.ranks, flat.index, flat.process, tiers, Meter(Clock.of(mesh.device)), inside=mesh.is_inside(ranks))
    return mine


def tiers_of(mesh: Mesh, first: int, ranks: Sequence[int]) -> Tiers | None:
    """The tiers of `ranks`, where they have any and this rank is one of them; `first`: the word where their lanes begin. All ranks call it."""
    table = table_of([mesh.identities[rank] for rank in ranks])
    mine: Tiers | None = None
    for column in zip(*table, strict=True) if table is not None else ():
        across = [ranks[place] for place in column]
        made = [dist.new_group(across) for _ in range(WAYS)]
        if mesh.rank in across:
            assert mesh.host is not None and table is not None
            ways = [group for process in made if (group := of_process(process)) is not None]
            mine = Tiers(mesh.host, ranks, table, first, ways)
    return mine
