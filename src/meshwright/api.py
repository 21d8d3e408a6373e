"""The public Python functions of planning: load a job, search plans, estimate, verify and simulate one plan.

Each function is also an attribute of the package: `mw.load`, `mw.plan`, `mw.estimate`, `mw.verify`, `mw.simulate`,
`mw.export_plan`, `mw.import_plan`.

Guarantees: importing this module imports no torch. `load` imports torch only to trace a model that the planner's closed
formulas do not cover.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.interop import exporting, importing
from meshwright.interop.for_system import plans_for
from meshwright.interop.importing import ImportedPlan
from meshwright.interop.registry import find_system
from meshwright.planner.cost import step
from meshwright.planner.cost.named_plans import complete_plan, read_named_plan, with_micro_batch
from meshwright.planner.inputs.job import known_sizes, read_job, resolve_job
from meshwright.planner.search.best_plans import RankedPlan
from meshwright.planner.search.ranking import search_plans
from meshwright.planner.simulate import run
from meshwright.planner.simulate.run import SimulationResult
from meshwright.spec.estimate import Estimate
from meshwright.spec.faults import Faults
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan


def load(path: str | Path) -> Job:
    """Reads the job file at `path`.

    Raises: InputError that names the wrong field, and its line if it is known.
    """
    from meshwright.cli.trace_model import trace_job_model

    file = trace_job_model(read_job(path))
    job, plan = resolve_job(file), file.given_plan()
    return job if plan is None else with_micro_batch(job, complete_plan(job, plan))


def plan(job: Job, top: int = 10, system: str | None = None) -> list[RankedPlan]:
    """Returns the `top` fastest plans that fit, the best first, each with `.plan` and `.estimate`. With `system`, such
    as 'megatron', only plans that this system can run, under the planner's profile of its runtime. With
    `job.but(trust="measured")`, only plans whose features all occur in published runs.

    Raises: NothingFits when no plan fits; InputError for an unknown system.
    """
    if system is None:
        return list(search_plans(job, top).plans)
    found = plans_for(job, find_system(system), None, top)
    return [RankedPlan(plan=each.plan, estimate=each.estimate) for each in found]


def export_plan(job: str | Path, plan: Plan | str, system: str) -> dict[str, str]:
    """Exports `plan` (a plan or its name) for the job file `job` to another system, such as 'megatron'. Returns the
    texts of its configuration and launch script by file name. What the system cannot express, the cost and the
    differences of its numerics are comments in them.

    Raises: InputError when the plan cannot run the job, or for an unknown system.
    """
    file, question = read_job(job), load(job)
    return exporting.export_plan(
        question, read_named_plan(question, plan), system, known_sizes(file), file.model.source
    ).files


def import_plan(*paths: str | Path, system: str | None = None, devices: int = 0) -> ImportedPlan:
    """Imports the configuration of another system from the files `paths`, which belong together. The result has the
    `.plan`, the sections `.job` of a job file, and `.not_carried`, a line for each key without an equivalent. `system`
    is the name of the system; None means that it is recognized. `devices` replaces the number of devices of the files.

    Raises: InputError when a key is unknown or the configuration contradicts itself.
    """
    return importing.import_plan(*paths, system=system, devices=devices)


def estimate(job: Job, plan: Plan | str) -> Estimate:
    """Returns the predicted memory (bytes) and time (seconds) of one step under `plan`, which is a plan or its name.

    Raises: InputError when the plan cannot run the job.
    """
    return step.estimate(job, read_named_plan(job, plan))


def verify(job: str | Path, plan: str | None = None, dtype: str = "both") -> list[dict[str, Any]]:
    """Runs a scaled-down version of the job's model and plan on real ranks of this machine, and compares it with one
    device.

    `plan` replaces the plan of the job file. `dtype` is float64, float32 or both. Returns one dictionary for each
    precision. Its key 'equal' says whether the results agree, 'first' names the first module that differs, and other
    keys have the largest differences.

    Raises: InputError for a wrong job or plan; RankFailed when a rank fails.
    """
    from meshwright.cli.launch_plan import read_job_file
    from meshwright.cli.options import JobOptions
    from meshwright.cli.verify import prepare_verification, run_verification

    return run_verification(prepare_verification(read_job_file(Path(job), JobOptions(plan=plan)), None, dtype))


def simulate(job: Job, plan: Plan | str, faults: Faults | None = None, steps: int = 0) -> SimulationResult:
    """Simulates one step under `plan` (a plan or its name), with the slow ranks and links of `faults`. Also simulates a
    run of `steps` steps, in which the killed ranks of `faults` die. If `steps` is 0, this run ends with the last step
    in which a rank dies, or after one step if no rank dies.

    Raises: InputError when the plan cannot run, when its replicas differ in work or states, or when a fault names a
    rank or a step that does not exist.
    """
    return run.simulate(job, plan, faults, steps)
