"""Computes the `Estimate` of one plan: step time, and memory of every pipeline rank. The search, the simulation, the
commands and re-planning use the function `estimate`.

The seconds by kind (compute, data, pipeline, ...) are those of the slowest pipeline rank, so their sum is the step
time.

The time of torch.compile is not part of a normal step. The compile time is added to the first step after each start of
the ranks. Two blocks are of one kind if their parameters have equal shapes and equal tensor-parallel splits. Blocks of
one kind share their compiled code, so each rank compiles each kind once:

    extra seconds of the first step = maximum number of kinds of blocks on one rank x compile seconds of one kind

Plans are ranked by the step time plus the compile time divided by the number of steps. compute.py has the seconds of
compiled blocks.

The module also computes the seconds of a proof run (train/proof/proof_run.py). A proof run computes a few sequences of
a batch under the plan, and also as one device would compute them (the reference).

- Reference: two forwards and a backward of these sequences, which cost as much as 4 forwards, at the rate of one rank.
  Below float32 the reference runs in two precisions.
- Traffic: all-reduces over all ranks, of the full weights for each of the two forwards, and of the full gradients once.
  Each all-reduce also writes and reads its buffers.
- Comparison: norms of both gradients and of the difference between them. Below float32, also sketches of the reference
  gradients in two precisions.
- Plan: the estimated step for these sequences and their length, plus one forward for the preflight. All-gathers of ZeRO
  3 and reductions take as long as in a training step, because they do not depend on the number of tokens.
- Batches: the proof run compares two batches, one with sequences of full length and one with sequences of half the
  length. If half the length is too short, both batches have the full length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from meshwright.core.messages import Message
from meshwright.core.units import show_bytes, show_seconds
from meshwright.planner.cost import constants, heterogeneous
from meshwright.planner.cost.communicators import driver_bytes
from meshwright.planner.cost.compute import sustained_flops
from meshwright.planner.cost.cost_context import CostContext, build_cost_context
from meshwright.planner.cost.cost_model import PER_MICRO_BATCH_FIELDS, CostModel, StepTime
from meshwright.planner.cost.links import collective_rates
from meshwright.planner.cost.memory import MemoryFootprint, memory_limit, physical_limit, reserved_bytes
from meshwright.planner.cost.plan_grid import Array, PlanGrid, are_blocks_compiled, broadcast_to_axis, grid_of_plan
from meshwright.planner.cost.step_terms import STEP_TERMS
from meshwright.planner.cost.uncertainty import is_on_host, memory_interval, step_interval
from meshwright.spec.constraints import check_batch_size, half_sequence_length, validate_plan
from meshwright.spec.enums import Offload
from meshwright.spec.estimate import FIT_STATUS_ORDER, Estimate, FitStatus, MemoryBreakdown, TimeBreakdown
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan
from meshwright.spec.record import ProofCost, is_proof_cheap


def compile_seconds(setting: CostContext, box: PlanGrid, layers: Array) -> Array:
    """Returns the seconds of torch.compile in the first step, over GRID_AXES. `layers` is the number of layers (r, o,
    layer run)."""
    compiled = are_blocks_compiled(box)
    if not compiled.any():
        return broadcast_to_axis(0.0, "")
    shapes = [
        tuple((each.shape, each.split) for each in entry.layer.parameters) if entry.is_block else None
        for entry in setting.entries
    ]
    kinds = np.array(
        [[shape == kind for kind in dict.fromkeys(shapes) if kind is not None] for shape in shapes], dtype=float
    )
    present = ((layers @ kinds) > 0).sum(axis=2).max(axis=0)
    each = constants.CPU_COMPILE_SECONDS if setting.on_host else constants.COMPILE_SECONDS
    return broadcast_to_axis(present[:, None] * compiled * each, "ob")


def estimate(job: Job, plan: Plan) -> Estimate:
    """Returns the estimate of one plan for `job`.

    Raises:
        InputError: the plan cannot run; the message names the rule that it breaks.
    """
    validate_plan(job, plan)
    if plan.placement or plan.shares or plan.micro_batch_sizes or plan.shard_weights:
        return estimate_heterogeneous(job, plan)
    pricer = CostModel(job)
    return estimate_grid(pricer, grid_of_plan(plan, job.workload.batch, job.model.blocks))


def estimate_grid(pricer: CostModel, box: PlanGrid) -> Estimate:
    """Returns the estimate of the only plan in `box`. All replicas of the plan are identical."""
    assert box.size == 1
    layers = pricer.ranks(box, each=True)
    states = pricer.states(box, layers)
    priced = pricer.seconds(box, layers, states)
    ranks = _split_by_rank(pricer, box, pricer.memory(box, layers, states))
    busiest = max((rank.memory for rank in ranks), key=lambda memory: memory.total)
    seconds = _slowest_rank_time(box, priced)
    job = pricer.setting.job
    tokens = job.workload.tokens
    plan, crowded = box.plan((0,) * len(box.shape)), _largest_host_deficit(ranks)
    verdict = FitStatus.no if crowded else min((_fit_status(plan, rank) for rank in ranks), key=FIT_STATUS_ORDER.index)
    first = float(compile_seconds(pricer.setting, box, layers.layers).max())
    return Estimate(
        memory=busiest,
        per_stage=tuple(rank.memory for rank in ranks),
        time=seconds,
        tokens_per_second=tokens / seconds.step,
        mfu=model_flops(job) / (seconds.step * peak_flops(job)),
        fits=busiest.reserved <= memory_limit(pricer.setting) and not crowded,
        verdict=verdict,
        limit=memory_limit(pricer.setting),
        step_interval=step_interval(pricer.setting, plan, seconds.step),
        memory_interval=memory_interval(pricer.setting, plan, busiest.total),
        offloaded=_offloaded_total(ranks),
        in_files=max(rank.files for rank in ranks),
        crowded=crowded.over if crowded else 0.0,
        first=first,
        notes=(
            *pricer.setting.notes,
            *_compile_notes(first, seconds.step, job.workload.steps),
            *_host_deficit_notes(crowded),
        ),
    )


class RankMemory(NamedTuple):
    """The memory of pipeline rank `at`: on the device by kind, and the bytes that the rank offloads to its host and to
    files."""

    pricer: CostModel
    box: PlanGrid
    at: int
    memory: MemoryBreakdown
    host: float
    files: float

    @property
    def limit(self) -> float:
        """Returns the bytes that the rank may use on its device."""
        return memory_limit(self.pricer.setting)

    @property
    def left(self) -> float:
        """Returns the free bytes on the device."""
        return self.limit - self.memory.reserved

    @property
    def over(self) -> float:
        """Returns the bytes by which the offloaded data of the rank exceeds the host memory of one device, or 0 if the
        data fits."""
        return max(self.host - self.pricer.setting.host_memory, 0.0)


def _fit_status(plan: Plan, rank: RankMemory) -> FitStatus:
    """Returns the fit status of one rank in device memory. A user's budget is a limit of the expected memory."""
    setting, allocated = rank.pricer.setting, rank.memory.total
    most = physical_limit(setting)
    if float(reserved_bytes(setting, np.array(allocated), rank.memory.driver)[1]) <= most and rank.left >= 0:
        return FitStatus.fits
    least = memory_interval(setting, plan, allocated).low + rank.memory.driver
    return FitStatus.no if least > most or (rank.left < 0 and rank.limit < most) else FitStatus.tight


