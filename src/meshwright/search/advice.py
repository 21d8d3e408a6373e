"""The six questions that people ask, answered for a job with its own numbers: how large is my model, does it fit on one device, how are my
devices linked, speed or memory, do I need a hybrid, which tp and pp. And what a single improvement would bring.
"""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.cost.step import estimate
from meshwright.search.answer import Answer, Family
from meshwright.search.division import divisors
from meshwright.search.explain import family_name
from meshwright.search.improve import improvements
from meshwright.search.near import fastest
from meshwright.search.ranking import Candidate
from meshwright.search.survey import survey
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan, Recompute
from meshwright.words.say import Sentence, tell

NEIGHBOURS = 3
"""Other degrees that are named on either side of the chosen one."""

FELT = 0.005
"""A change of speed below this share is none."""


def advise(job: Job, answer: Answer, runnable: bool = False) -> list[Sentence]:
    """Six answers in order, then what would change them."""
    return [
        _size(job),
        _one_device(job),
        _links(job),
        _speed_or_memory(job, answer, runnable),
        _hybrid(job, answer),
        _degrees(job, answer, runnable),
        *_improve(job, answer, runnable),
    ]


def alone(job: Job) -> Job:
    """One sequence on one of the devices."""
    group = job.cluster.groups[0]
    one = job.cluster.but(groups=(group.but(nodes=1, devices=1),))
    return job.but(cluster=one, workload=job.workload.but(batch=1), pins={})


def _size(job: Job) -> Sentence:
    """Question 1."""
    each = job.workload.bytes_per_parameter
    priced = [estimate(alone(job), Plan(recompute=choice)).memory.activations for choice in (Recompute.none, Recompute.full)]
    return tell(
        "advice.size",
        parameters=job.model.parameters,
        each=f"{each:g}",
        states=job.model.parameters * each,
        activations=priced[0],
        sequence=job.workload.sequence,
        recomputed=priced[1],
    )


def _one_device(job: Job) -> Sentence:
    """Question 2."""
    one = alone(job)
    whole, again = (estimate(one, Plan(recompute=choice)) for choice in (Recompute.none, Recompute.full))
    if whole.fits:
        return tell("advice.one.yes", reserved=whole.memory.reserved, limit=whole.limit)
    if again.fits:
        return tell("advice.one.recomputed", reserved=again.memory.reserved, limit=again.limit, whole=whole.memory.reserved)
    return tell("advice.one.no", reserved=again.memory.reserved, limit=again.limit, times=again.memory.reserved / again.limit)


def _links(job: Job) -> Sentence:
    """Question 3."""
    cluster = job.cluster
    group, network = cluster.groups[0], cluster.network
    nodes = sum(each.nodes for each in cluster.groups)
    if cluster.devices == 1:
        return tell("advice.links.one")
    inside = {"devices": group.devices, "link": group.link.name, "near": group.link.bandwidth}
    between = {"nodes": nodes, "network": network.name, "far": network.bandwidth}
    if nodes == 1:
        return tell("advice.links.inside", **inside)
    if group.devices == 1:
        return tell("advice.links.between", **between)
    return tell("advice.links.both", **inside, **between, times=group.link.bandwidth / network.bandwidth)


def _speed_or_memory(job: Job, answer: Answer, runnable: bool) -> Sentence:
    """Question 4: the chosen plan beside the one that needs least memory."""
    chosen = answer.chosen.estimate
    found = survey(job, 1, runnable=runnable).ranking
    even: tuple[Candidate | Family, ...] = (*found.nearest.values(), *found.families.values())
    lean = min(even or answer.families, key=lambda it: (it.reserved, it.seconds))  # no even plan is legal on some unlike groups
    values = {
        "plan": answer.chosen.name,
        "step": chosen.time.step,
        "reserved": chosen.memory.reserved,
        "lean": lean.plan.name,
        "least": lean.reserved,
        "share": lean.seconds / chosen.time.step - 1.0,
    }
    return tell("advice.speed.same" if lean.plan == answer.chosen.plan else "advice.speed", **values)


