"""Reads the tables of published measurements in the package, and users' tables with the same columns, for `meshwright
validate`.

`measurements.csv.gz` has the published times and memory of training steps, each with its source. `famous.csv` has
famous runs. `collectives.csv.gz` has published times of collectives by message size. An empty cell means that the
source does not state the value.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message

_TABLES_FOLDER = Path(__file__).parent / "tables"


class MeasurementRow:
    """One row of a table, with access to its cells by column."""

    def __init__(self, cells: dict[str, str]) -> None:
        self.cells = cells

    def text(self, name: str) -> str:
        """Returns the cell of column `name`, or '' if the table has no such column."""
        return self.cells.get(name) or ""

    def number(self, name: str) -> float | None:
        """Returns the cell of column `name` as a number, or None if the cell is empty or not a number."""
        cell = self.text(name)
        try:
            return float(cell) if cell else None
        except ValueError:
            return None

    def count(self, name: str, default: int = 1) -> int:
        """Returns the cell of column `name` rounded to a whole number, or `default` if the cell is empty or not a
        number."""
        number = self.number(name)
        return default if number is None else round(number)

    @property
    def flags(self) -> dict[str, Any]:
        """Returns the command-line options that the column `notes` quotes as `flags {...}` in JSON. Returns an empty
        dict if the column quotes no options."""
        found = re.search(r"flags (\{.*?\})", self.text("notes"))
        try:
            given = json.loads(found[1]) if found else {}
        except json.JSONDecodeError:
            return {}
        return dict(given)

    def states(self, name: str) -> bool:
        """Returns whether the source states the value of column `name`."""
        return self.text(name) != ""


def read_measurements(path: Path | None = None) -> list[MeasurementRow]:
    """Returns the rows of the table at `path`, by default the measurements of the package. Raises InputError if the
    file cannot be read, or if it has a column that the package's table does not have."""
    built_in = _TABLES_FOLDER / "measurements.csv.gz"
    rows = list(_read_rows(path or built_in))
    if path is not None and rows:
        known = next(_read_rows(built_in)).cells
        for column in rows[0].cells:
            if column not in known:
                raise InputError(
                    Message(
                        "table {path!r}: column {column!r} is not a column of the built-in table{hint}; rename or "
                        "remove it",
                        path=str(path),
                        column=column,
                        hint=did_you_mean(column, known),
                    )
                )
    return rows


def read_famous_runs() -> list[MeasurementRow]:
    """Returns the rows of the package's table of famous runs. Their layouts and results are published, but they are not
    among the measurements that the errors and intervals of the cost model come from."""
    return list(_read_rows(_TABLES_FOLDER / "famous.csv"))


def read_collectives() -> list[MeasurementRow]:
    """Returns the rows of the package's table of measured collectives."""
    return list(_read_rows(_TABLES_FOLDER / "collectives.csv.gz"))


def _read_rows(path: Path) -> Iterator[MeasurementRow]:
    try:
        with (
            gzip.open(path, "rt", newline="", encoding="utf-8")
            if path.suffix == ".gz"
            else path.open(newline="", encoding="utf-8") as file
        ):
            rows = csv.reader(file)
            columns = next(rows, [])
            for cells in rows:
                if cells:
                    yield MeasurementRow(dict(zip_longest(columns, cells, fillvalue="")))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            Message(
                "table {path!r} cannot be read: {error}; expected a CSV file with the columns of the built-in table",
                path=str(path),
                error=error,
            )
        ) from None
