"""`meshwright validate`: score the cost model on published measurements."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from meshwright.cli.options import AsJson, Language, print_json, print_output
from meshwright.core.messages import Message

if TYPE_CHECKING:
    from meshwright.planner.validation.score import FamilyScore, RelativeErrors, StepPrediction, ValidationReport


def validate(
    *,
    family: Annotated[str, Parameter(help="score only families whose name contains this text")] = "",
    table: Annotated[
        Path | None, Parameter(help="another table of measurements: a CSV file with the columns of the built-in table")
    ] = None,
    famous: Annotated[
        bool, Parameter(negative="", help="predict each famous run beside its published step time")
    ] = False,
    chosen: Annotated[
        bool,
        Parameter(negative="", help="compare the plans that the planner chooses with the best published MFU; minutes"),
    ] = False,
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """Score predicted times and memory on published training runs, family by family.

    Try: meshwright validate --family korthikanti
    """
    from meshwright.core.errors import InputError
    from meshwright.planner.validation.intervals import interval_coverage
    from meshwright.planner.validation.score import predict_rows, score_collectives, validation_report
    from meshwright.planner.validation.tables import read_collectives, read_measurements

    if famous:
        return _print_famous_runs(json)
    rows = [row for row in read_measurements(table) if family.lower() in row.text("family").lower()]
    if not rows:
        raise InputError(
            Message(
                "no row of {table} has {family!r} in its family",
                table=table or Message("the published table"),
                family=family,
            )
        )
    predictions, left = predict_rows(rows)
    if chosen:
        return _print_chosen_plans([each for part in predictions.values() for each in part], json)
    found = validation_report(predictions, left)
    coverage = interval_coverage([each for part in predictions.values() for each in part])
    operations = {} if family or table else score_collectives(read_collectives())
    if json:
        print_json({**scores_data(found, operations), "coverage": coverage})
    else:
        print_output("\n".join([scores_text(found, operations), *coverage_lines(coverage)]))
    return 0


def scores_data(found: ValidationReport, operations: dict[str, RelativeErrors]) -> dict[str, Any]:
    """Returns the report as JSON data."""

    def plain(value: Any) -> Any:
        if hasattr(value, "_asdict"):
            return {name: plain(each) for name, each in value._asdict().items()}
        return [plain(each) for each in value] if isinstance(value, tuple) else value

    return {**plain(found), "collectives": {name: plain(each) for name, each in operations.items()}}


def scores_text(found: ValidationReport, operations: dict[str, RelativeErrors]) -> str:
    """Returns the report as text."""
    from meshwright.report.text import align_columns

    times = _family_rows(found.families)
    memory = [["memory", "meter", "rows", "median", "p90", "signed", "refused"]]
    for one in found.memory:
        error = one.errors
        shown = [format_percent(error.median), format_percent(error.ninetieth), format_percent(error.signed, True)]
        memory.append([one.family, one.meter, str(error.rows), *shown, f"{one.refused} of {one.ran}"])
    parts = [align_columns(times), "", align_columns(memory), ""]
    if operations:
        wires = [["collectives", "rows", "median", "p90", "signed"]]
        wires += [
            [
                name,
                str(each.rows),
                format_percent(each.median),
                format_percent(each.ninetieth),
                format_percent(each.signed, True),
            ]
            for name, each in operations.items()
        ]
        parts += [align_columns(wires), ""]
    if found.compiled:
        ratios = [["compiled / eager", "pairs", "measured", "predicted"]]
        ratios += [
            [one.family, str(one.pairs), f"{one.measured:.3f}", f"{one.predicted:.3f}"] for one in found.compiled
        ]
        parts += [align_columns(ratios), ""]
    parts.append(f"time: {format_percent(found.median_of_medians)} is the median over families of the median error")
    if found.worst_regret is not None:
        parts.append(
            f"regret: {format_percent(found.median_regret)} in the median group of plans, "
            f"{format_percent(found.worst_regret)} in the worst"
        )
    if found.out_of_memory:
        parts.append(
            f"memory: {found.false_fits} of {found.out_of_memory} plans that ran out of memory are predicted to fit"
        )
    left = sum(count for _, _, count in found.left)
    parts.append(f"{left} rows are not predicted; --json says why")
    return "\n".join(parts)


def _print_famous_runs(as_json: bool) -> int:
    """Prints the predicted and the published step time of each famous run, and the interval of the prediction."""
    from meshwright.planner.validation.score import predict_rows
    from meshwright.planner.validation.tables import read_famous_runs
    from meshwright.report.plans import wrap_plan_names
    from meshwright.report.text import align_columns

    found, _ = predict_rows(read_famous_runs())
    runs, data = [["run", "plan", "predicted", "published", "error", "in interval", "source"]], []
    for each in (one for part in found.values() for one in part):
        published, row, interval = each.case.seconds or 0.0, each.case.row, each.estimate.step_interval
        assert interval is not None
        error, inside = each.seconds / published - 1.0, interval.low <= published <= interval.high
        name = f"{row.text('model')}, {row.text('gpus')} {row.text('gpu')}"
        source = row.text("source_ref")
        runs.append([name, each.plan.name, f"{each.seconds:.1f} s", f"{published:.1f} s", format_percent(error, True)])
        runs[-1] += ["yes" if inside else "no", source.split(";")[0]]
        data.append({"run": row.text("row_id"), "plan": each.plan.name, "predicted": each.seconds})
        data[-1] |= {"published": published, "error": error, "inside": inside, "source": source}
        data[-1] |= {"notes": row.text("notes")}
    if as_json:
        print_json({"runs": data})
    else:
        print_output(align_columns(wrap_plan_names(runs, at=1)))
    return 0


def _print_chosen_plans(found: list[StepPrediction], as_json: bool) -> int:
    """Prints the predicted MFU of the planner's choices and the best published MFU at their scale."""
    from meshwright.planner.validation.chosen import chosen_plans
    from meshwright.report.plans import wrap_plan_names
    from meshwright.report.text import align_columns

    lines, data = [["job", "plan", "MFU", "low end", "best published", "from", "choice is"]], []
    for each in chosen_plans(found):
        run, best = each.run, each.best.prediction.case.row
        name = f"{run.prediction.case.row.text('model')}, {run.devices} {run.device} {run.precision}"
        shares = [format_percent(share) for share in (each.mfu, each.low, each.best.mfu)]
        lines.append([name, each.plan.name, *shares, best.text("family"), each.verdict])
        data.append({"job": name, "plan": each.plan.name, "mfu": each.mfu, "low": each.low})
        data[-1] |= {"best": each.best.mfu, "row": best.text("row_id"), "verdict": each.verdict}
    if as_json:
        print_json({"chosen": data})
    else:
        kinds = [str(line["verdict"]) for line in data]
        said = ", ".join(f"{kinds.count(kind)} {kind}" for kind in ("below", "interval", "above"))
        print_output("\n".join([align_columns(wrap_plan_names(lines, at=1)), "", f"{len(data)} choices: {said}"]))
    return 0


