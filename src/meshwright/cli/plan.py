"""`meshwright plan`: rank the plans for a job and say why the others lost.

Exit code 3 means that no plan fits.
"""

from __future__ import annotations

import math
import os
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.cli.options import (
    AsJson,
    JobOptions,
    JobPath,
    announce_defaults,
    check_output_path,
    complete_given_plan,
    print_json,
    print_note,
    print_output,
    search_progress,
)
from meshwright.cli.plan_options import OutputOptions, RankingOptions, RunLengthOptions, SystemOptions
from meshwright.core.files import write_atomically
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, translate

if TYPE_CHECKING:
    from meshwright.planner.inputs.job import ClusterChoice, JobFile
    from meshwright.planner.search.best_plans import RankedPlan, SearchResult
    from meshwright.spec.job import Job


def plan(
    job: JobPath = None,
    /,
    *,
    shared: JobOptions = JobOptions(),  # noqa: B008
    wanted: RankingOptions = RankingOptions(),  # noqa: B008
    shown: OutputOptions = OutputOptions(),  # noqa: B008
    length: RunLengthOptions = RunLengthOptions(),  # noqa: B008
    other: SystemOptions = SystemOptions(),  # noqa: B008
    json: AsJson = False,
) -> int:
    """Rank the plans for a job, the fastest that fits first, and say why the others lost.

    Try: meshwright plan --model llama-65b --cluster 8x8:a100-80gb --batch 512 --seq 2048 --pin tp=8
    """
    from meshwright.cli.launch_plan import read_job_file

    _check_options(shared, wanted, shown)
    language = choose_language(shown.lang, os.environ)
    if other.system is not None or other.config:
        return _plan_for_system(job, shared, wanted.pin, other, language, json)
    file = read_job_file(job, shared, wanted.pin)
    if shown.compare is not None:
        _compare_plans(file, shown.compare, language, json)
        return 0
    if shown.why_not is not None or shown.page is not None or wanted.trials or length.by is not None:
        return _answer_once(file, _command_line(job, shared, wanted), wanted, shown, length, language, json)
    _answer_from_cache(file, wanted, shown, length, language, json)
    return 0


def _answer_from_cache(
    file: JobFile,
    wanted: RankingOptions,
    shown: OutputOptions,
    length: RunLengthOptions,
    language: str,
    json: bool,
) -> None:
    """Prints the answer to a question that depends on nothing but the job and the options: from the cache of an
    earlier search, or of a new search, which is stored."""
    from meshwright.cli.answer_cache import answer_key, load_answer, recorded_output, save_answer
    from meshwright.report.text import terminal_width

    question = _pinned_job(file, wanted, language)
    options = (wanted, replace(shown, save=None, fresh=False, lang=language), length, json, terminal_width())
    key = answer_key(question.to_json(None), *map(repr, options))
    stored = None if shown.fresh else load_answer(key)
    if stored is None:
        with recorded_output() as output:
            found = _search(question, wanted, shown.top, length, language)
            _print_result(*found, wanted, shown, length, language, json)
        stored = save_answer(key, output.getvalue(), found[1].plans[0].plan.to_json())
    else:
        print_note(
            Message("answer of the search of {day}, from the cache; --fresh searches again", day=stored.day), language
        )
    announce_defaults(file, question.workload, language)
    sys.stdout.write(stored.output)
    _save_plan(shown.save, stored.plan, language)


def _answer_once(
    file: JobFile,
    arguments: list[str],
    wanted: RankingOptions,
    shown: OutputOptions,
    length: RunLengthOptions,
    language: str,
    json: bool,
) -> int:
    """Prints the answer to a question that also depends on measurements or on the time of day, or that has a page or a
    rejected plan. Nothing is stored."""
    if (found := _search_after_trials(file, wanted, shown.top, language, length)) is None:
        return 0
    question, answer = found
    announce_defaults(file, question.workload, language)
    if shown.why_not is not None:
        _explain_rejection(question, answer, shown.why_not, wanted.runnable, language, json)
    else:
        _print_result(question, answer, wanted, shown, length, language, json)
    _save_plan(shown.save, answer.plans[0].plan.to_json(), language)
    if shown.page is not None:
        _report_page(question, answer, wanted, arguments, file.cluster, shown.page, language)
    return 0


def _print_result(
    question: Job,
    answer: SearchResult,
    wanted: RankingOptions,
    shown: OutputOptions,
    length: RunLengthOptions,
    language: str,
    json: bool,
) -> None:
    if json:
        print_json(
            _answer_data(question, answer, wanted.runnable, language, shown) | _cost_data(question, answer, length)
        )
    else:
        _print_answer(question, answer, wanted.runnable, language, shown)
        _print_cost(question, answer, length, language)


