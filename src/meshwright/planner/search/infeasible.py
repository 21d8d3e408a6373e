"""Diagnoses why no plan of a job fits. The error for the user names the plan that is nearest to fitting, the largest
kind of memory of this plan, and small changes of the job with which a plan fits.

A change is the removal of a pin, gradients in bfloat16, a chunked loss, a local disk, more nodes, or a shorter
sequence. Each change is tested by a search of the changed job. More recompute, a higher ZeRO stage and a smaller
micro-batch are not tested, because the first search already includes these choices unless they are pinned.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice
from math import ceil
from typing import Any, NamedTuple

from meshwright.catalog import read as catalog
from meshwright.core.errors import InputError, NothingFits
from meshwright.core.messages import Message, mark_msgid
from meshwright.core.quantities import parse_quantity
from meshwright.planner.cost.constants import USABLE_MEMORY_FRACTION
from meshwright.planner.cost.cost_context import build_cost_context
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.memory import physical_limit
from meshwright.planner.cost.step import estimate, estimate_grid
from meshwright.planner.search import heterogeneous
from meshwright.planner.search.best_plans import PlanCandidate, risk_adjusted_seconds
from meshwright.planner.search.branch_and_bound import PlanSearch, find_best_plan, search_best_plan
from meshwright.planner.search.explain import format_pin, illegal_reasons
from meshwright.spec.cluster import MAX_CLUSTER_NODES
from meshwright.spec.estimate import FitStatus, largest_memory_kind
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

MAX_NODE_COUNTS_TRIED = 6
"""The maximum number of node counts that are tested. The first tested cluster is the smallest multiple of the job's
cluster whose device memory could store the states."""
SEQUENCE_DIVISORS = (2, 4, 8, 16)
LOSS_CHUNKS_TRIED = 8
"""The number of loss chunks that is tested."""
MAX_MEMORY_INCREASE = 4.0
"""Devices with more than this many times the memory of the job's devices are suggested only if no other change makes a
plan fit."""
DISK_BYTES_PER_SECOND = 2e9
"""The bandwidth of a common NVMe disk in bytes/s. A disk with this bandwidth is tested if the cluster has no disk."""
MIB, GIB = 2.0**20, 2.0**30
LOWEST_MEMORY_CHOICES = {"micro_batch": 1, "recompute": "full", "schedule": "1f1b"}
"""The choices with which a plan has the lowest memory: the fewest sequences, saved activations and micro-batches in
flight."""

CHEAPEST_PINS = ("zero", "micro_batch", "recompute", "schedule")
"""Pins that can lower memory with the least time, cheapest first. A plan name pins every choice, offload too, which
costs far more time."""


class NoPlanFits(NothingFits):
    """Raised if no legal plan fits. The message names the plan nearest to fitting, and changes with which a plan would
    fit."""


def infeasibility_error(found: PlanSearch) -> NothingFits | InputError:
    """Returns the error to raise after a search without a result: InputError if no plan is legal, otherwise
    NothingFits."""
    candidate = lowest_memory_candidate(found)
    if candidate is None and found.fastest is not None:  # legal plans exist, but offload needs more host memory
        notes = estimate_grid(found.pricer, found.fastest.grid).notes
        return NothingFits(
            Message(
                "no plan fits: the nearest ({plan}) needs more host memory for offload: {notes}",
                plan=found.fastest.plan.name,
                notes=notes[-1],
            )
        )
    if candidate is None:
        return InputError(
            Message(
                "no plan is legal: {illegal_reasons}",
                illegal_reasons="; ".join(illegal_reasons(found)) or Message("the pins exclude every plan"),
            )
        )
    job = found.pricer.setting.job
    priced = estimate_grid(found.pricer, candidate.grid)
    stage = max(range(len(priced.per_stage)), key=lambda at: priced.per_stage[at].total)
    kind, size = largest_memory_kind(priced.memory)
    return NoPlanFits(
        Message(
            "no plan fits: the nearest ({plan}) needs {reserved:bytes} on rank {rank}, which may use {memory:bytes}; "
            "{kind} take {size:bytes}; {ways}",
            plan=candidate.plan.name,
            reserved=candidate.reserved,
            rank=stage * (job.cluster.devices // candidate.plan.pp),
            memory=job.cluster.budget or found.pricer.setting.device.memory,
            kind=kind,
            size=size,
            ways=tuple(suggest_changes(job, candidate, found.space.runnable)),
        )
    )


def lowest_memory_candidate(found: PlanSearch) -> PlanCandidate | None:
    """Returns the legal plan with the lowest device memory among the plans whose offloaded data fits in host memory, or
    None if there is no such plan."""
    return found.lowest_memory


def suggest_changes(job: Job, candidate: PlanCandidate, runnable: bool = False) -> Iterator[Message]:
    """Yields a message for each kind of change: the smallest change with which a plan fits, and this plan. The last
    message suggests a larger memory budget or devices with more memory. `candidate` is the plan nearest to fitting."""
    found = 0
    disks_and_nodes = (with_disks, with_more_nodes)
    for kind in (without_pins, with_bfloat16_sums, with_chunked_loss, *disks_and_nodes, with_shorter_sequence):
        for msgid, values, changed in kind(job):
            best = fastest_plan(changed, runnable)
            if best is not None:
                yield Message(msgid, **values, plan=best.plan.name, seconds=best.seconds)
                found += 1
                break
    if candidate.reserved <= physical_limit(build_cost_context(job)):
        yield Message(
            mark_msgid("a budget of {memory:bytes} would fit ({plan}, {seconds:step} a step)"),
            memory=ceil(candidate.reserved / MIB) * MIB,
            plan=candidate.plan.name,
            seconds=candidate.seconds,
        )
        return
    memory = ceil(candidate.reserved / USABLE_MEMORY_FRACTION / GIB) * GIB
    if not found or memory <= MAX_MEMORY_INCREASE * job.cluster.memory:
        device = device_with_memory(memory, job.cluster.groups[0].link.name)
        yield Message(
            "devices of {memory:bytes} would fit, such as {device} ({plan})"
            if device
            else "devices of {memory:bytes} would fit ({plan})",
            memory=memory,
            device=device,
            plan=candidate.plan.name,
        )


def device_with_memory(memory: float, link: str) -> str:
    """Returns the catalog name of the smallest device with at least `memory` bytes, or '' if there is none. Only
    devices whose link name equals `link` up to the version number (such as NVLink3 and NVLink4) are considered."""
    make = link.rstrip("0123456789")
    rows = {
        name: row
        for name, row in catalog.devices().items()
        if row["link"]["name"].rstrip("0123456789") == make and name != "cpu"
    }
    sizes = {name: parse_quantity(row["memory"], "B") for name, row in rows.items()}
    return min((name for name, size in sizes.items() if size >= memory), key=lambda name: sizes[name], default="")


class FastestPlan(NamedTuple):
    """A plan, the seconds of a step under this plan, and whether its memory is tight."""

    plan: Plan
    seconds: float
    tight: bool


def fastest_plan(
    job: Job, runnable: bool = False, known: Plan | None = None, pricer: CostModel | None = None
) -> FastestPlan | None:
    """Returns the best plan of `job` that fits, or None. The search includes plans over heterogeneous groups.
    `runnable`: whether to search only plans that this version can run. If the plan `known` fits, plans that are slower
    than `known` are not searched. `pricer` is a cost model of the job, which may have other pins.
    """
    try:
        even = _fastest_homogeneous(job, runnable, known, pricer)
        slowest = even.score if even is not None else float("inf")
        placed = heterogeneous.heterogeneous_plans(job, 1, runnable, slowest)
    except InputError:
        return None
    if placed and (even is None or placed[0][0] < even.score):
        priced = estimate(job, plan := placed[0][1])
        return FastestPlan(plan, priced.time.step, priced.verdict == FitStatus.tight)
    return FastestPlan(even.plan, even.seconds, even.tight) if even is not None else None


def _fastest_homogeneous(
    job: Job, runnable: bool, known: Plan | None, pricer: CostModel | None
) -> PlanCandidate | None:
    """Returns the best plan with identical ranks that fits, or None. If no plan fits under the choices with the lowest
    memory, other plans are not searched."""
    pricer = pricer or CostModel(job)
    try:
        priced = estimate(job, known) if known is not None else None
    except InputError:  # the micro-batch counts or the action table of `known` do not match the batch size of this job
        priced = None
    if known is not None and priced is not None and priced.fits:
        found = find_best_plan(job, runnable, risk_adjusted_seconds(job, known, priced), pricer)
        # A plan that offloads a fraction may be faster than all plans of the search, which offload all or nothing.
        if found is not None or min(known.offload_share, known.weights_share) == 100:
            return found
    least = search_best_plan(with_lowest_memory_pins(job), runnable, pricer=pricer)
    if least.ranking.best:
        return find_best_plan(job, runnable, least.ranking.best[0].score, pricer)
    return None if least.legal else find_best_plan(job, runnable, pricer=pricer)


def fits(job: Job, runnable: bool = False) -> bool:
    """Returns whether a plan with identical ranks fits. Only plans with the lowest memory are searched."""
    try:
        return bool(search_best_plan(with_lowest_memory_pins(job), runnable).ranking.best)
    except InputError:
        return False


def with_lowest_memory_pins(job: Job) -> Job:
    """Returns the job with pins that leave only the plans with the lowest memory. If none of these plans fits, no plan
    of `job` fits."""
    ordered = job.pins.keys() & {"schedule", "virtual_stages", "layers_per_stage"}
    return job.but(
        pins={
            **{name: value for name, value in LOWEST_MEMORY_CHOICES.items() if name != "schedule" or not ordered},
            **job.pins,
        }
    )


JobChange = tuple[str, dict[str, object], Job]
"""A change of a job: a message that describes the change, the values in this message by name, and the changed job."""


def without_pins(job: Job) -> Iterator[JobChange]:
    """Yields, for each pin, the job without this pin, first those that CHEAPEST_PINS names. If there are several pins,
    the last job has no pins."""
    first = [name for name in CHEAPEST_PINS if name in job.pins]
    for name in (*first, *(name for name in job.pins if name not in first)):
        pins: dict[str, Any] = {other: value for other, value in job.pins.items() if other != name}
        if name == "zero" and {"dp_replicate", "dp_shard"} <= pins.keys():  # how a plan name pins the replicas
            pins["dp"] = pins.pop("dp_replicate") * pins.pop("dp_shard")
        yield (
            mark_msgid("without the pin {pin} would fit ({plan}, {seconds:step} a step)"),
            {"pin": f"{name}={format_pin(job.pins[name])}"},
            job.but(pins=pins),
        )
    if len(job.pins) > 1:
        yield mark_msgid("without any pin would fit ({plan}, {seconds:step} a step)"), {}, job.but(pins={})


def with_bfloat16_sums(job: Job) -> Iterator[JobChange]:
    """Yields the job with gradients in bfloat16, if weights are in bfloat16 and gradients by default in float32."""
    work = job.workload
    if work.reduce is None and work.recipe.compute == "bfloat16" and work.recipe.gradient_size > 2:
        yield (
            mark_msgid("reduce: bf16 would fit ({plan}, {seconds:step} a step)"),
            {},
            job.but(workload=work.but(reduce="bf16")),
        )


def with_chunked_loss(job: Job) -> Iterator[JobChange]:
    """Yields the job with a chunked loss, which never stores the full logits. A normal search does not include chunked
    losses, because they gain almost nothing if a plan without chunks fits (docs/log/planner.md)."""
    if "loss_chunks" not in job.pins:
        yield (
            mark_msgid("the loss in {chunks} chunks would fit ({plan}, {seconds:step} a step)"),
            {"chunks": LOSS_CHUNKS_TRIED},
            job.but(pins={**job.pins, "loss_chunks": LOSS_CHUNKS_TRIED}),
        )


def with_disks(job: Job) -> Iterator[JobChange]:
    """Yields the job with a local disk in each node, if the cluster has none."""
    if not job.cluster.storage_bandwidth:
        groups = tuple(
            group.but(storage_bandwidth=group.storage_bandwidth or DISK_BYTES_PER_SECOND)
            for group in job.cluster.groups
        )
        yield (
            (
                mark_msgid(
                    "a local disk in each node (storage_bandwidth, {rate:rate}) would fit ({plan}, {seconds:step} "
                    "a step)"
                )
            ),
            {"rate": DISK_BYTES_PER_SECOND},
            job.but(cluster=job.cluster.but(groups=groups)),
        )


def with_more_nodes(job: Job) -> Iterator[JobChange]:
    """Yields the job on larger clusters, with a multiple (`node_multiples`) of the nodes of each type. Pins of dp,
    dp_replicate and dp_shard are removed, because the number of replicas grows with the number of devices."""
    pins = {name: value for name, value in job.pins.items() if not name.startswith("dp")}
    states = job.workload.bytes_per_parameter * job.model.parameters
    least = states / (job.cluster.memory * job.cluster.devices)
    for times in islice((times for times in node_multiples() if times >= least), MAX_NODE_COUNTS_TRIED):
        if times * job.cluster.devices > MAX_CLUSTER_NODES:  # a larger cluster is not a valid spec
            return
        groups = tuple(group.but(nodes=group.nodes * times) for group in job.cluster.groups)
        cluster = job.cluster.but(groups=groups)
        yield (
            (mark_msgid("{nodes:count node} ({devices:count device}) would fit ({plan}, {seconds:step} a step)")),
            {"nodes": sum(group.nodes for group in groups), "devices": cluster.devices},
            job.but(cluster=cluster, pins=pins),
        )


def node_multiples() -> Iterator[int]:
    """Yields 2, 3, 4, 6, 8, 12, 16, ...: powers of two, and 1.5 times powers of two. These numbers have many
    divisors."""
    for power in count(1):
        yield 2**power
        yield 3 * 2 ** (power - 1)


def with_shorter_sequence(job: Job) -> Iterator[JobChange]:
    """Yields the job with shorter sequences."""
    for part in SEQUENCE_DIVISORS:
        sequence = job.workload.sequence // part
        if sequence:
            yield (
                mark_msgid("sequence {sequence} would fit ({plan}, {seconds:step} a step)"),
                {"sequence": sequence},
                job.but(workload=job.workload.but(sequence=sequence)),
            )
