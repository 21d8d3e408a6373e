"""`meshwright report`: a run, or several, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from meshwright.cli.options import AsJson, say, say_json


def report(
    *runs: Annotated[Path, Parameter(name="RUN", help="folder that train wrote; several are shown side by side")],
    memory: Annotated[
        bool, Parameter(negative="", help="the memory of one step over its time, by kind, and the module that ran at its peak")
    ] = False,
    json: AsJson = False,
) -> int:
    """What a run planned and what it measured, in the same words; several runs side by side, with the difference of their losses.

    Try: meshwright report runs/one runs/two
    """
    from meshwright.base.errors import InputError
    from meshwright.report.compare import compare, compare_text
    from meshwright.report.memory import memory_text, read_timelines
    from meshwright.report.run import read_run, summarise
    from meshwright.report.run_text import run_text
    from meshwright.report.text import plain

    if not runs:
        raise InputError("report needs a run: name one or several folders that `meshwright train` has written")
    found = [read_run(folder) for folder in runs]
    if memory:
        if len(runs) > 1:
            raise InputError(f"report --memory shows one run: name one of the {len(runs)}")
        timelines = read_timelines(runs[0])
        if json:
            say_json([plain(timeline) for timeline in timelines])
        else:
            say(memory_text(found[0], timelines))
        return 0
    if len(found) == 1:
        if json:
            say_json(plain(summarise(found[0])))
        else:
            say(run_text(found[0]))
        return 0
    comparison = compare(found)
    if json:
        say_json(plain(comparison))
    else:
        say(compare_text(comparison))
    return 0