def _save_plan(path: Path | None, text: str, language: str) -> None:
    """Writes the plan with the JSON text `text` to `path`, if there is one."""
    from meshwright.spec.plan import Plan

    if path is None:
        return
    write_atomically(path, text + "\n")
    name = Plan.model_validate_json(text).name
    print_note(Message("plan {plan} is saved in {save}; `--plan {save}` uses it", plan=name, save=path), language)


def _plan_for_system(
    job: Path | None, shared: JobOptions, pin: str | None, other: SystemOptions, language: str, json: bool
) -> int:
    """Prints the best plan that another system can run, as a change of the user's configuration if it is given.

    Raises: InputError if --config is given without --for, or if the job and the configuration contradict each other.
    """
    from meshwright.cli.launch_plan import read_job_file
    from meshwright.core.errors import InputError
    from meshwright.interop.comparison import compare_for, comparison_lines
    from meshwright.interop.importing import import_plan
    from meshwright.interop.registry import find_system
    from meshwright.planner.inputs.job import known_sizes, read_job, resolve_cluster, resolve_job
    from meshwright.planner.inputs.plans import parse_pins
    from meshwright.report.plans import plan_data

    if other.system is None:
        raise InputError(Message("--config {config} needs --for SYSTEM", config=other.config[0]))
    system, yours, given = find_system(other.system), None, None
    if other.config:
        cluster = resolve_cluster(read_job(job, shared.set, shared.overrides()).cluster)
        imported = import_plan(*other.config, system=system.name, allow_unknown=True, default_devices=cluster.devices)
        yours, given = imported.plan, imported.keys
        options = {**imported.job_options(), **shared.overrides()}
        if job is None and "model" not in imported.job_options() and shared.model is None:
            raise InputError(imported.model_line())
        file = read_job(job, shared.set, options)
    else:
        file = read_job_file(job, shared, pin)
    question, sizes = resolve_job(file), known_sizes(file)
    pins = {**question.workload.fixed, **(parse_pins(pin) if pin else {})}
    found = compare_for(question.but(pins=pins), system, sizes, file.model.source, yours, given)
    lines = [translate(line, language) for line in comparison_lines(found)]
    if json:
        plans = {"yours": found.yours, "best": found.best, "here": found.here}
        print_json(
            {
                "system": system.name,
                **{name: plan_data(question, row.plan, row.estimate) for name, row in plans.items() if row is not None},
                "removed": found.removed,
                "added": found.added,
                "lines": lines,
            }
        )
    else:
        print_output("\n".join(lines))
    return 0


def _print_cost(question: Job, answer: SearchResult, length: RunLengthOptions, language: str) -> None:
    """Prints what the run costs under the chosen plan, and how well the devices are used."""
    from meshwright.planner.search.run_cost import parse_token_count, run_cost, run_cost_messages, usage_message
    from meshwright.report.plans import messages_text

    cost = run_cost(question, answer.chosen, parse_token_count("1B" if length.tokens is None else length.tokens))
    said = (
        run_cost_messages(question, cost, length.price is not None)
        if length.tokens is not None
        else [usage_message(question, cost)]
    )
    print_output("\n" + messages_text(said, language))


def _cost_data(question: Job, answer: SearchResult, length: RunLengthOptions) -> dict[str, Any]:
    """Returns the cost of the run as JSON data, or nothing without --tokens."""
    from meshwright.planner.search.run_cost import parse_token_count, run_cost

    if length.tokens is None:
        return {}
    return {"run": run_cost(question, answer.chosen, parse_token_count(length.tokens)).model_dump(mode="json")}


def _with_run_length(question: Job, wanted: RankingOptions, length: RunLengthOptions) -> tuple[Job, str, float]:
    """Returns the job with prices and the steps of --tokens, the objective, and the longest step in seconds that ends
    the run in time."""
    from meshwright.core.errors import InputError
    from meshwright.planner.search.run_cost import parse_token_count, seconds_until, with_prices

    question = question.but(cluster=with_prices(question.cluster, length.price))
    steps = 0.0
    if length.tokens is not None:  # compile times and other costs of a start are spread over these steps
        steps = parse_token_count(length.tokens) / question.workload.tokens
        question = question.but(workload=question.workload.but(steps=math.ceil(steps)))
    if length.by is None:
        return question, wanted.objective, float("inf")
    if length.tokens is None:
        raise InputError(Message("--by {date} needs --tokens", date=length.by))
    if wanted.objective == "headroom":
        raise InputError(
            Message(
                "--objective headroom ranks plans by memory, whatever time they take: leave --by {date} out, or choose "
                "another objective",
                date=length.by,
            )
        )
    left = seconds_until(length.by, datetime.now(UTC))
    return question, "fewest" if wanted.objective == "fastest" else wanted.objective, left / max(steps, 1.0)