FAMILY_COLUMNS = [
    "family",
    "rows",
    "time: median",
    "p90",
    "signed",
    "scaling",
    "rank corr.",
    "regret",
    "worst",
    "5 trials",
    "chosen",
]


def _family_rows(families: Sequence[FamilyScore]) -> list[list[str]]:
    """Returns the rows of the table of families, the heading first."""
    times = [FAMILY_COLUMNS]
    for family in families:
        each = family.time
        shown = (
            [format_percent(each.median), format_percent(each.ninetieth), format_percent(each.signed, True)]
            if each
            else ["-"] * 3
        )
        others = [
            format_percent(family.scaling),
            format_figure(family.correlation),
            format_percent(family.regret),
            format_percent(family.worst_regret),
            format_percent(family.after_trials),
            format_percent(family.chosen.signed, True) if family.chosen else "-",
        ]
        times.append([family.name, str(each.rows if each else 0), *shown, *others])
    return times


def coverage_lines(coverage: dict[str, dict[str, float]]) -> list[str]:
    """Returns a line for each quantity: the share of measured values inside intervals that other families give."""
    return [
        f"intervals of {name}: {format_percent(shares[''])} of the rows lie in intervals that the other families give "
        f"(90 % intended); least in {min((share, family) for family, share in shares.items() if family)[1]}"
        for name, shares in coverage.items()
    ]


def format_percent(value: float | None, sign: bool = False) -> str:
    """Returns `value` as a percentage, or a dash for None."""
    return "-" if value is None else f"{100 * value:{'+' if sign else ''}.1f} %"


def format_figure(value: float | None) -> str:
    """Returns `value` with two decimals, or a dash for None."""
    return "-" if value is None else f"{value:.2f}"
