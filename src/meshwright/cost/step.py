"""The `Estimate` of one plan: the price of the box that holds only it, with the memory of every pipeline rank. One cost model, whoever asks.

Time items are those of the slowest pipeline rank, so that they add up to the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from meshwright.base.units import show_bytes, show_seconds
from meshwright.cost import constants, unlike
from meshwright.cost.box import Box, box_of
from meshwright.cost.compiler import first_step
from meshwright.cost.memory import Footprint, ample, reserved, usable
from meshwright.cost.price import PER_MICRO_BATCH, Pricer, Seconds
from meshwright.spec.estimate import Estimate, Fits, Memory, Time
from meshwright.spec.job import Job
from meshwright.spec.plan import Offload, Plan
from meshwright.spec.rules import check_plan


def estimate(job: Job, plan: Plan) -> Estimate:
    """The price of one plan. Raises InputError when the plan cannot run, with the rule that it breaks."""
    check_plan(job, plan)
    if plan.placement or plan.shares or plan.micro_batch_sizes or plan.shard_weights:
        return placed(job, plan)
    pricer = Pricer(job)
    return estimate_of(pricer, box_of(plan, job.workload.batch, job.model.blocks))


def estimate_of(pricer: Pricer, box: Box) -> Estimate:
    """The only plan of `box`."""
    assert box.size == 1
    layers = pricer.ranks(box, each=True)
    states = pricer.states(box, layers)
    priced = pricer.seconds(box, layers, states)
    ranks = _ranks_of(pricer, box, pricer.memory(box, layers, states))
    busiest = max((rank.memory for rank in ranks), key=lambda memory: memory.total)
    seconds = _time(box, priced)
    job = pricer.setting.job
    tokens = job.workload.tokens
    _, safe = reserved(pricer.setting, np.array(busiest.total))
    limit, crowded = usable(pricer.setting), _most_crowded(ranks)
    verdict = Fits.no if busiest.reserved > limit or crowded else Fits.fits if safe <= ample(pricer.setting) else Fits.tight
    first = float(first_step(pricer.setting, box, layers.layers).max())
    return Estimate(
        memory=busiest,
        per_stage=tuple(rank.memory for rank in ranks),
        time=seconds,
        tokens_per_second=tokens / seconds.step,
        mfu=model_flops(job) / (seconds.step * sold(job)),
        fits=verdict != Fits.no,
        verdict=verdict,
        limit=limit,
        offloaded=_offloaded(ranks),
        in_files=max(rank.files for rank in ranks),
        crowded=crowded.over if crowded else 0.0,
        first=first,
        notes=(*pricer.setting.notes, *_of_compiler(first, seconds.step, job.workload.steps), *_of_hosts(crowded)),
    )


class Rank(NamedTuple):
    """What one pipeline rank of a box holds: on its device, on its host, in files."""

    pricer: Pricer
    box: Box
    at: int
    memory: Memory
    host: float
    files: float

    @property
    def limit(self) -> float:
        """Bytes that it can take of its device."""
        return usable(self.pricer.setting)

    @property
    def left(self) -> float:
        return self.limit - self.memory.reserved

    @property
    def over(self) -> float:
        """Bytes that its host has no room for."""
        return max(self.host - self.pricer.setting.host_memory, 0.0)


def _offloaded(ranks: Sequence[Rank]) -> float:
    return max(rank.host for rank in ranks) + max(rank.files for rank in ranks)


def _most_crowded(ranks: Sequence[Rank]) -> Rank | None:
    """The rank whose host lacks most, None where all have room."""
    worst = max(ranks, key=lambda rank: rank.over)
    return worst if worst.over else None


def _of_hosts(rank: Rank | None) -> tuple[str, ...]:
    """What a host has no room for, and the largest shares of the optimizer's states and of the weights, cut down alike, that it has room for."""
    if rank is None:
        return ()
    has, box = rank.pricer.setting.host_memory, rank.box
    said = f"{show_bytes(rank.host)} of each rank are to wait on its host, which has room for {show_bytes(has)} of each device"
    (offload,) = box.offload
    there = {Offload.optimizer: box.offload_share, Offload.parameters: box.weights_share}
    least = _priced_ranks(rank.pricer, replace(box, offload_share=0.0, weights_share=0.0))[rank.at].host
    part = 1.0 - rank.over / (rank.host - least) if rank.host > least else 0.0
    rooms = {what: int(100 * share * part) for what, share in there.items() if what in offload}
    less = ".".join(f"off-{what}{room}" for what, room in rooms.items())
    return (f"{said}: {less} would be the share that has room" if rooms and min(rooms.values()) >= 1 else said,)


def _of_compiler(first: float, step: float, steps: int) -> tuple[str, ...]:
    if not first:
        return ()
    share = f"{first / (first + steps * step):.1%}"
    return (f"compiled blocks: the first step of each launch takes {show_seconds(first)} more, {share} of a run of {steps} steps",)


