"""Determines what each rank of a plan has: coordinates, shards, rows of the batch, and what its blocks recompute and
offload. The planner and the runtime use it.

`RankGrid` maps ranks to coordinates on a plan's axes, and to shards of the ZeRO states.

By default the axes from outermost to innermost are pp, dp_replicate, dp_shard, cp and tp, so that tensor ranks are
neighbours. `Plan.axes` can change this order.

[Note: placed ranks] Ranks are numbered like their devices, group of nodes by group. If a plan places pipeline ranks on
groups, the ranks of the first group have the lowest numbers, whatever stages they run. With `place1-0`, pipeline rank 0
is the second half of the ranks.

>>> from meshwright.spec.plan import Plan
>>> RankGrid(Plan(pp=2, dp_shard=2, zero=1, tp=2)).place(5)
Coords(pp=1, dp_replicate=0, dp_shard=0, cp=0, tp=1)
>>> RankGrid(Plan(pp=2, dp_replicate=2, placement=(1, 0))).place(3)
Coords(pp=0, dp_replicate=1, dp_shard=0, cp=0, tp=0)
>>> RankGrid(Plan(pp=2, dp_replicate=2, axes=("dp", "pp", "tp"))).place(1)
Coords(pp=1, dp_replicate=0, dp_shard=0, cp=0, tp=0)

`micro_batch_rows` distributes a batch over the data replicas of a plan. `micro_batches_by_speed` chooses the numbers of
micro-batches for replicas that differ in speed.

`recompute_at` and `offloads_block` determine what a plan recomputes and offloads in each block of a virtual stage.

A block is identified by its index in its virtual stage ([Note: first blocks] in plan.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from meshwright.spec.enums import OFFLOAD_AMOUNT_FIELDS, PER_BLOCK_RECOMPUTE, Offload, Recompute, offloads_activations
from meshwright.spec.layout import ShardWeight
from meshwright.spec.plan import Plan


class Coords(NamedTuple):
    """The index of a rank along each axis."""

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int


class RankGrid:
    """Converts between ranks and coordinates for one plan."""

    def __init__(self, plan: Plan) -> None:
        self.sizes = Coords(plan.pp, plan.dp_replicate, plan.dp_shard, plan.cp, plan.tp)
        self.strides = Coords(**rank_strides(plan))
        self.plan = plan
        self._stage_of_block = (
            sorted(range(plan.pp), key=lambda pp: plan.placement[pp]) if plan.placement else list(range(plan.pp))
        )
        self._block_of_stage = {pp: block for block, pp in enumerate(self._stage_of_block)}

    def place(self, rank: int) -> Coords:
        """Returns the coordinates of `rank`."""
        place = Coords(*(rank // stride % size for stride, size in zip(self.strides, self.sizes, strict=True)))
        return place._replace(pp=self._stage_of_block[place.pp])

    def rank(self, place: Coords) -> int:
        """Returns the rank at the coordinates `place`."""
        place = place._replace(pp=self._block_of_stage[place.pp])
        return sum(coordinate * stride for coordinate, stride in zip(place, self.strides, strict=True))

    def along(self, rank: int, axis: str) -> list[int]:
        """Returns the ranks with the coordinates of `rank` on all axes except `axis`, in order of their coordinate on
        `axis`."""
        place = self.place(rank)
        return [self.rank(place._replace(**{axis: at})) for at in range(getattr(self.sizes, axis))]

    def replica(self, rank: int) -> int:
        """Returns the index of the data replica of `rank`, from 0 to dp - 1. The index determines which rows of the
        batch the rank reads."""
        place = self.place(rank)
        return place.dp_replicate * self.sizes.dp_shard + place.dp_shard

    def holding(self, rank: int) -> tuple[int, int]:
        """Returns the index of the state replica of `rank`, and the index of its shard of the states. In both indices,
        context ranks count like data ranks.

        >>> RankGrid(Plan(dp_replicate=2, dp_shard=2, cp=2, zero=1)).holding(5)
        (1, 1)
        >>> RankGrid(Plan(dp_replicate=4, cp=2)).holding(5)
        (5, 0)
        """
        return divmod(self.replica(rank) * self.sizes.cp + self.place(rank).cp, self.plan.shards)

    def ranks_of_replica(self, rank: int) -> list[int]:
        """Returns the ranks that together have the same replica of the states as `rank`, in order of their shards."""
        first = self.holding(rank)[0] * self.plan.shards
        return [self._state_rank(rank, at) for at in range(first, first + self.plan.shards)]

    def ranks_of_shard(self, rank: int) -> list[int]:
        """Returns the ranks that have the same shard of the states as `rank`, in order of their replicas."""
        count = self.sizes.dp_replicate * self.sizes.dp_shard * self.sizes.cp
        return [self._state_rank(rank, at) for at in range(self.holding(rank)[1], count, self.plan.shards)]

    def _state_rank(self, rank: int, at: int) -> int:
        """Returns the rank of the pipeline and tensor coordinates of `rank` with shard `at`, counted over replicas."""
        replica, piece = divmod(at, self.sizes.cp)
        replicate, shard = divmod(replica, self.sizes.dp_shard)
        return self.rank(self.place(rank)._replace(dp_replicate=replicate, dp_shard=shard, cp=piece))


def rank_strides(plan: Plan) -> dict[str, int]:
    """Returns the distance between neighbouring ranks along each axis.

    >>> rank_strides(Plan(pp=4, dp_replicate=3, tp=2, axes=("dp", "pp", "tp")))
    {'tp': 1, 'pp': 2, 'cp': 8, 'dp_shard': 8, 'dp_replicate': 8}
    """
    strides, inner = {}, 1
    for axis in reversed(plan.axes):
        for part in ("cp", "dp_shard", "dp_replicate") if axis == "dp" else (axis,):
            strides[part] = inner
            inner *= getattr(plan, part)
    return strides


def relative_shard_size(plan: Plan, replica: int | None = None) -> float:
    """Returns the size of the largest shard divided by the size of equal shards. Considers only the shards of the
    context ranks of `replica`, or all shards if `replica` is None.

    >>> from meshwright.spec.plan import parse_plan
    >>> relative_shard_size(parse_plan("dp2.z3.zw3-1"), 1), relative_shard_size(parse_plan("dp4.z3"))
    (0.5, 1.0)
    """
    if not plan.shard_weights:
        return 1.0
    return max(_shard_weights_of(plan, replica)) * plan.shards / sum(plan.shard_weights)


def largest_shard_weight(plan: Plan, replica: int | None = None) -> ShardWeight | None:
    """Returns the weight of the largest shard among the context ranks of `replica`, or among all ranks if `replica` is
    None. If several shards are equally large, the one with the lowest index counts. Returns None if the plan has no
    shard weights.

    >>> from meshwright.spec.plan import parse_plan
    >>> largest_shard_weight(parse_plan("dp2.z3.zw3-1"), 1)
    ShardWeight(before=3, past=4, total=4)
    """
    if not plan.shard_weights:
        return None
    index = plan.shard_weights.index(max(_shard_weights_of(plan, replica)))
    return ShardWeight(sum(plan.shard_weights[:index]), sum(plan.shard_weights[: index + 1]), sum(plan.shard_weights))


def _shard_weights_of(plan: Plan, replica: int | None) -> tuple[int, ...]:
    if replica is None:
        return plan.shard_weights
    first = replica % plan.dp_shard * plan.cp
    return plan.shard_weights[first : first + plan.cp]


def first_row(plan: Plan, batch: int, replica: int) -> int:
    """Returns the first row of the batch that `replica` reads.

    >>> from meshwright.spec.plan import parse_plan
    >>> first_row(parse_plan("dp2.mb4.ga3-1"), 16, 1), first_row(parse_plan("dp2.mb4"), 16, 1)
    (12, 8)
    >>> first_row(parse_plan("dp2.mb4-2"), 12, 1)
    8
    """
    count = plan.micro_batches(batch)
    counts = plan.shares or (count,) * plan.dp
    return sum(counts[earlier] * plan.micro_batch_of(earlier) for earlier in range(replica))


def micro_batch_rows(plan: Plan, batch: int, replica: int) -> list[tuple[int, int]]:
    """Returns the first row and the number of rows of each micro-batch of `replica`.

    >>> from meshwright.spec.plan import parse_plan
    >>> micro_batch_rows(parse_plan("dp2.mb4-3.ga1-2"), 10, 1)
    [(4, 3), (7, 3)]
    """
    first, size = first_row(plan, batch, replica), plan.micro_batch_of(replica)
    return [(first + index * size, size) for index in range(plan.micro_batches(batch, replica))]


def micro_batches_by_speed(speeds: Sequence[float], count: int) -> tuple[int, ...]:
    """Returns the number of micro-batches of each replica. The numbers add up to `count` and are at least 1. They
    minimize the time when the last replica ends.

    Each micro-batch in turn goes to the replica that would finish it first, which is optimal.

    >>> micro_batches_by_speed([1.0, 2.0], 24), micro_batches_by_speed([1.0, 1.0, 1.0], 8)
    ((8, 16), (3, 3, 2))
    >>> micro_batches_by_speed([1.0, 100.0], 4)
    (1, 3)
    """
    counts = [1] * len(speeds)
    for _ in range(count - len(speeds)):
        first = min(range(len(speeds)), key=lambda replica: (counts[replica] + 1) / speeds[replica])
        counts[first] += 1
    return tuple(counts)


def offload_percent(plan: Plan, what: Offload) -> int:
    """Returns the percentage of `what` that is offloaded, 100 without a limit.

    >>> from meshwright.spec.plan import parse_plan
    >>> plan = parse_plan("dp2.z3.off-optimizer60.off-parameters-disk50.off-activations8")
    >>> [offload_percent(plan, what) for what in plan.offload]
    [60, 50, 100]
    """
    field = OFFLOAD_AMOUNT_FIELDS.get(what, "")
    return int(getattr(plan, field)) if field.endswith("_share") else 100


def recompute_at(plan: Plan, index: int) -> Recompute:
    """Returns the kind of recompute of the block at `index` of its virtual stage."""
    return plan.recompute if not plan.recompute_layers or index < plan.recompute_layers else plan.recompute_rest


def offloads_block(plan: Plan, index: int) -> bool:
    """Returns whether the activations of the block at `index` of its virtual stage are offloaded."""
    return offloads_activations(plan.offload) and (not plan.offload_layers or index < plan.offload_layers)


def defers_wgrad(plan: Plan, index: int) -> bool:
    """Returns whether the block at `index` computes its weight gradients in the action W. This applies if the schedule
    splits the backward of its stage into B (input gradients) and W (weight gradients).

    A block with recompute `sac` or `full`, or with offload of activations, computes its weight gradients in B, because
    W would need its recomputed or fetched activations.
    """
    return recompute_at(plan, index) not in PER_BLOCK_RECOMPUTE and not offloads_block(plan, index)
