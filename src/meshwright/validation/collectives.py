"""Measured collectives against `cost.collectives`: errors of seconds by operation, in one node and across nodes, small and large."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from meshwright.base.errors import InputError
from meshwright.catalog import read as catalog
from meshwright.cost.collectives import exchange, fabric, group
from meshwright.intake.clusters import parse_cluster, read_link
from meshwright.validation.cases import EFA
from meshwright.validation.score import Errors, errors
from meshwright.validation.tables import Row

LARGE = 2**24
"""Bytes from which a message counts as large."""

ALIKE = {"n/s (A100-class NVLink node)": "a100-80gb"}
"""Devices that a source does not name but describes."""


def scored(rows: Iterable[Row]) -> dict[str, Errors]:
    """By operation, place and size. Rows without a size, a time or a known device are left out."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        seconds, size = row.number("time_us"), row.number("payload_bytes")
        if seconds and size and (predicted := predict(row, size)) is not None:
            place = "in a node" if row.count("nodes") == 1 else "across nodes"
            found[f"{row.text('collective')} {place}, {'large' if size >= LARGE else 'small'}"].append(predicted / (seconds * 1e-6) - 1.0)
    return {name: errors(each) for name, each in sorted(found.items())}


def predict(row: Row, size: float) -> float | None:
    """Seconds, or None where the row does not say on what."""
    ranks, nodes = row.count("gpus"), row.count("nodes")
    found = catalog.find(catalog.devices(), ALIKE.get(row.text("gpu"), row.text("gpu")))
    if found is None or ranks % nodes or (nodes > 1 and not row.text("inter")):
        return None
    cluster = parse_cluster(f"{nodes}x{ranks // nodes}:{found['name']}")
    if nodes > 1:
        try:
            cluster = cluster.but(network=read_link(network(row.text("inter")), ranks // nodes))
        except InputError:
            return None
    links = fabric(cluster)
    over = group(links, ranks, 1)
    match row.text("collective"):
        case "all_reduce":
            return float(over.reduce(size))
        case "all_gather" | "reduce_scatter":
            return float(over.gather(size))
        case "all_to_all":
            return float(exchange(links, ranks, 1, size))  # type: ignore[arg-type]
    return None


def network(text: str) -> str:
    """The network as `@LINK` says it."""
    if "EFA" in text:
        return EFA if "v2" in text else "efa-p6"
    ports = re.search(r"(\d+)x(\d+)\s*Gb/s", text)
    return f"{ports[1]}x{ports[2]}Gb" if ports else text
