"""Computes the cost of plans over heterogeneous groups of nodes, for the search and for `estimate` (cost/step.py). Each
pipeline rank is placed on one group. It computes at the speed of this group and must fit in the memory of the group's
devices.

The cost of the plan is computed once for each group, as if all devices of the cluster were devices of this group. Each
rank then has the cost that was computed for its group. The step time is

    step = m x (slowest rank's micro-batch) + bubble + messages + exposed reductions + update + terms

with m micro-batches and the terms of step_terms.py. Messages, exposed reductions, update and each term are maxima over
the groups. Tensor, data and context ranks of a stage are on one group, so they communicate over the links of this
group. Stages communicate over the network.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost.cost_model import PER_MICRO_BATCH_FIELDS, CostModel, StepTime
from meshwright.planner.cost.pipeline import slowest_rank_and_bubble
from meshwright.planner.cost.plan_grid import Array, PlanGrid, broadcast_to_axis
from meshwright.spec.cluster import NodeGroup
from meshwright.spec.grid import largest_shard_weight, rank_strides, relative_shard_size
from meshwright.spec.job import Job
from meshwright.spec.layout import ShardWeight
from meshwright.spec.plan import Plan


def group_cost_models(job: Job, placement: Sequence[int], world: int) -> dict[int, CostModel]:
    """Returns, for each group index in `placement`, the cost model of a cluster with `world` devices of this group."""
    found: dict[int, CostModel] = {}
    for at in sorted(set(placement)):
        found[at] = CostModel(
            job.but(cluster=job.cluster.but(groups=(homogeneous_group(job, at, world),))),
            like=next(iter(found.values()), None),
        )
    return found


class ReplicaPlacement(NamedTuple):
    """The placement and the work of one replica.

    `placement` is the group index of each pipeline rank. The replica runs `micro_batches` micro-batches of `size`
    sequences. `weight` is the size of its largest shard divided by the size of equal shards, and `heft` the position
    and size of this shard among uneven shards.
    """

    placement: tuple[int, ...]
    micro_batches: int
    size: int
    weight: float = 1.0
    heft: ShardWeight | None = None


def replica_placements(job: Job, plan: Plan) -> list[ReplicaPlacement]:
    """Returns the distinct replicas of a plan. Without a placement, the ranks are assigned to the devices in the order
    of the groups. If the tensor and context ranks of a stage are then on several groups, the slowest of these groups
    counts."""
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
    """Returns the group with index `group`, with as many nodes as `world` devices need."""
    like = job.cluster.groups[group]
    return like.but(nodes=max(ceil(world / like.devices), 1))


def rank_times(on: Mapping[int, CostModel], box: PlanGrid) -> dict[int, StepTime]:
    """Returns, for each group, the times of every pipeline rank as if all ranks were on this group. `on` has the cost
    model of each group. The sizes of flat buffers do not depend on the group."""
    first = next(iter(on.values()))
    ranks = first.ranks(box, each=True)
    states = first.states(box, ranks)
    return {group: pricer.seconds(box, ranks, states) for group, pricer in on.items()}


def pipeline_compute_bounds(
    on: Mapping[int, CostModel], placements: Sequence[tuple[tuple[int, ...], Sequence[int]]], box: PlanGrid
) -> list[Array]:
    """Returns lower bounds of the step times of the plans of `box`, over the axes `obsczf` of GRID_AXES, for each
    placement in `placements`. The second item of a placement is the indices of its schedules in `box`. A bound is the
    compute and the communication inside the stages, without data ranks, messages and update. Axis z has length 1."""
    ranks = next(iter(on.values())).ranks(box, each=True)
    each = {}
    for group, pricer in on.items():
        one = pricer.passes(box, ranks)
        each[group] = (one.compute + one.recompute + one.tensor) + one.context + one.expert
    found = []
    for placement, orders in placements:
        own = select_by_group({group: part[:, orders] for group, part in each.items()}, placement)
        longest, bubble = slowest_rank_and_bubble(own, np.ones((box.pp, 1, 1, 1, 1, 1, 1)), np.array(1.0))
        found.append((broadcast_to_axis(box.counts, "b") * longest + bubble)[0])
    return found


def select_by_group(parts: Mapping[int, Array], placement: Sequence[int]) -> Array:
    """Returns the values of each pipeline rank for its group, over GRID_AXES. `parts` has one array per group. The
    first axis of an array is the pipeline ranks, or has length 1 if its values apply to all ranks."""
    return np.concatenate(
        [part[rank : rank + 1] if len(part := parts[group]) > 1 else part for rank, group in enumerate(placement)]
    )


def pipeline_step_time(
    on: Mapping[int, CostModel], placement: Sequence[int], box: PlanGrid, times: Mapping[int, StepTime] | None = None
) -> StepTime:
    """Returns the parts of the step time of a plan with `placement`. The bubble is that of a 1f1b schedule. `on` has
    the cost model of each group. `times` is the result of `rank_times`, if it is already computed."""
    found = times or rank_times(on, box)
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
    step = broadcast_to_axis(box.counts, "b") * longest + bubble + sum(slowest[:-1]) + slowest[-1].sum(axis=0)
    return StepTime(*parts, bubble, *slowest, each, step)  # type: ignore[call-arg]
