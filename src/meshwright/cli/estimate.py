"""`meshwright estimate`: memory and time of one plan, item by item, stage by stage."""

from __future__ import annotations

import os
from typing import Annotated

from cyclopts import Parameter

from meshwright.cli.options import (
    AsJson,
    JobOptions,
    JobPath,
    Language,
    announce_defaults,
    given_or_best_plan,
    print_json,
    print_output,
)
from meshwright.core.language import choose_language


def estimate(
    job: JobPath = None,
    /,
    *,
    shared: JobOptions = JobOptions(),  # noqa: B008
    layers: Annotated[
        bool,
        Parameter(negative="", help="show the model layer by layer as the planner describes it, instead of a plan"),
    ] = False,
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """Memory and time of one plan, item by item and stage by stage. Without --plan it is the planner's first choice.

    Try: meshwright estimate --model llama2-7b --cluster 1x8:a100-80gb --batch 64 --seq 4096 --plan dp8.z3.rc-full
    """
    from meshwright.cli.launch_plan import read_job_file
    from meshwright.planner.cost.step import estimate as price
    from meshwright.planner.inputs.job import resolve_job
    from meshwright.report.plans import estimate_text, plan_data

    language = choose_language(lang, os.environ)
    file = read_job_file(job, shared)
    question = resolve_job(file)
    announce_defaults(file, question.workload, language)
    if layers:
        from meshwright.report.plans import layers_text

        if json:
            print_json(question.model.model_dump(mode="json"))
        else:
            print_output(layers_text(question.model, question.workload.precision, question.workload.sequence, language))
        return 0
    plan = given_or_best_plan(file, question, language)
    priced = price(question, plan)
    if json:
        print_json(plan_data(question, plan, priced))
    else:
        print_output(estimate_text(question, plan, priced, language))
    return 0
