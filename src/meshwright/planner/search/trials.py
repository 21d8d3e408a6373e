"""Trials: runs the best plans for a few steps, refits the cluster, and ranks the plans again.

- Refit: one factor for all devices and one for all links. The factors minimise the sum of log(estimate / measured)^2
  over the trials plus RIDGE_WEIGHT log(factor)^2, so that a trial moves little that it says nothing about.
- Next trial: the best plan; then the best plan with other degrees, which measures what the first cannot; then the first
  untried plan of the refitted ranking, as long as it promises MIN_TRIAL_GAIN over the best measured plan.

The refitted cluster is an ordinary `Cluster`. The whole search runs on it, and it is saved for the next job.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import log

from pydantic import Field

from meshwright.core.codec import StrictModel, TranslatableText
from meshwright.core.quantities import Seconds
from meshwright.planner.cost.step import estimate
from meshwright.planner.search.rank import search_plans
from meshwright.spec.cluster import Cluster, Link, NodeGroup
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

MIN_TRIAL_GAIN = 0.01
"""Part of the step that another trial must promise."""

RIDGE_WEIGHT = 5e-4
REFIT_STEP_FACTORS = (2.0, 1.3, 1.08, 1.02, 1.005)
REFIT_ROUNDS, FREE_SPEEDUP = 3, 1e6
"""Rounds of refitting, and the speed-up at which a part of the step costs nothing."""

MAX_TRIAL_CANDIDATES = 40
"""Plans among which the next one is looked for."""


class Trial(StrictModel):
    """A plan that was run; `why` it could not be, where `measured` is None. `predicted` before it was run."""

    plan: Plan
    predicted: Seconds
    measured: Seconds | None = None
    why: TranslatableText = ""
    busy: float = Field(default=0.0, ge=0, description="processors that other programs kept busy meanwhile")


def next_trial(job: Job, trials: Sequence[Trial], most: int) -> tuple[Plan, float] | None:
    """What to run next, and the seconds that it is predicted to take; None when that would teach nothing, or `most`
    have been run."""
    if len(trials) >= most:
        return None
    again = refit_job(job, trials)
    tried = {trial.plan for trial in trials}
    entries = [
        entry for entry in search_plans(again, MAX_TRIAL_CANDIDATES, runnable=True).plans if entry.plan not in tried
    ]
    measured = [trial.measured for trial in trials if trial.measured]
    if trials and len(measured) == 1:
        degrees = {_plan_degrees(trial.plan) for trial in trials}
        entries = [entry for entry in entries if _plan_degrees(entry.plan) not in degrees] or entries
    elif measured:
        entries = [entry for entry in entries if entry.estimate.time.step < (1.0 - MIN_TRIAL_GAIN) * min(measured)]
    return (entries[0].plan, entries[0].estimate.time.step) if entries else None


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """The fastest that was measured."""
    ran = [trial for trial in trials if trial.measured]
    return min(ran, key=lambda trial: trial.measured or 0.0, default=None)


def refit_job(job: Job, trials: Sequence[Trial]) -> Job:
    """`job` on the cluster with which its estimates come nearest to `trials`."""
    ran = [trial for trial in trials if trial.measured]
    compute = links = 1.0
    for _ in range(REFIT_ROUNDS if ran else 0):
        parts = [(_step_parts(job, trial.plan, compute, links), trial.measured or 1.0) for trial in ran]
        compute, links = _fit_factors(parts, compute, links)
    return job.but(cluster=scale_cluster(job.cluster, compute, links)) if ran else job


def _step_parts(job: Job, plan: Plan, compute: float, links: float) -> tuple[float, float, float]:
    """Seconds of a step that go with the devices, with the links, with neither: what is left when one of them is
    free."""

    def step(compute: float, links: float) -> float:
        return estimate(job.but(cluster=scale_cluster(job.cluster, compute, links)), plan).time.step

    whole, exchanged, computed = (
        step(compute, links),
        step(compute * FREE_SPEEDUP, links),
        step(compute, links * FREE_SPEEDUP),
    )
    return whole - exchanged, whole - computed, max(exchanged + computed - whole, 0.0)


def _fit_factors(
    parts: Sequence[tuple[tuple[float, float, float], float]], compute: float, links: float
) -> tuple[float, float]:
    """The factors with which the parts come nearest to what was measured: a search in two numbers."""

    def loss(at: tuple[float, float]) -> float:
        sums = ((a / at[0] + b / at[1] + rest) / measured for (a, b, rest), measured in parts)
        return sum(log(each) ** 2 for each in sums) + RIDGE_WEIGHT * (
            log(compute * at[0]) ** 2 + log(links * at[1]) ** 2
        )

    at, least = (1.0, 1.0), loss((1.0, 1.0))
    for size in REFIT_STEP_FACTORS:
        moved = True
        while moved:
            moved = False
            for first, second in product((size, 1.0, 1 / size), repeat=2):
                if (found := loss((at[0] * first, at[1] * second))) < least * (1.0 - 1e-9):
                    at, least, moved = (at[0] * first, at[1] * second), found, True
    return compute * at[0], links * at[1]


def scale_cluster(cluster: Cluster, compute: float, links: float) -> Cluster:
    """Devices `compute` times as fast, links `links` times.

    >>> from meshwright.spec.cluster import Device
    >>> link = Link(name="a", bandwidth=1e9, latency=1e-5)
    >>> device = Device(name="d", memory=1e9, bandwidth=1e9, peak={"fp32": 1e9})
    >>> group = NodeGroup(nodes=1, devices=2, device=device, link=link)
    >>> found = scale_cluster(Cluster(name="c", groups=(group,), network=link), 2.0, 0.5)
    >>> found.groups[0].device.peak, found.network.bandwidth, found.groups[0].link.latency
    ({'fp32': 2000000000.0}, 500000000.0, 2e-05)
    """

    def link(each: Link) -> Link:
        return each.but(bandwidth=each.bandwidth * links, latency=each.latency / links, meeting=each.meeting / links)

    def group(each: NodeGroup) -> NodeGroup:
        device = each.device
        peak = {name: rate * compute for name, rate in device.peak.items()}
        faster = device.but(peak=peak, bandwidth=device.bandwidth * compute, launch=device.launch / compute)
        return each.but(device=faster, link=link(each.link))

    return cluster.but(groups=tuple(map(group, cluster.groups)), network=link(cluster.network))


def _plan_degrees(plan: Plan) -> tuple[int, ...]:
    return plan.dp, plan.tp, plan.pp, plan.cp, plan.ep