def placed(job: Job, plan: Plan) -> Estimate:
    """A plan whose ranks lie on unlike groups or whose replicas have unlike shares or shards; `memory` and `limit` are of the rank that has least left."""
    whole = box_of(plan, job.workload.batch, job.model.blocks)
    kinds = unlike.replicas(job, plan)
    used = sorted({group for kind in kinds for group in kind.placement})
    on = unlike.pricers(job, used, plan.world)
    boxes = [replace(whole, micro_batches=(whole.micro_batches[0]._replace(size=kind.size, number=kind.micro_batches),)) for kind in kinds]
    held = [
        {group: _priced_ranks(on[group], replace(box, weight=kind.weight, heft=kind.heft)) for group in set(kind.placement)}
        for kind, box in zip(kinds, boxes, strict=True)
    ]
    ranks = [said[group][at] for kind, said in zip(kinds, held, strict=True) for at, group in enumerate(kind.placement)]
    fullest = [min(ranks[at :: plan.pp], key=lambda rank: rank.left) for at in range(plan.pp)]
    least, crowded = min(fullest, key=lambda rank: rank.left), _most_crowded(ranks)
    roomy = all(float(reserved(rank.pricer.setting, np.array(rank.memory.total))[1]) <= ample(rank.pricer.setting) for rank in ranks)
    verdict = Fits.no if least.left < 0 or crowded else Fits.fits if roomy else Fits.tight
    parts = [unlike.seconds(on, kind.placement, box) for kind, box in zip(kinds, boxes, strict=True)]
    seconds = _together([_time(box, each) for box, each in zip(boxes, parts, strict=True)], parts)
    groups = job.cluster.groups
    devices = {group: plan.world // plan.pp * plan.placement.count(group) for group in used} if plan.placement else None
    rates = sum(on[group].setting.rate * (devices[group] if devices else groups[group].nodes * groups[group].devices) for group in used)
    first = float(first_step(on[used[0]].setting, whole, on[used[0]].ranks(whole).layers).max())
    unused = [group.device.name for at, group in enumerate(groups) if at not in used]
    return Estimate(
        memory=least.memory,
        per_stage=tuple(rank.memory for rank in fullest),
        time=seconds,
        tokens_per_second=job.workload.tokens / seconds.step,
        mfu=model_flops(job) / (seconds.step * rates),
        fits=verdict != Fits.no,
        verdict=verdict,
        limit=least.limit,
        offloaded=_offloaded(ranks),
        in_files=max(rank.files for rank in ranks),
        crowded=crowded.over if crowded else 0.0,
        first=first,
        notes=((f"the devices of {' and '.join(unused)} are left out",) if unused else ())
        + (*_of_compiler(first, seconds.step, job.workload.steps), *_of_hosts(crowded)),
    )


def _together(times: Sequence[Time], parts: Sequence[Seconds]) -> Time:
    """The items of the replica that ends its micro-batches last; what all do together afterwards takes as long as the slowest."""
    after = [each.once.item() + each.update.item() + each.on_host.item() for each in parts]
    late = max(range(len(times)), key=lambda at: times[at].step - after[at])
    longer = {
        "compute": max(each.update.item() for each in parts) - parts[late].update.item(),
        "data": max(each.once.item() for each in parts) - parts[late].once.item(),
        "offload": max(each.on_host.item() for each in parts) - parts[late].on_host.item(),
    }
    own = times[late]
    return own.but(**{name: getattr(own, name) + more for name, more in longer.items()}, step=own.step + sum(longer.values()))


def _priced_ranks(pricer: Pricer, box: Box) -> tuple[Rank, ...]:
    """Every pipeline rank, priced as if it were its own kind."""
    return _ranks_of(pricer, box, pricer.memory(box, pricer.ranks(box, each=True)))


def _ranks_of(pricer: Pricer, box: Box, parts: Footprint) -> tuple[Rank, ...]:
    totals = parts.total
    taken, _ = reserved(pricer.setting, totals)
    kinds_of_memory = (
        parts.parameters,
        parts.gradients,
        parts.optimizer,
        parts.activations,
        parts.buffers,
        totals,
        taken,
    )
    table = [np.broadcast_to(part, totals.shape).reshape(box.pp) for part in (*kinds_of_memory, parts.host, parts.files)]
    found = []
    for at, (*column, host, files) in enumerate(zip(*table, strict=True)):
        memory = Memory(**dict(zip(Memory.model_fields, map(float, column), strict=True)))
        found.append(Rank(pricer, box, at, memory, float(host), float(files)))
    return tuple(found)


def _time(box: Box, seconds: Seconds) -> Time:
    """The items of the slowest rank."""
    micro_batches = box.micro_batches[0].number
    parts = [np.broadcast_to(part, seconds.each.shape).reshape(-1) for part in seconds[:PER_MICRO_BATCH]]
    slowest = int(seconds.each.reshape(-1).argmax())
    compute, again, tensor, context, expert, data, offload = (float(part[slowest]) * micro_batches for part in parts)
    return Time(
        compute=compute + seconds.update.item(),
        recompute=again,
        bubble=seconds.bubble.item(),
        tensor=tensor,
        data=data + seconds.once.item(),
        pipeline=seconds.messages.item(),
        context=context,
        expert=expert,
        offload=offload + seconds.on_host.item(),
        step=seconds.step.item(),
    )


def sold(job: Job) -> float:
    """FLOP/s of all devices at the job's precision, as sold."""
    return sum(group.nodes * group.devices * group.device.peak[job.workload.recipe.rates[-1]] for group in job.cluster.groups)


def model_flops(job: Job) -> float:
    """FLOPs of a step that the model needs, whatever the plan: forward once, backward twice."""
    layers = job.model.layers
    token = sum(layer.repeat * (layer.flops + layer.attention_flops * job.workload.sequence) for layer in layers)
    return (1.0 + constants.BACKWARD) * token * job.workload.tokens
