"""`meshwright plan`: ranks the plans for a job; exit code 3 when none fits."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from meshwright.base.files import write_whole
from meshwright.cli.options import AsJson, JobPath, Language, Shared, check_place, note, say, say_json

if TYPE_CHECKING:
    from meshwright.intake.job import ClusterChoice
    from meshwright.search.answer import Answer
    from meshwright.spec.job import Job


@Parameter(name="*")
@dataclass(frozen=True)
class Wanted:
    """Which plans are looked for."""

    pin: Annotated[str | None, Parameter(help="parts of the plan to fix, such as tp=2,pp=4")] = None
    objective: Annotated[
        Literal["fastest", "fewest", "cheapest", "headroom"],
        Parameter(help="the least time, the fewest devices, the least money (the cluster file has prices), or the least memory"),
    ] = "fastest"
    runnable: Annotated[bool, Parameter(negative="", help="only plans that this version runs; others are planned, not run")] = False
    trials: Annotated[
        int, Parameter(help="run up to so many of the best plans here for a few steps each, refit the estimate, rank again")
    ] = 0


@Parameter(name="*")
@dataclass(frozen=True)
class Shown:
    """What is said beside the ranked plans, and where they go."""

    top: Annotated[int, Parameter(help="how many plans to show")] = 10
    why: Annotated[bool, Parameter(negative="", help="every family of plans that lost: its best plan and what it lost by")] = False
    why_not: Annotated[str | None, Parameter(help="a plan, or pins such as tp=8,pp=8: the limit that it breaks or the time it loses")] = (
        None
    )
    advice: Annotated[bool, Parameter(negative="", help="six questions answered for this job, and what an improvement would bring")] = False
    save: Annotated[Path | None, Parameter(help="write the best plan to this file, for --plan")] = None
    page: Annotated[
        Path | None,
        Parameter(help="write an HTML page to this file: the plans here and for more or fewer devices, batch, sequence, memory"),
    ] = None
    lang: Language = None


def plan(
    job: JobPath = None,
    /,
    *,
    shared: Shared = Shared(),  # noqa: B008
    wanted: Wanted = Wanted(),
    shown: Shown = Shown(),
    json: AsJson = False,
) -> int:
    """Rank the plans for a job, the fastest that fits first, and say why the others lost.

    Try: meshwright plan --model llama-65b --cluster 8x8:a100-80gb --batch 512 --seq 2048 --pin tp=8
    """
    from meshwright.cli.preparation import read_file
    from meshwright.cli.trials import led_by, tried
    from meshwright.intake.job import resolve
    from meshwright.intake.plans import parse_pins
    from meshwright.search.answer import Objective
    from meshwright.search.near import NoPlanFits
    from meshwright.search.rank import narrowed, search
    from meshwright.words.say import language_of, tell
    from meshwright.words.say import say as said

    _check(shared, wanted, shown)
    language = language_of(shown.lang, os.environ)
    file = read_file(job, shared)
    question = resolve(file)
    if wanted.pin:
        question = question.but(pins={**question.pins, **parse_pins(wanted.pin)})
    try:
        if (found := tried(file, question, wanted.trials, language) if wanted.trials else (question, None)) is None:
            return 0
        question, best = found
        answer = search(question, shown.top, Objective(wanted.objective), wanted.runnable or best is not None)
    except NoPlanFits as error:
        raise error.said(language) from None
    answer = led_by(question, answer, best) if best is not None else answer
    question = narrowed(question, answer)
    if job is None and shared.model and shared.batch is None and shared.seq is None and not shared.set:
        note(said(tell("question.usual", batch=question.workload.batch, sequence=question.workload.sequence), language))
    if shown.why_not is not None:
        _why_not(question, answer, shown.why_not, wanted.runnable, language, json)
    elif json:
        say_json(_data(question, answer, wanted.runnable, language, shown))
    else:
        _answer(question, answer, wanted.runnable, language, shown)
    if shown.save is not None:
        write_whole(shown.save, answer.plans[0].plan.to_json() + "\n")
        note(f"{answer.plans[0].plan.name} is in {shown.save}; `--plan {shown.save}` uses it", language)
    if shown.page is not None:
        _page(question, answer, wanted, _asked(job, shared, wanted), file.cluster, shown.page, language)
    return 0


def _check(shared: Shared, wanted: Wanted, shown: Shown) -> None:
    """InputError where options do not go together or name no place."""
    from meshwright.base.errors import InputError

    if shown.top < 1:
        raise InputError(f"--top {shown.top}: must be at least 1")
    check_place("--save", shown.save)
    check_place("--page", shown.page)
    if shown.page is not None and wanted.objective in ("fewest", "cheapest"):
        raise InputError(
            f"--page ranks plans on all devices, --objective {wanted.objective} on fewer; leave one out: the page has a slider"
        )


def _asked(job: Path | None, shared: Shared, wanted: Wanted) -> list[str]:
    """The command line without what a page changes."""
    options = {
        "--model": shared.model,
        "--precision": shared.precision,
        "--optimizer": shared.optimizer,
        "--plan": shared.plan,
        "--pin": wanted.pin,
        "--objective": wanted.objective if wanted.objective != "fastest" else None,
    }
    given = [word for name, value in options.items() if value is not None for word in (name, value)]
    over = [word for text in shared.set for word in ("--set", text)]
    return ["meshwright", "plan", *([str(job)] if job else []), *given, *(["--runnable"] if wanted.runnable else []), *over]


def _page(question: Job, answer: Answer, wanted: Wanted, asked: list[str], choice: ClusterChoice, path: Path, language: str) -> None:
    """The page of this question and its neighbours."""
    from meshwright.base.units import show_bytes
    from meshwright.report.page import axes_of, grid, page_text, shape_for
    from meshwright.search.answer import Objective

    workers = min(os.cpu_count() or 1, 8)
    axes = axes_of(question, shape_for(answer.seconds / workers))
    note(f"page: a search for each of {axes.size} settings of devices, batch, sequence and memory", language)
    found = grid(question, axes, Objective(wanted.objective), wanted.runnable, workers if axes.size * answer.seconds > 2.0 else 1)
    cluster = choice.name if choice == choice.but(groups=(), path="", network=None, memory=None, failures_per_device_hour=0.0) else None
    text = page_text(found, asked, cluster, language)
    write_whole(path, text)
    note(f"page: {path}, {show_bytes(len(text.encode()))}", language)


def _answer(question: Job, answer: Answer, runnable: bool, language: str, shown: Shown) -> None:
    """The screen."""
    from meshwright.report.plans import answer_text
    from meshwright.search.explain import explain

    say(answer_text(question, answer, explain(question, answer), language))
    if shown.advice:
        from meshwright.report.plans import told
        from meshwright.search.advice import advise

        say("\n" + told(advise(question, answer, runnable), language))
    if shown.why:
        from meshwright.report.why import families_text
        from meshwright.search.why_not import families_against

        say("\n" + families_text(answer, families_against(question, answer), language))


def _data(question: Job, answer: Answer, runnable: bool, language: str, shown: Shown) -> dict[str, Any]:
    """The same as data: what was asked beside the plans has a key of its own."""
    from meshwright.report.plans import answer_data

    data = answer_data(question, answer)
    if shown.why:
        from meshwright.report.why import lost_data
        from meshwright.search.why_not import families_against

        data["families"] = [lost_data(found) for found in families_against(question, answer)]
    if shown.advice:
        from meshwright.search.advice import advise
        from meshwright.words.say import say as said

        data["advice"] = [said(sentence, language) for sentence in advise(question, answer, runnable)]
    return data


def _why_not(question: Job, answer: Answer, asked: str, runnable: bool, language: str, json: bool) -> None:
    """One plan, or the best of many, beside the chosen one."""
    from meshwright.base.errors import InputError
    from meshwright.cost.hiding import bucketed
    from meshwright.intake.plans import parse_pins, read_plan
    from meshwright.report.why import against_data, against_text
    from meshwright.search.why_not import why_not
    from meshwright.spec.plan import Plan

    wanted = parse_pins(asked) if "=" in asked else read_plan(asked)
    if wanted is None:
        raise InputError(f"--why-not {asked!r}: name a plan, such as dp8.tp2, or pins, such as tp=8,pp=8")
    wanted = bucketed(question, wanted) if isinstance(wanted, Plan) else wanted
    found = why_not(question, answer.chosen, asked, wanted, runnable)
    if json:
        say_json(against_data(answer, found))
    else:
        say(against_text(answer, found, language))
