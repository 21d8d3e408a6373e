"""Selects plans for trials and refits the cluster to the measured step times. A trial runs a plan for a few steps.
`meshwright train --trials` uses this module.

- Refit: there is one speed factor for all devices and one for all links. The factors minimise the sum of log(estimate /
  measured)^2 over the trials, plus RIDGE_WEIGHT log(factor)^2 for each factor. Because of the second term, a factor
  stays near 1 if the step times do not depend on this factor.
- Next trial: the first trial is the best plan. The second trial is the best plan whose degrees differ from those of the
  first, because its time depends in other proportions on devices and links. Each further trial is the plan with the
  largest expected gain over the best measured plan. Trials end if no expected gain is at least MIN_TRIAL_GAIN and the
  estimates of all trials were right to RELIABLE_ERROR.
- Expected gain: let e be log(measured / expected) of a plan. The expected seconds are the middle of the interval of the
  estimate on a logarithmic scale (planner/cost/uncertainty.py), because steps are more often far slower than predicted
  than far faster. e is a Gaussian process with the mean 0 and the size of the errors so far (at least MIN_ERROR). Its
  variance has these shares, so a plan that is many times slower than its estimate makes those plans less likely that
  share a feature with it:
  - FEATURE_SHARE for all plans together, and for each of four groups of features: tp and whether it crosses nodes, pp,
    the ZeRO stage, and dp with cp and the micro-batch size. The correlation in a group is exp(-d^2 / 2), where d is the
    distance of two plans in the group, with degrees as log2;
  - NEIGHBOUR_SHARE for plans that are close in all groups, with the product of the four correlations;
  - the rest for each plan alone.
  The expected gain is the mean of max(0, log(best measured) - log(step)) (Jones, Schonlau, Welch, Efficient Global
  Optimization, 1998, section 4.1).
- A trial that takes more than PATHOLOGY_FACTOR times as long as its estimate, relative to the trial with the smallest
  such ratio, does not count for the refit: no speed of devices and links explains it.

The refitted cluster is an ordinary `Cluster`. The search runs on this cluster, and the cluster is saved for the next
job.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import erf, log, log2, pi, sqrt
from typing import NamedTuple

import numpy as np
from pydantic import Field

from meshwright.core.codec import StrictModel, TranslatableText
from meshwright.core.quantities import Seconds
from meshwright.planner.cost.plan_grid import Array
from meshwright.planner.cost.step import estimate
from meshwright.planner.search.ranking import search_plans
from meshwright.spec.cluster import Cluster, Link, NodeGroup
from meshwright.spec.estimate import Estimate
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

MIN_TRIAL_GAIN = 0.01
"""Minimum expected gain for a further trial, as a fraction of the best measured step time."""

RELIABLE_ERROR, MIN_ERROR, MEASUREMENT_NOISE = 0.1, 0.02, 0.02
"""Sizes of log(measured / predicted): up to which estimates count as right, the least that is assumed for plans without
a trial, and the noise of a measurement."""

PATHOLOGY_FACTOR = 2.0
"""How many times as long as expected a step may take if only the speed of devices and links is unknown."""

FEATURE_SHARE, NEIGHBOUR_SHARE = 0.1, 0.25
"""Shares of the variance of errors. On random parts of the published sweeps, five trials leave 3 % more than the
fastest plan in the mean with them, and 8 % if all variance is of neighbours."""

RIDGE_WEIGHT = 5e-4
REFIT_STEP_FACTORS = (2.0, 1.3, 1.08, 1.02, 1.005)
REFIT_ROUNDS, FREE_SPEEDUP = 3, 1e4
"""The number of iterations of the refit, and a speed-up so large that the accelerated devices or links take almost no
time, and with which all rates are still valid in a cluster."""

MAX_TRIAL_CANDIDATES = 40
"""Number of ranked plans from which the next trial is chosen."""


class Trial(StrictModel):
    """A trial of a plan. `predicted` is the estimated seconds of a step before the trial, `measured` the measured
    seconds. If the plan could not run, `measured` is None and `why` is the reason."""

    plan: Plan
    predicted: Seconds
    measured: Seconds | None = None
    why: TranslatableText = ""
    busy: float = Field(
        default=0.0, ge=0, description="mean number of processors that other programs used during the trial"
    )


def next_trial(job: Job, trials: Sequence[Trial], most: int) -> tuple[Plan, float] | None:
    """Returns the plan of the next trial and the predicted seconds of a step. Returns None after `most` trials, or if
    no untried plan has a predicted gain of at least MIN_TRIAL_GAIN."""
    if len(trials) >= most:
        return None
    again = refit_job(job, trials)
    tried = {trial.plan for trial in trials}
    entries = [
        entry for entry in search_plans(again, MAX_TRIAL_CANDIDATES, runnable=True).plans if entry.plan not in tried
    ]
    measured = [trial for trial in trials if trial.measured]
    if trials and len(measured) == 1:
        degrees = {plan_degrees(trial.plan) for trial in trials}
        entries = [entry for entry in entries if plan_degrees(entry.plan) not in degrees] or entries
    elif measured and entries:
        ran = [TrialCandidate.of(trial.plan, estimate(again, trial.plan), trial.measured or 0.0) for trial in measured]
        candidates = [TrialCandidate.of(entry.plan, entry.estimate) for entry in entries]
        at = largest_expected_gain(candidates, ran, max(group.devices for group in job.cluster.groups))
        return None if at is None else (entries[at].plan, entries[at].estimate.time.step)
    return (entries[0].plan, entries[0].estimate.time.step) if entries else None


class TrialCandidate(NamedTuple):
    """A plan, the predicted seconds of a step, the expected seconds (the middle of the interval), and the measured
    seconds, or 0 without a trial."""

    plan: Plan
    predicted: float
    expected: float
    measured: float = 0.0

    @classmethod
    def of(cls, plan: Plan, priced: Estimate, measured: float = 0.0) -> TrialCandidate:
        """Returns the entry of a plan with its estimate."""
        interval = priced.step_interval
        expected = sqrt(interval.low * interval.high) if interval else priced.time.step
        return cls(plan, priced.time.step, expected, measured)


def largest_expected_gain(
    candidates: Sequence[TrialCandidate], ran: Sequence[TrialCandidate], devices_per_node: int
) -> int | None:
    """Returns the index of the candidate with the largest expected gain, or None if trials should end. `ran` is the
    plans with a trial."""
    errors = np.array([log(each.measured / each.expected) for each in ran])
    size = max(float(np.sqrt(np.mean(errors**2))), MIN_ERROR)
    tried, new = (
        np.array([_plan_features(each.plan, devices_per_node) for each in rows]) for rows in (ran, candidates)
    )
    own = (1.0 - 5 * FEATURE_SHARE - NEIGHBOUR_SHARE) * size**2 + MEASUREMENT_NOISE**2
    between = size**2 * _error_correlation(tried, new)
    known = size**2 * _error_correlation(tried, tried) + own * np.eye(len(ran))
    weights = np.linalg.solve(known, between).T
    mean = np.log([each.expected for each in candidates]) + weights @ errors
    spread = np.sqrt(np.maximum(size**2 - (weights * between.T).sum(axis=1), 1e-12))
    ahead = log(min(each.measured for each in ran)) - mean
    below = np.array([0.5 * (1.0 + erf(each / sqrt(2.0))) for each in ahead / spread])
    gains = ahead * below + spread * np.exp(-((ahead / spread) ** 2) / 2.0) / sqrt(2.0 * pi)
    best = int(gains.argmax())
    right = all(abs(log(each.measured / each.predicted)) <= RELIABLE_ERROR for each in ran)
    return None if gains[best] < MIN_TRIAL_GAIN and right else best


def _plan_features(plan: Plan, devices_per_node: int) -> tuple[float, ...]:
    """Returns the features of a plan, in the order of FEATURE_GROUPS."""
    tensor, pipeline = (log2(plan.tp), float(plan.tp > devices_per_node)), (log2(plan.pp), float(plan.pp > 1))
    return (*tensor, *pipeline, float(plan.zero), log2(plan.dp), log2(plan.cp), log2(plan.micro_batch))


FEATURE_GROUPS = (slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 8))


def _error_correlation(left: Array, right: Array) -> Array:
    """Returns the correlation of the errors of two different plans, over (left, right)."""
    distance = (left[:, None] - right[None]) ** 2
    groups = np.stack([np.exp(-distance[..., part].sum(axis=2) / 2.0) for part in FEATURE_GROUPS])
    return np.asarray(FEATURE_SHARE * (1.0 + groups.sum(axis=0)) + NEIGHBOUR_SHARE * groups.prod(axis=0))


def best_trial(trials: Sequence[Trial]) -> Trial | None:
    """Returns the trial with the shortest measured step, or None if no plan ran."""
    ran = [trial for trial in trials if trial.measured]
    return min(ran, key=lambda trial: trial.measured or 0.0, default=None)


def is_pathological(trial: Trial, trials: Sequence[Trial]) -> bool:
    """Returns whether `trial` took more than PATHOLOGY_FACTOR times as long as its estimate and the other trials let
    expect."""
    ratios = [each.measured / each.predicted for each in trials if each.measured and each.predicted]
    return bool(
        trial.measured and trial.predicted and trial.measured / trial.predicted > PATHOLOGY_FACTOR * min(ratios)
    )


def refit_job(job: Job, trials: Sequence[Trial]) -> Job:
    """Returns `job` on the refitted cluster, whose estimates are nearest to the measured times of `trials`."""
    ran = [trial for trial in trials if trial.measured and not is_pathological(trial, trials)]
    compute = links = 1.0
    for _ in range(REFIT_ROUNDS if ran else 0):
        parts = [(_step_parts(job, trial.plan, compute, links), trial.measured or 1.0) for trial in ran]
        compute, links = _fit_factors(parts, compute, links)
    return job.but(cluster=scale_cluster(job.cluster, compute, links)) if ran else job


def _step_parts(job: Job, plan: Plan, compute: float, links: float) -> tuple[float, float, float]:
    """Returns three parts of the estimated seconds of a step: the parts that depend on the devices, on the links, and
    on neither. These parts are computed from estimates with almost infinitely fast devices or links. `compute` and
    `links` are the speed factors of the cluster."""

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
    """Returns the speed factors of devices and of links with which the estimates are nearest to the measurements, by a
    search over both factors. `parts` has, for each trial, the result of `_step_parts` and the measured seconds.
    `compute` and `links` are the current factors."""

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
    """Returns the cluster with devices `compute` times as fast and links `links` times as fast.

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

    tiers = tuple(map(link, cluster.tiers))
    return cluster.but(groups=tuple(map(group, cluster.groups)), network=link(cluster.network), tiers=tiers)


def plan_degrees(plan: Plan) -> tuple[int, ...]:
    """Returns the degrees of parallelism of a plan."""
    return plan.dp, plan.tp, plan.pp, plan.cp, plan.ep
