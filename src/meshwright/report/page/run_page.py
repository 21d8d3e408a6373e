"""Builds the HTML page of a training run for `report --page`: plan, losses, predicted and measured times and memory,
failures, and goodput.

Guarantees: the page shows the numbers of `report --json`. It computes only the smoothing of curves. Long curves are
shortened by averaging over equal intervals.

A page of several runs shows the curves of all of them; all else is of the first run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.core.messages import LANGUAGES
from meshwright.core.storage import list_names
from meshwright.report.faults import fault_rows
from meshwright.report.memory import column_peaks, read_timelines
from meshwright.report.page.plan_page import fill_frame, localized_lines, localized_names, round_number
from meshwright.report.run import RunFolder, sample_balance_text, summarize_run
from meshwright.report.run_text import list_decisions
from meshwright.report.text import strict_json_data
from meshwright.spec.record import MemoryTimeline

MAX_CURVE_POINTS, MAX_PAGE_POINTS = 2000, 16_000
"""The maximum numbers of points of a curve and of all curves of a page, which keep a page below a megabyte."""
MEMORY_COLUMNS = 240
"""The page shows the memory of a step in this number of time intervals."""


def run_page_text(run: RunFolder, language: str = "en", others: Sequence[RunFolder] = ()) -> str:
    """Returns the HTML page of `run`, with the curves of `others`. `language`: the language in which the page opens."""
    title = " · ".join(filter(None, dict.fromkeys((run.model, Path(run.folder).name, "meshwright report"))))
    return fill_frame("run", title, run_page_data(run, others), language)


def run_page_data(run: RunFolder, others: Sequence[RunFolder] = ()) -> dict[str, Any]:
    """Returns all data of the page."""
    summary = summarize_run(run)
    most = min(MAX_CURVE_POINTS, MAX_PAGE_POINTS // (3 * (1 + len(others))))
    names = run_names([run, *others])
    data = strict_json_data(summary)
    steps = run.steps
    balance, events = sample_balance_text(summary.ledger) if summary.ledger else "", fault_rows(run.events, steps)
    decided = list_decisions(run.events)
    return {
        "folder": run.folder,
        "run": Path(run.folder).name,
        "model": run.model,
        "plan": summary.plan,
        "ranks": summary.devices,
        "steps": summary.steps,
        "planned": summary.planned_steps,
        "tokens": summary.tokens,
        "checkpoints": len(summary.checkpoints),
        "balance": balance,
        "last": {
            kind: round_number(curve.last.loss) if curve is not None and math.isfinite(curve.last.loss) else None
            for kind, curve in (("loss", summary.loss), ("held", summary.held_out))
        },
        "runs": [{"name": name, **run_curves(each, most)} for name, each in zip(names, [run, *others], strict=True)],
        "speed": data["tokens_per_second"],
        "mfu": data["mfu"],
        **{
            kind: [{**row, "ratio": pair.ratio} for row, pair in zip(data[kind], getattr(summary, kind), strict=True)]
            for kind in ("time", "memory")
        },
        "timeline": timeline_data(run),
        "events": [row._asdict() for row in events],
        "decisions": [row._asdict() for row in decided],
        "goodput": data["goodput"],
        "words": {language: localized_names(language, (), ()) for language in LANGUAGES},
        "lines": localized_lines(
            (balance, *(word for row in events for word in (row.cause, row.phase)), *(row.words for row in decided))
        ),
    }


def run_names(runs: Sequence[RunFolder]) -> list[str]:
    """Returns the last parts of the paths of the run folders: as many as make them different."""
    parts = [Path(run.folder).parts for run in runs]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names


def run_curves(run: RunFolder, most: int) -> dict[str, Any]:
    """Returns the plan and the curves of a run, each with at most `most` points: losses, validation losses, seconds."""
    steps = run.steps
    return {
        "plan": run.plan.name if run.plan else "",
        "loss": thin_curve([(record.step, record.loss) for record in steps], most),
        "held": thin_curve(
            [(record.step, record.held_out_loss) for record in run.records if record.held_out_loss is not None], most
        ),
        "seconds": thin_curve([(record.step, record.seconds) for record in steps], most),
    }


def thin_curve(points: Sequence[tuple[int, float]], most: int = MAX_CURVE_POINTS) -> list[tuple[int, float | None]]:
    """Divides a curve into at most `most` intervals. Returns for each interval its last step and the mean of its finite
    values, or None if there are none.

    >>> thin_curve([(1, 4.0), (2, 2.0), (3, math.nan), (4, math.inf)], 2)
    [(2, 3), (4, None)]
    """
    count = min(most, len(points))
    shares = [points[len(points) * at // count : len(points) * (at + 1) // count] for at in range(count)]
    found: list[tuple[int, float | None]] = []
    for share in shares:
        values = [value for _, value in share if math.isfinite(value)]
        found.append((share[-1][0], round_number(sum(values) / len(values)) if values else None))
    return found


def timeline_data(run: RunFolder) -> dict[str, Any] | None:
    """Returns the bytes of each kind in MEMORY_COLUMNS time intervals of the step, on the rank with the highest peak.
    Returns None if no rank recorded a timeline."""
    if not any(name.endswith(".json") for name in list_names(Path(run.folder) / "memory")):
        return None
    peak_rank: MemoryTimeline = read_timelines(Path(run.folder))[0]
    tops = column_peaks(peak_rank, MEMORY_COLUMNS)
    stored = {kind: [round_number(size)] * MEMORY_COLUMNS for kind, size in peak_rank.resident.items() if size > 0}
    moving = {
        "activations": [round_number(top.activations) for top in tops],
        "buffers": [round_number(top.buffers) for top in tops],
    }
    return {
        "rank": peak_rank.rank,
        "step": peak_rank.step,
        "seconds": peak_rank.seconds,
        "at": peak_rank.peak.at,
        "total": peak_rank.total,
        "place": peak_rank.place,
        "columns": {**stored, **moving},
    }
