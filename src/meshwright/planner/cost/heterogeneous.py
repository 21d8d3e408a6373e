"""Computes the cost of plans over heterogeneous groups of nodes. Each pipeline rank is placed on one group: it computes
at the speed of this group and must fit in the memory of its devices.

The cost of the plan is computed once for each group, as if all devices were like those of the group. Each rank has the
cost for its group. As for any pipeline,

    step = m x (slowest rank's micro-batch) + bubble + messages + exposed reductions + update,

where the last three are those of the slowest group. Tensor, data and context ranks of a stage are on one group, so
their traffic uses the links of that group. Stages communicate over the network.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost.cost_model import PER_MICRO_BATCH_FIELDS, CostModel, GridCost, StepTime
from meshwright.planner.cost.pipeline import slowest_rank_and_bubble
from meshwright.planner.cost.plan_grid import Array, PlanGrid, broadcast_to_axis
from meshwright.spec.cluster import NodeGroup
from meshwright.spec.grid import largest_shard_weight, rank_strides, relative_shard_size
from meshwright.spec.job import Job
from meshwright.spec.layout import ShardWeight
from meshwright.spec.plan import Plan


def group_cost_models(job: Job, placement: Sequence[int], world: int) -> dict[int, CostModel]:
    """Returns, for each group in `placement`, the cost model for `world` devices like those of the group."""
    found: dict[int, CostModel] = {}
    for at in sorted(set(placement)):
        found[at] = CostModel(
            job.but(cluster=job.cluster.but(groups=(homogeneous_group(job, at, world),))),
            like=next(iter(found.values()), None),
        )
    return found


class ReplicaPlacement(NamedTuple):
    """The placement of one replica: the group of each pipeline rank, the number of micro-batches, and the sequences per
    micro-batch. `weight` is the size of the replica's shard of the states relative to an equal shard. `heft` identifies
    this shard."""

    placement: tuple[int, ...]
    micro_batches: int
    size: int
    weight: float = 1.0
    heft: ShardWeight | None = None


def replica_placements(job: Job, plan: Plan) -> list[ReplicaPlacement]:
    """Returns the distinct replicas of a plan. If the tensor and context ranks of a stage are on several groups, the
    slowest group counts. Device numbers count group by group."""
    shared = [
        (
            plan.micro_batches(job.workload.batch, replica),
            plan.micro_batch_of(replica),
            relative_shard_size(plan, replica),
            largest_shard_weight(plan, replica),
        )
        for replica in range(plan.dp)
    ]
    if plan.placement:
        return [ReplicaPlacement(plan.placement, *each) for each in sorted(set(shared))]
    groups, strides = job.cluster.groups, rank_strides(plan)
    past = list(accumulate(group.nodes * group.devices for group in groups))
    rates = [group.device.peak[job.workload.recipe.rate] * group.device.efficiency for group in groups]

    def of_rank(replica: int, stage: int) -> int:
        outer, inner = divmod(replica, plan.dp_shard)
        first = outer * strides["dp_replicate"] + inner * strides["dp_shard"] + stage * strides["pp"]
        contents = {
            bisect(past, first + cp * strides["cp"] + tp * strides["tp"])
            for cp in range(plan.cp)
            for tp in range(plan.tp)
        }
        return min(contents, key=lambda group: rates[group])

    found = {
        ReplicaPlacement(
            tuple(of_rank(replica, stage) for stage in range(plan.pp)),
            *shared[replica],
        )
        for replica in range(plan.dp)
    }
    return sorted(found)


def homogeneous_group(job: Job, group: int, world: int) -> NodeGroup:
    """Returns a group of at least `world` devices like those of group `group`."""
    like = job.cluster.groups[group]
    return like.but(nodes=max(ceil(world / like.devices), 1))


def group_costs(on: Mapping[int, CostModel], box: PlanGrid) -> dict[int, GridCost]:
    """Returns the cost of every pipeline rank for each group."""
    return {group: pricer.price_ranks(box, pricer.ranks(box, each=True)) for group, pricer in on.items()}


def _rank_times(pricer: CostModel, box: PlanGrid) -> StepTime:
    """Returns the times of every pipeline rank. It does not compute memory."""
    ranks = pricer.ranks(box, each=True)
    return pricer.seconds(box, ranks, pricer.states(box, ranks))


def select_by_group(parts: Mapping[int, Array], placement: Sequence[int]) -> Array:
    """Returns the cost of each rank for its group, over GRID_AXES. An array with one row applies to all ranks."""
    return np.concatenate(
        [part[rank : rank + 1] if len(part := parts[group]) > 1 else part for rank, group in enumerate(placement)]
    )


def pipeline_step_time(
    on: Mapping[int, CostModel], placement: Sequence[int], box: PlanGrid, said: Mapping[int, GridCost] | None = None
) -> StepTime:
    """Returns the parts of the step time. `said`: the costs by group, if already computed."""
    found = {group: said[group].seconds if said else _rank_times(pricer, box) for group, pricer in on.items()}
    shape = np.broadcast_shapes(*(it.each.shape for it in found.values()))
    rows = {
        group: [np.broadcast_to(part, np.broadcast_shapes(part.shape, shape)) for part in it[:PER_MICRO_BATCH_FIELDS]]
        for group, it in found.items()
    }
    parts = [
        select_by_group({group: table[at] for group, table in rows.items()}, placement)
        for at in range(PER_MICRO_BATCH_FIELDS)
    ]
    each = sum(parts[1:], parts[0])
    longest, bubble = slowest_rank_and_bubble(each, np.ones((box.pp, 1, 1, 1, 1, 1, 1)), np.array(1.0))
    slowest = [
        np.maximum.reduce(np.broadcast_arrays(*values))
        for values in zip(*(it[PER_MICRO_BATCH_FIELDS + 1 : -2] for it in found.values()), strict=True)
    ]
    step = broadcast_to_axis(box.counts, "b") * longest + bubble + sum(slowest)
    return StepTime(*parts, bubble, *slowest, each, step)  # type: ignore[call-arg]
