"""Completes plans that are parsed from a name. A name has no bucket size, and without `mb` it leaves the micro-batch
open: the whole batch of a replica, or the largest part of it that fits into memory."""

from __future__ import annotations

from meshwright.core.errors import InputError
from meshwright.planner.cost.cost_context import build_cost_context
from meshwright.planner.cost.overlap import choose_bucket
from meshwright.planner.cost.step import estimate
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan, default_micro_batches, parse_plan
from meshwright.spec.plan_name import is_open


def with_chosen_bucket(job: Job, plan: Plan) -> Plan:
    """Returns `plan` with the bucket size that a search of `job` would choose, unless the plan sets one."""
    if "bucket" in plan.model_fields_set:
        return plan
    return plan.model_copy(update={"bucket": job.pins.get("bucket") or choose_bucket(build_cost_context(job))})


def complete_plan(job: Job, plan: Plan) -> Plan:
    """Returns `plan` with a bucket size. If its name leaves the micro-batch open, the plan gets the largest one that
    fits, or the smallest one if none fits. If `job` cannot run the plan with any micro-batch, it stays open."""
    plan = with_chosen_bucket(job, plan)
    sizes = default_micro_batches(plan, job.workload.batch) if is_open(plan) else []
    for size in [job.workload.exact] if sizes and job.workload.exact else sizes:
        sized = plan.but(micro_batch=size)
        try:
            fits = estimate(job, sized).fits
        except InputError:
            continue
        plan = sized
        if fits:
            break
    return plan


def read_named_plan(job: Job, plan: Plan | str) -> Plan:
    """Returns the complete plan for a plan or its name."""
    return complete_plan(job, parse_plan(plan, lambda: job.cluster.devices) if isinstance(plan, str) else plan)


def with_micro_batch(job: Job, plan: Plan) -> Job:
    """Returns `job` with the micro-batch of the complete `plan` as a pin. If the plan is still open, it cannot run on
    all devices of `job`. The pins then stay as they are, and a search of fewer devices chooses the micro-batch."""
    return job if is_open(plan) else job.but(pins={**job.pins, "micro_batch": plan.micro_batch})
