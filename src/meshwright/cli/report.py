"""`meshwright report`: a run as text or as a page, or several as text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from meshwright.base.files import write_whole
from meshwright.base.storage import overdue
from meshwright.cli.options import AsJson, Language, check_place, note, say, say_json

if TYPE_CHECKING:
    from meshwright.report.run import Run


def report(
    *runs: Annotated[Path, Parameter(name="RUN", help="folder that train wrote; several are shown side by side")],
    memory: Annotated[
        bool, Parameter(negative="", help="the memory of one step over its time, by kind, and the module that ran at its peak")
    ] = False,
    page: Annotated[
        Path | None,
        Parameter(help="write an HTML page of one run to this file: plan, losses, predicted beside measured, memory, what broke"),
    ] = None,
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """What a run planned and what it measured, in the same words; several runs side by side, with the difference of their losses.

    Try: meshwright report runs/one runs/two
    """
    from meshwright.base.errors import InputError
    from meshwright.report.compare import compare, compare_text
    from meshwright.report.memory import memory_text, read_ranks, read_timelines
    from meshwright.report.run import read_run, summarise
    from meshwright.report.run_text import run_text
    from meshwright.report.text import plain
    from meshwright.words.say import language_of

    language = language_of(lang, os.environ)
    if not runs:
        raise InputError("report needs a run: name one or several folders that `meshwright train` has written")
    if page is not None and len(runs) > 1:
        raise InputError(f"report --page shows one run: name one of the {len(runs)}")
    if page is not None:
        check_place("--page", page)
    with overdue(lambda: note("still reading: the disk of the run is slow, or does not answer", language)):
        found = [read_run(folder) for folder in runs]
    if page is not None:
        _page(found[0], page, language)
    if memory:
        if len(runs) > 1:
            raise InputError(f"report --memory shows one run: name one of the {len(runs)}")
        timelines, ranks = read_timelines(runs[0]), read_ranks(runs[0])
        if json:
            say_json({"run": found[0].folder, "timelines": [plain(timeline) for timeline in timelines], "ranks": ranks})
        else:
            say(memory_text(found[0], timelines, ranks, language))
        return 0
    if len(found) == 1:
        if json:
            say_json(plain(summarise(found[0])))
        else:
            say(run_text(found[0], language))
        return 0
    comparison = compare(found)
    if json:
        say_json(plain(comparison))
    else:
        say(compare_text(comparison, language))
    return 0


def _page(run: Run, path: Path, language: str) -> None:
    from meshwright.base.units import show_bytes
    from meshwright.report.page import run_page_text

    text = run_page_text(run, language)
    write_whole(path, text)
    note(f"page: {path}, {show_bytes(len(text.encode()))}", language)
