"""`meshwright plan`: ranks the plans for a job; exit code 3 when none fits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from meshwright.cli.options import AsJson, JobPath, Shared, note, say, say_json


def plan(
    job: JobPath = None,
    /,
    *,
    shared: Shared = Shared(),  # noqa: B008
    top: Annotated[int, Parameter(help="how many plans to show")] = 10,
    pin: Annotated[str | None, Parameter(help="parts of the plan to fix, such as tp=2,pp=4")] = None,
    save: Annotated[Path | None, Parameter(help="write the best plan to this file, for --plan")] = None,
    json: AsJson = False,
) -> int:
    """Rank the plans for a job, the fastest that fits first, and say why the others lost.

    Try: meshwright plan --model llama-65b --cluster 8x8:a100-80gb --batch 512 --seq 2048 --pin tp=8
    """
    from meshwright.base.errors import InputError
    from meshwright.cli.preparation import read_file
    from meshwright.intake.job import resolve
    from meshwright.intake.plans import parse_pins
    from meshwright.report.plans import answer_data, answer_text
    from meshwright.search.explain import explain
    from meshwright.search.rank import search

    if top < 1:
        raise InputError(f"--top {top}: must be at least 1")
    question = resolve(read_file(job, shared))
    if pin:
        question = question.but(pins={**question.pins, **parse_pins(pin)})
    answer = search(question, top)
    if json:
        say_json(answer_data(question, answer))
    else:
        say(answer_text(question, answer, explain(question, answer)))
    if save is not None:
        save.write_text(answer.plans[0].plan.to_json() + "\n", encoding="utf-8")
        note(f"{answer.plans[0].plan.name} is in {save}; `--plan {save}` uses it")
    return 0
