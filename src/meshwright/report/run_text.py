"""Formats one training run, or several side by side, as text.

`run_text` formats a training run as text: the plan, the losses, predicted and measured figures by kind, and stragglers
with the decisions about them.

In the table of decisions, a measured speed-up is in the row of the last change with the same predicted speed-up. If
another change of plan follows within a few steps, the speed-up of the first change is not measured.

`compare_text` compares several training runs, one column for each, and their losses at equal steps.

Only the workload may determine the losses, not the plan. Therefore, runs of the same workload under different plans
must have equal loss curves. The reported difference is the largest relative difference from the loss of the first run,
over all steps that both runs have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import Field

from meshwright.core.codec import StrictModel
from meshwright.core.errors import InputError
from meshwright.core.messages import Message, mark_msgid, term, translate
from meshwright.core.units import show_bytes, show_count, show_seconds
from meshwright.report.faults import faults_text, goodput_text
from meshwright.report.run import (
    LossCurve,
    PredictedMeasured,
    RunFolder,
    RunSummary,
    sample_balance_text,
    summarize_run,
)
from meshwright.report.text import align_columns, align_facts, sparkline
from meshwright.spec.job import job_difference
from meshwright.spec.record import RunEvent, device_names

MAX_DECISIONS_SHOWN = 20
"""The maximum number of decisions in the table. If there are more, the table lists the last decisions."""


class RebalanceDecision(NamedTuple):
    """A decision about stragglers. `predicted` and `measured`: by which factor steps become faster; 0 means unknown."""

    step: int
    ranks: str
    words: str
    predicted: float = 0.0
    measured: float = 0.0


SLOW_RATIO = 3.0
"""A step with this ratio of measured to predicted time gets a hint."""


def list_decisions(events: Sequence[RunEvent]) -> list[RebalanceDecision]:
    """Returns every straggler diagnosis and every change, in order."""
    found: list[RebalanceDecision] = []
    for event in events:
        ranks = ", ".join(map(str, event.ranks))
        if event.kind == "slow":
            words = event.cause
            if event.decision:
                words = Message("{cause}: {decision}", cause=words, decision=event.decision)
            found.append(RebalanceDecision(event.step, ranks, words, event.predicted))
        elif event.kind == "rebalanced":
            found.append(
                RebalanceDecision(event.step, ranks, Message("{plan} from here on", plan=event.plan), event.predicted)
            )
        elif event.kind == "device_readmitted":
            devices = device_names(event.slots)
            found.append(
                RebalanceDecision(
                    event.step,
                    ranks,
                    Message("{devices} comes back: {cause}", devices=devices, cause=event.cause),
                    event.predicted,
                )
            )
        elif event.kind == "rebalance_result":
            waiting = [at for at, each in enumerate(found) if each.predicted == event.predicted and not each.measured]
            for at in waiting[-1:]:
                found[at] = found[at]._replace(measured=event.measured)
    return found


def decisions_text(events: Sequence[RunEvent], language: str = "en") -> str:
    """Returns the table of decisions, or '' if there were none."""
    rows = list_decisions(events)
    if not rows:
        return ""
    shown = [
        (
            str(row.step),
            row.ranks,
            translate(row.words, language),
            *(f"{gain:.2f}" if gain else "" for gain in (row.predicted, row.measured)),
        )
        for row in rows[-MAX_DECISIONS_SHOWN:]
    ]
    more = (
        [(translate(Message("... {count} earlier", count=len(rows) - MAX_DECISIONS_SHOWN), language),)]
        if len(rows) > MAX_DECISIONS_SHOWN
        else []
    )
    head = [translate(term("broke", word), language) for word in ("step", "rank", "slow", "faster", "measured")]
    return align_columns([head, *more, *shown], "  ")


def run_text(run: RunFolder, language: str = "en") -> str:
    """Returns the text that `meshwright report RUN` prints."""
    summary = summarize_run(run)
    said = lambda *parts: translate(Message(", "), language).join(translate(part, language) for part in parts)
    facts = [("planned", said(*_plan_messages(run, summary))), ("trained", said(*_training_messages(summary)))]
    if speed := _speed_messages(summary):
        facts.append(("speed", said(*speed)))
    if summary.loss:
        facts.append(
            ("loss", f"{said(_loss_message(summary.loss))}  {sparkline([record.loss for record in run.steps])}")
        )
    if summary.held_out:
        curve = [record.held_out_loss for record in run.records if record.held_out_loss is not None]
        share = Message(
            " ({share} of the first)", share=f"{summary.held_out.last.loss / summary.held_out.first.loss:.1%}"
        )
        facts.append(
            (
                "held out",
                f"{said(_loss_message(summary.held_out))}{said(share) if len(curve) > 1 else ''}  {sparkline(curve)}",
            )
        )
    facts.append(
        (
            "skipped",
            said(
                Message("{steps}: a gradient was not finite", steps=_steps_message(summary.skipped))
                if summary.skipped
                else Message("none")
            ),
        )
    )
    facts.append(("checkpoints", said(_steps_message(summary.checkpoints) if summary.checkpoints else Message("none"))))
    if summary.ledger:
        facts.append(("samples", translate(sample_balance_text(summary.ledger), language)))
    if summary.goodput and run.events:
        facts.append(("goodput", goodput_text(summary.goodput, language)))
    parts = [
        said(Message("run {folder}", folder=summary.run)),
        align_facts([(said(term("fact", word)), words) for word, words in facts], "  "),
    ]
    for table in (faults_text(run.events, run.steps, language), decisions_text(run.events, language)):
        if table:
            parts.append("\n" + table)
    time, memory = Message("time per step"), Message("memory of the peak rank")
    for title, rows, show in ((time, summary.time, show_seconds), (memory, summary.memory, show_bytes)):
        if rows:
            head = [
                said(word) for word in (title, Message("predicted"), Message("measured"), Message("measured/predicted"))
            ]
            parts.append("\n" + align_columns([head, *(_format_pair(row, show, said) for row in rows)], "  "))
    return "\n".join(parts)


def _plan_messages(run: RunFolder, summary: RunSummary) -> list[Message]:
    if run.plan is None:
        return [Message("unknown: the folder has no plan.json")]
    count = run.job.model.parameters if run.job else run.launch.parameters if run.launch else 0
    parts = [Message("plan {plan} on {ranks:count rank}", plan=run.plan.name, ranks=run.plan.world)]
    if run.model:
        parts.insert(
            0,
            Message(
                "{model} ({parameters:parameters} parameters)" if count else "{model}",
                model=run.model,
                parameters=count,
            ),
        )
    if summary.tokens_per_second.predicted:
        parts.append(Message("{rate:parameters} tokens/s predicted", rate=summary.tokens_per_second.predicted))
    return parts


def _training_messages(summary: RunSummary) -> list[Message]:
    if not summary.steps:
        return [Message("no step yet")]
    steps = Message(
        "{steps} of {planned} steps" if summary.planned_steps else "{steps} steps",
        steps=summary.steps,
        planned=summary.planned_steps,
    )
    parts = [steps, Message("{tokens:parameters} tokens", tokens=summary.tokens)]
    if summary.tokens_per_second.measured:
        parts.append(Message("{rate:parameters} tokens/s (median)", rate=summary.tokens_per_second.measured))
    if summary.repeated:
        parts.append(Message("{steps} repeated after a restart", steps=summary.repeated))
    if summary.cut:
        parts.append(Message("{lines} cut off by a kill and ignored", lines=summary.cut))
    return parts


def _speed_messages(summary: RunSummary) -> list[Message]:
    """Returns tokens per second and device, the MFU, and the share of each wait in a step."""
    parts = []
    if summary.tokens_per_second.measured and summary.devices:
        rate = summary.tokens_per_second.measured / summary.devices
        parts.append(Message("{rate:parameters} tokens/s per device", rate=rate))
    if summary.mfu.measured:
        values = {"measured": f"{summary.mfu.measured:.1%}", "predicted": f"{summary.mfu.predicted or 0.0:.1%}"}
        parts.append(
            Message("MFU {measured} ({predicted} predicted)" if summary.mfu.predicted else "MFU {measured}", **values)
        )
    for name, share in summary.waits.items():
        template = {
            "pipeline": mark_msgid("waiting for pipeline and bubble {share}"),
            "offload": mark_msgid("waiting for offload {share}"),
        }.get(name, mark_msgid("waiting for {kind}-parallel communication {share}"))
        parts.append(Message(template, kind=term("row", name), share=f"{share:.1%}"))
    return parts


def _loss_message(curve: LossCurve) -> Message:
    values = {
        f"{place}_{field}": f"{point.loss:.4f}" if field == "loss" else point.step
        for place, point in (("first", curve.first), ("last", curve.last), ("best", curve.best))
        for field in ("loss", "step")
    }
    return Message(
        "{last_loss} at step {last_step}"
        if curve.first == curve.last
        else "{first_loss} at step {first_step}, {last_loss} at step {last_step}, best {best_loss} at step {best_step}",
        **values,
    )


def _steps_message(steps: Sequence[int]) -> Message:
    """Returns a message that names the steps. More than six steps are abbreviated.

    >>> translate(_steps_message((5,))), translate(_steps_message((1, 2, 3, 4, 5, 6, 7, 8)))
    ('step 5', '8: steps 1, 2, 3, ... 8')
    """
    if len(steps) == 1:
        return Message("step {step}", step=steps[0])
    if len(steps) <= 6:
        return Message("steps {steps}", steps=", ".join(map(str, steps)))
    return Message(
        "{count}: steps {steps}, ... {last}", count=len(steps), steps=", ".join(map(str, steps[:3])), last=steps[-1]
    )


def _format_pair(row: PredictedMeasured, show: Callable[[float], str], said: Callable[..., str]) -> tuple[str, ...]:
    within = said(Message("in {row}", row=term("row", row.within)))
    return (
        said(term("row", row.name)),
        "-" if row.predicted is None else show(row.predicted),
        within if row.within else "-" if row.measured is None else show(row.measured),
        "" if row.ratio is None else f"{row.ratio:.2f}",
    )


class RunComparison(StrictModel):
    """The runs, and for each run the difference between its losses and those of the first run. `report --json` prints
    this comparison if several runs are given."""

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
    first = {record.step: record.loss for record in runs[0].steps}
    shared: list[int] = []
    differences: list[float | None] = []
    for run in runs:
        pairs = [(first[record.step], record.loss) for record in run.steps if record.step in first]
        shared.append(len(pairs))
        differences.append(max((_relative_difference(mine, theirs) for theirs, mine in pairs), default=None))
    return RunComparison(
        runs=tuple(summarize_run(run) for run in runs),
        shared_steps=tuple(shared),
        loss_difference=tuple(differences),
        another_job=tuple(_job_difference(runs[0], run) for run in runs),
    )


def _relative_difference(loss: float, other: float) -> float:
    """Returns the relative difference of two losses. It is 0 if neither is finite, and infinite if only one is
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
    add("MFU", ["-" if run.mfu.measured is None else f"{run.mfu.measured:.1%}" for run in runs])
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
        say(Message("compared with {other}, {one} is another job: {what}", one=called[at], other=called[0], what=words))
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
    return say(Message("{apart} over {steps:count step}", apart=f"{difference:.1e}", steps=comparison.shared_steps[at]))


FEW_STEPS = 4
"""The first three steps of a run include checks of the plan. In a run of at most this number of steps, they decide the
median."""


def speed_hint(ratio: float | None, steps: int, load: float, ranks: int, cores: int) -> Message | None:
    """Returns a likely reason if a step took SLOW_RATIO times the prediction or more, otherwise None. `ratio`: measured
    to predicted seconds. `steps`: the number of steps of the run. `load`: the mean number of running processes of this
    machine, which has `cores` cores and ran `ranks` ranks."""
    if ratio is None or ratio < SLOW_RATIO:
        return None
    if steps <= FEW_STEPS:
        return Message(
            "a step took {ratio:.1f} times the prediction: the first three steps check the plan, so a longer run shows "
            "its speed",
            ratio=ratio,
        )
    if load - ranks > cores / 2:
        return Message(
            "a step took {ratio:.1f} times the prediction: other programs use this machine ({load:.1f} processes want "
            "to run on {cores:count core})",
            ratio=ratio,
            load=load,
            cores=cores,
        )
    return Message(
        "a step took {ratio:.1f} times the prediction: `meshwright probe` measures this machine, and later predictions "
        "use its rates",
        ratio=ratio,
    )