def _pinned_job(file: JobFile, wanted: RankingOptions, language: str) -> Job:
    """Returns the job with the pins and the trust of the options.

    Raises: InputError if a plan by name needs more devices than there are, or cannot run on all of them.
    """
    from meshwright.planner.cost.named_plans import with_micro_batch
    from meshwright.planner.inputs.job import resolve_job
    from meshwright.planner.inputs.plans import parse_pins
    from meshwright.spec.constraints import validate_plan

    question, plan = resolve_job(file).but(trust=wanted.trust), file.given_plan()
    pins = parse_pins(wanted.pin) if wanted.pin else {}
    if plan is not None and "micro_batch" not in pins:
        complete = complete_given_plan(question, plan, file.plan["name"], language)
        if complete.world >= question.cluster.devices and not pins:
            validate_plan(question, complete)
        question = with_micro_batch(question, complete)
    return question.but(pins={**question.pins, **pins}) if pins else question


def _search(
    question: Job, wanted: RankingOptions, count: int, length: RunLengthOptions, language: str
) -> tuple[Job, SearchResult]:
    """Returns the job and its `count` best plans."""
    from meshwright.planner.search.best_plans import SearchObjective
    from meshwright.planner.search.ranking import search_plans, with_used_devices

    question, objective, longest = _with_run_length(question, wanted, length)
    with search_progress(language):
        answer = search_plans(question, count, SearchObjective(objective), wanted.runnable, longest)
    return with_used_devices(question, answer), answer


def _search_after_trials(
    file: JobFile, wanted: RankingOptions, count: int, language: str, length: RunLengthOptions
) -> tuple[Job, SearchResult] | None:
    """Returns the job and its `count` best plans, after the trials of the options. Returns None on a rank other than 0,
    which only takes part in trials."""
    from meshwright.cli.device_checks import check_devices
    from meshwright.cli.trials import job_from_trials, with_fastest_first

    question = _pinned_job(file, wanted, language)
    if not wanted.trials:
        return _search(question, wanted, count, length, language)
    check_devices(question, 0)
    found = job_from_trials(file, question, wanted.trials, language)
    if found is None:
        return None
    question, best = found
    wanted = replace(wanted, runnable=wanted.runnable or best is not None)
    question, answer = _search(question, wanted, count, length, language)
    return question, answer if best is None else with_fastest_first(question, answer, best)


def _check_options(shared: JobOptions, wanted: RankingOptions, shown: OutputOptions) -> None:
    """Raises InputError if options conflict or name an invalid path."""
    from meshwright.core.errors import InputError

    if shown.top < 1:
        raise InputError(Message("--top {top} must be at least 1", top=shown.top))
    check_output_path("--save", shown.save)
    check_output_path("--page", shown.page)
    if shown.page is not None and wanted.objective in ("fewest", "cheapest", "energy"):
        raise InputError(
            Message(
                "--page ranks plans on all devices, --objective {objective} also on fewer; leave one out: the page "
                "has a slider for the number of devices",
                objective=wanted.objective,
            )
        )


def _command_line(job: Path | None, shared: JobOptions, wanted: RankingOptions) -> list[str]:
    """Returns the command line without the options that the report page changes."""
    options = {
        "--model": shared.model,
        "--precision": shared.precision,
        "--optimizer": shared.optimizer,
        "--plan": shared.plan,
        "--pin": wanted.pin,
        "--objective": wanted.objective if wanted.objective != "fastest" else None,
        "--trust": wanted.trust if wanted.trust != "all" else None,
    }
    given = [word for name, value in options.items() if value is not None for word in (name, value)]
    over = [word for text in shared.set for word in ("--set", text)]
    return [
        "meshwright",
        "plan",
        *([str(job)] if job else []),
        *given,
        *(["--runnable"] if wanted.runnable else []),
        *over,
    ]


