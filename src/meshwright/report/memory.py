"""`report --memory`: the memory of one step over its time, as the fullest rank measured it, with what ran at the peak.

Each column of the chart is a part of the step, its height the most that was allocated in it; kinds lie on each other in the order of the legend.
"""

from __future__ import annotations

from pathlib import Path

from meshwright.base.codec import read
from meshwright.base.errors import InputError
from meshwright.base.units import show_bytes, show_seconds
from meshwright.report.run import Run
from meshwright.report.text import columns
from meshwright.spec.timeline import Moment, Timeline

WIDTH, HEIGHT = 72, 16
LETTERS = {"parameters": "P", "gradients": "G", "optimizer": "O", "passing": "S", "activations": "a", "buffers": "b"}


def read_timelines(folder: Path) -> list[Timeline]:
    """Of all ranks that wrote one, the fullest first. Raises InputError where there is none."""
    found = [read(Timeline, path) for path in sorted((folder / "memory").glob("rank-*.json"))]
    if not found:
        raise InputError(
            f"run {str(folder)!r} has no memory timeline: ranks on cores write one in the third step after each start; train it for three steps"
        )
    return sorted(found, key=lambda timeline: (-timeline.total, timeline.rank))


def memory_text(run: Run, timelines: list[Timeline]) -> str:
    """What `meshwright report RUN --memory` prints."""
    fullest = timelines[0]
    kinds = {**fullest.held, "activations": fullest.peak.activations, "buffers": fullest.peak.buffers}
    predicted = run.estimate.memory.model_dump() if run.estimate is not None else {}
    rows = [
        (LETTERS[kind] if size else "", kind, show_bytes(predicted[kind]) if kind in predicted else "-", show_bytes(size))
        for kind, size in kinds.items()
        if size or kind != "passing"
    ]
    total = predicted.get("total")
    rows.append(("", "total", "-" if total is None else show_bytes(total), show_bytes(fullest.total)))
    lines = [
        f"memory of step {fullest.step} on rank {fullest.rank}, the fullest of {len(timelines)}: {show_bytes(fullest.total)} at its peak, "
        f"{show_seconds(fullest.peak.at)} into {show_seconds(fullest.seconds)}",
        f"at the peak: {fullest.place or 'outside of all modules'}",
        "",
        *chart(fullest),
        "",
        columns([("", "at the peak", "predicted", "measured"), *rows], "  "),
    ]
    if len(timelines) > 1:
        others = ", ".join(
            f"rank {each.rank} {show_bytes(each.total)} ({each.place or 'outside of all modules'})" for each in timelines[1:5]
        )
        lines += ["", f"others: {others}" + (", ..." if len(timelines) > 5 else "")]
    return "\n".join(lines)


def chart(timeline: Timeline, width: int = WIDTH, height: int = HEIGHT) -> list[str]:
    """Rows of letters, the highest first.

    >>> moments = (Moment(at=0, activations=0, buffers=0), Moment(at=1, activations=2, buffers=0))
    >>> one = Timeline(rank=0, step=1, seconds=2, held={"parameters": 2.0}, moments=moments, peak=moments[1])
    >>> [line.split()[-1] for line in chart(one, 2, 2)[:2]]
    ['a', '|PP']
    """
    tops = highest(timeline, width)
    whole = max(timeline.total, 1.0)
    drawn = []
    for row in range(height, 0, -1):
        line = "".join(_letter(timeline, moment, (row - 0.5) / height * whole) for moment in tops)
        label = show_bytes(whole * row / height) if row in (height, (height + 1) // 2) else ""
        drawn.append(f"{label:>10} |{line.rstrip()}")
    scale = f"0 {'':{max(width - 12, 0)}}{show_seconds(timeline.seconds)}"
    return [*drawn, f"{'':>10} +{'-' * width}", f"{'':>12}{scale}"]


def highest(timeline: Timeline, width: int) -> list[Moment]:
    """Of each column the highest moment, or what was there before where nothing changed."""
    found: list[Moment | None] = [None] * width
    for moment in timeline.moments:
        at = min(int(moment.at * width / timeline.seconds), width - 1)
        before = found[at]
        if before is None or before.activations + before.buffers < moment.activations + moment.buffers:
            found[at] = moment
    last, filled = Moment(at=0.0, activations=0.0, buffers=0.0), []
    for each in found:
        last = last if each is None else each
        filled.append(last)
    return filled


def _letter(timeline: Timeline, moment: Moment, height: float) -> str:
    for kind, size in (*timeline.held.items(), ("activations", moment.activations), ("buffers", moment.buffers)):
        height -= max(size, 0.0)
        if height < 0:
            return LETTERS[kind]
    return " "
