"""Computes every line that `meshwright report RUN` must print from the raw files of the run. It shares the formats of
numbers and the names of rows with the report, but no figure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from sample_accounting import goodput, raw

from meshwright.core.messages import term, translate
from meshwright.core.units import show_bytes, show_count, show_seconds
from meshwright.report.text import sparkline

Line = dict[str, Any]
Cells = list[str]

LOST = {
    "data": "waiting for data",
    "skipped": "skipped steps",
    "between": "between steps",
    "again": "repeated steps",
    "saves": "saves",
    "detection": "detecting hangs",
    "recovery": "lost in restarts",
}


def cells(text: str) -> list[Cells]:
    """Returns the lines of a text that are not empty, each as a list of its cells."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]


def expected(folder: Path, name: str, plan: str) -> list[Cells]:
    """Returns the lines of the report on the run in `folder`. `name`: the run folder as the command names it. `plan`:
    the name of its plan."""
    files = {kind: json.loads((folder / f"{kind}.json").read_text()) for kind in ("estimate", "launch", "plan")}
    records, events = raw(folder / "records.jsonl"), raw(folder / "events.jsonl")
    every = [record for record in records if record["tokens"] or record.get("skipped")]
    last = {record["step"]: record for record in every}
    steps = [last[step] for step in sorted(last)]
    return [
        [f"run {name}"],
        ["planned", planned(files, plan)],
        *facts(folder, files["launch"], records, every, steps, events),
        *faults(events, last),
        *times(files["estimate"], steps),
        *memory(files["estimate"], steps),
    ]


def facts(
    folder: Path, launch: Line, records: list[Line], every: list[Line], steps: list[Line], events: list[Line]
) -> list[Cells]:
    speed = median(record["tokens_per_second"] for record in steps[1:])
    repeated = len(every) - len(steps)
    held = [record for record in {record["step"]: record for record in records}.values() if "held_out_loss" in record]
    curve = [record["held_out_loss"] for record in held]
    saved = sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step-*"))
    trained = [
        f"{len(steps)} of {launch['workload']['steps']} steps",
        f"{show_count(sum(record['tokens'] for record in steps))} tokens",
        f"{show_count(speed)} tokens/s (median)",
        *([f"{repeated} repeated after a restart"] if repeated else []),
    ]
    return [
        ["trained", ", ".join(trained)],
        ["loss", ends([(record["step"], record["loss"]) for record in steps]),
         sparkline([record["loss"] for record in steps])],
        ["val loss", ends([(record["step"], record["held_out_loss"]) for record in held])
         + f" ({curve[-1] / curve[0]:.1%} of the first)", sparkline(curve)],
        ["skipped", "none"],
        ["checkpoints", listed(saved)],
        ["samples", samples(launch, steps)],
        ["goodput", spent(every, events)],
    ]  # fmt: skip


def planned(files: dict[str, Line], name: str) -> str:
    launch, plan = files["launch"], files["plan"]
    world = plan["dp_replicate"] * plan["dp_shard"] * plan["tp"] * plan["pp"] * plan["cp"]
    model = f"{launch['model']['name']} ({show_count(launch['parameters'])} parameters)"
    speed = f"{show_count(files['estimate']['tokens_per_second'])} tokens/s predicted"
    return f"{model}, plan {name} on {world} ranks, {speed}"


def ends(points: list[tuple[int, float]]) -> str:
    (first, begin), (last, end) = points[0], points[-1]
    best, least = min(points, key=lambda point: point[1])
    return f"{begin:.4f} at step {first}, {end:.4f} at step {last}, best {least:.4f} at step {best}"


def listed(steps: list[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    if len(steps) <= 6:
        return f"steps {', '.join(map(str, steps))}"
    return f"{len(steps)}: steps {', '.join(map(str, steps[:3]))}, ... {steps[-1]}"


def samples(launch: Line, steps: list[Line]) -> str:
    proven = sum(bool(record.get("samples")) for record in steps)
    text = f"{show_count(launch['workload']['batch'] * len(steps))} samples in {len(steps)} steps, each once"
    return text + (f"; proven for {proven} of them" if proven < len(steps) else "")


def spent(every: list[Line], events: list[Line]) -> str:
    terms, useful = goodput(every, events)
    lost = [f"{LOST[name]} {show_seconds(seconds)}" for name, seconds in terms.items() if seconds > 0]
    return f"{useful / (useful + sum(terms.values())):.1%} useful; " + ", ".join(lost)


def faults(events: list[Line], last: dict[int, Line]) -> list[Cells]:
    """Returns a row for each fault and for each checkpoint that was not written."""
    rows: list[Cells] = []
    healed: dict[int, Cells] = {}
    fault = 0
    for event in events:
        if event["kind"] in ("fault", "unsaved"):
            noticed = [show_seconds(event["detection"])] if event.get("detection") else []
            rank = [str(event["rank"])] if "rank" in event else []
            phase = [event["phase"]] if event.get("phase") else []
            rows.append([str(event["step"]), *rank, *phase, event["cause"].partition(":")[0], *noticed])
            fault = len(rows) - 1 if event["kind"] == "fault" else fault
        elif event["kind"] == "recovery":
            seconds = goodput([*last.values()], [event])[0]["recovery"]
            again = str(event.get("lost", 0))
            healed[fault] = [f"{show_seconds(event['seconds'])} from {event['source']}", show_seconds(seconds), again]
    head = ["step", "rank", "in", "failure", "detected after", "recovered in", "of it lost", "repeated steps"]
    return [head, *(row + healed.get(at, []) for at, row in enumerate(rows))] if rows else []


def times(estimate: Line, steps: list[Line]) -> list[Cells]:
    warm = steps[1:]
    kinds = sorted({kind for record in warm for kind in record["exposed"]})
    found = {kind: median(record["exposed"].get(kind, 0.0) for record in warm) for kind in kinds}
    found["batch"] = median(record["data_seconds"] for record in warm)
    found["compute"] = median(
        max(0.0, record["seconds"] - record["data_seconds"] - sum(record["exposed"].values())) for record in warm
    )
    found["step"] = median(record["seconds"] for record in warm)
    names = [name for name in estimate["time"] if name != "step"] + ["batch", "step"]
    return table("time per step", names, estimate["time"], found, show_seconds)


def memory(estimate: Line, steps: list[Line]) -> list[Cells]:
    stages = [estimate["memory"], *estimate["per_stage"]]
    said = {kind: max(stage[kind] for stage in stages) for kind in estimate["memory"]}
    kinds = dict.fromkeys(kind for record in steps for kind in record["memory"])
    found = {kind: max(record["memory"].get(kind, 0.0) for record in steps) for kind in kinds}
    return table("memory of the peak rank", [*dict.fromkeys([*said, *found])], said, found, show_bytes)


def table(
    title: str, names: list[str], said: dict[str, float], found: dict[str, float], show: Callable[[float], str]
) -> list[Cells]:
    rows = [[title, "predicted", "measured", "measured/predicted"]]
    for name in names:
        predicted, measured = said.get(name), found.get(name)
        if predicted or measured or name == "step":
            ratio = [f"{measured / predicted:.2f}"] if predicted and measured is not None else []
            shown = ["-" if value is None else show(value) for value in (predicted, measured)]
            rows.append([translate(term("row", name)), *shown, *ratio])
    return rows
