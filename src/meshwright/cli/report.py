"""`meshwright report`: a run, or several, as text; one as a page."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from meshwright.cli.options import AsJson, Language, check_output_path, print_json, print_note, print_output
from meshwright.core.files import write_atomically
from meshwright.core.language import choose_language
from meshwright.core.messages import Message

if TYPE_CHECKING:
    from meshwright.report.run import RunFolder


def report(
    *runs: Annotated[Path, Parameter(name="RUN", help="run folder that train wrote; several run folders are compared")],
    memory: Annotated[
        bool,
        Parameter(
            negative="", help="show the memory of one step over time, by kind, and the module that ran at the peak"
        ),
    ] = False,
    page: Annotated[
        Path | None,
        Parameter(
            help=(
                "write an HTML page of the first run to this file: plan, losses, predicted and measured "
                "values, memory, faults; with the curves of all runs"
            )
        ),
    ] = None,
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """Predicted and measured values of a run side by side; or several runs side by side, with the difference of
    their losses.

    Try: meshwright report runs/one runs/two
    """
    from meshwright.core.errors import InputError
    from meshwright.report.run import read_run, summarize_run
    from meshwright.report.run_text import compare_runs, compare_text, run_text
    from meshwright.report.text import strict_json_data

    language = choose_language(lang, os.environ)
    if not runs:
        raise InputError(Message("report needs a run: name one or several folders that `meshwright train` has written"))
    if memory and len(runs) > 1:
        raise InputError(Message("report --memory shows one run, but {count} are given: name one", count=len(runs)))
    if page is not None:
        check_output_path("--page", page)
    found = [read_run(folder) for folder in runs]
    if page is not None:
        _run_page(found, page, language)
    if memory:
        _print_memory(runs[0], found[0], json, language)
    elif len(found) == 1:
        _print(json, lambda: strict_json_data(summarize_run(found[0])), lambda: run_text(found[0], language))
    else:
        comparison = compare_runs(found)
        _print(json, lambda: strict_json_data(comparison), lambda: compare_text(comparison, language))
    return 0


def _print(json: bool, data: Callable[[], Any], text: Callable[[], str]) -> None:
    """Prints a result as JSON or as text."""
    if json:
        print_json(data())
    else:
        print_output(text())


def _print_memory(folder: Path, run: RunFolder, json: bool, language: str) -> None:
    """Prints the memory timelines and the peak of each rank."""
    from meshwright.report.memory import memory_text, read_rank_peaks, read_timelines
    from meshwright.report.text import strict_json_data

    timelines, ranks = read_timelines(folder), read_rank_peaks(folder)
    data = {"run": run.folder, "timelines": [strict_json_data(timeline) for timeline in timelines], "ranks": ranks}
    _print(json, lambda: data, lambda: memory_text(run, timelines, ranks, language))


def _run_page(runs: list[RunFolder], path: Path, language: str) -> None:
    from meshwright.core.units import show_bytes
    from meshwright.report.page.run_page import run_page_text

    text = run_page_text(runs[0], language, runs[1:])
    write_atomically(path, text)
    print_note(Message("page: {path}, {count}", path=path, count=show_bytes(len(text.encode()))), language)
