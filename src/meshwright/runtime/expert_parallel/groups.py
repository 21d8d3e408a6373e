"""Expert-parallel groups: which ranks store which experts, and which groups exchange tokens and gradients. The build
pass `create_groups` creates them.

[Note: expert ranks] The experts are divided over ep expert ranks, which are taken first from neighbouring data ranks
and then from tensor ranks. A replica has D = dp_shard x cp data ranks and tp tensor ranks. Of these, g = gcd(ep, D)
data ranks and j = ep / g tensor ranks divide the experts. The remaining factor x = tp / j of the tensor ranks splits
the inner features of each expert (`Plan.expert_tp`). In every replica, D / g data ranks store the same experts. These
ranks sum the gradients of their experts, and ZeRO shards the states among them.

For data rank d and tensor rank t:

    expert rank                            (d mod g) j + (t div x)
    index among the x ranks of an expert   t mod x
    ZeRO shard of the experts' states      d div g

If the data rank varies faster than the tensor rank in the rank order, the expert rank is (t div x) g + (d mod g)
instead.
"""

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
    """The coordinates of a rank ([Note: expert ranks]).

    `pp`: pipeline rank. `replicate`: replica. `data`: index among the D data ranks. `expert`: index among the ep expert
    ranks. `share`: index among the x tensor ranks that split an expert. `joined`: index among the j tensor ranks that
    divide the experts. `rest`: index among the D / g data ranks with the same experts.
    """

    pp: int
    replicate: int
    data: int
    expert: int
    share: int
    joined: int
    rest: int


@dataclass(frozen=True)
class EpGroups:
    """This rank's expert-parallel groups. A group of one rank is None."""

    place: EpCoords
    ranks: int
    """The number ep of expert ranks."""
    shares: int
    """The number x of tensor ranks that split each expert."""
    group: CommGroup | None
    """The ep expert ranks, which together store all experts and exchange tokens."""
    tensor: CommGroup | None
    """The x tensor ranks that split this rank's experts."""
    joined: CommGroup | None
    """The j tensor ranks that store different experts and have the same tokens. Each of these ranks dispatches a part
    of the tokens."""
    sharing: ShardPlacement
    """How the states of this rank's experts are sharded and replicated."""
    dealt: dict[str, StackedExperts]
    """Maps the full name of each parameter that is divided over expert ranks to its expert module. Empty if ep is 1."""

    def dense(self, anatomy: ModelGraph) -> ModelGraph:
        """Returns `anatomy` without the parameters that are divided over expert ranks. The pass `shard_tensors` splits
        the remaining parameters over tensor ranks."""
        if not self.dealt:
            return anatomy
        splits = {name: split for name, split in anatomy.splits.items() if name not in self.dealt}
        return replace(
            anatomy,
            splits=splits,
            divisible={name: size for name, size in anatomy.divisible.items() if name != "moe_ffn"},
        )

    def without(self, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Returns the `parameters` that are not divided over expert ranks."""
        return {name: parameter for name, parameter in parameters.items() if name not in self.dealt}


def ep_coords(grid: RankGrid, rank: int) -> EpCoords:
    """Returns the coordinates of `rank` among the expert ranks ([Note: expert ranks]).

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
    """Creates the expert-parallel groups. All ranks must call this function. If ep is 1, tensor ranks split every
    expert, and experts have the same shards and replicas as dense weights."""
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
