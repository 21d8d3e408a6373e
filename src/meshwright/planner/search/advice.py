"""Answers six questions about a job, and estimates the effect of single improvements. `meshwright plan --advice` prints
the answers.

The questions are: how large is my model, does it fit on one device, how are my devices linked, speed or memory, do I
need a hybrid (several kinds of parallelism), which tp and pp. An improvement is one change of the cluster or the
workload: twice the memory, links or devices twice as fast, twice the batch, fewer bytes between nodes. The search is
repeated for each improvement, because another plan may then be best. Improvements are compared by tokens per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import NamedTuple

from meshwright.core.messages import Message, join_messages
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.step import estimate
from meshwright.planner.search.best_plans import PlanFamily, SearchResult
from meshwright.planner.search.branch_and_bound import search_top_plans
from meshwright.planner.search.choices import divisors
from meshwright.planner.search.explain import family_name
from meshwright.planner.search.infeasible import FastestPlan, fastest_plan
from meshwright.planner.search.ranking import lowest_memory_plan
from meshwright.spec.cluster import Cluster, NodeGroup
from meshwright.spec.enums import Recompute
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan
from meshwright.spec.precision import DilocoConfig, GradientCompression

IMPROVEMENT_FACTOR = 2.0


WHAT_IF_NAMES = {
    "memory": Message("twice the memory"),
    "compute": Message("devices twice as fast"),
    "links": Message("links inside nodes twice as fast"),
    "network": Message("a network twice as fast"),
    "batch": Message("twice the batch"),
    "bf16": Message("gradients in bf16 between nodes (changes the result)"),
    "int8": Message("gradients in int8 between nodes (changes the result)"),
    "low-rank": Message("low-rank gradients between nodes (changes the result)"),
    "local": Message("nodes that synchronize every 50 steps (changes the result)"),
}
"""The description of each improvement, by the name of the improvement."""


class JobImprovement(NamedTuple):
    """An improvement of the job. `speed` is the tokens per second of the improved job divided by those of the job.
    `plan` is the name of the best plan of the improved job."""

    name: str
    speed: float
    plan: str


def with_node_groups(cluster: Cluster, groups: Iterator[NodeGroup]) -> Cluster:
    """Returns `cluster` with the node groups `groups`."""
    return cluster.but(groups=tuple(groups))


def improved_jobs(job: Job) -> Iterator[tuple[str, Job]]:
    """Yields each improvement as a pair (name, changed job). Improvements without effect on this cluster are
    omitted."""
    cluster, groups = job.cluster, job.cluster.groups
    more = (group.but(device=group.device.but(memory=group.device.memory * IMPROVEMENT_FACTOR)) for group in groups)
    yield "memory", job.but(cluster=with_node_groups(cluster, more))
    rates = (
        group.but(
            device=group.device.but(
                peak={precision: rate * IMPROVEMENT_FACTOR for precision, rate in group.device.peak.items()}
            )
        )
        for group in groups
    )
    yield "compute", job.but(cluster=with_node_groups(cluster, rates))
    if any(group.devices > 1 for group in groups):
        near = (group.but(link=group.link.but(bandwidth=group.link.bandwidth * IMPROVEMENT_FACTOR)) for group in groups)
        yield "links", job.but(cluster=with_node_groups(cluster, near))
    if sum(group.nodes for group in groups) > 1:
        network, *tiers = (
            link.but(bandwidth=link.bandwidth * IMPROVEMENT_FACTOR) for link in (cluster.network, *cluster.tiers)
        )
        yield "network", job.but(cluster=cluster.but(network=network, tiers=tuple(tiers)))
        yield from _with_less_traffic(job)
    yield "batch", job.but(workload=job.workload.but(batch=int(job.workload.batch * IMPROVEMENT_FACTOR)))


def _with_less_traffic(job: Job) -> Iterator[tuple[str, Job]]:
    """Yields improvements that reduce the traffic between nodes: gradient compression, and local steps (DiLoCo).
    Improvements that the job already has, or that its precision, batch or pins do not allow, are omitted. All of them
    change the training result, so the planner only suggests them.
    """
    work, blocks = job.workload, job.cluster.blocks
    if work.compression is None and not work.exact and work.precision != "fp16":
        for kind in ("bf16",) * (work.recipe.gradient_size > 2) + ("int8", "low-rank"):
            yield kind, job.but(workload=work.but(compression=GradientCompression(kind=kind)))  # type: ignore[arg-type]
    if (
        work.local is None
        and not work.exact
        and work.batch % blocks == 0
        and not {"dp", "dp_replicate", "ep"} & job.pins.keys()
    ):
        local_work = work.but(local=DilocoConfig(replicas=blocks))
        yield "local", job.but(workload=local_work, pins={**job.pins, **local_work.fixed})


def rank_improvements(
    job: Job, step: float, runnable: bool = False, chosen: Plan | None = None
) -> tuple[JobImprovement, ...]:
    """Returns all improvements of a job, the largest speed-up first. Improvements with which no plan fits are omitted.

    `step` is the seconds of a step under the job's best plan. `chosen` is this plan, or None if it is not known.
    """
    found, pricer = [], CostModel(job)
    for name, changed in improved_jobs(job):
        known = chosen if changed.pins == job.pins else None
        best = fastest_plan(changed, runnable, known, CostModel(changed, like=pricer))
        if best is not None:
            found.append(
                JobImprovement(
                    name, step / best.seconds * (changed.workload.batch / job.workload.batch), best.plan.name
                )
            )
    return tuple(sorted(found, key=lambda it: -it.speed))


MAX_NEIGHBOUR_DEGREES = 3
"""The maximum number of degrees below the chosen degree, and of degrees above it, that an answer names."""

MIN_SPEED_CHANGE = 0.005
"""Relative changes of speed below this value are reported as no change."""


def advise(job: Job, answer: SearchResult, runnable: bool = False) -> list[Message]:
    """Returns the answers to the six questions in order, then one message with all improvements. `answer` is the result
    of the search for `job`."""
    return [
        _size_message(job),
        _one_device_message(job),
        _links_message(job),
        _speed_or_memory_message(job, answer, runnable),
        _hybrid_message(job, answer),
        _degrees_message(job, answer, runnable),
        *_improvement_messages(job, answer, runnable),
    ]


def single_device_job(job: Job) -> Job:
    """Returns the job with a batch of one sequence on one device of the first group, without pins."""
    group = job.cluster.groups[0]
    one = job.cluster.but(groups=(group.but(nodes=1, devices=1),))
    return job.but(cluster=one, workload=job.workload.but(batch=1), pins={})


def _size_message(job: Job) -> Message:
    """Answers question 1: the size of the model."""
    each = job.workload.bytes_per_parameter
    priced = [
        estimate(single_device_job(job), Plan(recompute=choice)).memory.activations
        for choice in (Recompute.none, Recompute.full)
    ]
    return Message(
        "1. How large is my model? {parameters:parameters} parameters. Weights, gradients and optimizer states take "
        "{each} bytes per parameter, {states:bytes} in total. One sequence of {sequence} tokens saves "
        "{activations:bytes} of activations, or {recomputed:bytes} with full recompute.",
        parameters=job.model.parameters,
        each=f"{each:g}",
        states=job.model.parameters * each,
        activations=priced[0],
        sequence=job.workload.sequence,
        recomputed=priced[1],
    )


def _one_device_message(job: Job) -> Message:
    """Answers question 2: whether the model fits on one device."""
    one = single_device_job(job)
    whole, again = (estimate(one, Plan(recompute=choice)) for choice in (Recompute.none, Recompute.full))
    if whole.fits:
        return Message(
            "2. Does it fit on one device? Yes: one sequence needs {reserved:bytes} of {limit:bytes}.",
            reserved=whole.memory.reserved,
            limit=whole.limit,
        )
    if again.fits:
        return Message(
            "2. Does it fit on one device? Only with full recompute: one sequence then needs {reserved:bytes} of "
            "{limit:bytes}, and {whole:bytes} without recompute.",
            reserved=again.memory.reserved,
            limit=again.limit,
            whole=whole.memory.reserved,
        )
    return Message(
        "2. Does it fit on one device? No: one sequence with full recompute needs {reserved:bytes}, "
        "{times:times} times the {limit:bytes} of a device.",
        reserved=again.memory.reserved,
        limit=again.limit,
        times=again.memory.reserved / again.limit,
    )


def _links_message(job: Job) -> Message:
    """Answers question 3: the links between devices."""
    cluster = job.cluster
    group, network = cluster.groups[0], cluster.network
    nodes = sum(each.nodes for each in cluster.groups)
    if cluster.devices == 1:
        return Message("3. How are my devices linked? There is only one.")
    inside = {"devices": group.devices, "link": group.link.name, "near": group.link.bandwidth}
    between = {"nodes": nodes, "network": network.name, "far": network.bandwidth}
    if nodes == 1:
        return Message(
            "3. How are my devices linked? {devices} in one node over {link}, {near:rate} each: every kind of "
            "parallelism works well there.",
            **inside,
        )
    if group.devices == 1:
        return Message(
            "3. How are my devices linked? {nodes} nodes of one device over {network}, {far:rate} a device: fast "
            "enough for data and pipeline parallelism, hardly for tensor parallelism.",
            **between,
        )
    return Message(
        "3. How are my devices linked? {devices} in a node over {link}, {near:rate} each; {nodes} nodes over "
        "{network}, {far:rate} a device, {times:times} times less: keep tensor parallelism inside a node, let data "
        "and pipeline parallelism cross nodes.",
        **inside,
        **between,
        times=group.link.bandwidth / network.bandwidth,
    ) + join_messages(
        "",
        [
            Message(
                " Blocks of {devices} over {link}, {rate:rate} a device.",
                devices=inner.span,
                link=link.name,
                rate=link.bandwidth,
            )
            for inner, link in pairwise((network, *cluster.tiers))
        ],
    )


def _speed_or_memory_message(job: Job, answer: SearchResult, runnable: bool) -> Message:
    """Answers question 4: compares the chosen plan with the plan with the lowest memory."""
    chosen = answer.chosen.estimate
    lean = answer.lowest_memory or lowest_memory_plan(search_top_plans(job, 1, runnable=runnable).ranking)
    if lean is None:  # on some heterogeneous clusters, no plan with identical ranks is legal
        lean = min(answer.families, key=lambda it: (it.reserved, it.seconds))
    values = {
        "plan": answer.chosen.name,
        "step": chosen.time.step,
        "reserved": chosen.memory.reserved,
        "lean": lean.plan.name,
        "least": lean.reserved,
        "share": lean.seconds / chosen.time.step - 1.0,
    }
    return Message(
        "4. Speed or memory? Both: {plan} takes {step:step} a step and {reserved:bytes}, and "
        "no other plan takes less memory."
        if lean.plan == answer.chosen.plan
        else "4. Speed or memory? The first plan, {plan}, takes {step:step} a step and "
        "{reserved:bytes}. The lowest-memory plan, {lean}, takes {least:bytes} and "
        "{share:percent} more time.",
        **values,
    )


def _hybrid_message(job: Job, answer: SearchResult) -> Message:
    """Answers question 5: compares the chosen plan with the plan families that use only one kind of parallelism."""
    step = answer.chosen.estimate.time.step
    single = [family for family in answer.families if count_parallelisms(family.plan) <= 1]
    fitting = [family for family in single if family.fits]
    mine = [family for family in single if family.plan == answer.chosen.plan]
    if mine:
        return Message(
            "5. Do I need a hybrid? No: one kind of parallelism is fastest, {family} ({plan}).",
            family=family_name(mine[0].name),
            plan=answer.chosen.name,
        )
    if fitting:
        best = min(fitting, key=lambda family: family.seconds)
        return Message(
            "5. Do I need a hybrid? Not to fit, but {plan} is faster: the best single kind, {family} ({single}), "
            "takes {share:percent} longer.",
            plan=answer.chosen.name,
            family=family_name(best.name),
            single=best.plan.name,
            share=best.seconds / step - 1.0,
        )
    if not single:
        return Message(
            "5. Do I need a hybrid? Yes, {plan}: no single kind divides this batch and this model among "
            "{devices:count device}.",
            plan=answer.chosen.name,
            devices=job.cluster.devices,
        )
    return Message(
        "5. Do I need a hybrid? Yes, {plan}: no single kind fits ({families}).",
        plan=answer.chosen.name,
        families=tuple(map(_shortage_message, single[:MAX_NEIGHBOUR_DEGREES])),
    )


def count_parallelisms(plan: Plan) -> int:
    """Returns the number of kinds of parallelism that a plan combines."""
    return sum(degree > 1 for degree in (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep))


def _shortage_message(family: PlanFamily) -> Message:
    return Message("{family} needs {reserved:bytes}", family=family_name(family.name), reserved=family.reserved)


def _degrees_message(job: Job, answer: SearchResult, runnable: bool) -> Message:
    """Answers question 6: the cost of other tensor and pipeline degrees."""
    plan, pricer = answer.chosen.plan, CostModel(job)
    return Message(
        "6. Which tp and pp? tp {tp} and pp {pp}. Other tp: {tensor}. Other pp: {pipeline}.",
        tp=plan.tp,
        pp=plan.pp,
        tensor=_neighbour_degrees(job, answer, "tp", runnable, pricer),
        pipeline=_neighbour_degrees(job, answer, "pp", runnable, pricer),
    )


def _neighbour_degrees(
    job: Job, answer: SearchResult, axis: str, runnable: bool, pricer: CostModel
) -> tuple[Message, ...]:
    """Returns a message for each of the next lower and higher degrees of `axis` (tp or pp): the relative change of the
    step time under the best plan with this degree, or that no plan with this degree fits."""
    chosen, step = getattr(answer.chosen.plan, axis), answer.chosen.estimate.time.step
    degrees = divisors(job.cluster.devices)  # on some heterogeneous groups the chosen degree is not a divisor
    lower, higher = [degree for degree in degrees if degree < chosen], [degree for degree in degrees if degree > chosen]
    near = [*lower[-MAX_NEIGHBOUR_DEGREES:], *higher[:MAX_NEIGHBOUR_DEGREES]]
    found = best_by_degree(answer, axis)
    return tuple(
        _degree_message(
            axis, degree, step, fastest_plan(_pinned(job, axis, degree), runnable, found.get(degree), pricer)
        )
        for degree in near
    ) or (Message("none"),)


def _pinned(job: Job, axis: str, degree: int) -> Job:
    return job.but(pins={**job.pins, axis: degree})


def best_by_degree(answer: SearchResult, axis: str) -> dict[int, Plan]:
    """Returns the fastest plan in `answer` for each degree of `axis`, of the plans that a search with a pinned degree
    includes: with identical ranks, and without fractions of offload."""
    plans = [(entry.estimate.time.step, entry.plan) for entry in answer.plans]
    plans += [(family.seconds, family.plan) for family in answer.families if family.fits]
    return {
        getattr(plan, axis): plan
        for _, plan in sorted(plans, key=lambda pair: -pair[0])
        if min(plan.offload_share, plan.weights_share) == 100
        and not (plan.placement or plan.shares or plan.shard_weights or plan.micro_batch_sizes)
    }


def _degree_message(axis: str, degree: int, step: float, best: FastestPlan | None) -> Message:
    if best is None:
        return Message("{axis} {degree} has no plan that fits", axis=axis, degree=degree)
    share = _signed_percent(best.seconds / step - 1.0)
    return Message(
        "with {axis} {degree} the step time changes by {share}, but memory is tight"
        if best.tight
        else "with {axis} {degree} the step time changes by {share}",
        axis=axis,
        degree=degree,
        share=share,
    )


def _improvement_messages(job: Job, answer: SearchResult, runnable: bool) -> Iterable[Message]:
    """Yields one message with the effect of each improvement on the tokens per second."""
    found = rank_improvements(job, answer.chosen.estimate.time.step, runnable, answer.chosen.plan)
    yield Message(
        "Effect of improvements on tokens per second: {changes}.",
        changes=tuple(
            Message(
                "{what} {share} ({plan})" if abs(it.speed - 1.0) >= MIN_SPEED_CHANGE else "{what} no change",
                what=WHAT_IF_NAMES[it.name],
                share=_signed_percent(it.speed - 1.0),
                plan=it.plan if it.plan != answer.chosen.name else Message("the same plan"),
            )
            for it in found
        ),
    )


def _signed_percent(share: float) -> str:
    """Formats the fraction `share` as a percentage with a sign.

    >>> _signed_percent(0.123), _signed_percent(-0.0001)
    ('+12%', '0%')
    """
    return f"{share:+.0%}".replace("+0%", "0%").replace("-0%", "0%")
