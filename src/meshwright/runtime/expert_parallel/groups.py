"""Expert-parallel groups: which ranks store which experts, and which groups exchange tokens and gradients.

[Note: expert ranks] ep is taken from the data ranks first (dp_shard x cp, neighbours), then from the tensor ranks. With
D data ranks, g = gcd(ep, D) and j = ep / g, the experts are dealt to g data ranks times j of the tp tensor ranks. The
other x = tp / j tensor ranks split the inner features of each expert (`Plan.expert_tp`). D / g data ranks in every
replica store the same experts; they sum the gradients, and ZeRO shards the states among them.

    data rank d, tensor rank t    expert rank (d mod g) j + t div x    share t mod x    shard d div g

Expert ranks are numbered as their ranks are: where tensor ranks are outside of data ranks, the expert rank is (t div x)
g + d mod g."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import nn

from meshwright.analysis.graph import ModelGraph, StackedExperts
from meshwright.runtime.comm.group import CommGroup, ShardPlacement
from meshwright.runtime.comm.topology import GroupFactory
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.spec.grid import RankGrid


class EpCoords(NamedTuple):
    """Stores the coordinates of a rank: `expert` of ep, `share` of x, `rest` of D / g, its data rank `data`, and its
    index `joined` among the j tensor ranks."""

    pp: int
    replicate: int
    data: int
    expert: int
    share: int
    joined: int
    rest: int


@dataclass(frozen=True)
class EpGroups:
    """Stores this rank's expert-parallel groups. Groups of one rank are None."""

    place: EpCoords
    ranks: int
    """The number ep of ranks that the experts are distributed over."""
    shares: int
    """The number x of tensor ranks that split each expert."""
    group: CommGroup | None
    """The ep ranks that together hold all experts and exchange tokens."""
    tensor: CommGroup | None
    """The x tensor ranks that split this rank's experts."""
    joined: CommGroup | None
    """The j tensor ranks that store different experts. Each sends a part of the tokens that all j have."""
    sharing: ShardPlacement
    dealt: dict[str, StackedExperts]
    """The parameters that are distributed over expert ranks, by their full names; none without ep."""

    def dense(self, anatomy: ModelGraph) -> ModelGraph:
        """Returns `anatomy` without the parameters that expert ranks distribute, for the ordinary cut over tensor
        ranks."""
        if not self.dealt:
            return anatomy
        splits = {name: split for name, split in anatomy.splits.items() if name not in self.dealt}
        return replace(
            anatomy,
            splits=splits,
            divisible={name: size for name, size in anatomy.divisible.items() if name != "moe_ffn"},
        )

    def without(self, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Returns the parameters that are not distributed over expert ranks."""
        return {name: parameter for name, parameter in parameters.items() if name not in self.dealt}


def ep_coords(grid: RankGrid, rank: int) -> EpCoords:
    """Returns the coordinates of a rank among the expert ranks, see [Note: expert ranks].

    >>> from meshwright.spec.plan import Plan
    >>> grid = RankGrid(Plan(dp_shard=2, zero=1, tp=4, ep=4))
    >>> [(place.expert, place.share) for place in (ep_coords(grid, rank) for rank in range(8))]
    [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1)]
    """
    plan, place = grid.plan, grid.place(rank)
    data = place.dp_shard * plan.cp + place.cp
    dealt = math.gcd(plan.ep, plan.dp_shard * plan.cp)
    joined, share = divmod(place.tp, plan.expert_tp)
    outside = plan.axes.index("tp") < plan.axes.index("dp")
    expert = joined * dealt + data % dealt if outside else data % dealt * (plan.ep // dealt) + joined
    return EpCoords(place.pp, place.dp_replicate, data, expert, share, joined, data // dealt)


def make_ep_groups(mesh: ParallelContext, factory: GroupFactory, anatomy: ModelGraph) -> EpGroups:
    """Creates the groups. All ranks call it. Without ep the tensor ranks split every expert, and the data ranks are
    those of the dense weights."""
    plan, grid = mesh.plan, mesh.grid
    place = ep_coords(grid, mesh.rank)
    if plan.ep == 1:
        return EpGroups(place, 1, plan.tp, None, mesh.tp, None, mesh.sharing, {})

    def group(name: str, key: Callable[[EpCoords], Hashable]) -> CommGroup | None:
        return factory.by_key(name, lambda rank: key(ep_coords(grid, rank)))

    experts = group("experts", lambda at: (at.pp, at.replicate, at.rest, at.share))
    tensor = group("expert_tensor", lambda at: (at.pp, at.replicate, at.data, at.joined))
    joined = group("expert_joined", lambda at: (at.pp, at.replicate, at.data, at.share))
    rests = plan.dp_shard * plan.cp // math.gcd(plan.ep, plan.dp_shard * plan.cp)
    if plan.zero:
        shards = group("expert_shards", lambda at: (at.pp, at.replicate, at.expert, at.share))
        copies = group("expert_copies", lambda at: (at.pp, at.rest, at.expert, at.share))
        sharing = ShardPlacement(rests, place.rest, plan.dp_replicate, place.replicate, shards, copies, tensor)
    else:
        copies = group("expert_copies", lambda at: (at.pp, at.expert, at.share))
        sharing = ShardPlacement(
            1, 0, rests * plan.dp_replicate, place.replicate * rests + place.rest, None, copies, tensor
        )
    dealt = {f"{each.path}.{name}": each for each in anatomy.experts for name in each.names}
    return EpGroups(place, plan.ep, plan.expert_tp, experts, tensor, joined, sharing, dealt)