def _offloaded_total(ranks: Sequence[RankMemory]) -> float:
    return max(rank.host for rank in ranks) + max(rank.files for rank in ranks)


def _largest_host_deficit(ranks: Sequence[RankMemory]) -> RankMemory | None:
    """Returns the rank whose offloaded data exceeds the host memory by the most bytes, or None if the data of all ranks
    fits."""
    worst = max(ranks, key=lambda rank: rank.over)
    return worst if worst.over else None


def _host_deficit_notes(rank: RankMemory | None) -> tuple[str, ...]:
    """Returns a note about the missing host memory, or no note if `rank` is None. The note names the largest offload
    fractions of optimizer states and weights that fit; one factor scales both fractions."""
    if rank is None:
        return ()
    has, box = rank.pricer.setting.host_memory, rank.box
    said = Message(
        "each rank offloads {host} to its host, but the host has only {has} for each device",
        host=show_bytes(rank.host),
        has=show_bytes(has),
    )
    (offload,) = box.offload
    there = {Offload.optimizer: box.offload_share, Offload.parameters: box.weights_share}
    least = _rank_memories(rank.pricer, replace(box, offload_share=0.0, weights_share=0.0))[rank.at].host
    part = 1.0 - rank.over / (rank.host - least) if rank.host > least else 0.0
    rooms = {what: int(100 * share * part) for what, share in there.items() if what in offload}
    less = ".".join(f"off-{what}{room}" for what, room in rooms.items())
    if rooms and min(rooms.values()) >= 1:
        said = Message("{deficit}: the largest offload that fits is {less} in the plan name", deficit=said, less=less)
    return (said,)


