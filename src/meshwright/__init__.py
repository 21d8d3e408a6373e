"""Meshwright: plan, prove, run and keep running the training of any PyTorch model on any cluster. Importing this
imports no torch.

    job = mw.load("job.yaml")                  # model, cluster, workload, pins
    best = mw.plan(job)[0]                     # .plan, .estimate
    trainer = mw.parallelize(model, optimizer=..., plan=best.plan)

What stands behind a name is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright.planner.search.result import RankedPlan
    from meshwright.planner.simulate.run import simulate
    from meshwright.runtime.deferred_init import deferred_init
    from meshwright.spec.estimate import Estimate
    from meshwright.spec.faults import Faults
    from meshwright.spec.job import Job
    from meshwright.spec.plan import Plan, parse_plan
    from meshwright.spec.precision import recipe
    from meshwright.train.trainer import parallelize

__version__ = "0.1.0"
__all__ = [
    "Faults",
    "Job",
    "Plan",
    "__version__",
    "deferred_init",
    "estimate",
    "load",
    "parallelize",
    "parse_plan",
    "plan",
    "recipe",
    "simulate",
    "verify",
]

_LAZY_IMPORTS = {
    "Faults": "meshwright.spec.faults",
    "Job": "meshwright.spec.job",
    "deferred_init": "meshwright.runtime.deferred_init",
    "Plan": "meshwright.spec.plan",
    "parallelize": "meshwright.train.trainer",
    "parse_plan": "meshwright.spec.plan",
    "recipe": "meshwright.spec.precision",
    "simulate": "meshwright.planner.simulate",
}


def load(path: str | Path) -> Job:
    """The job file at `path`. InputError says which line of it is wrong."""
    from meshwright.cli.trace_model import trace_job_model
    from meshwright.planner.inputs.job import read_job, resolve_job

    return resolve_job(trace_job_model(read_job(path)))


def plan(job: Job, top: int = 10) -> list[RankedPlan]:
    """The `top` fastest plans that fit, each with `.plan` and `.estimate`. Raises NothingFits when none does."""
    from meshwright.planner.search.rank import search_plans

    return list(search_plans(job, top).plans)


def verify(job: str | Path, plan: str | None = None, dtype: str = "both") -> list[dict[str, Any]]:
    """What `meshwright verify` finds of the job file at `job` under its plan, or under `plan`: for each precision
    whether it is 'equal' to one
    device, the largest differences, and 'first', the module that differs first. `dtype`: float64, float32 or both."""
    from meshwright.cli.options import JobOptions
    from meshwright.cli.verify import prepare_verification, run_verification

    return run_verification(prepare_verification(Path(job), JobOptions(plan=plan), None, dtype))


def estimate(job: Job, plan: Plan | str) -> Estimate:
    """Memory and time of one plan, or of its name."""
    from meshwright.planner.cost.overlap import with_chosen_bucket
    from meshwright.planner.cost.step import estimate
    from meshwright.spec.plan import parse_plan

    return estimate(job, with_chosen_bucket(job, parse_plan(plan)) if isinstance(plan, str) else plan)


def __getattr__(name: str) -> Any:
    if name not in _LAZY_IMPORTS:
        raise AttributeError(f"module 'meshwright' has no attribute {name!r}")
    home = import_module(_LAZY_IMPORTS[name])
    return getattr(home, name, home)  # the room `simulate` is the verb itself


def __dir__() -> list[str]:
    return sorted(__all__)
