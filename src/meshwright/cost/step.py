"""The `Estimate` of one plan: the price of the box that holds only it, with the memory of every pipeline rank. One cost model, whoever asks.

Time items are those of the slowest pipeline rank, so that they add up to the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from meshwright.base.units import show_bytes, show_seconds
from meshwright.cost import constants, unlike
from meshwright.cost.box import Box, box_of
from meshwright.cost.compiler import first_step
from meshwright.cost.memory import Footprint, ample, reserved, usable
from meshwright.cost.price import PER_MICRO_BATCH, Pricer, Seconds
from meshwright.spec.estimate import Estimate, Fits, Memory, Time
from meshwright.spec.job import Job
from meshwright.spec.plan import Offload, Plan, goes_in_part
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
    ranks = pricer.ranks(box, each=True)
    states = pricer.states(box, ranks)
    footprint, priced = pricer.memory(box, ranks, states), pricer.seconds(box, ranks, states)
    per_stage = _memory_of(pricer, box, footprint)
    busiest = max(per_stage, key=lambda memory: memory.total)
    seconds = _time(box, priced)
    job = pricer.setting.job
    tokens = job.workload.tokens
    _, safe = reserved(pricer.setting, np.array(busiest.total))
    limit = usable(pricer.setting)
    verdict = Fits.no if busiest.reserved > limit else Fits.fits if safe <= ample(pricer.setting) else Fits.tight
    on_host, in_files = (float(part.max()) for part in (footprint.host, footprint.files))
    notes, crowded = pricer.setting.notes, on_host > pricer.setting.host_memory
    if crowded:
        notes = (*notes, _crowded(pricer, box, on_host))
        verdict = Fits.no
    first = float(first_step(pricer.setting, box, ranks.layers).max())
    return Estimate(
        memory=busiest,
        per_stage=per_stage,
        time=seconds,
        tokens_per_second=tokens / seconds.step,
        mfu=model_flops(job) / (seconds.step * sold(job)),
        fits=verdict != Fits.no,
        verdict=verdict,
        limit=limit,
        offloaded=on_host + in_files,
        first=first,
        notes=(*notes, *_of_compiler(first, seconds.step, job.workload.steps)),
    )


def _crowded(pricer: Pricer, box: Box, on_host: float) -> str:
    """What a host has no room for, and the largest share of the optimizer's states, or of the weights, that it has room for."""
    has, share = pricer.setting.host_memory, box.offload_share
    said = f"{show_bytes(on_host)} of each rank are to wait on its host, which has {show_bytes(has)} for each device"
    half = replace(box, offload_share=share / 2)
    least = pricer.memory(half, pricer.ranks(half, each=True)).host.max()
    room = int(100 * (share - (on_host - has) * share / 2 / (on_host - least))) if on_host > least else 0
    (offload,) = box.offload
    what = next((str(what) for what in offload if what in (Offload.optimizer, Offload.parameters)), "")
    return f"{said}: off-{what}{room} would be the share that has room" if room >= 1 and goes_in_part(offload) else said


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
        {group: _per_stage(on[group], replace(box, weight=kind.weight)) for group in set(kind.placement)}
        for kind, box in zip(kinds, boxes, strict=True)
    ]
    ranks = [
        (usable(on[group].setting), said[group][rank], on[group].setting)
        for kind, said in zip(kinds, held, strict=True)
        for rank, group in enumerate(kind.placement)
    ]
    left = [limit - memory.reserved for limit, memory, _ in ranks]
    fullest = [min(range(rank, len(ranks), plan.pp), key=lambda at: left[at]) for rank in range(plan.pp)]
    least = min(fullest, key=lambda at: left[at])
    roomy = all(float(reserved(setting, np.array(memory.total))[1]) <= ample(setting) for _, memory, setting in ranks)
    parts = [unlike.seconds(on, kind.placement, box) for kind, box in zip(kinds, boxes, strict=True)]
    seconds = _together([_time(box, each) for box, each in zip(boxes, parts, strict=True)], parts)
    groups = job.cluster.groups
    devices = {group: plan.world // plan.pp * plan.placement.count(group) for group in used} if plan.placement else None
    rates = sum(on[group].setting.rate * (devices[group] if devices else groups[group].nodes * groups[group].devices) for group in used)
    first = float(first_step(on[used[0]].setting, whole, on[used[0]].ranks(whole).layers).max())
    unused = [group.device.name for at, group in enumerate(groups) if at not in used]
    return Estimate(
        memory=ranks[least][1],
        per_stage=tuple(ranks[at][1] for at in fullest),
        time=seconds,
        tokens_per_second=job.workload.tokens / seconds.step,
        mfu=model_flops(job) / (seconds.step * rates),
        fits=left[least] >= 0,
        verdict=Fits.no if left[least] < 0 else Fits.fits if roomy else Fits.tight,
        limit=ranks[least][0],
        first=first,
        notes=((f"the devices of {' and '.join(unused)} are left out",) if unused else ())
        + _of_compiler(first, seconds.step, job.workload.steps),
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


def _per_stage(pricer: Pricer, box: Box) -> tuple[Memory, ...]:
    """Memory of every pipeline rank: each priced as if it were its own kind."""
    return _memory_of(pricer, box, pricer.memory(box, pricer.ranks(box, each=True)))


def _memory_of(pricer: Pricer, box: Box, parts: Footprint) -> tuple[Memory, ...]:
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
    table = [np.broadcast_to(part, totals.shape).reshape(box.pp) for part in kinds_of_memory]
    return tuple(Memory(**dict(zip(Memory.model_fields, map(float, column), strict=True))) for column in zip(*table, strict=True))


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
