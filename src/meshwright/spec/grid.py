"""Ranks as coordinates: by default pp outermost, then dp_replicate, dp_shard, cp, and tp innermost, so that tensor
ranks are neighbours; a plan may
name another order of axes.

[Note: placed ranks] Ranks are numbered as their devices are, group of nodes after group. Where a plan places pipeline
ranks on groups, those of the
first group come first, whatever stages they hold: pipeline rank 0 of `place1-0` is the second half of the ranks.

>>> from meshwright.spec.plan import Plan
>>> RankGrid(Plan(pp=2, dp_shard=2, zero=1, tp=2)).place(5)
Coords(pp=1, dp_replicate=0, dp_shard=0, cp=0, tp=1)
>>> RankGrid(Plan(pp=2, dp_replicate=2, placement=(1, 0))).place(3), RankGrid(Plan(pp=2, dp_replicate=2, axes=("dp", "pp", "tp"))).place(1)
(Coords(pp=0, dp_replicate=1, dp_shard=0, cp=0, tp=0), Coords(pp=1, dp_replicate=0, dp_shard=0, cp=0, tp=0))
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.spec.plan import Plan


class Coords(NamedTuple):
    """Where a rank stands on each axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


class RankGrid:
    """The arithmetic between ranks and places of one plan."""

    def __init__(self, plan: Plan) -> None:
        self.sizes = Coords(plan.pp, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp)
        self.strides = Coords(**plan.strides())
        self.plan = plan
        self._stage_of_block = (
            sorted(range(plan.pp), key=lambda pp: plan.placement[pp]) if plan.placement else list(range(plan.pp))
        )
        self._block_of_stage = {pp: block for block, pp in enumerate(self._stage_of_block)}

    def place(self, rank: int) -> Coords:
        place = Coords(*(rank // stride % size for stride, size in zip(self.strides, self.sizes, strict=True)))
        return place._replace(pp=self._stage_of_block[place.pp])

    def rank(self, place: Coords) -> int:
        place = place._replace(pp=self._block_of_stage[place.pp])
        return sum(coordinate * stride for coordinate, stride in zip(place, self.strides, strict=True))

    def along(self, rank: int, axis: str) -> list[int]:
        """The ranks along `axis` through `rank`, in order."""
        place = self.place(rank)
        return [self.rank(place._replace(**{axis: at})) for at in range(getattr(self.sizes, axis))]

    def replica(self, rank: int) -> int:
        """Which slice of the batch `rank` reads: 0 to dp - 1."""
        place = self.place(rank)
        return place.dp_replicate * self.sizes.dp_shard + place.dp_shard

    def holding(self, rank: int) -> tuple[int, int]:
        """Which copy of the states `rank` holds, and which shard of it: its data and context ranks lie one after the
        other.

        >>> RankGrid(Plan(dp_replicate=2, dp_shard=2, cp=2, zero=1)).holding(5), RankGrid(Plan(dp_replicate=4, cp=2)).holding(5)
        ((1, 1), (5, 0))
        """
        return divmod(self.replica(rank) * self.sizes.cp + self.place(rank).cp, self.plan.shards)

    def sharing(self, rank: int) -> tuple[list[int], list[int]]:
        """The ranks that share one copy of the states with `rank`, and those that hold the same shard; each with `rank`
        in it."""
        place, (copy, shard) = self.place(rank), self.holding(rank)
        beside = [
            self.rank(place._replace(dp_replicate=replicate, dp_shard=each, cp=piece))
            for replicate in range(self.sizes.dp_replicate)
            for each in range(self.sizes.dp_shard)
            for piece in range(self.sizes.cp)
        ]
        return beside[copy * self.plan.shards :][: self.plan.shards], beside[shard :: self.plan.shards]
