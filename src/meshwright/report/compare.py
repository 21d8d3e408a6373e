"""Compares several training runs, one column for each, and their losses at equal steps.

The workload determines the result; the plan must not change it. So runs of one workload under several plans must have
equal loss curves. The reported difference is the largest difference of losses over all steps that a run shares with the
first run, relative to the loss of the first run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import Field

from meshwright.core.codec import StrictModel
from meshwright.core.errors import InputError
from meshwright.core.messages import Message, term, translate
from meshwright.core.units import show_bytes, show_count, show_seconds
from meshwright.report.run import PredictedMeasured, RunFolder, RunSummary, summarize_run
from meshwright.report.text import align_columns
from meshwright.spec.run import job_difference


class RunComparison(StrictModel):
    """The runs, and for each run the difference of its losses from those of the first run. `report --json` prints it
    for several runs."""

    runs: tuple[RunSummary, ...]
    shared_steps: tuple[int, ...]
    loss_difference: tuple[float | None, ...]
    another_job: tuple[str | None, ...] = Field(
        description="difference from the first run's job; empty if the jobs are identical"
    )


def compare_runs(runs: Sequence[RunFolder]) -> RunComparison:
    """Compares several runs. Raises InputError for fewer than two runs."""
    if len(runs) < 2:
        raise InputError(Message("a comparison needs two runs or more, got {count}", count=len(runs)))
    first = {record.step: record.loss for record in runs[0].records}
    shared: list[int] = []
    differences: list[float | None] = []
    for run in runs:
        pairs = [(first[record.step], record.loss) for record in run.records if record.step in first]
        shared.append(len(pairs))
        differences.append(max((_relative_difference(mine, theirs) for theirs, mine in pairs), default=None))
    return RunComparison(
        runs=tuple(summarize_run(run) for run in runs),
        shared_steps=tuple(shared),
        loss_difference=tuple(differences),
        another_job=tuple(_job_difference(runs[0], run) for run in runs),
    )


def _relative_difference(loss: float, other: float) -> float:
    """Returns the relative difference of two losses. It is 0 if both are not finite, and infinite if only one is
    finite."""
    if not (math.isfinite(loss) and math.isfinite(other)):
        return 0.0 if math.isfinite(loss) == math.isfinite(other) else math.inf
    return abs(loss - other) / max(abs(other), 1e-300)


def _job_difference(first: RunFolder, other: RunFolder) -> str | None:
    """Returns how the job of `other` differs from that of `first`; '' if the jobs are equal, None if a launch file is
    missing."""
    if first.launch is None or other.launch is None:
        return None
    return job_difference(other.launch, first.launch)


def compare_text(comparison: RunComparison, language: str = "en") -> str:
    """Returns the text that `meshwright report RUN RUN ...` prints."""
    say = lambda message: translate(message, language)
    runs = comparison.runs
    short = [Path(run.run).name for run in runs]
    called = short if len(set(short)) == len(short) else [run.run for run in runs]
    rows: list[tuple[str, ...]] = [("", *called)]

    def add(head: str, cells: Sequence[str]) -> None:
        if any(cell != "-" for cell in cells):
            rows.append((head, *cells))

    add(say(Message("model")), [run.model or "-" for run in runs])
    add(say(Message("plan")), [run.plan or "-" for run in runs])
    add(say(Message("ranks")), [str(run.devices or "-") for run in runs])
    add(say(Message("steps")), [str(run.steps) for run in runs])
    add(say(Message("first loss")), [f"{run.loss.first.loss:.4f}" if run.loss else "-" for run in runs])
    add(say(Message("last loss")), [f"{run.loss.last.loss:.4f}" if run.loss else "-" for run in runs])
    add(say(Message("best loss")), [f"{run.loss.best.loss:.4f}" if run.loss else "-" for run in runs])
    add(
        say(Message("val loss")),
        [f"{run.held_out.last.loss:.4f}" if run.held_out else "-" for run in runs],
    )
    add(say(Message("tokens/s")), [_format_values(run.tokens_per_second, show_count) for run in runs])
    add(say(Message("seconds per step")), [_format_values(run.pair("time", "step"), show_seconds) for run in runs])
    add(say(Message("measured/predicted")), [_format_ratio(run.pair("time", "step")) for run in runs])
    for kind in sorted({row.name for run in runs for row in run.time if row.name != "step" and row.measured}):
        add(
            f"  {translate(term('row', kind), language)}",
            [_format_values(run.pair("time", kind), show_seconds) for run in runs],
        )
    for kind in dict.fromkeys(row.name for run in runs for row in run.memory if row.measured):
        add(
            say(Message("memory {kind}", kind=term("row", kind))),
            [_format_values(run.pair("memory", kind), show_bytes) for run in runs],
        )
    add(say(Message("skipped steps")), [str(len(run.skipped)) for run in runs])
    add(say(Message("loss difference")), [_format_loss_difference(comparison, at, say) for at in range(len(runs))])
    notes = [
        say(Message("{one} and {other} are different jobs: {what}", one=called[at], other=called[0], what=words))
        for at, words in enumerate(comparison.another_job)
        if words
    ]
    return "\n".join([align_columns(rows), *notes])


def _format_values(pair: PredictedMeasured, show: Callable[[float], str]) -> str:
    return "-" if pair.measured is None else show(pair.measured)


def _format_ratio(pair: PredictedMeasured) -> str:
    return "-" if pair.ratio is None else f"{pair.ratio:.2f}"


def _format_loss_difference(comparison: RunComparison, at: int, say: Callable[[str], str]) -> str:
    difference = comparison.loss_difference[at]
    if at == 0 or difference is None:
        return "-"
    return say(Message("{apart} over {steps}", apart=f"{difference:.1e}", steps=comparison.shared_steps[at]))
