"""Formats the results of `fit` as text: a chart of the largest model for each number of devices, or the smallest
clusters for a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from meshwright.core.messages import Message, term, translate
from meshwright.core.units import show_bytes, show_count
from meshwright.planner.inputs.plan_only import untrainable_part
from meshwright.report.plans import clip_text, table_heading
from meshwright.report.text import align_columns, wrap_text
from meshwright.spec.cluster import Cluster
from meshwright.spec.model import ModelSpec
from meshwright.spec.workload import Workload

if TYPE_CHECKING:
    from meshwright.planner.search.fit import LargestModel, SmallestCluster

MAX_DEVICE_COLUMNS = 8
"""Maximum number of device counts that have a column in the chart."""
BAR_COLUMNS = 56


def fit_conditions(cluster: Cluster, workload: Workload) -> Message:
    """Returns a message with the assumptions of `fit`: device, precision, optimizer, sequence and recompute."""
    group = cluster.groups[0]
    return Message(
        "on {device} ({memory:bytes}, {each} a node): {precision}, {optimizer}, {sequence} tokens, one sequence a "
        "device, full recompute, no offload, a safety margin",
        device=group.device.name,
        memory=group.device.memory,
        each=group.devices,
        precision=workload.precision,
        optimizer=workload.optimizer.name,
        sequence=workload.sequence,
    )


def fit_text(
    model: ModelSpec | None,
    cluster: Cluster,
    workload: Workload,
    rows: Sequence[LargestModel] | Sequence[SmallestCluster],
    language: str = "en",
) -> str:
    """Returns the text of `fit` for one kind of node: without a model the chart, otherwise the table of smallest
    clusters."""
    if model is not None:
        return smallest_cluster_text(model, cluster, workload, rows, language)  # type: ignore[arg-type]
    return fit_chart_text(cluster, workload, rows, language)  # type: ignore[arg-type]


def fit_chart_text(cluster: Cluster, workload: Workload, rows: Sequence[LargestModel], language: str = "en") -> str:
    """Returns a table of model sizes by strategy and number of devices, and bars for the largest number of devices."""
    if not rows:
        return (
            wrap_text(translate(fit_conditions(cluster, workload), language))
            + "\n\n"
            + translate(Message("not even the smallest model fits"), language)
        )
    counts = sorted({row.devices for row in rows})[-MAX_DEVICE_COLUMNS:]
    table = {(row.strategy, row.devices): row for row in rows}
    strategies = list(dict.fromkeys(row.strategy for row in rows))
    lines = [[table_heading("devices", language), *(f"{count:,}" for count in counts)]]
    for strategy in strategies:
        cells = [show_count(row.parameters) if (row := table.get((strategy, count))) else "-" for count in counts]
        lines.append([translate(term("label", strategy), language), *cells])
    most = counts[-1]
    longest = max(row.parameters for row in rows if row.devices == most)
    bars = [
        [
            translate(term("label", strategy), language),
            show_count(row.parameters),
            "█" * max(round(BAR_COLUMNS * row.parameters / longest), 1),
        ]
        for strategy in strategies
        if (row := table.get((strategy, most)))
    ]
    wide = max(len(bar[1]) for bar in bars)
    drawn = align_columns([[bar[0], bar[1].rjust(wide) + "  " + bar[2].ljust(BAR_COLUMNS)] for bar in bars])
    said = [wrap_text(translate(sentence, language)) for sentence in chart_remarks(table, most)]
    return "\n".join(
        [
            wrap_text(translate(fit_conditions(cluster, workload), language)),
            "",
            translate(Message("largest model, GPT-shaped, that fits on a number of devices"), language),
            align_columns(lines),
            "",
            translate(Message("on {devices:count device}", devices=most), language),
            "\n".join(line.rstrip() for line in drawn.splitlines()),
            "",
            *said,
        ]
    )


def chart_remarks(table: dict[tuple[str, int], LargestModel], most: int) -> list[Message]:
    """Returns the conclusions from the chart as messages. `table` maps (strategy, number of devices) to a result, and
    `most` is the largest number of devices."""
    said = []
    if ("DDP", most) in table:
        said.append(
            Message(
                "DDP fits {parameters:parameters} parameters on any number of devices: every device stores the whole "
                "model with its gradients and optimizer states",
                parameters=table["DDP", most].parameters,
            )
        )
    if ("ZeRO-3", most) in table and most > 1:
        said.append(
            Message(
                "ZeRO-3 fits {parameters:parameters} parameters on {devices:count device}: every device stores one "
                "shard",
                parameters=table["ZeRO-3", most].parameters,
                devices=most,
            )
        )
    return said


def smallest_cluster_text(
    model: ModelSpec, cluster: Cluster, workload: Workload, rows: Sequence[SmallestCluster], language: str = "en"
) -> str:
    """Returns a table: for each strategy the fewest devices, or the reason why no number of devices is enough."""
    lines = [[table_heading(head, language) for head in ("strategy", "devices", "nodes", "memory", "plan")]]
    said = []
    for row in rows:
        called = translate(term("label", row.strategy), language)
        if row.devices:
            cells = [f"{row.devices:,}", f"{row.nodes:,}", show_bytes(row.reserved), clip_text(row.plan, 40)]
        else:
            cells = ["-", "-", "-", table_heading("never", language)]
            said.append(
                Message(
                    "{strategy} never fits: every rank stores {floor:bytes}, on any number of devices"
                    if row.floor > cluster.memory
                    else "{strategy} fits on no number of devices that was tried: in addition to {floor:bytes} a "
                    "rank needs memory for activations and temp buffers",
                    strategy=called,
                    floor=row.floor,
                )
            )
        lines.append([called, *cells])
    if (fault := untrainable_part(model, cluster)) is not None:
        said.append(Message("plan-only: {fault}", fault=fault))
    return "\n".join(
        [
            translate(
                Message(
                    "model    {model}: {parameters:parameters} parameters, {blocks} blocks, hidden {hidden}",
                    model=model.name,
                    parameters=model.parameters,
                    blocks=model.blocks,
                    hidden=model.hidden,
                ),
                language,
            ),
            wrap_text(translate(fit_conditions(cluster, workload), language)),
            "",
            translate(Message("fewest devices on which it fits"), language),
            align_columns(lines),
            *(["", *(wrap_text(translate(sentence, language)) for sentence in said)] if said else []),
        ]
    )


def fit_data(
    cluster: Cluster, workload: Workload, rows: Sequence[LargestModel] | Sequence[SmallestCluster]
) -> dict[str, Any]:
    """Returns the data of `fit --json`. Memory is in bytes, parameters are counts."""
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
