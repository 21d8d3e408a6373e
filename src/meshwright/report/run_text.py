"""One run as text: the plan, the losses, then predicted beside measured, kind by kind, in the same words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from meshwright.base.units import show_bytes, show_seconds
from meshwright.report.decisions import decisions_text
from meshwright.report.faults import faults_text, goodput_text
from meshwright.report.ledger import balance_text
from meshwright.report.run import Curve, Pair, Run, Summary, summarise
from meshwright.report.text import columns, lines, sparkline
from meshwright.words.lines import translated
from meshwright.words.say import Sentence, name, say, tell


def run_text(run: Run, language: str = "en") -> str:
    """What `meshwright report RUN` prints."""
    summary = summarise(run)
    said = lambda *parts: say(tell("parts"), language).join(say(part, language) for part in parts)
    facts = [("planned", said(*_planned(run, summary))), ("trained", said(*_trained(summary)))]
    if summary.loss:
        facts.append(("loss", f"{said(_curve(summary.loss))}  {sparkline([record.loss for record in run.steps])}"))
    if summary.held_out:
        curve = [record.held_out_loss for record in run.records if record.held_out_loss is not None]
        share = tell("run.share", share=f"{summary.held_out.last.loss / summary.held_out.first.loss:.1%}")
        facts.append(("held out", f"{said(_curve(summary.held_out))}{said(share) if len(curve) > 1 else ''}  {sparkline(curve)}"))
    facts.append(("skipped", said(tell("run.skipped", steps=_steps(summary.skipped)) if summary.skipped else tell("run.none"))))
    facts.append(("checkpoints", said(_steps(summary.checkpoints) if summary.checkpoints else tell("run.none"))))
    if summary.ledger:
        facts.append(("samples", translated(balance_text(summary.ledger), language)))
    if summary.goodput and run.events:
        facts.append(("goodput", goodput_text(summary.goodput, language)))
    parts = [said(tell("run.run", folder=summary.run)), lines([(said(name("fact", word)), words) for word, words in facts], "  ")]
    for table in (faults_text(run.events, run.steps, language), decisions_text(run.events, language)):
        if table:
            parts.append("\n" + table)
    for title, rows, show in (("time", summary.time, show_seconds), ("memory", summary.memory, show_bytes)):
        if rows:
            head = [said(tell(f"run.{word}")) for word in (title, "predicted", "measured", "ratio")]
            parts.append("\n" + columns([head, *(_row(row, show, said) for row in rows)], "  "))
    return "\n".join(parts)


def _planned(run: Run, summary: Summary) -> list[Sentence]:
    if run.plan is None:
        return [tell("run.unplanned")]
    count = run.job.model.parameters if run.job else run.launch.parameters if run.launch else 0
    parts = [tell("run.plan", plan=run.plan.name, ranks=run.plan.world)]
    if run.model:
        parts.insert(0, tell("run.model" if count else "run.named", model=run.model, parameters=count))
    if summary.tokens_per_second.predicted:
        parts.append(tell("run.promised", rate=summary.tokens_per_second.predicted))
    return parts


def _trained(summary: Summary) -> list[Sentence]:
    if not summary.steps:
        return [tell("run.begun")]
    steps = tell("run.steps.of" if summary.planned_steps else "run.steps.all", steps=summary.steps, planned=summary.planned_steps)
    parts = [steps, tell("run.tokens", tokens=summary.tokens)]
    if summary.tokens_per_second.measured:
        parts.append(tell("run.speed", rate=summary.tokens_per_second.measured))
    if summary.repeated:
        parts.append(tell("run.again", steps=summary.repeated))
    if summary.cut:
        parts.append(tell("run.cut", lines=summary.cut))
    return parts


def _curve(curve: Curve) -> Sentence:
    values = {
        f"{place}_{field}": f"{point.loss:.4f}" if field == "loss" else point.step
        for place, point in (("first", curve.first), ("last", curve.last), ("best", curve.best))
        for field in ("loss", "step")
    }
    return tell("run.point" if curve.first == curve.last else "run.curve", **values)


def _steps(steps: Sequence[int]) -> Sentence:
    """
    >>> say(_steps((5,))), say(_steps((1, 2, 3, 4, 5, 6, 7, 8)))
    ('step 5', '8: steps 1, 2, 3, ... 8')
    """
    if len(steps) == 1:
        return tell("run.step", step=steps[0])
    if len(steps) <= 6:
        return tell("run.steps", steps=", ".join(map(str, steps)))
    return tell("run.steps.many", count=len(steps), steps=", ".join(map(str, steps[:3])), last=steps[-1])


def _row(row: Pair, show: Callable[[float], str], said: Callable[..., str]) -> tuple[str, ...]:
    within = said(tell("run.within", row=name("row", row.within)))
    return (
        said(name("row", row.name)),
        "-" if row.predicted is None else show(row.predicted),
        within if row.within else "-" if row.measured is None else show(row.measured),
        "" if row.ratio is None else f"{row.ratio:.2f}",
    )
