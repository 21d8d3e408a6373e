"""The accounts of a run, computed once more from its raw files: what a report says must be what they say. Shares no
code with the report."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from meshwright.report.faults import fault_rows
from meshwright.report.run import read_run, summarize_run

WORD = 2**64


def raw(path: Path) -> list[dict[str, Any]]:
    """Whole lines of JSON."""
    found = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def check(folder: Path) -> dict[str, float]:
    """Asserts that goodput, causes and the ledger of the report are those of the records and events. Returns the
    seconds of each term."""
    records, events = raw(folder / "records.jsonl"), raw(folder / "events.jsonl")
    last = {record["step"]: record for record in records if record["tokens"] or record.get("skipped")}
    every = [record for record in records if record["tokens"] or record.get("skipped")]
    run = read_run(folder)
    report = summarize_run(run)

    def spent(*kinds: str, field: str = "seconds") -> float:
        return sum(event.get(field, 0.0) for event in events if event["kind"] in kinds)

    def lost(event: dict[str, Any]) -> float:
        first, count = event.get("step", 0), event.get("lost", 0)
        ran = sum(record["seconds"] for step, record in last.items() if first < step <= first + count + 1)
        return max(0.0, event["seconds"] - ran)

    terms = {
        "data": sum(record.get("data_seconds", 0.0) for record in last.values() if not record.get("skipped")),
        "skipped": sum(record["seconds"] for record in last.values() if record.get("skipped")),
        "again": sum(record["seconds"] for record in every) - sum(record["seconds"] for record in last.values()),
        "saves": spent("save", "unsaved"),
        "detection": spent("fault", field="detection"),
        "recovery": sum(lost(event) for event in events if event["kind"] == "recovery"),
    }
    useful = sum(record["seconds"] for record in last.values() if not record.get("skipped")) - terms["data"]
    assert report.goodput is not None
    for name, seconds in terms.items():
        assert abs(getattr(report.goodput, name) - seconds) < 1e-9 * max(1.0, seconds), (
            name,
            getattr(report.goodput, name),
            seconds,
        )
    assert abs(report.goodput.share - useful / (useful + sum(terms.values()))) < 1e-12
    broken = ("fault", "verdict", "spike", "divergence", "bad_data", "unsaved", "resize", "run_extended")
    rows = fault_rows(run.events, run.steps)
    assert len(rows) == sum(event["kind"] in broken for event in events)
    told = Counter(
        event["cause"].removeprefix(f"step {event.get('step', 0)}: ").partition(":")[0]
        for event in events
        if event["kind"] in broken
    )
    assert Counter(row.cause for row in rows) == told
    recovered = [row for row in rows if row.seconds is not None]
    assert abs(sum(row.seconds or 0.0 for row in recovered) - spent("recovery")) < 1e-6
    ledger(folder, last, report.ledger)
    return terms


def ledger(folder: Path, last: dict[int, dict[str, Any]], said: Any) -> None:
    """The numbers of the samples of each step, squared and added, against those of its batch."""
    rows = json.loads((folder / "launch.json").read_text())["workload"]["batch"]
    wrong = missing = 0
    for step in range(1, max(last) + 1):
        record = last.get(step)
        if record is None:
            missing += 1
        elif record.get("samples"):
            first = record["batch"] * rows
            count, squares = record["samples"].split(":")
            expected = sum((number + 1) ** 2 for number in range(first, first + rows)) % WORD
            wrong += (int(count), int(squares, 16)) != (rows, expected)
    assert (said.steps, said.missing, said.samples) == (len(last), missing, rows * len(last))
    assert bool(said.problems) == bool(wrong) == bool(sum(record["batch"] != step - 1 for step, record in last.items()))
