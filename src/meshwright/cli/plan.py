"""`meshwright plan`: rank the plans for a job and say why the others lost.

Exit code 3 means that no plan fits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from meshwright.cli.options import (
    AsJson,
    JobOptions,
    JobPath,
    Language,
    announce_defaults,
    check_output_path,
    count_option,
    print_json,
    print_note,
    print_output,
)
from meshwright.core.files import write_atomically
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, translate

if TYPE_CHECKING:
    from meshwright.planner.inputs.job import ClusterChoice, JobFile
    from meshwright.planner.search.best_plans import RankedPlan, SearchResult
    from meshwright.spec.job import Job


@Parameter(name="*")
@dataclass(frozen=True)
class RankingOptions:
    """The options that select the plans of the search."""

    pin: Annotated[str | None, Parameter(help="plan fields to fix, such as tp=2,pp=4")] = None
    objective: Annotated[
        Literal["fastest", "fewest", "cheapest", "energy", "headroom"],
        Parameter(help="minimize step time, number of devices, price, energy of the devices, or device memory"),
    ] = "fastest"
    runnable: Annotated[
        bool, Parameter(negative="", help="rank only plans that this version can run; some plans are plan-only")
    ] = False
    trust: Annotated[
        Literal["all", "measured"],
        Parameter(help="rank all plans, or only plans whose features all occur in published runs with a measured time"),
    ] = "all"
    trials: Annotated[
        int,
        count_option("run up to this many of the best plans for a few steps each, refit the estimate and rank again"),
    ] = 0


@Parameter(name="*")
@dataclass(frozen=True)
class RunLengthOptions:
    """The length of the run, its price and its end."""

    tokens: Annotated[
        str | None, Parameter(help="tokens of the whole run, such as 1T: prints days, device-hours, money and energy")
    ] = None
    price: Annotated[
        float | None, Parameter(help="money per device hour; default: of the cluster file, else of the catalog")
    ] = None
    by: Annotated[
        str | None,
        Parameter(help="with --tokens: the day by which the run must end, such as 2027-03-01, on the fewest devices"),
    ] = None


@Parameter(name="*")
@dataclass(frozen=True)
class OutputOptions:
    """The further output of the command, and the files to write."""

    top: Annotated[int, count_option("number of plans to show")] = 10
    why: Annotated[
        bool, Parameter(negative="", help="show the best plan of each rejected plan family, and why it lost")
    ] = False
    why_not: Annotated[
        str | None,
        Parameter(
            help=(
                "explain why a plan, or pins such as tp=8,pp=8, was not chosen: the violated limit or "
                "the additional time"
            )
        ),
    ] = None
    compare: Annotated[
        tuple[str, str] | None,
        Parameter(negative="", help="two plans, such as dp8.z1 tp2.dp4: compare their times and memory"),
    ] = None
    advice: Annotated[
        bool,
        Parameter(
            negative="",
            help=(
                "answer six questions about the job, and predict the effect of improvements of the cluster or workload"
            ),
        ),
    ] = False
    save: Annotated[Path | None, Parameter(help="write the best plan to this file, for --plan")] = None
    page: Annotated[
        Path | None,
        Parameter(
            help=(
                "write an HTML page to this file: plans for this job and for other numbers of "
                "devices, batch, sequence, memory"
            )
        ),
    ] = None
    lang: Language = None


@Parameter(name="*")
@dataclass(frozen=True)
class SystemOptions:
    """The options that plan for another system."""

    system: Annotated[
        str | None,
        Parameter(
            name="--for",
            help="plan for another system: only plans that it can run, as a diff of its own keys; such as megatron",
        ),
    ] = None
    config: Annotated[
        tuple[Path, ...],
        Parameter(negative="", show_default=False, help="with --for: a file of your configuration, repeatable"),
    ] = ()


def plan(
    job: JobPath = None,
    /,
    *,
    shared: JobOptions = JobOptions(),  # noqa: B008
    wanted: RankingOptions = RankingOptions(),
    shown: OutputOptions = OutputOptions(),
    length: RunLengthOptions = RunLengthOptions(),
    other: SystemOptions = SystemOptions(),
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
    file = read_job_file(job, shared)
    if shown.compare is not None:
        _compare_plans(file, shown.compare, language, json)
        return 0
    if (found := _search(file, wanted, shown.top, language, length)) is None:
        return 0
    question, answer = found
    announce_defaults(file, question.workload, language)
    if shown.why_not is not None:
        _explain_rejection(question, answer, shown.why_not, wanted.runnable, language, json)
    elif json:
        print_json(
            _answer_data(question, answer, wanted.runnable, language, shown) | _cost_data(question, answer, length)
        )
    else:
        _print_answer(question, answer, wanted.runnable, language, shown)
        _print_cost(question, answer, length, language)
    if shown.save is not None:
        write_atomically(shown.save, answer.plans[0].plan.to_json() + "\n")
        print_note(
            Message(
                "plan {plan} is saved in {save}; `--plan {save}` uses it",
                plan=answer.plans[0].plan.name,
                save=shown.save,
            ),
            language,
        )
    if shown.page is not None:
        _report_page(question, answer, wanted, _command_line(job, shared, wanted), file.cluster, shown.page, language)
    return 0


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
            raise InputError(Message("the configuration does not state the model: add --model"))
        file = read_job(job, shared.set, options)
    else:
        file = read_job_file(job, shared)
    question, sizes = resolve_job(file), known_sizes(file)
    pins = {**question.workload.fixed, **(parse_pins(pin) if pin else {})}
    found = compare_for(question.but(pins=pins), system, sizes, file.model.source, yours, given)
    lines = [translate(line, language) for line in comparison_lines(found)]
    if json:
        plans = {"yours": found.yours, "best": found.best, "here": found.here}
        print_json(
            {
                "system": system.name,
                **{name: plan_data(row.plan, row.estimate) for name, row in plans.items() if row is not None},
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

    cost = run_cost(question, answer.chosen, parse_token_count(length.tokens or "1B"))
    said = (
        run_cost_messages(question, cost, length.price is not None)
        if length.tokens
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
    """Returns the job with prices, the objective, and the longest step in seconds that ends the run in time."""
    from meshwright.core.errors import InputError
    from meshwright.planner.search.run_cost import parse_token_count, seconds_until, with_prices

    question = question.but(cluster=with_prices(question.cluster, length.price))
    if length.by is None:
        return question, wanted.objective, float("inf")
    if length.tokens is None:
        raise InputError(Message("--by {date} needs --tokens", date=length.by))
    steps = parse_token_count(length.tokens) / question.workload.tokens
    left = seconds_until(length.by, datetime.now(UTC))
    return question, "fewest" if wanted.objective == "fastest" else wanted.objective, left / max(steps, 1.0)


def _search(
    file: JobFile, wanted: RankingOptions, count: int, language: str, length: RunLengthOptions
) -> tuple[Job, SearchResult] | None:
    """Returns the job and its `count` best plans. Returns None on a rank other than 0, which only takes part in
    trials."""
    from meshwright.cli.trials import job_from_trials, with_fastest_first
    from meshwright.planner.inputs.job import resolve_job
    from meshwright.planner.inputs.plans import parse_pins
    from meshwright.planner.search.best_plans import SearchObjective
    from meshwright.planner.search.ranking import search_plans, with_used_devices

    question = resolve_job(file)
    question = question.but(trust=wanted.trust)
    if wanted.pin:
        question = question.but(pins={**question.pins, **parse_pins(wanted.pin)})
    question, objective, longest = _with_run_length(question, wanted, length)
    found = job_from_trials(file, question, wanted.trials, language) if wanted.trials else (question, None)
    if found is None:
        return None
    question, best = found
    runnable = wanted.runnable or best is not None
    answer = search_plans(question, count, SearchObjective(objective), runnable, longest)
    answer = with_fastest_first(question, answer, best) if best is not None else answer
    return with_used_devices(question, answer), answer


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
    axes = page_axes(question, grid_shape_for(answer.seconds / workers))
    print_note(
        Message(
            "page: searching a plan for each of {size} settings of devices, batch, sequence and memory", size=axes.size
        ),
        language,
    )
    found = search_page_grid(
        question,
        axes,
        SearchObjective(wanted.objective),
        wanted.runnable,
        workers if axes.size * answer.seconds > 2.0 else 1,
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

        data["families"] = [plan_comparison_data(found) for found in compare_families(question, answer)]
    if shown.advice:
        from meshwright.planner.search.advice import advise

        data["advice"] = [translate(sentence, language) for sentence in advise(question, answer, runnable)]
    return data


def _compare_plans(file: JobFile, names: tuple[str, str], language: str, json: bool) -> None:
    """Prints the comparison of two plans. `names` are plan names or plan files.

    Raises: InputError if a name is no plan, or the job cannot run the plan.
    """
    from meshwright.core.errors import InputError
    from meshwright.planner.cost.overlap import with_chosen_bucket
    from meshwright.planner.inputs.job import resolve_job
    from meshwright.planner.inputs.plans import read_plan
    from meshwright.planner.search.explain import priced_plan
    from meshwright.report.why import plan_pair_data, plan_pair_text

    question = resolve_job(file)

    def priced(name: str) -> RankedPlan:
        plan = read_plan(name, lambda: question.cluster.devices)
        if plan is None:
            raise InputError(Message("--compare {name!r}: name a plan, such as dp8.tp2, or a plan file", name=name))
        return priced_plan(question, with_chosen_bucket(question, plan))

    first, second = map(priced, names)
    announce_defaults(file, question.workload, language)
    if json:
        print_json(plan_pair_data(first, second))
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
    from meshwright.planner.cost.overlap import with_chosen_bucket
    from meshwright.planner.inputs.plans import parse_pins, read_plan
    from meshwright.planner.search.explain import why_not
    from meshwright.report.why import plan_comparison_text, why_not_data
    from meshwright.spec.plan import Plan

    wanted = parse_pins(name) if "=" in name else read_plan(name, lambda: question.cluster.devices)
    if wanted is None:
        raise InputError(
            Message("--why-not {name!r}: name a plan, such as dp8.tp2, or pins, such as tp=8,pp=8", name=name)
        )
    wanted = with_chosen_bucket(question, wanted) if isinstance(wanted, Plan) else wanted
    found = why_not(question, answer.chosen, name, wanted, runnable)
    if json:
        print_json(why_not_data(answer, found))
    else:
        print_output(plan_comparison_text(answer, found, language))
