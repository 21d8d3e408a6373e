"""Reads the published tables of the package, and users' tables with the same columns.

`measurements.csv.gz` has the published times and memory of training steps, each with its source. `collectives.csv.gz`
has collectives by size. If a cell is empty, the source does not state the value.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.core.errors import InputError
from meshwright.core.messages import Message

_TABLES_FOLDER = Path(__file__).parent / "tables"


class MeasurementRow:
    """One row of a table, with access to its cells by column."""

    def __init__(self, cells: dict[str, str]) -> None:
        self.cells = cells

    def text(self, name: str) -> str:
        """Returns a cell, or an empty text if it is absent."""
        return self.cells.get(name) or ""

    def number(self, name: str) -> float | None:
        """Returns a cell as a number, or None if it is empty or not a number."""
        try:
            return float(self.text(name))
        except ValueError:
            return None

    def count(self, name: str, default: int = 1) -> int:
        """Returns a cell as a whole number."""
        number = self.number(name)
        return default if number is None else round(number)

    @property
    def flags(self) -> dict[str, Any]:
        """Returns the options of the command line that the notes quote as `flags {...}`."""
        found = re.search(r"flags (\{.*?\})", self.text("notes"))
        try:
            given = json.loads(found[1]) if found else {}
        except json.JSONDecodeError:
            return {}
        return dict(given)

    def states(self, name: str) -> bool:
        """Returns whether the source states a cell."""
        return self.text(name) != ""


def read_measurements(path: Path | None = None) -> list[MeasurementRow]:
    """Returns the rows of `path`, by default those of the package."""
    return list(_read_rows(path or _TABLES_FOLDER / "measurements.csv.gz"))


def read_collectives() -> list[MeasurementRow]:
    """Returns the table of measured collectives."""
    return list(_read_rows(_TABLES_FOLDER / "collectives.csv.gz"))


def _read_rows(path: Path) -> Iterator[MeasurementRow]:
    try:
        with (
            gzip.open(path, "rt", newline="", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(newline="", encoding="utf-8") as file
        ):
            for cells in csv.DictReader(file):
                yield MeasurementRow({str(key): value or "" for key, value in cells.items()})
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            Message(
                "table {path!r} cannot be read: {error}; expected a CSV file with the columns of the built-in table",
                path=str(path),
                error=error,
            )
        ) from None
