"""The answer to a job: the best plans that fit, with what was refused and the best of every family.

On fewer devices than the job has (`fewest`, `cheapest`) the same search runs on each smaller cluster: so many of the nodes of every group, the
last ones left out; of a single node so many devices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from meshwright.base.errors import InputError
from meshwright.cost.price import Pricer
from meshwright.cost.step import estimate
from meshwright.search import unlike
from meshwright.search.answer import Answer, Entry, Family, Objective, Rejection
from meshwright.search.eased import eased
from meshwright.search.near import nothing_fits
from meshwright.search.ranking import Candidate, Ranking, family_of, rounded
from meshwright.search.survey import Survey, survey
from meshwright.spec.cluster import Cluster
from meshwright.spec.job import Job
from meshwright.spec.runs import runs


def search(job: Job, top: int = 10, objective: Objective = Objective.fastest, runnable: bool = False) -> Answer:
    """The `top` best plans that fit; `runnable`: of those that this version runs.

    Raises NothingFits with the nearest plan and the smallest change that would fit.
    """
    began = time.perf_counter()
    found = best(job, top, objective, runnable)
    entries, families = standing(job, found, top, objective, runnable)
    if not entries:
        raise nothing_fits(found)
    return Answer(
        plans=entries,
        families=families,
        considered=found.space.considered,
        rejected=tuple(Rejection(reason=reason, count=it.count, example=it.example) for reason, it in found.space.refused.items()),
        seconds=time.perf_counter() - began,
        devices=found.space.job.cluster.devices,
    )


def standing(
    job: Job, found: Survey, top: int, objective: Objective = Objective.fastest, runnable: bool = False
) -> tuple[tuple[Entry, ...], tuple[Family, ...]]:
    """The ranked plans of a survey, those over unlike groups among them, and the best of every family."""
    scored = [_entry(found.pricer, each) for each in found.ranking.best]
    if objective == Objective.fastest:
        scored += [(score, Entry(plan=plan, estimate=estimate(job, plan))) for score, plan in unlike.plans(job, top, runnable)]
        scored = sorted(scored, key=lambda pair: rounded(pair[0]))
    kin = families(found.ranking, scored if objective == Objective.fastest else ())
    return tuple(entry.but(runs=runs(entry.plan)) for _, entry in scored[:top]), kin


def _entry(pricer: Pricer, candidate: Candidate) -> tuple[float, Entry]:
    """A plan that was found, with its score; of what it offloads no more than must be."""
    box, estimate = eased(pricer, candidate.alone)
    plan = box.plan((0,) * len(box.shape))
    gain = estimate.time.step / candidate.seconds if min(plan.offload_share, plan.weights_share) < 100 else 1.0
    return candidate.score * gain, Entry(plan=plan, estimate=estimate)


def best(job: Job, top: int, objective: Objective, runnable: bool) -> Survey:
    """The survey of the number of devices that serves the objective best."""
    if objective not in (Objective.fewest, Objective.cheapest):
        return survey(job, top, objective, runnable)
    chosen, lowest = None, float("inf")
    for cluster in smaller(job.cluster):
        price = cluster.price
        if objective == Objective.cheapest and price is None:
            raise InputError("the cheapest plan needs a price: give each device of the cluster file a price, in money per device hour")
        try:
            found = survey(job.but(cluster=cluster), top, objective, runnable, ceiling=lowest / (price or 1.0))
        except InputError:  # the pins do not divide so many devices; where no number will do, the last line says so of all of them
            continue
        if not found.ranking.best:
            continue
        if objective == Objective.fewest:
            return found
        money = found.ranking.best[0].score * (price or 0.0)
        if money < lowest:
            chosen, lowest = found, money
    return chosen or survey(job, top, objective, runnable)


def narrowed(job: Job, answer: Answer) -> Job:
    """`job` on the devices that the answer uses."""
    if answer.devices in (0, job.cluster.devices):
        return job
    return job.but(cluster=next(each for each in smaller(job.cluster) if each.devices == answer.devices))


def smaller(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with fewer nodes, or with fewer devices of its only node, the smallest first, itself last."""
    group = cluster.groups[0]
    if len(cluster.groups) == 1 and group.nodes == 1:
        for devices in range(1, group.devices + 1):
            yield cluster.but(groups=(group.but(devices=devices),))
        return
    counts = [each.nodes for each in cluster.groups]
    for nodes in range(1, sum(counts) + 1):
        left, groups = nodes, []
        for each in cluster.groups:
            taken = min(each.nodes, left)
            left -= taken
            groups += [each.but(nodes=taken)] if taken else []
        yield cluster.but(groups=tuple(groups))


def families(ranking: Ranking, ranked: Sequence[tuple[float, Entry]] = ()) -> tuple[Family, ...]:
    """The best of each family, those that fit first and fastest first, then the nearest of the others. The survey's families are of even plans
    that treat all blocks alike; a ranked plan, with its score, may be better than the best of these."""
    scores = {name: it.score for name, it in ranking.families.items()}
    found = {
        name: Family(name=name, plan=it.plan, fits=name in scores, seconds=it.seconds, reserved=it.reserved)
        for name, it in {**ranking.nearest, **ranking.families}.items()
    }
    for score, entry in ranked:
        name = family_of(entry.plan)
        if rounded(score) < rounded(scores.get(name, float("inf"))):
            scores[name], price = score, entry.estimate
            found[name] = Family(name=name, plan=entry.plan, fits=True, seconds=price.time.step, reserved=price.memory.reserved)
    return tuple(sorted(found.values(), key=lambda family: (not family.fits, family.seconds if family.fits else family.reserved)))
