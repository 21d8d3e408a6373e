"""Answers six questions about a job with its own numbers, and says what single improvements would bring.

The questions: how large is my model, does it fit on one device, how are my devices linked, speed or memory, do I need a
hybrid, which tp and pp. An improvement is one change of the cluster or the workload: twice the memory, links or devices
twice as fast, twice the batch, fewer bytes between nodes. Each is a search of the changed job, so that the plan may
change too. Improvements are compared by tokens per second.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from meshwright.core.i18n.messages import Message, make_message
from meshwright.planner.cost.step import estimate
from meshwright.planner.search.branch_and_bound import search_top_plans
from meshwright.planner.search.explain import family_name
from meshwright.planner.search.infeasible import fastest_plan
from meshwright.planner.search.offered_choices import divisors
from meshwright.planner.search.result import PlanFamily, SearchResult
from meshwright.planner.search.top_k import PlanCandidate
from meshwright.spec.cluster import Cluster, NodeGroup
from meshwright.spec.enums import Recompute
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan
from meshwright.spec.precision import DilocoConfig, GradientCompression

IMPROVEMENT_FACTOR = 2.0


class JobImprovement(NamedTuple):
    """A change by its name, the speed-up in tokens per second under the best plan, and that plan."""

    name: str
    speed: float
    plan: str


def with_node_groups(cluster: Cluster, groups: Iterator[NodeGroup]) -> Cluster:
    """Returns the cluster with other node groups."""
    return cluster.but(groups=tuple(groups))


def improved_jobs(job: Job) -> Iterator[tuple[str, Job]]:
    """Yields the changed jobs by name, without changes that cannot affect the cluster."""
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
        yield (
            "network",
            job.but(
                cluster=cluster.but(
                    network=cluster.network.but(bandwidth=cluster.network.bandwidth * IMPROVEMENT_FACTOR)
                )
            ),
        )
        yield from _with_less_traffic(job)
    yield "batch", job.but(workload=job.workload.but(batch=int(job.workload.batch * IMPROVEMENT_FACTOR)))


def _with_less_traffic(job: Job) -> Iterator[tuple[str, Job]]:
    """Yields jobs with the same batch and less traffic between nodes.

    These change the result, so the user must request them.
    """
    work, nodes = job.workload, sum(group.nodes for group in job.cluster.groups)
    if work.compression is None and not work.exact and work.precision != "fp16":
        for kind in ("bf16",) * (work.recipe.gradient_size > 2) + ("int8", "low-rank"):
            yield kind, job.but(workload=work.but(compression=GradientCompression(kind=kind)))  # type: ignore[arg-type]
    if (
        work.local is None
        and not work.exact
        and work.batch % nodes == 0
        and not {"dp", "dp_replicate", "ep"} & job.pins.keys()
    ):
        local_work = work.but(local=DilocoConfig(replicas=nodes))
        yield "local", job.but(workload=local_work, pins={**job.pins, **local_work.fixed})


def rank_improvements(
    job: Job, step: float, runnable: bool = False, chosen: Plan | None = None
) -> tuple[JobImprovement, ...]:
    """Returns every single change of a job, the best first.

    `step` is the time of the job's best plan in seconds, `chosen` that plan where it is known.
    """
    found = []
    for name, changed in improved_jobs(job):
        best = fastest_plan(changed, runnable, chosen if changed.pins == job.pins else None)
        if best is not None:
            found.append(
                JobImprovement(
                    name, step / best.seconds * (changed.workload.batch / job.workload.batch), best.plan.name
                )
            )
    return tuple(sorted(found, key=lambda it: -it.speed))


MAX_NEIGHBOUR_DEGREES = 3
"""Other degrees that are named on either side of the chosen one."""

MIN_SPEED_CHANGE = 0.005
"""A change of speed below this share is none."""


def advise(job: Job, answer: SearchResult, runnable: bool = False) -> list[Message]:
    """Returns the six answers in order, then the improvements."""
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
    """One sequence on one of the devices."""
    group = job.cluster.groups[0]
    one = job.cluster.but(groups=(group.but(nodes=1, devices=1),))
    return job.but(cluster=one, workload=job.workload.but(batch=1), pins={})


def _size_message(job: Job) -> Message:
    """Question 1."""
    each = job.workload.bytes_per_parameter
    priced = [
        estimate(single_device_job(job), Plan(recompute=choice)).memory.activations
        for choice in (Recompute.none, Recompute.full)
    ]
    return make_message(
        "advice.size",
        parameters=job.model.parameters,
        each=f"{each:g}",
        states=job.model.parameters * each,
        activations=priced[0],
        sequence=job.workload.sequence,
        recomputed=priced[1],
    )


def _one_device_message(job: Job) -> Message:
    """Question 2."""
    one = single_device_job(job)
    whole, again = (estimate(one, Plan(recompute=choice)) for choice in (Recompute.none, Recompute.full))
    if whole.fits:
        return make_message("advice.one.yes", reserved=whole.memory.reserved, limit=whole.limit)
    if again.fits:
        return make_message(
            "advice.one.recomputed", reserved=again.memory.reserved, limit=again.limit, whole=whole.memory.reserved
        )
    return make_message(
        "advice.one.no", reserved=again.memory.reserved, limit=again.limit, times=again.memory.reserved / again.limit
    )


def _links_message(job: Job) -> Message:
    """Question 3."""
    cluster = job.cluster
    group, network = cluster.groups[0], cluster.network
    nodes = sum(each.nodes for each in cluster.groups)
    if cluster.devices == 1:
        return make_message("advice.links.one")
    inside = {"devices": group.devices, "link": group.link.name, "near": group.link.bandwidth}
    between = {"nodes": nodes, "network": network.name, "far": network.bandwidth}
    if nodes == 1:
        return make_message("advice.links.inside", **inside)
    if group.devices == 1:
        return make_message("advice.links.between", **between)
    return make_message("advice.links.both", **inside, **between, times=group.link.bandwidth / network.bandwidth)


def _speed_or_memory_message(job: Job, answer: SearchResult, runnable: bool) -> Message:
    """Question 4: the chosen plan and the plan that needs least memory."""
    chosen = answer.chosen.estimate
    found = search_top_plans(job, 1, runnable=runnable).ranking
    even: tuple[PlanCandidate | PlanFamily, ...] = (*found.nearest.values(), *found.families.values())
    lean = min(
        even or answer.families, key=lambda it: (it.reserved, it.seconds)
    )  # some heterogeneous groups have no legal homogeneous plan
    values = {
        "plan": answer.chosen.name,
        "step": chosen.time.step,
        "reserved": chosen.memory.reserved,
        "lean": lean.plan.name,
        "least": lean.reserved,
        "share": lean.seconds / chosen.time.step - 1.0,
    }
    return make_message("advice.speed.same" if lean.plan == answer.chosen.plan else "advice.speed", **values)


def _hybrid_message(job: Job, answer: SearchResult) -> Message:
    """Question 5: families of one kind of parallelism, compared with the chosen plan."""
    step = answer.chosen.estimate.time.step
    single = [family for family in answer.families if count_parallelisms(family.plan) <= 1]
    fitting = [family for family in single if family.fits]
    mine = [family for family in single if family.plan == answer.chosen.plan]
    if mine:
        return make_message("advice.hybrid.no", family=family_name(mine[0].name), plan=answer.chosen.name)
    if fitting:
        best = min(fitting, key=lambda family: family.seconds)
        return make_message(
            "advice.hybrid.faster",
            plan=answer.chosen.name,
            family=family_name(best.name),
            single=best.plan.name,
            share=best.seconds / step - 1.0,
        )
    if not single:
        return make_message("advice.hybrid.indivisible", plan=answer.chosen.name, devices=job.cluster.devices)
    return make_message(
        "advice.hybrid.needed",
        plan=answer.chosen.name,
        families=tuple(map(_shortage_message, single[:MAX_NEIGHBOUR_DEGREES])),
    )


def count_parallelisms(plan: Plan) -> int:
    """How many kinds of parallelism a plan joins."""
    return sum(degree > 1 for degree in (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep))


def _shortage_message(family: PlanFamily) -> Message:
    return make_message("why.needs", family=family_name(family.name), reserved=family.reserved)


def _degrees_message(job: Job, answer: SearchResult, runnable: bool) -> Message:
    """Question 6: what other tensor and pipeline degrees would cost."""
    plan = answer.chosen.plan
    return make_message(
        "advice.degrees",
        tp=plan.tp,
        pp=plan.pp,
        tensor=_neighbour_degrees(job, answer, "tp", runnable),
        pipeline=_neighbour_degrees(job, answer, "pp", runnable),
    )


def _neighbour_degrees(job: Job, answer: SearchResult, axis: str, runnable: bool) -> tuple[Message, ...]:
    """The next lower and higher degrees of an axis, each with what its best plan takes more, or that none fits."""
    chosen, step = getattr(answer.chosen.plan, axis), answer.chosen.estimate.time.step
    degrees = divisors(job.cluster.devices)  # on some heterogeneous groups the chosen degree is none of them
    lower, higher = [degree for degree in degrees if degree < chosen], [degree for degree in degrees if degree > chosen]
    near = [*lower[-MAX_NEIGHBOUR_DEGREES:], *higher[:MAX_NEIGHBOUR_DEGREES]]
    return tuple(_degree_message(axis, degree, job, step, runnable) for degree in near) or (
        make_message("advice.no_other"),
    )


def _degree_message(axis: str, degree: int, job: Job, step: float, runnable: bool) -> Message:
    best = fastest_plan(
        job.but(pins={**{name: value for name, value in job.pins.items() if name != axis}, axis: degree}), runnable
    )
    if best is None:
        return make_message("advice.degree.none", axis=axis, degree=degree)
    share = _signed_percent(best.seconds / step - 1.0)
    return make_message("advice.degree.tight" if best.tight else "advice.degree", axis=axis, degree=degree, share=share)


def _improvement_messages(job: Job, answer: SearchResult, runnable: bool) -> Iterable[Message]:
    """What each single improvement brings."""
    found = rank_improvements(job, answer.chosen.estimate.time.step, runnable, answer.chosen.plan)
    yield make_message(
        "advice.improve",
        changes=tuple(
            make_message(
                "advice.change" if abs(it.speed - 1.0) >= MIN_SPEED_CHANGE else "advice.change.none",
                what=make_message(f"advice.twice.{it.name}"),
                share=_signed_percent(it.speed - 1.0),
                plan=it.plan if it.plan != answer.chosen.name else make_message("advice.same_plan"),
            )
            for it in found
        ),
    )


def _signed_percent(share: float) -> str:
    """
    >>> _signed_percent(0.123), _signed_percent(-0.0001)
    ('+12%', '0%')
    """
    return f"{share:+.0%}".replace("+0%", "0%").replace("-0%", "0%")
