"""Writes a simulated step as a Chrome trace (`simulate --trace`), which opens in ui.perfetto.dev and chrome://tracing.

Each lane (a set of identical replicas) is a process of the trace. Each rank has a track for compute, a track for
collectives, and tracks for the messages that it sends. An arrow leads from the sending action to the message. Times are
in microseconds.

Source: the Trace Event Format (complete events 'X', metadata 'M', flows 's' and 'f'). The events of one track do not
overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.core.files import write_atomically
from meshwright.planner.simulate.run import SimulationResult
from meshwright.planner.simulate.step import SimulatedRank, TraceSpan

ChromeTraceEvent = dict[str, Any]
ACTION_COLORS = {
    "F": "thread_state_running",
    "B": "thread_state_runnable",
    "W": "thread_state_iowait",
    "u": "rail_load",
}
TRACKS_PER_RANK = 100
"""The number of track ids reserved for each rank. The first is compute, the second is collectives, and the others are
messages."""


def chrome_trace(simulation: SimulationResult) -> dict[str, Any]:
    """Returns the trace as JSON data."""
    width = simulation.plan.pp
    events = [
        event for at, cell in enumerate(simulation.cells) for event in _rank_events(simulation, cell, at // width)
    ]
    about = {"plan": simulation.plan.name, "model": simulation.job.model.name, "cluster": simulation.job.cluster.name}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def write_trace(simulation: SimulationResult, path: Path) -> None:
    """Writes the trace of a simulated step to a file."""
    write_atomically(path, json.dumps(chrome_trace(simulation), separators=(",", ":")))


def _rank_events(simulation: SimulationResult, cell: SimulatedRank, lane: int) -> Iterator[ChromeTraceEvent]:
    rank = cell.lane.ranks[cell.pp]
    base = cell.pp * TRACKS_PER_RANK
    like = f", {cell.lane.replicas} like it" if cell.lane.replicas > 1 else ""
    if cell.pp == 0:
        wrong = "with a fault" if cell.lane.marks else "healthy"
        yield _name_event(lane, None, "process_name", f"lane of rank {rank}: {wrong}{like}")
    yield from _track_metadata(lane, base, f"rank {rank} (stage rank {cell.pp})")
    for span in cell.actions:
        yield _span_event(lane, base, span, "compute", ACTION_COLORS.get(span.name.lstrip("0123456789")[:1]))
    if cell.collectives:
        yield from _track_metadata(lane, base + 1, f"rank {rank} collectives")
    for span in cell.collectives:
        yield _span_event(lane, base + 1, span, "collective")
    starts = {span.name: span for span in cell.actions}
    for number, spans in enumerate(_pack_spans(cell.messages)):
        yield from _track_metadata(
            lane, base + 2 + number, f"rank {rank} sends" + (f" ({number + 1})" if number else "")
        )
        for span in spans:
            other = simulation.cells[span.to]
            yield _span_event(lane, base + 2 + number, span, "message") | {
                "args": {"to rank": other.lane.ranks[other.pp]}
            }
            yield from _flow_events(lane, base, base + 2 + number, starts[span.name], span)


def _pack_spans(spans: list[TraceSpan]) -> list[list[TraceSpan]]:
    """Distributes spans over tracks so that the spans of a track do not overlap."""
    rows: list[list[TraceSpan]] = []
    for span in sorted(spans, key=lambda span: span.start):
        row = next((row for row in rows if row[-1].end <= span.start), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def _span_event(process: int, track: int, span: TraceSpan, kind: str, color: str | None = None) -> ChromeTraceEvent:
    start = microseconds(span.start)
    event: ChromeTraceEvent = {"name": span.name, "cat": kind, "ph": "X", "pid": process, "tid": track, "ts": start}
    event["dur"] = round(microseconds(span.end) - start, 3)
    return event | ({"cname": color} if color else {})


def _flow_events(
    process: int, track: int, to: int, action: TraceSpan, message: TraceSpan
) -> Iterator[ChromeTraceEvent]:
    shared = {"name": "sends", "cat": "message", "pid": process, "id": f"{process}.{to}.{message.name}"}
    yield {**shared, "ph": "s", "tid": track, "ts": microseconds((action.start + action.end) / 2)}
    yield {**shared, "ph": "f", "bp": "e", "tid": to, "ts": microseconds(message.start)}


def _track_metadata(process: int, track: int, words: str) -> Iterator[ChromeTraceEvent]:
    yield _name_event(process, track, "thread_name", words)
    yield {"name": "thread_sort_index", "ph": "M", "pid": process, "tid": track, "args": {"sort_index": track}}


def _name_event(process: int, track: int | None, kind: str, words: str) -> ChromeTraceEvent:
    event: ChromeTraceEvent = {"name": kind, "ph": "M", "pid": process, "args": {"name": words}}
    return event if track is None else {**event, "tid": track}


def microseconds(seconds: float) -> float:
    """Converts seconds to microseconds."""
    return round(seconds * 1e6, 3)
