"""What fits as text: the largest model for each number of devices, with bars; the smallest cluster for a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.base.units import show_bytes, show_count
from meshwright.report.plans import clip, label
from meshwright.report.text import columns, folded
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import ModelSpec
from meshwright.spec.workload import Workload
from meshwright.words.say import Sentence, name, say, tell

if TYPE_CHECKING:
    from meshwright.search.fit import Largest, Smallest

SHOWN = 8
"""Numbers of devices that fit beside each other."""
BAR = 56


def conditions(cluster: Cluster, workload: Workload) -> Sentence:
    """Under which assumptions."""
    group = cluster.groups[0]
    return tell(
        "fit.conditions",
        device=group.device.name,
        memory=group.device.memory,
        each=group.devices,
        precision=workload.precision,
        optimizer=workload.optimizer.name,
        sequence=workload.sequence,
    )


def fit_text(
    model: ModelSpec | None, cluster: Cluster, workload: Workload, rows: Sequence[Largest] | Sequence[Smallest], language: str = "en"
) -> str:
    """What fits on one kind of node: the chart without a model, else the table of its smallest clusters."""
    if model is not None:
        return smallest_text(model, cluster, workload, rows, language)  # type: ignore[arg-type]
    return chart_text(cluster, workload, rows, language)  # type: ignore[arg-type]


def chart_text(cluster: Cluster, workload: Workload, rows: Sequence[Largest], language: str = "en") -> str:
    """A table of sizes by strategy and devices, and bars for the most devices."""
    if not rows:
        return folded(say(conditions(cluster, workload), language)) + "\n\n" + say(tell("fit.nothing"), language)
    counts = sorted({row.devices for row in rows})[-SHOWN:]
    table = {(row.strategy, row.devices): row for row in rows}
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    lines = [[label("devices", language), *(f"{count:,}" for count in counts)]]
    for strategy in strategies:
        cells = [show_count(row.parameters) if (row := table.get((strategy, count))) else "-" for count in counts]
        lines.append([say(name("label", strategy), language), *cells])
    most = counts[-1]
    longest = max(row.parameters for row in rows if row.devices == most)
    bars = [
        [say(name("label", strategy), language), show_count(row.parameters), "█" * max(round(BAR * row.parameters / longest), 1)]
        for strategy in strategies
        if (row := table.get((strategy, most)))
    ]
    wide = max(len(bar[1]) for bar in bars)
    drawn = columns([[bar[0], bar[1].rjust(wide) + "  " + bar[2].ljust(BAR)] for bar in bars])
    said = [folded(say(sentence, language)) for sentence in remarks(table, most)]
    return "\n".join(
        [
            folded(say(conditions(cluster, workload), language)),
            "",
            say(tell("fit.largest"), language),
            columns(lines),
            "",
            say(tell("fit.bars", devices=most), language),
            "\n".join(line.rstrip() for line in drawn.splitlines()),
            "",
            *said,
        ]
    )


def remarks(table: dict[tuple[str, int], Largest], most: int) -> list[Sentence]:
    """What the chart shows, in words."""
    said = []
    if ("DDP", most) in table:
        said.append(tell("fit.ddp", parameters=table["DDP", most].parameters))
    if ("ZeRO-3", most) in table and most > 1:
        said.append(tell("fit.zero", parameters=table["ZeRO-3", most].parameters, devices=most))
    return said


def smallest_text(model: ModelSpec, cluster: Cluster, workload: Workload, rows: Sequence[Smallest], language: str = "en") -> str:
    """The fewest devices for each strategy, or why none are enough."""
    lines = [[label(head, language) for head in ("strategy", "devices", "nodes", "memory", "plan")]]
    said = []
    for row in rows:
        called = say(name("label", row.strategy), language)
        if row.devices:
            cells = [f"{row.devices:,}", f"{row.nodes:,}", show_bytes(row.reserved), clip(row.plan, 40)]
        else:
            cells = ["-", "-", "-", label("never", language)]
            said.append(tell("fit.never" if row.floor > cluster.memory else "fit.beyond", strategy=called, floor=row.floor))
        lines.append([called, *cells])
    return "\n".join(
        [
            say(tell("question.model", model=model.name, parameters=model.parameters, blocks=model.blocks, hidden=model.hidden), language),
            folded(say(conditions(cluster, workload), language)),
            "",
            say(tell("fit.smallest"), language),
            columns(lines),
            *(["", *(folded(say(sentence, language)) for sentence in said)] if said else []),
        ]
    )


def fit_data(cluster: Cluster, workload: Workload, rows: Sequence[Largest] | Sequence[Smallest]) -> dict[str, Any]:
    """`fit --json`. Bytes; parameters as a count."""
    group = cluster.groups[0]
    return {
        "device": group.device.name,
        "memory": group.device.memory,
        "devices_per_node": group.devices,
        "precision": workload.precision,
        "optimizer": workload.optimizer.name,
        "sequence": workload.sequence,
        "rows": [row.model_dump(mode="json") for row in rows],
    }