def _hybrid(job: Job, answer: Answer) -> Sentence:
    """Question 5: families of one kind of parallelism beside the chosen plan."""
    step = answer.chosen.estimate.time.step
    single = [family for family in answer.families if kinds_of(family.plan) <= 1]
    fitting = [family for family in single if family.fits]
    mine = [family for family in single if family.plan == answer.chosen.plan]
    if mine:
        return tell("advice.hybrid.no", family=family_name(mine[0].name), plan=answer.chosen.name)
    if fitting:
        best = min(fitting, key=lambda family: family.seconds)
        return tell(
            "advice.hybrid.faster",
            plan=answer.chosen.name,
            family=family_name(best.name),
            single=best.plan.name,
            share=best.seconds / step - 1.0,
        )
    if not single:
        return tell("advice.hybrid.indivisible", plan=answer.chosen.name, devices=job.cluster.devices)
    return tell("advice.hybrid.needed", plan=answer.chosen.name, families=tuple(map(_lack, single[:NEIGHBOURS])))


def kinds_of(plan: Plan) -> int:
    """How many kinds of parallelism a plan joins."""
    return sum(degree > 1 for degree in (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep))


def _lack(family: Family) -> Sentence:
    return tell("why.needs", family=family_name(family.name), reserved=family.reserved)


def _degrees(job: Job, answer: Answer, runnable: bool) -> Sentence:
    """Question 6: what other tensor and pipeline degrees would cost."""
    plan = answer.chosen.plan
    return tell(
        "advice.degrees", tp=plan.tp, pp=plan.pp, tensor=_others(job, answer, "tp", runnable), pipeline=_others(job, answer, "pp", runnable)
    )


def _others(job: Job, answer: Answer, axis: str, runnable: bool) -> tuple[Sentence, ...]:
    """The next lower and higher degrees of an axis, each with what its best plan takes more, or that none fits."""
    chosen, step = getattr(answer.chosen.plan, axis), answer.chosen.estimate.time.step
    degrees = divisors(job.cluster.devices)  # of which the chosen one need not be, on some of unlike groups
    lower, higher = [degree for degree in degrees if degree < chosen], [degree for degree in degrees if degree > chosen]
    near = [*lower[-NEIGHBOURS:], *higher[:NEIGHBOURS]]
    return tuple(_priced(axis, degree, job, step, runnable) for degree in near) or (tell("advice.no_other"),)


def _priced(axis: str, degree: int, job: Job, step: float, runnable: bool) -> Sentence:
    best = fastest(job.but(pins={**{name: value for name, value in job.pins.items() if name != axis}, axis: degree}), runnable)
    if best is None:
        return tell("advice.degree.none", axis=axis, degree=degree)
    share = _signed(best.seconds / step - 1.0)
    return tell("advice.degree.tight" if best.tight else "advice.degree", axis=axis, degree=degree, share=share)


def _improve(job: Job, answer: Answer, runnable: bool) -> Iterable[Sentence]:
    """What each single improvement brings."""
    found = improvements(job, answer.chosen.estimate.time.step, runnable, answer.chosen.plan)
    yield tell(
        "advice.improve",
        changes=tuple(
            tell(
                "advice.change" if abs(it.speed - 1.0) >= FELT else "advice.change.none",
                what=tell(f"advice.twice.{it.name}"),
                share=_signed(it.speed - 1.0),
                plan=it.plan if it.plan != answer.chosen.name else tell("advice.same_plan"),
            )
            for it in found
        ),
    )


def _signed(share: float) -> str:
    """
    >>> _signed(0.123), _signed(-0.0001)
    ('+12%', '0%')
    """
    return f"{share:+.0%}".replace("+0%", "0%").replace("-0%", "0%")
