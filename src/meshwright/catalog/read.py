"""Reads the data files. Rows come out as plain dictionaries, keyed by name, in the order of the files; aliases and
spellings are one rule.

Adding a model is a row in `models/*.csv`, a device an entry in `devices/*.json`, a cluster or a link a line in its
file. Every row names its
source. Numbers of models stay text here, as the table has them: who reads them knows which are whole.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CatalogEntry = dict[str, Any]
_CATALOG_FOLDER = Path(__file__).parent


def models() -> dict[str, CatalogEntry]:
    """Architectures. A cell that is empty in the table is left out of its row.

    >>> models()["llama2-7b"]["hidden"]
    '4096'
    """
    rows = []
    for path in sorted((_CATALOG_FOLDER / "models").glob("*.csv")):
        with path.open(newline="", encoding="utf-8") as file:
            rows += [{key: value for key, value in row.items() if value != ""} for row in csv.DictReader(file)]
    return {row["model"]: {**row, "aliases": row.get("aliases", "").split()} for row in rows}


def devices() -> dict[str, CatalogEntry]:
    """Accelerators, with the link between those of a node and the network that such nodes usually have. The `vendor` is
    the name of the file.

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
    """Networks between nodes, by the share of one device."""
    return {row["name"]: row for row in _read_entries(_CATALOG_FOLDER / "links.json")}


def clusters() -> dict[str, CatalogEntry]:
    """Clusters of common shape, each written as `is` in the words of `--cluster`."""
    return {row["name"]: row for row in _read_entries(_CATALOG_FOLDER / "clusters.json")}


def failures() -> dict[str, CatalogEntry]:
    """How often devices of known fleets failed."""
    return {row["name"]: row for row in _read_entries(_CATALOG_FOLDER / "failures.json")}


def find_entry(rows: Mapping[str, CatalogEntry], name: str) -> CatalogEntry | None:
    """The row of that name or alias, whatever the case.

    >>> find_entry(models(), "LLaMA-65B")["model"]
    'llama1-65b'
    """
    word = name.strip().lower()
    for key, row in rows.items():
        if word == key or word in row.get("aliases", ()):
            return row
    return None


def all_names(rows: Mapping[str, CatalogEntry]) -> list[str]:
    """Every name and alias, for suggestions."""
    return [word for key, row in rows.items() for word in (key, *row.get("aliases", ()))]


def _read_entries(path: Path) -> list[CatalogEntry]:
    entries: list[CatalogEntry] = json.loads(path.read_text(encoding="utf-8"))
    return entries