def _report_page(
    question: Job,
    answer: SearchResult,
    wanted: RankingOptions,
    arguments: list[str],
    choice: ClusterChoice,
    path: Path,
    language: str,
) -> None:
    """Writes the HTML page of plans for this job and for other numbers of devices, batches, sequences and memory
    sizes."""
    from meshwright.core.units import show_bytes
    from meshwright.planner.search.best_plans import SearchObjective
    from meshwright.report.page.page_grid import grid_shape_for, page_axes, search_page_grid
    from meshwright.report.page.plan_page import plan_page_text

    workers = min(os.cpu_count() or 1, 8)
    axes = page_axes(question, grid_shape_for(answer.considered))
    print_note(
        Message("page: searching plans for {size} settings of devices, batch and sequence", size=axes.size), language
    )
    found = search_page_grid(
        question,
        axes,
        SearchObjective(wanted.objective),
        wanted.runnable,
        workers if axes.size * answer.seconds > 0.3 else 1,
    )
    cluster = (
        choice.name
        if choice == choice.but(groups=(), path="", network=None, memory=None, failures_per_device_hour=0.0)
        else None
    )
    text = plan_page_text(found, arguments, cluster, language)
    write_atomically(path, text)
    print_note(Message("page: {path}, {count}", path=path, count=show_bytes(len(text.encode()))), language)


def _print_answer(question: Job, answer: SearchResult, runnable: bool, language: str, shown: OutputOptions) -> None:
    """Prints the ranked plans."""
    from meshwright.planner.search.explain import explain
    from meshwright.planner.validation.nearest import trust_messages
    from meshwright.report.plans import search_result_text

    why, trust = explain(question, answer), trust_messages(question, answer)
    print_output(search_result_text(question, answer, why, trust, language))
    if shown.advice:
        from meshwright.planner.search.advice import advise
        from meshwright.report.plans import messages_text

        print_output("\n" + messages_text(advise(question, answer, runnable), language))
    if shown.why:
        from meshwright.planner.search.explain import compare_families
        from meshwright.report.why import families_text

        print_output("\n" + families_text(answer, compare_families(question, answer), language))


def _answer_data(
    question: Job, answer: SearchResult, runnable: bool, language: str, shown: OutputOptions
) -> dict[str, Any]:
    """Returns the ranked plans as JSON data. --why adds the key `families`, and --advice adds `advice`."""
    from meshwright.planner.validation.nearest import nearest_data
    from meshwright.report.plans import search_result_data

    data = {**search_result_data(question, answer), "nearest": nearest_data(question, answer.chosen.plan)}
    if shown.why:
        from meshwright.planner.search.explain import compare_families
        from meshwright.report.why import plan_comparison_data

        data["families"] = [plan_comparison_data(question, found) for found in compare_families(question, answer)]
    if shown.advice:
        from meshwright.planner.search.advice import advise

        data["advice"] = [translate(sentence, language) for sentence in advise(question, answer, runnable)]
    return data


def _compare_plans(file: JobFile, names: tuple[str, str], language: str, json: bool) -> None:
    """Prints the comparison of two plans. `names` are plan names or plan files.

    Raises: InputError if a name is no plan, or the job cannot run the plan.
    """
    from meshwright.core.errors import InputError
    from meshwright.planner.inputs.job import resolve_job
    from meshwright.planner.inputs.plans import read_plan
    from meshwright.planner.search.explain import priced_plan
    from meshwright.report.why import plan_pair_data, plan_pair_text

    question = resolve_job(file)

    def priced(name: str) -> RankedPlan:
        plan = read_plan(name, lambda: question.cluster.devices)
        if plan is None:
            raise InputError(Message("--compare {name!r}: name a plan, such as dp8.tp2, or a plan file", name=name))
        return priced_plan(question, complete_given_plan(question, plan, name, language))

    first, second = map(priced, names)
    announce_defaults(file, question.workload, language)
    if json:
        print_json(plan_pair_data(question, first, second))
    else:
        print_output(plan_pair_text(first, second, language))


def _explain_rejection(
    question: Job, answer: SearchResult, name: str, runnable: bool, language: str, json: bool
) -> None:
    """Prints why a plan was not chosen. `name` is a plan name, a plan file, or pins; with pins, the best plan with
    these pins is explained.

    Raises: InputError if `name` is none of these.
    """
    from meshwright.core.errors import InputError
    from meshwright.planner.inputs.plans import parse_pins, read_plan
    from meshwright.planner.search.explain import why_not
    from meshwright.report.why import plan_comparison_text, why_not_data
    from meshwright.spec.plan import Plan

    wanted = parse_pins(name) if "=" in name else read_plan(name, lambda: question.cluster.devices)
    if wanted is None:
        raise InputError(
            Message("--why-not {name!r}: name a plan, such as dp8.tp2, or pins, such as tp=8,pp=8", name=name)
        )
    wanted = complete_given_plan(question, wanted, name, language) if isinstance(wanted, Plan) else wanted
    found = why_not(question, answer.chosen, name, wanted, runnable)
    if json:
        print_json(why_not_data(question, answer, found))
    else:
        print_output(plan_comparison_text(answer, found, language))
