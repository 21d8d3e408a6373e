"""The advice uses plans and cost models of other searches. Searches that know nothing find the same plans."""

import random

import pytest
from brute_force import random_job
from jobs import cluster, decoder, small_job
from test_search_heterogeneous import heavy_job, unlike_job

from meshwright.core.errors import InputError, NothingFits
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.search.advice import best_by_degree, improved_jobs, rank_improvements
from meshwright.planner.search.branch_and_bound import search_top_plans
from meshwright.planner.search.choices import divisors
from meshwright.planner.search.heterogeneous import heterogeneous_plans
from meshwright.planner.search.infeasible import fastest_plan
from meshwright.planner.search.ranking import search_plans
from meshwright.spec.job import Job


def whole_search(job: Job) -> tuple[str, float] | None:
    """Returns the name of the best plan and the seconds of its step, from a search with families and without any known
    plan."""
    try:
        found = [(it.score, it.plan.name, it.seconds) for it in search_top_plans(job, 1).ranking.best]
        placed = heterogeneous_plans(job, 1)
    except InputError:
        return None
    if placed and (not found or placed[0][0] < found[0][0]):
        best = fastest_plan(job)
        return None if best is None else (best.plan.name, best.seconds)
    return found[0][1:] if found else None


def equals_whole_searches(job: Job) -> int:
    """Compares every pinned degree and every improvement of `job`, and returns the number of plans that were found."""
    try:
        answer = search_plans(job)
    except (InputError, NothingFits):
        return 0
    count, chosen, pricer = 0, answer.chosen, CostModel(job)
    for axis in ("tp", "pp"):
        known = best_by_degree(answer, axis)
        for degree in divisors(job.cluster.devices):
            pinned = job.but(pins={**job.pins, axis: degree})
            best = fastest_plan(pinned, False, known.get(degree), pricer)
            expected = whole_search(pinned)
            assert (best and (best.plan.name, pytest.approx(best.seconds, rel=1e-12))) == expected, (axis, degree)
            count += best is not None
    step, batch = chosen.estimate.time.step, job.workload.batch
    found = {it.name: it for it in rank_improvements(job, step, chosen=chosen.plan)}
    for name, changed in improved_jobs(job):
        expected = whole_search(changed)
        assert (name in found) == (expected is not None), name
        if expected is not None:
            speed = step / expected[1] * changed.workload.batch / batch
            assert (found[name].plan, found[name].speed) == (expected[0], pytest.approx(speed, rel=1e-12)), name
    return count + len(found)


@pytest.mark.parametrize("seed", [5, 7, *(pytest.param(each, marks=pytest.mark.soak) for each in (2, 3, 11, 13))])
def test_degrees_and_improvements_have_the_plans_of_whole_searches(seed: int) -> None:
    equals_whole_searches(random_job(random.Random(seed).choice))


@pytest.mark.parametrize("memory", [64e6, *(pytest.param(each, marks=pytest.mark.soak) for each in (6e6, 12e6))])
def test_plans_with_little_memory_have_the_advice_of_whole_searches(memory: float) -> None:
    on = cluster(2, 2, memory)
    host = on.groups[0].but(host_bandwidth=1e12, host_memory=1e9)
    job = small_job(decoder(((4, 256),), hidden=128, heads=4), on.but(groups=(host,)), 8)
    assert equals_whole_searches(job) > 10


@pytest.mark.parametrize(
    "job",
    [
        unlike_job(),
        pytest.param(unlike_job(slower=3.0, less=2.0), marks=pytest.mark.soak),
        pytest.param(heavy_job(slower=3.0, batch=16), marks=pytest.mark.soak),
    ],
)
def test_advice_on_unlike_groups_has_the_plans_of_whole_searches(job: Job) -> None:
    assert equals_whole_searches(job) > 5


def test_the_plan_with_the_lowest_memory_is_known_after_the_search() -> None:
    for memory in (12e6, 64e6):
        job = small_job(decoder(((4, 256),), hidden=128, heads=4), cluster(2, 2, memory), 8)
        answer, again = search_plans(job, 10), search_top_plans(job, 1).ranking
        assert answer.lowest_memory is not None
        every = [*again.nearest.values(), *again.families.values()]
        assert answer.lowest_memory.reserved == min(it.reserved for it in every)
