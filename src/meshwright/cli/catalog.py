"""`meshwright catalog`: list known models, devices and clusters."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from meshwright.cli.options import AsJson, Language, print_json, print_output
from meshwright.core.language import choose_language
from meshwright.core.messages import Message, term, translate


def catalog(
    kind: Annotated[
        Literal["models", "devices", "clusters", "links"],
        Parameter(name="KIND", help="kind of entry: models, devices, clusters or links"),
    ],
    /,
    *,
    like: Annotated[str, Parameter(help="list only entries whose name, family or source contains this text")] = "",
    json: AsJson = False,
    lang: Language = None,
) -> int:
    """List the models, devices, clusters or links that have a name.

    Try: meshwright catalog models --like llama
    """
    from meshwright.catalog import read
    from meshwright.core.errors import InputError

    rows = {"models": read.models, "devices": read.devices, "clusters": read.clusters, "links": read.links}[kind]()
    word = like.lower()
    found = {
        name: row
        for name, row in rows.items()
        if word
        in " ".join(
            [name, *row.get("aliases", ()), row.get("family", ""), row.get("title", ""), row.get("source", "")]
        ).lower()
    }
    if not found:
        raise InputError(
            Message(
                "catalog {kind}: none of {count} entries has {like!r} in its name, family or source",
                kind=kind,
                count=len(rows),
                like=like,
            )
        )
    if json:
        print_json({kind: list(found.values())})
        return 0
    from meshwright.report.text import align_columns

    table = {"models": model_lines, "devices": device_lines, "clusters": cluster_lines, "links": link_lines}[kind]
    head, *lines = table(found)
    language = choose_language(lang, os.environ)
    print_output(align_columns([[translate(term("catalog", column), language) for column in head], *lines]))
    return 0


def model_lines(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Returns the rows of the table of models, with the header first."""
    from meshwright.core.units import show_count
    from meshwright.planner.inputs.architecture import model_spec
    from meshwright.planner.inputs.architecture_sizes import sizes_from_catalog

    lines = [["model", "parameters", "layers", "hidden", "heads", "kv", "ffn", "vocabulary", "sequence"]]
    for name, row in rows.items():
        sizes = sizes_from_catalog(row)
        shape = [sizes.layers, sizes.hidden, sizes.heads, sizes.kv_heads, sizes.ffn, sizes.vocab, sizes.seq]
        lines.append([name, show_count(model_spec(name, sizes).parameters), *map(str, shape)])
    return lines


def device_lines(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Returns the rows of the table of devices, with the header first."""
    lines = [["device", "memory", "bandwidth", "fp32", "bf16", "fp16", "fp8", "link", "network"]]
    for name, row in rows.items():
        peaks = [
            row["peak"].get(precision, "-").replace(" TFLOP/s", "").replace(" GFLOP/s", "G")
            for precision in ("fp32", "bf16", "fp16", "fp8")
        ]
        lines.append(
            [name, row["memory"], row["bandwidth"], *peaks, row["link"]["bandwidth"], row["network"]["bandwidth"]]
        )
    return lines


def cluster_lines(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Returns the rows of the table of clusters, with the header first."""
    from meshwright.planner.inputs.cluster_syntax import parse_cluster

    lines = [["cluster", "devices", "is", "memory"]]
    for name, row in rows.items():
        cluster = parse_cluster(row["is"])
        lines.append([name, str(cluster.devices), row["is"], f"{cluster.memory / 2**30:.0f} GiB"])
    return lines


def link_lines(rows: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Returns the rows of the table of links, with the header first."""
    return [["link", "a device", "latency"], *([name, row["bandwidth"], row["latency"]] for name, row in rows.items())]
