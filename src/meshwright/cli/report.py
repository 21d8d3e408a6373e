"""`meshwright report`: a run, or several, as text."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from meshwright.cli.options import AsJson, say, say_json


def report(
    *runs: Annotated[Path, Parameter(name="RUN", help="folder that train wrote; several are shown side by side")],
    json: AsJson = False,
) -> int:
    """What a run planned and what it measured, in the same words; several runs side by side, with the difference of their losses.

    Try: meshwright report runs/one runs/two
    """
    from meshwright.base.errors import InputError
    from meshwright.report.compare import compare, compare_text
    from meshwright.report.run import read_run, summarise
    from meshwright.report.run_text import run_text
    from meshwright.report.text import plain

    if not runs:
        raise InputError("report needs a run: name one or several folders that `meshwright train` has written")
    found = [read_run(folder) for folder in runs]
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
