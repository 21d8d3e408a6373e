"""`meshwright export`: write a job and a plan as the configuration of another system."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from meshwright.cli.options import (
    AsJson,
    JobOptions,
    JobPath,
    Language,
    complete_given_plan,
    print_json,
    print_note,
    print_output,
)
from meshwright.core.files import check_output_folder, write_atomically
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, translate


def export(
    job: JobPath = None,
    /,
    *,
    to: Annotated[str, Parameter(help="the system, such as megatron, deepspeed or torchtitan")],
    shared: JobOptions = JobOptions(),  # noqa: B008
    out: Annotated[Path | None, Parameter(help="folder for the files; default: print them")] = None,
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """Write a job and a plan as the configuration of another system, with its launch line. Without --plan it is the
    best plan that the system can run. The command says what the system cannot express, what that costs in step time and
    memory, and where its numerics differ.

    Try: meshwright export --model llama2-7b --cluster 1x8:a100-80gb --batch 64 --plan dp2.tp4.z1 --to megatron
    """
    check_output_folder(out)
    from meshwright.cli.launch_plan import read_job_file
    from meshwright.interop.exporting import export_lines, export_plan
    from meshwright.interop.for_system import best_plan_for
    from meshwright.interop.registry import find_system
    from meshwright.planner.inputs.job import known_sizes, resolve_job

    language = choose_language(lang, os.environ)
    system = find_system(to)
    file = read_job_file(job, shared)
    question, sizes = resolve_job(file), known_sizes(file)
    given = file.given_plan()
    plan = (
        best_plan_for(question, system, sizes).plan
        if given is None
        else complete_given_plan(question, given, file.plan["name"], language)
    )
    found = export_plan(question, plan, system.name, sizes, file.model.source, language)
    lines = [translate(line, language) for line in export_lines(found, question, plan)]
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        for name, text in found.files.items():
            write_atomically(out / name, text)
    if json:
        print_json({"system": system.name, "plan": found.plan.name, "files": found.files, "lines": lines})
        return 0
    if out is None:
        print_output("\n".join(f"==> {name} <==\n{text}" for name, text in found.files.items()).rstrip())
        return 0
    print_output("\n".join(lines))
    print_note(Message("written: {paths}", paths=", ".join(str(out / name) for name in found.files)), language)
    return 0
