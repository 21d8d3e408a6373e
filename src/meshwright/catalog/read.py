"""Reads the data files of the catalog for the planner and the command line. Each function returns the rows of a table
as plain dictionaries by name, in the order of the files.

To add a model, add a row to `models/*.csv`. To add a device, add an entry to `devices/*.json`. To add a cluster, a link
or a failure rate, add an entry to `clusters.json`, `links.json` or `failures.json`. Every row names its source. Numbers
of models stay text, as in the table, because the caller knows which are integers.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

CatalogEntry = dict[str, Any]
_CATALOG_FOLDER = Path(__file__).parent


def models() -> dict[str, CatalogEntry]:
    """Returns the model architectures. Empty cells of the table are omitted. `aliases` is a list.

    >>> models()["llama2-7b"]["hidden"]
    '4096'
    """
    rows = []
    for path in sorted((_CATALOG_FOLDER / "models").glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows += [{key: value for key, value in row.items() if value != ""} for row in csv.DictReader(file)]
    return {row["model"]: {**row, "aliases": row.get("aliases", "").split()} for row in rows}


def devices() -> dict[str, CatalogEntry]:
    """Returns the accelerators. Each row has the link between the devices of a node and the usual network between
    nodes. The field `vendor` is the name of the file.

    >>> devices()["a100-80gb"]["memory"]
    '80 GiB'
    """
    rows = [
        {**row, "vendor": path.stem}
        for path in sorted((_CATALOG_FOLDER / "devices").glob("*.json"))
        for row in _read_entries(path)
    ]
    return {row["name"]: row for row in rows}


def links() -> dict[str, CatalogEntry]:
    """Returns the networks between nodes. Bandwidths are per device."""
    return {row["name"]: row for row in _read_entries(_CATALOG_FOLDER / "links.json")}


def clusters() -> dict[str, CatalogEntry]:
    """Returns common clusters. The field `is` is the cluster in the notation of `--cluster`."""
    return {row["name"]: row for row in _read_entries(_CATALOG_FOLDER / "clusters.json")}


def prices() -> dict[str, CatalogEntry]:
    """Returns published rents by device, in money per device hour, each with its date and source."""
    return {row["name"]: row for row in _read_entries(_CATALOG_FOLDER / "prices.json")}


def failures() -> dict[str, CatalogEntry]:
    """Returns published failure rates of large training clusters, in failures per device and hour."""
    return {row["name"]: row for row in _read_entries(_CATALOG_FOLDER / "failures.json")}


@cache
def accuracy() -> CatalogEntry:
    """Returns the errors of predictions on published measurements, and which plan features these measurements have."""
    data: CatalogEntry = json.loads((_CATALOG_FOLDER / "accuracy.json").read_text(encoding="utf-8"))
    return data


@cache
def interop_keys() -> Mapping[str, frozenset[str]]:
    """Returns the known keys of other training systems by system. A key that ends with a dot is a section with any
    keys.

    >>> "--tensor-model-parallel-size" in interop_keys()["megatron"]
    True
    """
    data = json.loads((_CATALOG_FOLDER / "interop_keys.json").read_text(encoding="utf-8"))
    return {name: frozenset(entry["keys"]) for name, entry in data.items()}


def find_entry(rows: Mapping[str, CatalogEntry], name: str) -> CatalogEntry | None:
    """Returns the row whose name or alias is `name`, None if there is none. The case of `name` is ignored.

    >>> find_entry(models(), "LLaMA-65B")["model"]
    'llama1-65b'
    """
    word = name.strip().lower()
    for key, row in rows.items():
        if word == key or word in row.get("aliases", ()):
            return row
    return None


def all_names(rows: Mapping[str, CatalogEntry]) -> list[str]:
    """Returns every name and alias in `rows`, for suggestions in error messages."""
    return [word for key, row in rows.items() for word in (key, *row.get("aliases", ()))]


def _read_entries(path: Path) -> list[CatalogEntry]:
    entries: list[CatalogEntry] = json.loads(path.read_text(encoding="utf-8"))
    return entries
