"""A played step as a Chrome trace, which opens in ui.perfetto.dev and chrome://tracing.

One process for each lane; in it a track for each rank's compute, one for its collectives, one for each kind of message that it sends. An arrow leads
from the action that sends to the message. Times are microseconds.

Source: the Trace Event Format (complete events 'X', metadata 'M', flows 's' and 'f'). The events of one track do not overlap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.base.files import write_whole
from meshwright.simulate.run import Simulation
from meshwright.simulate.step import Cell, Span

Event = dict[str, Any]
COLORS = {"F": "thread_state_running", "B": "thread_state_runnable", "W": "thread_state_iowait", "u": "rail_load"}
TRACKS = 100
"""Track numbers of one rank: 0 compute, 1 collectives, from 2 messages."""


def trace(simulation: Simulation) -> dict[str, Any]:
    """The whole of it as JSON data."""
    width = simulation.plan.pp
    events = [event for at, cell in enumerate(simulation.cells) for event in _rank(simulation, cell, at // width)]
    about = {"plan": simulation.plan.name, "model": simulation.job.model.name, "cluster": simulation.job.cluster.name}
    return {"displayTimeUnit": "ms", "otherData": about, "traceEvents": events}


def write_trace(simulation: Simulation, path: Path) -> None:
    write_whole(path, json.dumps(trace(simulation), separators=(",", ":")))


def _rank(simulation: Simulation, cell: Cell, lane: int) -> Iterator[Event]:
    rank = cell.lane.ranks[cell.pp]
    base = cell.pp * TRACKS
    like = f", {cell.lane.replicas} like it" if cell.lane.replicas > 1 else ""
    if cell.pp == 0:
        wrong = "with a fault" if cell.lane.marks else "healthy"
        yield _name(lane, None, "process_name", f"lane of rank {rank}: {wrong}{like}")
    yield from _track(lane, base, f"rank {rank} (stage rank {cell.pp})")
    for span in cell.actions:
        yield _span(lane, base, span, "compute", COLORS.get(span.name.lstrip("0123456789")[:1]))
    if cell.collectives:
        yield from _track(lane, base + 1, f"rank {rank} collectives")
    for span in cell.collectives:
        yield _span(lane, base + 1, span, "collective")
    starts = {span.name: span for span in cell.actions}
    for number, spans in enumerate(_side_by_side(cell.messages)):
        yield from _track(lane, base + 2 + number, f"rank {rank} sends" + (f" ({number + 1})" if number else ""))
        for span in spans:
            other = simulation.cells[span.to]
            yield _span(lane, base + 2 + number, span, "message") | {"args": {"to rank": other.lane.ranks[other.pp]}}
            yield from _arrow(lane, base, base + 2 + number, starts[span.name], span)


def _side_by_side(spans: list[Span]) -> list[list[Span]]:
    """Rows in which nothing overlaps."""
    rows: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.start):
        row = next((row for row in rows if row[-1].end <= span.start), None)
        if row is None:
            rows.append([span])
        else:
            row.append(span)
    return rows


def _span(process: int, track: int, span: Span, kind: str, color: str | None = None) -> Event:
    start = micro(span.start)
    event: Event = {"name": span.name, "cat": kind, "ph": "X", "pid": process, "tid": track, "ts": start}
    event["dur"] = round(micro(span.end) - start, 3)
    return event | ({"cname": color} if color else {})


def _arrow(process: int, track: int, to: int, action: Span, message: Span) -> Iterator[Event]:
    shared = {"name": "sends", "cat": "message", "pid": process, "id": f"{process}.{to}.{message.name}"}
    yield {**shared, "ph": "s", "tid": track, "ts": micro((action.start + action.end) / 2)}
    yield {**shared, "ph": "f", "bp": "e", "tid": to, "ts": micro(message.start)}


def _track(process: int, track: int, words: str) -> Iterator[Event]:
    yield _name(process, track, "thread_name", words)
    yield {"name": "thread_sort_index", "ph": "M", "pid": process, "tid": track, "args": {"sort_index": track}}


def _name(process: int, track: int | None, kind: str, words: str) -> Event:
    event: Event = {"name": kind, "ph": "M", "pid": process, "args": {"name": words}}
    return event if track is None else {**event, "tid": track}


def micro(seconds: float) -> float:
    return round(seconds * 1e6, 3)
