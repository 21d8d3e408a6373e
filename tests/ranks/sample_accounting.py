"""Recomputes the accounts of a run from its raw files, and compares them with those of the report. It shares no code
with the report.

`check(folder)` compares goodput, causes and the ledger of samples with the raw lines, and the goodput with the clock
(`clock`). `check_changed(folder, seen)` does so for every run below a folder that has changed and ended. conftest.py
calls it after each test, so that no fault test can leave it out.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from meshwright.core.errors import MeshwrightError
from meshwright.report.faults import fault_rows
from meshwright.report.run import read_run, summarize_run
from meshwright.train.run_lock import is_locked

Line = dict[str, Any]

WORD = 2**64

BROKEN = ("fault", "verdict", "spike", "divergence", "bad_data", "unsaved", "degraded", "resize", "run_extended")
"""Kinds of events that are rows of the table of faults."""

TAKEN_OVER = ("the supervisor was killed", "the node that led was lost")
"""Causes that another supervisor than the one of the steps before has written."""

LEAST_SECONDS, BUSY_SECONDS, SHARE = 0.5, 1.5, 0.02
"""The goodput may differ from the clock by LEAST_SECONDS and this share of the time between two events: messages take
their time to the supervisor. It is BUSY_SECONDS in `make test`, where several tests share the processors and a
process may wait for a second. A detection or a recovery that is in no account takes longer."""

OTHERS = ("checkpoints", "logs", "tb", "cache")
"""Folders that hold no run."""


def raw(path: Path) -> list[Line]:
    """Returns the complete JSON lines of a file."""
    found = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        with suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict)]


def check(folder: Path) -> dict[str, float]:
    """Asserts that goodput, causes and the ledger of the report are those of the records and events. Returns the
    seconds of each term."""
    records, events = raw(folder / "records.jsonl"), raw(folder / "events.jsonl")
    every = [record for record in records if record["tokens"] or record.get("skipped")]
    last = {record["step"]: record for record in every}
    run = read_run(folder)
    report = summarize_run(run)
    assert (report.goodput is None) == (not last)
    assert run.repeated == len(records) - len({record["step"] for record in records})
    terms, useful = goodput(every, events)
    for name, seconds in terms.items() if last else ():
        said = getattr(report.goodput, name)
        assert abs(said - seconds) < 1e-9 * max(1.0, seconds), f"{folder}: {name} is {said} in the report, {seconds}"
    if report.goodput is not None:
        assert abs(report.goodput.share - useful / (useful + sum(terms.values()))) < 1e-12
    causes(folder, events, fault_rows(run.events, run.steps))
    if last and run.launch is not None:
        ledger(folder, last, events, report.ledger, run.last)
    clock(folder, records, events)
    return terms


def goodput(every: list[Line], events: list[Line]) -> tuple[dict[str, float], float]:
    """Returns the seconds of each kind of lost time, and the useful seconds."""
    last = {record["step"]: record for record in every}

    def lost(event: Line) -> float:
        first, parts = event.get("step", 0), event.get("parts", {})
        ran = sum(spent(last[step]) for step in range(first + 1, first + event.get("lost", 0) + 2) if step in last)
        return max(0.0, event["seconds"] - parts.get("detection", 0.0) - ran) + parts.get("unfinished", 0.0)

    terms = {
        "data": sum(record.get("data_seconds", 0.0) for record in last.values() if not record.get("skipped")),
        "skipped": sum(record["seconds"] for record in last.values() if record.get("skipped")),
        "between": sum(record.get("between_seconds", 0.0) for record in last.values())
        + sum(event["seconds"] for event in events if event["kind"] == "ended"),
        "again": sum(map(spent, every)) - sum(map(spent, last.values())),
        "saves": sum(event.get("seconds", 0.0) for event in events if event["kind"] in ("save", "unsaved")),
        "detection": sum(event.get("detection", 0.0) for event in events if event["kind"] in ("fault", "verdict")),
        "recovery": sum(lost(event) for event in events if event["kind"] == "recovery"),
    }
    return terms, sum(record["seconds"] for record in last.values() if not record.get("skipped")) - terms["data"]


def spent(record: Line) -> float:
    """Returns the seconds of a step and of the gap before it."""
    return float(record["seconds"] + record.get("between_seconds", 0.0))


def causes(folder: Path, events: list[Line], rows: list[Any]) -> None:
    """Asserts that each fault event has one row in the table of faults, with its step, rank and cause, and with the
    recovery that followed."""
    told, step = Counter[tuple[str, str]](), 0
    for event in events:
        step = event.get("step") or step
        if event["kind"] in BROKEN:
            of_all = event["kind"] in ("resize", "run_extended")
            cause = event.get("cause", "").removeprefix(f"step {event.get('step', 0)}: ").partition(":")[0]
            rank = "" if of_all or event.get("rank") is None else str(event["rank"])
            told[rank, cause or event["kind"]] += 1
    said = Counter((row.ranks, str(row.cause)) for row in rows)
    assert said == told, f"{folder}: causes {said - told} are in no event, {told - said} are not in the report"
    healed = [event for event in events if event["kind"] == "recovery"]
    noticed = sum(event.get("detection", 0.0) for event in events if event["kind"] in BROKEN)
    assert abs(sum(row.noticed for row in rows) - noticed) < 1e-6
    if any(event["kind"] in ("fault", "resize", "verdict") for event in events):
        shown = sum(row.seconds or 0.0 for row in rows)
        hidden = sum(event["seconds"] for event in overwritten(events))
        assert abs(shown + hidden - sum(event["seconds"] for event in healed)) < 1e-6, folder


def overwritten(events: list[Line]) -> Iterator[Line]:
    """Yields the recoveries that are followed by another recovery without a fault between them. The table shows only
    the later one. This happens only if a supervisor was killed."""
    before = None
    for event in events:
        if event["kind"] in ("fault", "resize", "verdict"):
            before = None
        elif event["kind"] == "recovery":
            if before is not None:
                yield before
            before = event


def ledger(folder: Path, last: dict[int, Line], events: list[Line], said: Any, end: int) -> None:
    """Compares the numbers of samples of each step, and the sums of their squares, with those of its batch. Compares
    the batch with the next batch of the data, without skipped batches."""
    rows = json.loads((folder / "launch.json").read_text())["workload"]["batch"]
    steps = {step: record for step, record in last.items() if record.get("batch") is not None}
    if not steps:
        assert said is None
        return
    spikes = (event["batches"] for event in events if event["kind"] == "spike" and event.get("batches"))
    left_out = {batch for first, stop in spikes for batch in range(first, stop)}
    wrong, follows = 0, 0
    for step in range(1, max(steps) + 1):
        while follows in left_out:
            follows += 1
        record = steps.get(step)
        if record is not None:
            wrong += record["batch"] != follows
            follows = record["batch"]
            if record.get("samples"):
                first = follows * rows
                count, squares = record["samples"].split(":")
                expected = sum((number + 1) ** 2 for number in range(first, first + rows)) % WORD
                wrong += (int(count), int(squares, 16)) != (rows, expected)
        follows += 1
    missing = max(end, *steps) - len(steps)
    counts = (said.steps, said.missing, said.samples, said.left_out)
    assert counts == (len(steps), missing, rows * len(steps), len(left_out)), f"{folder}: {counts}"
    assert len(said.problems) == wrong, f"{folder}: {wrong} steps read other samples, the report says {said.problems}"


def clock(folder: Path, records: list[Line], events: list[Line]) -> int:
    """Asserts that the seconds of the goodput agree with the clock. The compared spans are: from a fault to the end of
    its recovery, between two recoveries of one command, and from the last recovery to the end of training.

    The time between two commands is in no account and is left out. Returns the number of compared spans.
    """
    once(folder, records, events)
    compared = decided(folder, events)
    places = anchors(records, events)
    for (at, index), (after, end) in itertools.pairwise(places):
        first, last, inside = events[at], events[after], events[at + 1 : after]
        heals = last["kind"] == "recovery"
        steps = records[index + 1 : end - last.get("lost", 0) if heals else end + 1]
        if not is_one_command(steps, inside):
            continue
        seconds = sum(map(spent, steps))
        told = (event.get("seconds", 0.0) for event in [*inside, last] if event["kind"] in ("save", "unsaved", "ended"))
        seconds += sum(told)
        if heals:
            parts = last.get("parts", {})
            noticed = sum(event.get("detection", 0.0) for event in inside if event["kind"] == "fault")
            seconds += last["seconds"] + parts.get("unfinished", 0.0) + noticed - parts.get("detection", 0.0)
        where = f"{first['kind']} and {last['kind']} of step {last.get('step', 0)}"
        hold(folder, where, seconds, last["at"] - first["at"])
        compared += 1
    return compared


def once(folder: Path, records: list[Line], events: list[Line]) -> None:
    """Asserts that a step is recorded twice only after a start of ranks or a loss spike. After a start, the record of
    the step from which the ranks resumed may also be recorded twice."""
    begins = [not record.get("between_seconds") for record in records] + [True]
    back = {event["step"] - event.get("lost", 0) + 1 for event in events if event["kind"] == "spike"}
    for at in range(1, len(records)):
        before, step = records[at - 1]["step"], records[at]["step"]
        again = step > before or begins[at] or begins[at + 1] or step in back
        assert again, f"{folder}: step {step} is counted twice, and nothing started ranks anew"


def hold(folder: Path, where: str, seconds: float, elapsed: float) -> None:
    limit = (BUSY_SECONDS if "PYTEST_XDIST_WORKER" in os.environ else LEAST_SECONDS) + SHARE * abs(elapsed)
    assert abs(seconds - elapsed) <= limit, (
        f"{folder}: between {where} the accounts have {seconds:.3f} s, the clock {elapsed:.3f} s"
    )


def decided(folder: Path, events: list[Line]) -> int:
    """Asserts that a recovery lasts from the first fault after the previous recovery. Returns the number of compared
    recoveries."""
    begun: Line | None = None
    count = 0
    for event in events:
        if event["kind"] in ("fault", "resize") and (begun is None or event.get("cause") in TAKEN_OVER):
            begun = event
        elif event["kind"] == "verdict":
            begun = None
        elif event["kind"] == "recovery":
            if begun is not None and begun["kind"] == "fault":  # of a resize the planning comes before its event
                where = f"fault and recovery of step {event.get('step', 0)}"
                hold(folder, where, event["seconds"], event["at"] - begun["at"])
                count += 1
            begun = None
    return count


def anchors(records: list[Line], events: list[Line]) -> list[tuple[int, int]]:
    """Returns the events whose position among the records is known, as pairs of an index of an event and the index of
    the record before it. These events are recoveries, which end with a new step, and the end of training."""
    found: list[tuple[int, int]] = []
    index = -1
    for at, event in enumerate(events):
        if event["kind"] == "recovery":
            new = event.get("step", 0) + event.get("lost", 0) + 1
            place = next((each for each in range(index + 1, len(records)) if records[each]["step"] == new), None)
            if place is None:
                return found  # its record is lost
            index = place
            found.append((at, index))
    final = [at for at, event in enumerate(events) if event["kind"] == "ended" and records]
    if final and found and events[final[-1]].get("step") == records[-1]["step"] and final[-1] > found[-1][0]:
        found.append((final[-1], len(records) - 1))
    return found


def is_one_command(steps: list[Line], events: list[Line]) -> bool:
    """Returns whether the records `steps` follow one another without a start of ranks, and no other supervisor wrote
    one of the `events` between them."""
    if any(event.get("cause") in TAKEN_OVER or event["kind"] in ("verdict", "run_extended") for event in events):
        return False
    whole = all(after["step"] == before["step"] + 1 for before, after in itertools.pairwise(steps))
    return whole and all(record.get("between_seconds") for record in steps)


def run_folders(folder: Path) -> Iterator[Path]:
    """Yields the folders below `folder` in which a run was recorded."""
    for path, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in OTHERS and not name.startswith((".", "step-"))]
        if {"records.jsonl", "events.jsonl"} <= set(files):
            yield Path(path)


def check_changed(folder: Path, seen: dict[Path, tuple[int, int]], since: int = 0) -> list[Path]:
    """Checks the runs below `folder` whose log differs from its state in `seen`. Returns the checked folders.

    Runs that have not ended are left out, and also runs that were last written before `since` (in nanoseconds): other
    tests forged them.
    """
    checked = []
    for run in run_folders(folder):
        stamp = (run / "records.jsonl").stat().st_mtime_ns, (run / "events.jsonl").stat().st_mtime_ns
        if seen.get(run) == stamp or max(stamp) < since:
            continue
        with suppress(MeshwrightError):
            if is_locked(run):
                continue
        seen[run] = stamp  # what is wrong is said once
        check(run)
        checked.append(run)
    return checked
