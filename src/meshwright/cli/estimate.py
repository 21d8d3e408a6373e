"""`meshwright estimate`: one plan's memory and time, item by item."""

from __future__ import annotations

import os
from typing import Annotated

from cyclopts import Parameter

from meshwright.cli.options import AsJson, JobPath, Language, Shared, say, say_json


def estimate(
    job: JobPath = None,
    /,
    *,
    shared: Shared = Shared(),  # noqa: B008
    layers: Annotated[bool, Parameter(negative="", help="what the model was found to be, layer by layer, instead of a plan")] = False,
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """Memory and time of one plan, item by item and stage by stage. Without --plan it is the planner's first choice.

    Try: meshwright estimate --model llama2-7b --cluster 1x8:a100-80gb --batch 64 --seq 4096 --plan dp8.z3.rc-full
    """
    from meshwright.cli.preparation import read_file
    from meshwright.cost.hiding import bucketed
    from meshwright.cost.step import estimate as price
    from meshwright.intake.job import resolve
    from meshwright.report.plans import entry_data, estimate_text
    from meshwright.words.say import language_of

    language = language_of(lang, os.environ)
    file = read_file(job, shared)
    question = resolve(file)
    if layers:
        from meshwright.report.layers import layers_text

        if json:
            say_json(question.model.model_dump(mode="json"))
        else:
            say(layers_text(question.model, question.workload.precision, question.workload.sequence, language))
        return 0
    plan = file.given_plan()
    if plan is None:
        from meshwright.search.rank import search

        plan = search(question, 1).chosen.plan
    plan = bucketed(question, plan)
    priced = price(question, plan)
    if json:
        say_json(entry_data(plan, priced))
    else:
        say(estimate_text(question, plan, priced, language))
    return 0
