"""`meshwright estimate`: one plan's memory and time, item by item."""

from __future__ import annotations

from meshwright.cli.options import AsJson, JobPath, Shared, say, say_json


def estimate(
    job: JobPath = None,
    /,
    *,
    shared: Shared = Shared(),  # noqa: B008
    json: AsJson = False,
) -> int:
    """Memory and time of one plan, item by item and stage by stage. Without --plan it is the planner's first choice.

    Try: meshwright estimate --model llama2-7b --cluster 1x8:a100-80gb --batch 64 --seq 4096 --plan dp8.z3.rc-layer
    """
    from meshwright.cli.preparation import read_file
    from meshwright.cost.step import estimate as price
    from meshwright.intake.job import resolve
    from meshwright.report.plans import entry_data, estimate_text

    file = read_file(job, shared)
    question = resolve(file)
    plan = file.given_plan()
    if plan is None:
        from meshwright.search.rank import search

        plan = search(question, 1).chosen.plan
    priced = price(question, plan)
    if json:
        say_json(entry_data(plan, priced))
    else:
        say(estimate_text(question, plan, priced))
    return 0