def _compile_notes(first: float, step: float, steps: int) -> tuple[str, ...]:
    if not first:
        return ()
    share = f"{first / (first + steps * step):.1%}"
    return (
        Message(
            "compiled blocks: the first step of each launch takes {first} more, {share} of a run of {steps} steps",
            first=show_seconds(first),
            share=share,
            steps=steps,
        ),
    )


def estimate_heterogeneous(job: Job, plan: Plan, known: Mapping[int, CostModel] | None = None) -> Estimate:
    """Returns the estimate of a plan on heterogeneous groups, or with uneven micro-batches or shards. `memory` and
    `limit` are those of the rank with the least headroom. `known` is the cost models of all groups for `plan.world`
    devices (`group_cost_models`), if they already exist."""
    whole = grid_of_plan(plan, job.workload.batch, job.model.blocks)
    kinds = heterogeneous.replica_placements(job, plan)
    used = sorted({group for kind in kinds for group in kind.placement})
    on = (
        heterogeneous.group_cost_models(job, used, plan.world)
        if known is None
        else {group: known[group] for group in used}
    )
    boxes = [
        replace(whole, micro_batches=(whole.micro_batches[0]._replace(size=kind.size, number=kind.micro_batches),))
        for kind in kinds
    ]
    present = [
        {
            group: _rank_memories(on[group], replace(box, weight=kind.weight, heft=kind.heft))
            for group in set(kind.placement)
        }
        for kind, box in zip(kinds, boxes, strict=True)
    ]
    ranks = [
        said[group][at] for kind, said in zip(kinds, present, strict=True) for at, group in enumerate(kind.placement)
    ]
    peak_ranks = [min(ranks[at :: plan.pp], key=lambda rank: rank.left) for at in range(plan.pp)]
    least, crowded = min(peak_ranks, key=lambda rank: rank.left), _largest_host_deficit(ranks)
    verdict = FitStatus.no if crowded else min((_fit_status(plan, rank) for rank in ranks), key=FIT_STATUS_ORDER.index)
    parts = [heterogeneous.pipeline_step_time(on, kind.placement, box) for kind, box in zip(kinds, boxes, strict=True)]
    seconds = _merge_replica_times(
        [_slowest_rank_time(box, each) for box, each in zip(boxes, parts, strict=True)], parts
    )
    groups = job.cluster.groups
    devices = {group: plan.world // plan.pp * plan.placement.count(group) for group in used} if plan.placement else None
    rates = sum(
        on[group].setting.rate * (devices[group] if devices else groups[group].nodes * groups[group].devices)
        for group in used
    )
    first = float(compile_seconds(on[used[0]].setting, whole, on[used[0]].ranks(whole).layers).max())
    unused = [group.device.name for at, group in enumerate(groups) if at not in used]
    return Estimate(
        memory=least.memory,
        per_stage=tuple(rank.memory for rank in peak_ranks),
        time=seconds,
        tokens_per_second=job.workload.tokens / seconds.step,
        mfu=model_flops(job) / (seconds.step * rates),
        fits=least.left >= 0 and not crowded,
        verdict=verdict,
        limit=least.limit,
        step_interval=step_interval(least.pricer.setting, plan, seconds.step),
        memory_interval=memory_interval(least.pricer.setting, plan, least.memory.total),
        offloaded=_offloaded_total(ranks),
        in_files=max(rank.files for rank in ranks),
        crowded=crowded.over if crowded else 0.0,
        first=first,
        notes=((Message("the devices of {unused} are not used", unused=" and ".join(unused)),) if unused else ())
        + (*_compile_notes(first, seconds.step, job.workload.steps), *_host_deficit_notes(crowded)),
    )


def _merge_replica_times(times: Sequence[TimeBreakdown], parts: Sequence[StepTime]) -> TimeBreakdown:
    """Returns the times of the replica that ends its last micro-batch last. The times after the last micro-batch
    (reductions, updates) are maxima over the replicas."""
    after = [each.once.item() + each.update.item() + each.on_host.item() for each in parts]
    slowest = max(range(len(times)), key=lambda at: times[at].step - after[at])
    longer = {
        "compute": max(each.update.item() for each in parts) - parts[slowest].update.item(),
        "data": max(each.once.item() for each in parts) - parts[slowest].once.item(),
        "offload": max(each.on_host.item() for each in parts) - parts[slowest].on_host.item(),
    }
    own = times[slowest]
    return own.but(
        **{name: getattr(own, name) + more for name, more in longer.items()}, step=own.step + sum(longer.values())
    )


def _rank_memories(pricer: CostModel, box: PlanGrid) -> tuple[RankMemory, ...]:
    """Returns the memory of every pipeline rank."""
    return _split_by_rank(pricer, box, pricer.memory(box, pricer.ranks(box, each=True)))


def _split_by_rank(pricer: CostModel, box: PlanGrid, parts: MemoryFootprint) -> tuple[RankMemory, ...]:
    totals = parts.total
    driver = driver_bytes(pricer.setting, box)
    taken, _ = reserved_bytes(pricer.setting, totals, driver)
    kinds_of_memory = (
        parts.parameters,
        parts.gradients,
        parts.optimizer,
        parts.activations,
        parts.buffers,
        totals,
        np.broadcast_to(driver, taken.shape),
        taken,
    )
    table = [
        np.broadcast_to(part, totals.shape).reshape(box.pp) for part in (*kinds_of_memory, parts.host, parts.files)
    ]
    found = []
    for at, (*column, host, files) in enumerate(zip(*table, strict=True)):
        memory = MemoryBreakdown(**dict(zip(MemoryBreakdown.model_fields, map(float, column), strict=True)))
        found.append(RankMemory(pricer, box, at, memory, float(host), float(files)))
    return tuple(found)


def _slowest_rank_time(box: PlanGrid, seconds: StepTime) -> TimeBreakdown:
    """Returns the seconds of a step by kind, on the slowest pipeline rank."""
    return TimeBreakdown(**time_by_kind(box, seconds))


def time_by_kind(box: PlanGrid, seconds: StepTime) -> dict[str, Any]:
    """Returns the fields of `TimeBreakdown` of the only plan in `box`: the seconds on the slowest pipeline rank. The
    values are symbols if `seconds` is (symbolic.py)."""
    micro_batches = box.micro_batches[0].number
    slowest = np.expand_dims(np.argmax(seconds.each.reshape(-1)), 0)
    compute, again, tensor, context, expert, data, offload = (
        np.take_along_axis(np.broadcast_to(part, seconds.each.shape).reshape(-1), slowest, 0).item() * micro_batches
        for part in seconds[:PER_MICRO_BATCH_FIELDS]
    )
    time = {
        "compute": compute + seconds.update.item(),
        "recompute": again,
        "bubble": seconds.bubble.item(),
        "tensor": tensor,
        "data": data + seconds.once.item(),
        "pipeline": seconds.messages.item(),
        "context": context,
        "expert": expert,
        "offload": offload + seconds.on_host.item(),
        "step": seconds.step.item(),
    }
    for (name, _), value in zip(STEP_TERMS, seconds.terms, strict=True):
        time[name] = time[name] + value.item()
    return time


def peak_flops(job: Job) -> float:
    """Returns the nominal FLOP/s of all devices at the precision of the blocks' matrix products."""
    return sum(
        group.nodes * group.devices * group.device.peak[job.workload.recipe.rates[-1]] for group in job.cluster.groups
    )


def model_flops(job: Job) -> float:
    """Returns the FLOPs of a step that the model needs under any plan. Recompute is not included. Backward counts as
    two forwards."""
    layers = job.model.layers
    token = sum(layer.repeat * (layer.flops + layer.attention_flops * job.workload.sequence) for layer in layers)
    return (1.0 + constants.BACKWARD_FORWARD_RATIO) * token * job.workload.tokens


def ideal_seconds(job: Job | None, estimated: Estimate | None) -> float:
    """Returns the seconds of a step at an MFU of 1 (`LaunchSpec.ideal_seconds`). CPU ranks have no nominal peak: their
    rate is measured, so the result is 0."""
    if job is None or estimated is None or is_on_host(job.cluster):
        return 0.0
    return estimated.mfu * estimated.time.step


PROOF_REFERENCE_PASSES = 4 / 3
"""The FLOPs of the reference divided by the FLOPs of a training step on the same sequences. The reference has two
forwards and a training step has one; a backward counts as two forwards."""
PROOF_WEIGHT_GATHERS = 2
"""The number of times that the reference gathers all weights."""
ALL_REDUCE_MEMORY_PASSES, HOST_MEMORY_PASSES = 3, 18
"""How many times an all-reduce of the reference also moves its bytes through local memory: zeros are written, local
parts are written, and rank 0 copies the result. On a CPU the bytes are also new memory each time, whose pages the
kernel clears. The number for CPUs was measured with 1.1 B parameters in float32; rank 0 converts to twice as many bytes
for float64."""
COMPARE_BYTES_PER_ELEMENT, SKETCH_BYTES_PER_ELEMENT = 48, 29
"""Bytes per gradient element that the norms and the sketches move through memory. They were measured on a CPU, where
caches store intermediate results."""
PROOF_PLAN_PASSES = 4 / 3
"""The time to compute the sequences of a proof run under the plan, divided by the step time for these sequences. The
preflight adds one forward to the three forwards of a step."""


def proof_price(job: Job, plan: Plan, step: float) -> ProofCost:
    """Returns the cost of the proof run before the first update. `step` is the estimated seconds of a training step.
    The sequence length is halved until the proof run is cheap (`is_proof_cheap`), or until the length cannot be
    halved."""
    length = job.workload.sequence
    seconds = proof_seconds(job, plan, length)
    while not is_proof_cheap(seconds, step) and (half := half_sequence_length(plan, length)):
        length = half
        seconds = proof_seconds(job, plan, length)
    return ProofCost(seconds=seconds, step=step, length=length, rounding=rounding_seconds(job, plan, length))


def proof_seconds(job: Job, plan: Plan, length: int) -> float:
    """Returns the seconds of a proof run whose sequences have `length` tokens. Each of the two batches is computed
    under the plan and by the reference. In float32, the measurement of rounding is not included
    (`rounding_seconds`)."""
    return sum(
        sum(_reference_seconds(job, plan, each, run) for run in _reference_runs(job))
        + PROOF_PLAN_PASSES * estimate(_of_proof(job, plan, each), plan).time.step
        for each in _proof_lengths(plan, length)
    )


def rounding_seconds(job: Job, plan: Plan, length: int) -> float:
    """Returns the additional seconds of a proof run in float32 if its rounding has to be measured: each batch is also
    computed by a reference in float64 and by one more in float32. Returns 0 for other precisions: below float32 the
    measurement is part of every proof run."""
    recipe = job.workload.recipe
    if recipe.size != 4:
        return 0.0
    measurement = (_ReferenceRun("fp64", 4, True, True), _ReferenceRun(recipe.rate, 4, False, True))
    return sum(_reference_seconds(job, plan, each, run) for each in _proof_lengths(plan, length) for run in measurement)


class _ReferenceRun(NamedTuple):
    """A run of the reference of a proof. `rate`: the precision of its matrix products. `size`: the bytes of a weight or
    gradient that is sent to rank 0. `is_compared`: whether its gradients are compared with those of the plan.
    `has_sketches`: whether it computes sketches of its gradients."""

    rate: str
    size: int
    is_compared: bool
    has_sketches: bool


def _reference_runs(job: Job) -> tuple[_ReferenceRun, ...]:
    """Returns the runs of a proof's reference for each batch. The extra runs that measure the rounding errors of
    float32 are not included."""
    recipe = job.workload.recipe
    if recipe.size >= 4:
        return (_ReferenceRun(recipe.rate, recipe.size, True, False),)
    return _ReferenceRun("fp32", 4, True, True), _ReferenceRun(recipe.rate, recipe.size, False, True)


def _proof_lengths(plan: Plan, length: int) -> tuple[int, int]:
    """Returns the sequence lengths of the two batches of a proof run."""
    return length, half_sequence_length(plan, length) or length


def _of_proof(job: Job, plan: Plan, length: int) -> Job:
    """Returns the job whose step computes the sequences of a proof run under the plan: the batch is these sequences, of
    `length` tokens each."""
    return job.but(workload=job.workload.but(batch=min(check_batch_size(plan), job.workload.batch), sequence=length))


def _reference_seconds(job: Job, plan: Plan, length: int, run: _ReferenceRun) -> float:
    shared = build_cost_context(job)
    computed = PROOF_REFERENCE_PASSES * model_flops(_of_proof(job, plan, length)) / _reference_flops(shared, run.rate)
    sent = [float(job.model.parameters * run.size)] * (PROOF_WEIGHT_GATHERS + run.is_compared)
    reduce = sum(float(collective_rates(shared.fabric, plan.world, 1).reduce(size)) for size in sent)
    passes = HOST_MEMORY_PASSES * (2 if run.rate == "fp64" else 1) if shared.on_host else ALL_REDUCE_MEMORY_PASSES
    touched = passes * sum(sent) + job.model.parameters * (
        COMPARE_BYTES_PER_ELEMENT * run.is_compared + SKETCH_BYTES_PER_ELEMENT * run.has_sketches
    )
    # While rank 0 computes the reference, the other ranks only send their parts, so rank 0 has a whole processor.
    return reduce + (computed + touched / shared.device.bandwidth) * shared.device.share


def _reference_flops(shared: CostContext, rate: str) -> float:
    """Returns the FLOP/s of the reference. A CPU computes float64 products at half the rate of float32, because a
    vector holds half as many elements. The same ratio applies to a device without a known rate, as on V100, A100 and
    H100 (NVIDIA's data sheets, products without tensor cores)."""
    known = shared.device.peak
    if rate == "fp64" and "fp32" in known and (shared.on_host or rate not in known):
        return sustained_flops(shared, "fp32") / 2
    return sustained_flops(shared, rate)
