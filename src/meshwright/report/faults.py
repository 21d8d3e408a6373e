"""Computes and formats the faults of a training run and their cost (from RUN/events.jsonl), and the goodput with every
kind of lost time. `meshwright report` shows them.

Goodput = useful seconds / (useful seconds + lost seconds). Useful seconds are the seconds of the last execution of each
step, without the wait for data. Lost seconds are:
- waits for data, skipped steps, and repeated steps.
- the time between steps and after the last one (validation, replica checks, in-memory checkpoints).
- saves for which training waited.
- the time until a hang was noticed.
- recoveries.

A recovery lasts from the decision to recover to the end of the next new step. Its new step and its repeated steps count
as steps, and the detection of further faults counts as detection. The remaining time of the recovery is lost. The part
of the interrupted step before the detection of the fault is lost too. The table of faults shows both the whole duration
and the lost seconds of a recovery.

Guarantees: no second counts twice. From the beginning of the first step to the end of training, the last save included,
the useful and lost seconds add up to the elapsed time. Two times are excepted: between two commands, and for a start of
ranks that no fault caused.

Source of the definition: Jiang et al., MegaScale, NSDI 2024; ByteRobust (effective training time ratio).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from meshwright.core.codec import StrictModel
from meshwright.core.errors import MeshwrightError
from meshwright.core.messages import Message, mark_msgid, term, translate
from meshwright.core.storage import read_text
from meshwright.core.units import show_seconds
from meshwright.report.text import align_columns
from meshwright.spec.record import RunEvent, StepRecord, parse_events

MAX_FAULTS_SHOWN = 12
"""The maximum number of faults in the table. If there are more, the table lists the last faults."""


LOST_TIME_TEXTS = {
    "data": mark_msgid("waiting for data {seconds:seconds}"),
    "skipped": mark_msgid("skipped steps {seconds:seconds}"),
    "between": mark_msgid("between steps {seconds:seconds}"),
    "again": mark_msgid("repeated steps {seconds:seconds}"),
    "saves": mark_msgid("saves {seconds:seconds}"),
    "detection": mark_msgid("detecting hangs {seconds:seconds}"),
    "recovery": mark_msgid("lost in restarts {seconds:seconds}"),
}
"""Message ids of the kinds of lost time."""


class Goodput(StrictModel):
    """Seconds by use. `share` is the useful fraction of all seconds."""

    share: float
    useful: float
    data: float = 0.0
    skipped: float = 0.0
    between: float = 0.0
    again: float = 0.0
    saves: float = 0.0
    detection: float = 0.0
    recovery: float = 0.0


def read_events(path: Path) -> tuple[RunEvent, ...]:
    """Returns the events in `path`, or none if the file does not exist. Incomplete lines are skipped."""
    return tuple(parse_events(read_text(path) or ""))


def compute_goodput(records: Sequence[StepRecord], repeated: float, events: Sequence[RunEvent]) -> Goodput | None:
    """Returns the goodput, or None if there is no step. `records` has only the last record of each step. `repeated` is
    the total seconds of the earlier records of repeated steps."""
    steps = [record for record in records if record.tokens or record.skipped]
    if not steps:
        return None
    terms = {
        "data": sum(record.data_seconds for record in steps if not record.skipped),
        "skipped": sum(record.seconds for record in steps if record.skipped),
        "between": sum(record.between_seconds for record in steps)
        + sum(event.seconds for event in events if event.kind == "ended"),
        "again": repeated,
        "saves": sum(event.seconds for event in events if event.kind in ("save", "unsaved")),
        "detection": sum(event.detection for event in events if event.kind in ("fault", "verdict")),
        "recovery": sum(lost_seconds(event, steps) for event in events if event.kind == "recovery"),
    }
    useful = sum(record.seconds for record in steps if not record.skipped) - terms["data"]
    whole = useful + sum(terms.values())
    return Goodput(share=useful / whole if whole > 0 else 1.0, useful=useful, **terms)


def lost_seconds(event: RunEvent, steps: Sequence[StepRecord]) -> float:
    """Returns the seconds that a recovery has lost. These are its duration, minus its new step, its repeated steps and
    the detection of further faults, plus the part of the interrupted step before the recovery.

    >>> step = StepRecord(step=1, loss=5.0, tokens=8, gradient_norm=1.0, lr=1e-3, seconds=2.0)
    >>> steps = [step.but(step=number) for number in (1, 2, 3, 4)]
    >>> lost_seconds(RunEvent(kind="recovery", at=0.0, step=1, lost=1, seconds=9.0), steps)  # 9 s - 2 steps
    5.0
    """
    ran = sum(
        record.seconds + record.between_seconds
        for record in steps
        if event.step < record.step <= event.step + event.lost + 1
    )
    unfinished, detection = event.parts.get("unfinished", 0.0), event.parts.get("detection", 0.0)
    return max(0.0, event.seconds - detection - ran) + unfinished


def goodput_text(found: Goodput, language: str = "en") -> str:
    """Returns one line with the useful percentage and every kind of lost time that is not zero.

    >>> goodput_text(Goodput(share=0.9, useful=90, saves=4, recovery=6))
    '90.0% useful; saves 4.00 s, lost in restarts 6.00 s'
    """
    lost = [field for field in Goodput.model_fields if field not in ("share", "useful") and getattr(found, field) > 0]
    terms = [translate(Message(LOST_TIME_TEXTS[field], seconds=getattr(found, field)), language) for field in lost]
    useful = translate(Message("{share} useful", share=f"{found.share:.1%}"), language)
    return translate(Message("; "), language).join(
        [useful, *([translate(Message(", "), language).join(terms)] if terms else [])]
    )


def _short_cause(event: RunEvent) -> str:
    """Returns the cause of a fault without the step and without the details after the colon.

    >>> cause = "step 8: the states of ranks 0, 1, 2 differed: rank 2 held wrong ones"
    >>> _short_cause(RunEvent(kind="divergence", at=0.0, step=8, cause=cause))
    'the states of ranks 0, 1, 2 differed'
    """
    return event.cause.removeprefix(f"step {event.step}: ").partition(":")[0] or event.kind


class FaultRow(NamedTuple):
    """A fault and its recovery. It took `noticed` seconds to detect the fault. The recovery took `seconds` and lost
    `lost` seconds (`lost_seconds`). `again` is the number of repeated steps."""

    step: int
    ranks: str
    phase: str
    cause: str
    noticed: float = 0.0
    seconds: float | None = None
    source: str = ""
    lost: float = 0.0
    again: int = 0


def fault_rows(events: Sequence[RunEvent], records: Sequence[StepRecord] = ()) -> list[FaultRow]:
    """Returns one row for each fault, each change of the number of ranks, and each extension of the run. `records` has
    only the last record of each step; the lost seconds of a recovery are computed from these records."""
    rows: list[FaultRow] = []
    last = broken = 0
    for event in events:
        last = event.step or last  # the event of a rank that failed before its first step has no step
        if event.kind in ("fault", "resize", "verdict"):
            broken = len(rows)
        if event.kind in ("fault", "verdict", "spike", "divergence", "bad_data", "unsaved", "degraded"):
            rows.append(
                FaultRow(
                    last,
                    "" if event.rank is None else str(event.rank),
                    event.phase,
                    _short_cause(event),
                    event.detection,
                )
            )
        elif event.kind in ("resize", "run_extended"):
            rows.append(FaultRow(event.step, "", "", _short_cause(event)))
        elif event.kind == "recovery" and rows:
            lost = lost_seconds(event, records)
            rows[broken] = rows[broken]._replace(
                seconds=event.seconds, source=event.source, lost=lost, again=event.lost
            )
    return rows


def faults_text(events: Sequence[RunEvent], records: Sequence[StepRecord] = (), language: str = "en") -> str:
    """Returns the table of faults and recoveries, or '' if there are no faults."""
    rows = fault_rows(events, records)
    if not rows:
        return ""
    shown: list[tuple[str, ...]] = []
    for row in rows[-MAX_FAULTS_SHOWN:]:
        said = (translate(words, language) for words in (term("phase", row.phase), row.cause))
        shown.append(
            (
                str(row.step),
                row.ranks,
                *said,
                show_seconds(row.noticed) if row.noticed else "",
                *_recovery_cells(row, language),
            )
        )
    more = (
        [(translate(Message("... {count} earlier", count=len(rows) - MAX_FAULTS_SHOWN), language),)]
        if len(rows) > MAX_FAULTS_SHOWN
        else []
    )
    head = ("step", "rank", "phase", "cause", "noticed", "recovered", "lost", "again")
    return align_columns([[translate(term("broke", word), language) for word in head], *more, *shown], "  ")


def _recovery_cells(row: FaultRow, language: str) -> tuple[str, str, str]:
    if row.seconds is None:
        return "", "", ""
    source = term("source", row.source or "beginning")
    return (
        translate(Message("{seconds:seconds} from {source}", seconds=row.seconds, source=source), language),
        show_seconds(row.lost),
        str(row.again),
    )


MAX_SKIPPED_SHARE = 0.05
"""A run fails if more than this share of its steps changed no weight."""


def check_skipped(steps: Sequence[StepRecord]) -> None:
    """Raises MeshwrightError if more than MAX_SKIPPED_SHARE of `steps` changed no weight. A step that fp16
    skips to lower its loss scale does not count."""
    lost = [record for record in steps if record.skipped and record.loss_scale <= 1.0]
    if lost and len(lost) > MAX_SKIPPED_SHARE * len(steps):
        raise MeshwrightError(
            Message(
                "{count} of {steps} steps changed no weight, because their gradient was not finite (step {first} was "
                "the first, with loss {loss}): lower the learning rate (--lr, {lr:.3g} in this step), or check data "
                "and model",
                count=len(lost),
                steps=len(steps),
                first=lost[0].step,
                loss=f"{lost[0].loss:.4g}",
                lr=lost[0].lr,
            )
        )
