"""Ranks the plans of a job for `meshwright plan`, the Python API and re-planning. `search_plans` returns the best plans
that fit, the rejected plans with reasons, and the best plan of every family.

The objectives `fewest` and `cheapest` run this search on each smaller cluster. A smaller cluster has fewer nodes, or
fewer devices if the cluster has only one node.

Offload fractions: the search offloads all optimizer states or none, and all weights or none. `minimize_offload` then
lowers the offloaded fractions of the resulting plans. The costs of all pairs (fraction of states, fraction of weights)
in steps of FRACTION_STEP_PERCENT are computed together. Only pairs count whose fit status is at least that of the
original plan. The fastest of these pairs is chosen; among equally fast pairs, the pair with the lowest fraction of
states, then of weights. If states and weights are both offloaded and the host updates the weights, the fraction of
weights is at most the fraction of states.

Guarantees: a plan with lower fractions is not slower than the original plan. If the original plan fits with the safety
margin, so does the new plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from meshwright.core.errors import InputError, NothingFits
from meshwright.core.messages import Message
from meshwright.planner.cost.communicators import driver_bytes
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.memory import memory_limit, physical_limit, reserved_bytes
from meshwright.planner.cost.plan_grid import Array, PlanGrid, broadcast_to_axis
from meshwright.planner.cost.step import estimate, estimate_grid
from meshwright.planner.inputs.plan_only import plan_only_parts, untrainable_part
from meshwright.planner.search import heterogeneous
from meshwright.planner.search.best_plans import (
    PlanCandidate,
    PlanFamily,
    PlanRejection,
    RankedPlan,
    SearchObjective,
    SearchResult,
    TopK,
    plan_family,
    round_score,
)
from meshwright.planner.search.branch_and_bound import PlanSearch, search_top_plans
from meshwright.planner.search.feasibility import OFFLOAD_FRACTION_PINS
from meshwright.planner.search.infeasible import infeasibility_error
from meshwright.planner.search.run_cost import with_power_as_price
from meshwright.spec.cluster import Cluster
from meshwright.spec.enums import offloads_states, offloads_weights, upgrade_offload_fields
from meshwright.spec.estimate import FIT_STATUS_ORDER, Estimate
from meshwright.spec.job import Job
from meshwright.spec.workload_constraints import UpdateProperties

FRACTION_STEP_PERCENT = 5
"""Difference between neighbouring offload fractions, in percent. Memory estimates are not accurate enough for smaller
differences."""

OFFLOAD_FRACTIONS = np.arange(FRACTION_STEP_PERCENT, 101, FRACTION_STEP_PERCENT) / 100


def minimize_offload(pricer: CostModel, box: PlanGrid) -> tuple[PlanGrid, Estimate]:
    """Returns the grid with the only plan of `box` under lower offload fractions, and the estimate of this plan. The
    result is `box` and its estimate if the plan does not fit, if it offloads neither states nor weights, if the
    fractions are pinned, or if lower fractions make it slower."""
    whole = estimate_grid(pricer, box)
    less = _fastest_fractions(pricer, box, FIT_STATUS_ORDER.index(whole.verdict)) if whole.fits else None
    if less is None:
        return box, whole
    price = estimate_grid(pricer, less)
    return (less, price) if price.time.step <= whole.time.step else (box, whole)


def _fastest_fractions(pricer: CostModel, box: PlanGrid, safety: int) -> PlanGrid | None:
    """Returns `box` with the best offload fractions whose fit status is at least `safety` (an index into
    FIT_STATUS_ORDER), or None if the fractions cannot vary."""
    job, (offload,) = pricer.setting.job, box.offload
    pins, both = upgrade_offload_fields(job.pins), offloads_states(offload) and offloads_weights(offload)
    of_states, of_weights = (
        OFFLOAD_FRACTIONS if waits(offload) and name not in pins else np.array([float(getattr(box, name))])
        for name, waits in OFFLOAD_FRACTION_PINS.items()
    )
    states, weights = (part.reshape(-1) for part in np.meshgrid(of_states, of_weights))
    if len(states) == 1:
        return None
    many = replace(box, offload_share=broadcast_to_axis(states, "f"), weights_share=broadcast_to_axis(weights, "f"))
    legal = states >= weights if both and UpdateProperties.of(job.workload, job.cluster).there else np.array(True)
    step = np.broadcast_to(pricer.price(many).step.reshape(-1), states.shape)
    as_safe = np.flatnonzero((_fit_levels(pricer, many) >= safety) & legal)
    found = min(((round_score(float(step[at])), float(states[at]), float(weights[at])) for at in as_safe), default=None)
    return None if found is None else replace(box, offload_share=found[1], weights_share=found[2])


def _fit_levels(pricer: CostModel, box: PlanGrid) -> Array:
    """Returns the fit status of each plan of `box` along f, as an index into FIT_STATUS_ORDER."""
    setting, prices = pricer.setting, pricer.price(box)
    taken, safe = reserved_bytes(setting, prices.allocated, driver_bytes(setting, box))
    fits = (taken <= memory_limit(setting)) & (prices.on_host <= setting.host_memory)
    return np.asarray(np.where(fits, np.where(safe <= physical_limit(setting), 2, 1), 0).reshape(-1))


def search_plans(
    job: Job,
    top: int = 10,
    objective: SearchObjective = SearchObjective.fastest,
    runnable: bool = False,
    longest: float = float("inf"),
) -> SearchResult:
    """Returns the `top` best plans of `job` that fit. `runnable`: whether to return only plans that this version can
    run. Plans whose step takes longer than `longest` seconds are left out.

    Raises: NothingFits if no plan fits; the message names the nearest plan and changes with which a plan would fit.
    InputError if no plan is legal, if the objective is `cheapest` and a device has no price, or if `runnable` is set
    and this version cannot train on the devices.
    """
    began = time.perf_counter()
    if runnable and (fault := untrainable_part(job.model, job.cluster)) is not None:
        raise InputError(fault)
    if objective == SearchObjective.energy:
        job, objective = job.but(cluster=with_power_as_price(job.cluster)), SearchObjective.cheapest
    found = search_cluster_sizes(job, top, objective, runnable, longest)
    entries, families = rank_plans(job, found, top, objective, runnable)
    if not entries and np.isfinite(longest):
        raise _too_slow_error(job, runnable, longest)
    if not entries:
        raise infeasibility_error(found)
    return SearchResult(
        plans=entries,
        families=families,
        lowest_memory=lowest_memory_plan(found.ranking) if objective == SearchObjective.fastest else None,
        considered=found.space.considered,
        rejected=tuple(
            PlanRejection(reason=reason, count=it.count, example=it.example)
            for reason, it in found.space.rejected.items()
        ),
        seconds=time.perf_counter() - began,
        devices=found.space.job.cluster.devices,
    )


def _too_slow_error(job: Job, runnable: bool, longest: float) -> NothingFits:
    """Returns the error if no plan has a step of at most `longest` seconds. Raises the error of a search without this
    limit if no plan fits at all."""
    fastest = search_plans(job, 1, SearchObjective.fastest, runnable).chosen
    return NothingFits(
        Message(
            "no plan is fast enough: the step may take {longest:seconds}, and the fastest plan ({plan}) takes "
            "{seconds:seconds} on {devices:count device}: allow more time, or add devices",
            longest=longest,
            plan=fastest.name,
            seconds=fastest.estimate.time.step,
            devices=job.cluster.devices,
        )
    )


def rank_plans(
    job: Job, found: PlanSearch, top: int, objective: SearchObjective = SearchObjective.fastest, runnable: bool = False
) -> tuple[tuple[RankedPlan, ...], tuple[PlanFamily, ...]]:
    """Returns the ranked plans of the search `found`, and the best plan of every family. With the objective `fastest`,
    plans over heterogeneous groups are included."""
    scored = [_ranked_plan(found.pricer, each, objective) for each in found.ranking.best]
    if objective == SearchObjective.fastest:
        scored += [
            (score, RankedPlan(plan=plan, estimate=estimate(job, plan)))
            for score, plan in heterogeneous.heterogeneous_plans(job, top, runnable)
        ]
        scored = sorted(scored, key=lambda pair: round_score(pair[0]))
    kin = best_per_family(found.ranking, scored if objective == SearchObjective.fastest else ())
    return tuple(entry.but(runs=not plan_only_parts(job, entry.plan)) for _, entry in scored[:top]), kin


def _ranked_plan(pricer: CostModel, candidate: PlanCandidate, objective: SearchObjective) -> tuple[float, RankedPlan]:
    """Returns a candidate as a pair (score, ranked plan). Unless the objective is the lowest memory, the plan has the
    offload fractions of `minimize_offload`."""
    if objective == SearchObjective.headroom:
        plan = candidate.plan
        return candidate.score, RankedPlan(plan=plan, estimate=estimate(pricer.setting.job, plan))
    box, priced = minimize_offload(pricer, candidate.grid)
    plan = box.plan((0,) * len(box.shape))
    gain = priced.time.step / candidate.seconds if min(plan.offload_share, plan.weights_share) < 100 else 1.0
    return candidate.score * gain, RankedPlan(plan=plan, estimate=priced)


def search_cluster_sizes(
    job: Job, top: int, objective: SearchObjective, runnable: bool, longest: float = float("inf")
) -> PlanSearch:
    """Returns the search on the cluster size that is best for the objective, among plans whose score is at most
    `longest` seconds. With `fewest`, sizes are searched in
    ascending order until a plan fits. With `cheapest`, all sizes are searched. With other objectives, only the whole
    cluster is searched. If no plan fits on any size, the result is the search on the whole cluster. Raises InputError
    if the objective is `cheapest` and a device has no price."""
    if objective not in (SearchObjective.fewest, SearchObjective.cheapest):
        limited = objective == SearchObjective.fastest
        return search_top_plans(job, top, objective, runnable, longest if limited else float("inf"))
    chosen, lowest = None, float("inf")
    for cluster in smaller_clusters(job.cluster):
        price = cluster.price
        if objective == SearchObjective.cheapest and price is None:
            unpriced = dict.fromkeys(group.device.name for group in cluster.groups if group.device.price is None)
            raise InputError(
                Message(
                    "the cheapest plan needs the price of {devices}: add --price, or give each device of the cluster "
                    "file a price, in money per device hour",
                    devices=", ".join(unpriced),
                )
            )
        try:
            found = search_top_plans(
                job.but(cluster=cluster), top, objective, runnable, ceiling=min(lowest / (price or 1.0), longest)
            )
        # The pinned degrees do not divide this number of devices. The error is raised only if no plan exists on any
        # cluster size.
        except InputError:
            continue
        if not found.ranking.best:
            continue
        if objective == SearchObjective.fewest:
            return found
        money = found.ranking.best[0].score * (price or 0.0)
        if money < lowest:
            chosen, lowest = found, money
    return chosen or search_top_plans(job, top, objective, runnable, longest)


def with_used_devices(job: Job, answer: SearchResult) -> Job:
    """Returns `job` on the smaller cluster with the devices that the plans in `answer` use."""
    if answer.devices in (0, job.cluster.devices):
        return job
    return job.but(cluster=next(each for each in smaller_clusters(job.cluster) if each.devices == answer.devices))


def smaller_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """Yields smaller clusters in ascending order: with fewer nodes, or with fewer devices if the cluster has one node.
    The whole cluster is last."""
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


def lowest_memory_plan(ranking: TopK) -> PlanFamily | None:
    """Returns the plan with the lowest memory of all families, or None if the search had a ceiling. Of plans with equal
    memory, the faster one is returned."""
    found = [(name, it) for each in (ranking.nearest, ranking.families) for name, it in each.items()]
    if not found or np.isfinite(ranking.ceiling):
        return None
    name, least = min(found, key=lambda pair: (pair[1].reserved, pair[1].seconds))
    fits = name in ranking.families
    return PlanFamily(name=name, plan=least.plan, fits=fits, seconds=least.seconds, reserved=least.reserved)


def best_per_family(ranking: TopK, ranked: Sequence[tuple[float, RankedPlan]] = ()) -> tuple[PlanFamily, ...]:
    """Returns one plan of each family. Families in which a plan fits are first, with their best plans, sorted by step
    time. The other families follow, with the plans nearest to fitting.

    During the search, families contain only plans with uniform recompute and without offload. A plan in `ranked` may be
    better, so it replaces the best plan of its family if its score is lower.
    """
    scores = {name: it.score for name, it in ranking.families.items()}
    found = {
        name: PlanFamily(name=name, plan=it.plan, fits=name in scores, seconds=it.seconds, reserved=it.reserved)
        for name, it in {**ranking.nearest, **ranking.families}.items()
    }
    for score, entry in ranked:
        name = plan_family(entry.plan)
        if round_score(score) < round_score(scores.get(name, float("inf"))):
            scores[name], price = score, entry.estimate
            found[name] = PlanFamily(
                name=name, plan=entry.plan, fits=True, seconds=price.time.step, reserved=price.memory.reserved
            )
    return tuple(
        sorted(found.values(), key=lambda family: (not family.fits, family.seconds if family.fits else family.reserved))
    )
