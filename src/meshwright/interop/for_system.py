"""Searches the best plan that another system can run, under the planner's profile of the system: its runtime and its
kernels (planner/validation/frameworks.py). Compares it with a given configuration and with the best plan here.

Guarantees: for each mode of the system (`PlanSpaceLimit`), the search is exact, except that plans that a rule of the
mode refuses are removed from the `SEARCHED_PLANS` best.
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.core.errors import InputError, NothingFits
from meshwright.core.messages import Message
from meshwright.interop.system import ANY, PlanSpaceLimit, System
from meshwright.planner.cost.cost_model import CostModel
from meshwright.planner.cost.overlap import choose_bucket
from meshwright.planner.cost.plan_grid import grid_of_plan
from meshwright.planner.cost.step import estimate_grid
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
from meshwright.planner.search.best_plans import SearchObjective, TopK, round_score
from meshwright.planner.search.branch_and_bound import PlanSearch
from meshwright.planner.search.ranking import minimize_offload
from meshwright.planner.search.space import PlanSpace
from meshwright.planner.validation.frameworks import EAGER_TORCH, FRAMEWORKS, Framework, framework_model_spec
from meshwright.spec.estimate import Estimate
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan

SEARCHED_PLANS = 30
"""Number of plans of each mode that are kept before its rule removes plans."""


class SystemPlan(NamedTuple):
    """A plan that a system can run, with its estimate under the system's profile."""

    plan: Plan
    estimate: Estimate


def profile_of(system: System) -> Framework:
    """Returns the planner's profile of a system."""
    return next((each for each in FRAMEWORKS if each.name == system.framework), EAGER_TORCH)


def system_pricer(job: Job, system: System, sizes: ArchitectureSizes | None) -> CostModel:
    """Returns the cost model of `job` in `system`. Without the sizes of the model, its kernels are those of this
    project."""
    profile = profile_of(system)
    if sizes is not None and sizes.kind != "convnet" and job.workload.lora is None:
        job = job.but(model=framework_model_spec(job.model.name, sizes, profile.kernels))
    return CostModel(job, profile.practice)


def price_in(job: Job, plan: Plan, system: System, sizes: ArchitectureSizes | None) -> Estimate:
    """Returns the estimate of `plan` under the profile of `system`."""
    pricer = system_pricer(job, system, sizes)
    bucket = plan.bucket if "bucket" in plan.model_fields_set else choose_bucket(pricer.setting)
    return estimate_grid(pricer, grid_of_plan(plan.but(bucket=bucket), job.workload.batch, job.model.blocks))


def best_plan_for(job: Job, system: System, sizes: ArchitectureSizes | None) -> SystemPlan:
    """Returns the fastest plan that `system` can run and that fits (`plans_for`)."""
    return plans_for(job, system, sizes, 1)[0]


def plans_for(job: Job, system: System, sizes: ArchitectureSizes | None, top: int) -> list[SystemPlan]:
    """Returns the `top` fastest plans that `system` can run and that fit.

    Raises: NothingFits if no such plan fits; InputError if the pins exclude all plans.
    """
    pricer = system_pricer(job, system, sizes)
    found = sorted(
        (each for limit in system.limits for each in _search(pricer, limit)), key=lambda scored: round_score(scored[0])
    )
    if not found:
        raise NothingFits(
            Message(
                "no plan that {system} can run fits on {devices:count device}",
                system=system.title,
                devices=job.cluster.devices,
            )
        )
    return [each for _, each in found[:top]]


def _search(pricer: CostModel, limit: PlanSpaceLimit) -> list[tuple[float, SystemPlan]]:
    """Returns plans of one mode that fit, with their scores."""
    job = pricer.setting.job
    allowed = {name: values for name in Plan.model_fields if (values := limit.allowed(name)) is not ANY}
    for free in ("bucket", "version", "loss_chunks", "shares", "micro_batch_sizes", "placement"):
        allowed.pop(free, None)
    try:
        space = PlanSpace(job, bucket=choose_bucket(pricer.setting), allowed=allowed)
        found = PlanSearch(pricer, space, TopK(SEARCHED_PLANS, float("inf"), by_family=False), SearchObjective.fastest)
        found.explore()
    except InputError:
        return []
    plans = []
    for candidate in found.ranking.best:
        plan = candidate.plan
        if limit.violations(plan) or limit.rule(plan):
            continue
        grid = candidate.grid
        if limit.allowed("offload_share") is ANY:
            grid, _ = minimize_offload(pricer, grid)
        chosen = grid.plan((0,) * len(grid.shape))
        chosen = plan if limit.violations(chosen) else chosen
        priced = estimate_grid(pricer, grid_of_plan(chosen, job.workload.batch, job.model.blocks))
        gain = priced.time.step / candidate.seconds
        plans.append((candidate.score * gain, SystemPlan(chosen, priced)))
    return plans
