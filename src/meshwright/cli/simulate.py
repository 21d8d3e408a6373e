"""`meshwright simulate`: play a step action by action, or months of a fleet that fails."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from meshwright.cli.options import (
    AsJson,
    JobOptions,
    JobPath,
    Language,
    announce_defaults,
    check_output_path,
    count_option,
    given_or_best_plan,
    print_json,
    print_note,
    print_output,
)
from meshwright.core.errors import InputError
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, translate

if TYPE_CHECKING:
    from meshwright.planner.inputs.job import JobFile
    from meshwright.planner.simulate.fleet import RecoveryPolicy


RECOVERY_OPTIONS = ("save", "detect", "rebuild", "restore")
"""Fields of `FleetOptions` that also apply to --kill without --days."""


@Parameter(name="*")
@dataclass(frozen=True)
class FaultOptions:
    """The faults of the simulated step."""

    slow: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            help="RANK:FACTOR, a straggler that takes FACTOR times as long to compute; repeatable",
        ),
    ] = ()
    link: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            help=(
                "RANK:SHARE[:SECONDS[:START]], limit a rank's bandwidth to fraction SHARE, "
                "permanently or for SECONDS from START"
            ),
        ),
    ] = ()
    kill: Annotated[
        tuple[str, ...],
        Parameter(negative="", show_default=False, help="RANK:STEP, a rank that dies in this step; repeatable"),
    ] = ()
    steps: Annotated[int, count_option("number of steps to simulate if ranks die; 0: up to the last death")] = 0


@Parameter(name="*")
@dataclass(frozen=True)
class FleetOptions:
    """The cluster over several days, and how a run recovers from failures. Times are written as '90 s' or '10 min'."""

    days: Annotated[
        float | None, Parameter(help="simulate the cluster with failures for this many days, instead of one step")
    ] = None
    failures: Annotated[
        str | None,
        Parameter(
            help=(
                "llama3, rsc-1, rsc-2, failures per device hour (2e-5), or mean time between failures "
                "of a device ('5 y')"
            )
        ),
    ] = None
    save: Annotated[str | None, Parameter(help="time that a save blocks training")] = None
    durable: Annotated[
        str | None,
        Parameter(help="time from the end of the blocking part of a save until the checkpoint can be restored"),
    ] = None
    interval: Annotated[str | None, Parameter(help="training time between two saves; default: Daly's optimum")] = None
    detect: Annotated[str | None, Parameter(help="time to detect a failure")] = None
    rebuild: Annotated[str | None, Parameter(help="time to restart processes and process groups")] = None
    restore: Annotated[str | None, Parameter(help="time to load the state")] = None
    spares: Annotated[int | None, count_option("number of spare nodes; default: always one available")] = None
    repair: Annotated[str | None, Parameter(help="time until a failed node is a spare node again")] = None
    fleet_table: Annotated[
        bool, Parameter(negative="", help="print a table of seven policies on 16,384 to 100,000 devices, 54 days each")
    ] = False


def simulate(
    job: JobPath = None,
    /,
    *,
    shared: JobOptions = JobOptions(),  # noqa: B008
    wrong: FaultOptions = FaultOptions(),
    long: FleetOptions = FleetOptions(),
    trace: Annotated[Path | None, Parameter(help="write a trace of the step to this file, for ui.perfetto.dev")] = None,
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """Simulate one step of a plan action by action, with slow ranks and slow links; or, with --days, months of a
    cluster whose devices fail.

    Try: meshwright simulate --model gpt3-175b --cluster 128x8:a100-80gb --batch 1536 --seq 2048 --plan dp16.tp8.pp8.z1
    --slow 3:1.5
    Or:  meshwright simulate --cluster 2048x8:h100 --days 90 --failures llama3 --spares 20
    """
    language = choose_language(lang, os.environ)
    check_output_path("--trace", trace)
    if long.fleet_table:
        return _print_fleet_table(long, json, language)
    from meshwright.cli.launch_plan import read_job_file

    file = read_job_file(job, shared)
    if long.days is None:
        given = [name for name in FleetOptions.__dataclass_fields__ if getattr(long, name) not in (None, False)]
        _refuse_options(
            [name for name in given if not (wrong.kill and name in RECOVERY_OPTIONS)],
            Message("a fleet: set its duration with --days"),
        )
        return _simulate_step(file, wrong, long, trace, json, language)
    step_only = {
        "trace": trace is not None,
        **{name: getattr(wrong, name) for name in FaultOptions.__dataclass_fields__},
        "plan": shared.plan,
    }
    _refuse_options([name for name, given in step_only.items() if given], Message("one step: leave out --days"))
    return _simulate_fleet(file, long, json, language)


def _refuse_options(names: list[str], what: str) -> None:
    if names:
        raise InputError(Message("--{names} applies to {what}", names=names[0].replace("_", "-"), what=what))


def _simulate_step(
    file: JobFile, wrong: FaultOptions, long: FleetOptions, trace: Path | None, json: bool, language: str
) -> int:
    from meshwright.planner.inputs.job import resolve_job
    from meshwright.planner.simulate.run import simulate as play
    from meshwright.report.simulation import simulation_data, simulation_text
    from meshwright.spec.faults import Faults, KilledRank, SlowLink, SlowRank, parse_faults

    if wrong.steps < 0:
        raise InputError(Message("--steps {steps} must be at least 0", steps=wrong.steps))
    question = resolve_job(file)
    announce_defaults(file, question.workload, language)
    faults = Faults(
        kill=parse_faults(KilledRank, wrong.kill, "--kill"),
        slow=parse_faults(SlowRank, wrong.slow, "--slow"),
        link=parse_faults(SlowLink, wrong.link, "--link"),
    )
    plan = given_or_best_plan(file, question, language)
    played = play(question, plan, faults, wrong.steps, file.run.every, _recovery_policy(long))
    if trace is not None:
        from meshwright.report.trace import write_trace

        write_trace(played, trace)
        print_note(
            Message("the trace of the step is saved in {trace}; open it in https://ui.perfetto.dev", trace=trace),
            language,
        )
    if json:
        print_json(simulation_data(played))
    else:
        print_output(simulation_text(played, language))
    return 0


def _simulate_fleet(file: JobFile, long: FleetOptions, json: bool, language: str) -> int:
    from meshwright.planner.inputs.job import resolve_cluster
    from meshwright.planner.simulate.fleet import DEFAULT_FAILURE_SOURCE, FleetSpec, parse_failure_rate, simulate_fleet
    from meshwright.report.simulation import fleet_data, fleet_text

    assert long.days is not None
    if not 0 < long.days < 36525:
        raise InputError(Message("--days {days:g} must be above 0 and below 36,525 (a hundred years)", days=long.days))
    cluster = resolve_cluster(file.cluster)
    rate = parse_failure_rate(
        long.failures
        or (f"{cluster.failures_per_device_hour:g}" if cluster.failures_per_device_hour else DEFAULT_FAILURE_SOURCE)
    )
    repair = {"repair": _parse_seconds(long, "repair")} if long.repair is not None else {}
    if long.spares is not None and long.spares < 0:
        raise InputError(Message("--spares {spares} must be at least 0", spares=long.spares))
    fleet = FleetSpec(
        devices=cluster.devices,
        devices_per_node=cluster.devices_per_node,
        failures_per_device_hour=rate.per_device_hour,
        spares=long.spares,
        **repair,
    )
    outcome = simulate_fleet(fleet, _recovery_policy(long), long.days * 86400.0)
    if json:
        print_json(fleet_data(outcome, rate.words))
    else:
        print_output(fleet_text(outcome, rate.words, language))
    return 0


def _recovery_policy(long: FleetOptions) -> RecoveryPolicy:
    from meshwright.planner.simulate.fleet import RecoveryPolicy

    given = {
        name: _parse_seconds(long, name) for name in RecoveryPolicy.model_fields if getattr(long, name) is not None
    }
    return RecoveryPolicy(**given)


def _parse_seconds(long: FleetOptions, name: str) -> float:
    from meshwright.core.quantities import parse_quantity

    text = getattr(long, name)
    try:
        seconds = parse_quantity(float(text) if text.replace(".", "", 1).isdigit() else text, "s")
    except ValueError as error:
        raise InputError(Message("--{name} {text!r}: {error}", name=name, text=text, error=error)) from None
    if not 0.0 <= seconds < float("inf"):
        raise InputError(Message("--{name} {text!r}: a time must be at least 0", name=name, text=text))
    return seconds


def _print_fleet_table(long: FleetOptions, json: bool, language: str) -> int:
    from meshwright.planner.simulate.fleet import DEFAULT_FAILURE_SOURCE, TABLE_DAYS, fleet_table, parse_failure_rate
    from meshwright.report.simulation import fleet_table_data, fleet_table_text

    rate = parse_failure_rate(long.failures or DEFAULT_FAILURE_SOURCE)
    cells = list(fleet_table(rate.per_device_hour, TABLE_DAYS if long.days is None else long.days))
    if json:
        print_json(fleet_table_data(cells))
    else:
        title = translate(Message("failures are {source}", source=rate.words), language)
        print_output(title + "\n\n" + fleet_table_text(cells, language))
    return 0
