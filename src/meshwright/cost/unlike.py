"""Plans over unlike groups of nodes: each pipeline rank lies on one group, computes at its speed and fits in its memory.

Each group prices the plan as if all devices were its own; of these prices each rank takes that of its group. Then, as for any pipeline,

    step = m x (slowest rank's micro-batch) + bubble + messages + reductions not hidden + update,  the last three of the slowest group.

Tensor, data and context ranks of a stage lie on one group, so that their traffic is on its own links; stages speak over the network.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import ceil
from typing import NamedTuple

import numpy as np

from meshwright.cost.box import Array, Box, lift
from meshwright.cost.pipeline import idle
from meshwright.cost.price import PER_MICRO_BATCH, Pricer, Prices, Seconds
from meshwright.spec.cluster import NodeGroup
from meshwright.spec.job import Job
from meshwright.spec.layout import Heft
from meshwright.spec.plan import Plan


def pricers(job: Job, placement: Sequence[int], world: int) -> dict[int, Pricer]:
    """For each group of `placement` the prices of `world` devices like its own."""
    found: dict[int, Pricer] = {}
    for at in sorted(set(placement)):
        found[at] = Pricer(job.but(cluster=job.cluster.but(groups=(even(job, at, world),))), like=next(iter(found.values()), None))
    return found


class Replica(NamedTuple):
    """The group of each of its pipeline ranks, its micro-batches, the sequences in one, and its shard of the states as so many equal ones, and which
    one."""

    placement: tuple[int, ...]
    micro_batches: int
    size: int
    weight: float = 1.0
    heft: Heft | None = None


def replicas(job: Job, plan: Plan) -> list[Replica]:
    """The unlike replicas of a plan. A rank that several groups hold, with
    its tensor and context ranks, is as slow as the slowest. Devices are counted group by group."""
    shared = [
        (plan.micro_batches(job.workload.batch, replica), plan.size_of(replica), plan.shard_weight(replica), plan.shard_heft(replica))
        for replica in range(plan.dp)
    ]
    if plan.placement:
        return [Replica(plan.placement, *each) for each in sorted(set(shared))]
    groups, strides = job.cluster.groups, plan.strides()
    past = list(accumulate(group.nodes * group.devices for group in groups))
    rates = [group.device.peak[job.workload.recipe.rate] * group.device.efficiency for group in groups]

    def of_rank(replica: int, stage: int) -> int:
        outer, inner = divmod(replica, plan.dp_shard)
        first = outer * strides["dp_replicate"] + inner * strides["dp_shard"] + stage * strides["pp"]
        held = {bisect(past, first + cp * strides["cp"] + tp * strides["tp"]) for cp in range(plan.cp) for tp in range(plan.tp)}
        return min(held, key=lambda group: rates[group])

    found = {
        Replica(
            tuple(of_rank(replica, stage) for stage in range(plan.pp)),
            *shared[replica],
        )
        for replica in range(plan.dp)
    }
    return sorted(found)


def even(job: Job, group: int, world: int) -> NodeGroup:
    """A group of at least `world` devices like those of `group`."""
    like = job.cluster.groups[group]
    return like.but(nodes=max(ceil(world / like.devices), 1))


def prices(on: Mapping[int, Pricer], box: Box) -> dict[int, Prices]:
    """What each group says of every pipeline rank."""
    return {group: pricer.price_ranks(box, pricer.ranks(box, each=True)) for group, pricer in on.items()}


def _times(pricer: Pricer, box: Box) -> Seconds:
    """Of every pipeline rank, without its memory."""
    ranks = pricer.ranks(box, each=True)
    return pricer.seconds(box, ranks, pricer.states(box, ranks))


def chosen(parts: Mapping[int, Array], placement: Sequence[int]) -> Array:
    """Of each rank the part that its group says, over AXES; parts of one row are the same for all ranks."""
    return np.concatenate([part[rank : rank + 1] if len(part := parts[group]) > 1 else part for rank, group in enumerate(placement)])


def seconds(on: Mapping[int, Pricer], placement: Sequence[int], box: Box, said: Mapping[int, Prices] | None = None) -> Seconds:
    """Parts of a step of the pipeline."""
    found = {group: said[group].seconds if said else _times(pricer, box) for group, pricer in on.items()}
    shape = np.broadcast_shapes(*(it.each.shape for it in found.values()))
    rows = {
        group: [np.broadcast_to(part, np.broadcast_shapes(part.shape, shape)) for part in it[:PER_MICRO_BATCH]]
        for group, it in found.items()
    }
    parts = [chosen({group: table[at] for group, table in rows.items()}, placement) for at in range(PER_MICRO_BATCH)]
    each = sum(parts[1:], parts[0])
    longest, bubble = idle(each, np.ones((box.pp, 1, 1, 1, 1, 1, 1)), np.array(1.0))
    slowest = [
        np.maximum.reduce(np.broadcast_arrays(*values))
        for values in zip(*(it[PER_MICRO_BATCH + 1 : -2] for it in found.values()), strict=True)
    ]
    step = lift(box.counts, "b") * longest + bubble + sum(slowest)
    return Seconds(*parts, bubble, *slowest, each, step)  # type: ignore[call-arg]
