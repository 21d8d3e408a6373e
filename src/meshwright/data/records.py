"""Whole records of JSON lines, Parquet and Arrow files, in order, each with its place for an error.

Arrow files are those of a folder that Hugging Face `datasets` saved (`save_to_disk`): streams of record batches, read by pyarrow alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.base.errors import InputError

LINES = (".jsonl", ".ndjson", ".json")
PARQUET, ARROW = ".parquet", ".arrow"


class Record(NamedTuple):
    """An object and where it stands."""

    place: str
    fields: dict[str, Any]


def records(files: list[Path]) -> Iterator[Record]:
    """Everything in `files`. Files of another kind hold no records."""
    for path in files:
        suffix = path.suffix.lower()
        if suffix in LINES:
            yield from _lines(path)
        elif suffix in (PARQUET, ARROW):
            yield from rows_of_table(path)


def _lines(path: Path) -> Iterator[Record]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                place = f"{path}:{number}"
                yield Record(place, json_object(line, place))


def json_object(line: bytes, place: str, field: str = "text") -> dict[str, Any]:
    """The object of one line, in which `field` is looked for."""
    try:
        found: Any = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: not UTF-8 text (byte {error.start} of the line)") from None
    except (json.JSONDecodeError, RecursionError) as error:
        what = f"{error.msg} (column {error.colno})" if isinstance(error, json.JSONDecodeError) else "nested too deeply"
        raise InputError(f"{place}: not a line of JSON: {what}; {', '.join(LINES)} files hold one object a line") from None
    if not isinstance(found, dict):
        raise InputError(f"{place}: a line holds an object with field {field!r}, this one holds a {type(found).__name__}")
    return found


def rows_of_table(path: Path) -> Iterator[Record]:
    """The rows of a Parquet file, or of an Arrow stream."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"data file {str(path)!r} is a table, which needs pyarrow: pip install 'meshwright[parquet]'") from None
    row = 0
    try:
        with path.open("rb") as file:
            if path.suffix.lower() == ARROW:
                batches: Any = pyarrow.ipc.open_stream(file)
            else:
                batches = pyarrow.parquet.ParquetFile(file).iter_batches()
            for batch in batches:
                for fields in batch.to_pylist():
                    row += 1
                    yield Record(f"{path}, row {row}", fields)
    except pyarrow.ArrowInvalid as error:
        raise InputError(f"data file {str(path)!r} is not a whole table: {str(error).splitlines()[0]}") from None


def saved_dataset(folder: Path) -> list[Path] | None:
    """The files of a folder that `datasets` saved, of its split 'train' where it has several; None for any other folder."""
    if (folder / "dataset_dict.json").is_file():
        if not (folder / "train" / "state.json").is_file():
            raise InputError(f"data source {str(folder)!r}: a set of splits without 'train'; name the folder of one split")
        folder = folder / "train"
    state = folder / "state.json"
    if not (state.is_file() and (folder / "dataset_info.json").is_file()):
        return None
    listed = json_object(state.read_bytes().replace(b"\n", b" "), str(state)).get("_data_files", [])
    return [folder / Path(entry["filename"]).name for entry in listed]
