"""Formats the output of `report --memory`. It shows the memory of one step over time on the rank with the highest peak,
and the module that ran at the peak. It also shows the peak of each rank.

Each column of the chart is a time interval of the step. Its height is the largest number of bytes that were allocated
in this interval. The kinds of memory are stacked in the order of the legend.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path

from meshwright.core.codec import parse_text, validate_data
from meshwright.core.errors import InputError
from meshwright.core.messages import Message, term, translate
from meshwright.core.storage import StorageFailed, describe_failure, list_names, read_text
from meshwright.core.units import show_bytes, show_seconds
from meshwright.report.run import RunFolder
from meshwright.report.text import align_columns
from meshwright.spec.record import AllocationEvent, MemoryTimeline

CHART_COLUMNS, CHART_LINES = 72, 16
MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "total", "reserved", "resident")
KIND_LETTERS = {
    "parameters": "P",
    "gradients": "G",
    "optimizer": "O",
    "passing": "S",
    "activations": "a",
    "buffers": "b",
}


def read_timelines(folder: Path) -> list[MemoryTimeline]:
    """Returns the memory timelines that ranks have written, sorted by peak in descending order.

    Raises: InputError if no rank has written a timeline.
    """
    found = [
        validate_data(MemoryTimeline, parse_text(read_text(path) or "", str(path)), f"{path}: $")
        for path in _rank_files(folder, ".json")
    ]
    if not found:
        raise InputError(
            Message(
                "run {folder!r} has no memory timeline: ranks write one in the fourth step after each start; train it "
                "for four steps",
                folder=str(folder),
            )
        )
    return sorted(found, key=lambda timeline: (-timeline.total, timeline.rank))


def _rank_files(folder: Path, ending: str) -> list[Path]:
    """Returns the files rank-N of all ranks in RUN/memory that have the extension `ending`.

    Raises: StorageFailed if the folder cannot be read.
    """
    try:
        found = list_names(folder / "memory")
    except OSError as error:
        raise StorageFailed(describe_failure(error, folder / "memory")) from None
    return [folder / "memory" / name for name in found if re.fullmatch(rf"rank-\d+\{ending}", name)]


def read_rank_peaks(folder: Path) -> list[dict[str, float]]:
    """Returns one dictionary for each rank, in order: the index of the rank, and the maximum bytes of each kind of
    memory over all steps."""
    found: dict[int, dict[str, float]] = {}
    for path in _rank_files(folder, ".jsonl"):
        most = found.setdefault(int(path.stem.removeprefix("rank-")), {})
        for row in (read_text(path) or "").splitlines():
            with suppress(ValueError):  # a killed rank may leave an incomplete line
                most |= {
                    kind: max(size, most.get(kind, 0.0)) for kind, size in json.loads(row).items() if kind != "step"
                }
    return [{"rank": float(rank), **found[rank]} for rank in sorted(found)]


def memory_text(
    run: RunFolder, timelines: list[MemoryTimeline], ranks: list[dict[str, float]], language: str = "en"
) -> str:
    """Returns the text that `meshwright report RUN --memory` prints."""
    say = lambda message: translate(message, language)
    place = lambda timeline: timeline.place or say(Message("outside of all modules"))
    peak_rank = timelines[0]
    kinds = {**peak_rank.resident, "activations": peak_rank.peak.activations, "buffers": peak_rank.peak.buffers}
    predicted = run.estimate.memory.model_dump() if run.estimate is not None else {}
    rows = [
        (
            KIND_LETTERS[kind] if size else "",
            translate(term("row", kind), language),
            show_bytes(predicted[kind]) if kind in predicted else "-",
            show_bytes(size),
        )
        for kind, size in kinds.items()
        if size or kind != "passing"
    ]
    total = predicted.get("total")
    rows.append(
        (
            "",
            translate(term("row", "total"), language),
            "-" if total is None else show_bytes(total),
            show_bytes(peak_rank.total),
        )
    )
    lines = [
        say(
            Message(
                "memory of step {step} on rank {rank}, the peak rank of {ranks}: {size:bytes} at its peak, "
                "{at:seconds} into {all:seconds}",
                step=peak_rank.step,
                rank=peak_rank.rank,
                ranks=len(timelines),
                size=peak_rank.total,
                at=peak_rank.peak.at,
                all=peak_rank.seconds,
            )
        ),
        say(Message("at the peak: {place}", place=place(peak_rank))),
        "",
        *memory_chart(peak_rank),
        "",
        align_columns(
            [("", *(say(Message("at the peak")), say(Message("predicted")), say(Message("measured")))), *rows], "  "
        ),
    ]
    if len(timelines) > 1:
        others = ", ".join(
            say(Message("rank {rank} {size:bytes} ({place})", rank=each.rank, size=each.total, place=place(each)))
            for each in timelines[1:5]
        )
        lines += ["", say(Message("others: {ranks}", ranks=others)) + (", ..." if len(timelines) > 5 else "")]
    if len(ranks) > 1:
        title = say(Message("the peak of each rank over all steps:"))
        lines += ["", title, _rank_table(ranks, language)]
    return "\n".join(lines)


def _rank_table(ranks: list[dict[str, float]], language: str) -> str:
    """Returns a table of the memory of each rank, with one column for each kind."""
    columns = [kind for kind in MEMORY_KINDS if any(each.get(kind) for each in ranks)]
    head = [translate(Message("rank"), language), *(translate(term("row", kind), language) for kind in columns)]
    cells = [
        (f"{each['rank']:.0f}", *(show_bytes(each[kind]) if kind in each else "-" for kind in columns))
        for each in ranks
    ]
    return align_columns([head, *cells], "  ")


def memory_chart(timeline: MemoryTimeline, width: int = CHART_COLUMNS, height: int = CHART_LINES) -> list[str]:
    """Returns the rows of the chart from top to bottom. Letters are the kinds of memory (KIND_LETTERS).

    >>> moments = (AllocationEvent(at=0, activations=0, buffers=0), AllocationEvent(at=1, activations=2, buffers=0))
    >>> one = MemoryTimeline(rank=0, step=1, seconds=2, resident={"parameters": 2.0}, moments=moments, peak=moments[1])
    >>> [line.split()[-1] for line in memory_chart(one, 2, 2)[:2]]
    ['a', '|PP']
    """
    tops = column_peaks(timeline, width)
    whole = max(timeline.total, 1.0)
    drawn = []
    for row in range(height, 0, -1):
        line = "".join(_kind_letter(timeline, moment, (row - 0.5) / height * whole) for moment in tops)
        label = show_bytes(whole * row / height) if row in (height, (height + 1) // 2) else ""
        drawn.append(f"{label:>10} |{line.rstrip()}")
    scale = f"0 {'':{max(width - 12, 0)}}{show_seconds(timeline.seconds)}"
    return [*drawn, f"{'':>10} +{'-' * width}", f"{'':>12}{scale}"]


def column_peaks(timeline: MemoryTimeline, width: int) -> list[AllocationEvent]:
    """Returns the event with the most memory in each of `width` equal time intervals of the step. An interval without
    an event repeats the event of the previous interval."""
    found: list[AllocationEvent | None] = [None] * width
    for moment in timeline.moments:
        at = min(int(moment.at * width / timeline.seconds), width - 1)
        before = found[at]
        if before is None or before.activations + before.buffers < moment.activations + moment.buffers:
            found[at] = moment
    last, filled = AllocationEvent(at=0.0, activations=0.0, buffers=0.0), []
    for each in found:
        last = last if each is None else each
        filled.append(last)
    return filled


def _kind_letter(timeline: MemoryTimeline, moment: AllocationEvent, height: float) -> str:
    for kind, size in (*timeline.resident.items(), ("activations", moment.activations), ("buffers", moment.buffers)):
        height -= max(size, 0.0)
        if height < 0:
            return KIND_LETTERS[kind]
    return " "
