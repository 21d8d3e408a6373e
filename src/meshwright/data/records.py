"""Reads whole records of JSON lines, Parquet and Arrow files in order. Each record has its position for error messages.

Arrow files are those of a folder that Hugging Face `datasets` saved (`save_to_disk`). They are streams of record
batches, which pyarrow reads without `datasets`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.data.document_chunking import MAX_LINE_BYTES, LongJsonLine

JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES, ARROW_SUFFIXES = ".parquet", ".arrow"
PARQUET_BUFFER_BYTES = 2**20
"""The number of bytes that one read of a Parquet file requests."""

_MAX_DECODED_BYTES = 2**24
"""The number of bytes of table rows that are decoded at a time."""


class SourceRecord(NamedTuple):
    """An object and its position in the sources."""

    place: str
    fields: dict[str, Any]


def iter_records(files: list[Path]) -> Iterator[SourceRecord]:
    """Yields every record in `files`. Files of another kind have no records."""
    for path in files:
        suffix = path.suffix.lower()
        if suffix in JSON_LINES_SUFFIXES:
            yield from _iter_json_lines(path)
        elif suffix in (PARQUET_SUFFIXES, ARROW_SUFFIXES):
            yield from iter_table_rows(path)


def _iter_json_lines(path: Path) -> Iterator[SourceRecord]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
            place = f"{path}:{number}"
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                raise InputError(
                    Message(
                        "{place}: a record of instructions has more than {max_line_bytes:,} bytes; split it into "
                        "several lines",
                        place=place,
                        max_line_bytes=MAX_LINE_BYTES,
                    )
                )
            if line.strip():
                yield SourceRecord(place, parse_json_object(line, place))


def first_record(files: list[Path]) -> dict[str, Any] | None:
    """Returns the fields of the first record of `files`, or None if there is no record.

    For a line longer than MAX_LINE_BYTES, the result has only the names and types of the fields.
    """
    for path in files:
        if path.suffix.lower() in JSON_LINES_SUFFIXES:
            with path.open("rb") as file:
                line = file.readline(MAX_LINE_BYTES)
                if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                    return LongJsonLine(line, file, f"{path}:1").outline()
        for record in iter_records([path]):
            return record.fields
    return None


def rows_per_read(table: Any) -> int:
    """Returns how many rows of a Parquet file are decoded at a time. The number is chosen so that they take about
    _MAX_DECODED_BYTES, by the mean row size of the largest row group."""
    groups = (table.metadata.row_group(at) for at in range(table.metadata.num_row_groups))
    largest = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=1.0)
    return max(1, min(4096, int(_MAX_DECODED_BYTES / max(largest, 1.0))))


def parse_json_object(line: bytes, place: str, field: str = "text") -> dict[str, Any]:
    """Returns the JSON object in one line. Error messages name `field` as the required field."""
    what, found = "", None
    try:
        found = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(
            Message("{place}: not UTF-8 text (byte {start} of the line)", place=place, start=error.start)
        ) from None
    except json.JSONDecodeError as error:
        what = Message("{msg} (column {colno})", msg=error.msg, colno=error.colno)
    except RecursionError:
        what = Message("nested too deeply")
    except ValueError:  # Python refuses integers of more than 4,300 digits
        what = Message("a whole number of more than 4,300 digits")
    if what:
        raise InputError(
            Message(
                "{place}: not a line of JSON: {what}; {json_lines_suffixes} files hold one object a line",
                place=place,
                what=what,
                json_lines_suffixes=", ".join(JSON_LINES_SUFFIXES),
            )
        )
    if not isinstance(found, dict):
        raise InputError(
            Message(
                "{place}: a line holds an object with field {field!r}, this one holds a {type}",
                place=place,
                field=field,
                type=type(found).__name__,
            )
        )
    return found


def iter_table_rows(path: Path) -> Iterator[SourceRecord]:
    """Yields the rows of a Parquet file or of an Arrow stream."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            Message(
                "data file {path!r} is a table, which needs pyarrow: pip install 'meshwright[parquet]'", path=str(path)
            )
        ) from None
    row = 0
    try:
        with path.open("rb") as file:
            if path.suffix.lower() == ARROW_SUFFIXES:
                batches: Any = pyarrow.ipc.open_stream(file)
            else:
                table = pyarrow.parquet.ParquetFile(file, buffer_size=PARQUET_BUFFER_BYTES)
                batches = table.iter_batches(rows_per_read(table))
            for batch in batches:
                for fields in batch.to_pylist():
                    row += 1
                    yield SourceRecord(Message("{path}, row {row}", path=path, row=row), fields)
    except pyarrow.ArrowInvalid as error:
        raise InputError(
            Message(
                "data file {path!r} is not a whole table: {error}", path=str(path), error=str(error).splitlines()[0]
            )
        ) from None


def saved_dataset_files(folder: Path) -> list[Path] | None:
    """Returns the files of a folder that `datasets` saved, None for any other folder. Where the folder has several
    splits, these are the files of 'train'.
    """
    if (folder / "dataset_dict.json").is_file():
        if not (folder / "train" / "state.json").is_file():
            raise InputError(
                Message(
                    "data source {folder!r}: a set of splits without 'train'; name the folder of one split",
                    folder=str(folder),
                )
            )
        folder = folder / "train"
    state = folder / "state.json"
    if not (state.is_file() and (folder / "dataset_info.json").is_file()):
        return None
    listed = parse_json_object(state.read_bytes().replace(b"\n", b" "), str(state)).get("_data_files", [])
    return [folder / Path(entry["filename"]).name for entry in listed]
