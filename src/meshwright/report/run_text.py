"""One run as text: the plan, the losses, then predicted beside measured, kind by kind, in the same words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.base.units import show_bytes, show_count, show_seconds
from meshwright.report.faults import faults_text, goodput_text
from meshwright.report.ledger import balance_text
from meshwright.report.run import Curve, Pair, Run, Summary, summarise
from meshwright.report.text import columns, lines, sparkline


def run_text(run: Run) -> str:
    """What `meshwright report RUN` prints."""
    summary = summarise(run)
    facts = [("planned", _planned(run, summary)), ("trained", _trained(summary))]
    if summary.loss:
        facts.append(("loss", f"{_curve(summary.loss)}  {sparkline([record.loss for record in run.steps])}"))
    if summary.held_out:
        curve = [record.held_out_loss for record in run.records if record.held_out_loss is not None]
        share = f" ({summary.held_out.last.loss / summary.held_out.first.loss:.1%} of the first)" if len(curve) > 1 else ""
        facts.append(("held out", f"{_curve(summary.held_out)}{share}  {sparkline(curve)}"))
    facts.append(("skipped", f"{_steps(summary.skipped)}: a gradient was not finite" if summary.skipped else "none"))
    facts.append(("checkpoints", _steps(summary.checkpoints) if summary.checkpoints else "none"))
    if summary.ledger:
        facts.append(("samples", balance_text(summary.ledger)))
    if summary.goodput and run.events:
        facts.append(("goodput", goodput_text(summary.goodput)))
    parts = [f"run {summary.run}", lines(facts, "  ")]
    broken = faults_text(run.events, run.steps)
    if broken:
        parts.append("\n" + broken)
    for title, rows, show in (
        ("time per step", summary.time, show_seconds),
        ("memory of the fullest rank", summary.memory, show_bytes),
    ):
        if rows:
            parts.append("\n" + columns([(title, "predicted", "measured", "measured/predicted"), *(_row(row, show) for row in rows)], "  "))
    return "\n".join(parts)


def _planned(run: Run, summary: Summary) -> str:
    if run.plan is None:
        return "unknown: the folder has no plan.json"
    ranks = f"{run.plan.world} rank{'s' if run.plan.world > 1 else ''}"
    count = run.job.model.parameters if run.job else run.launch.parameters if run.launch else 0
    what = f"{run.model}{f' ({show_count(count)} parameters)' if count else ''}, " if run.model else ""
    speed = summary.tokens_per_second.predicted
    return f"{what}plan {run.plan.name} on {ranks}" + (f", {show_count(speed)} tokens/s predicted" if speed else "")


def _trained(summary: Summary) -> str:
    if not summary.steps:
        return "no step yet"
    words = f"{summary.steps} of {summary.planned_steps} steps" if summary.planned_steps else f"{summary.steps} steps"
    words += f", {show_count(summary.tokens)} tokens"
    if summary.tokens_per_second.measured:
        words += f", {show_count(summary.tokens_per_second.measured)} tokens/s (median)"
    if summary.repeated:
        words += f", {summary.repeated} run again after a restart"
    if summary.cut:
        words += f", {summary.cut} cut off by a kill and left out"
    return words


def _curve(curve: Curve) -> str:
    if curve.first == curve.last:
        return f"{curve.last.loss:.4f} at step {curve.last.step}"
    return (
        f"{curve.first.loss:.4f} at step {curve.first.step}, {curve.last.loss:.4f} at step {curve.last.step}, "
        f"best {curve.best.loss:.4f} at step {curve.best.step}"
    )


def _steps(steps: Sequence[int]) -> str:
    """
    >>> _steps((5,)), _steps((1, 2, 3, 4, 5, 6, 7, 8))
    ('step 5', '8: steps 1, 2, 3, ... 8')
    """
    if len(steps) == 1:
        return f"step {steps[0]}"
    if len(steps) <= 6:
        return "steps " + ", ".join(map(str, steps))
    return f"{len(steps)}: steps " + ", ".join(map(str, steps[:3])) + f", ... {steps[-1]}"


def _row(row: Pair, show: Callable[[float], str]) -> tuple[str, ...]:
    measured = f"in {row.within}" if row.within else "-" if row.measured is None else show(row.measured)
    return (
        row.name,
        "-" if row.predicted is None else show(row.predicted),
        measured,
        "" if row.ratio is None else f"{row.ratio:.2f}",
    )
