"""Reads the documents of a text data set in chunks, for the tokenizer (dataset.py). The sources are files, folders and
glob patterns of text, JSON lines, Parquet and Arrow, or the Python sources of the standard library.

A document is a text file, a JSON line or a table row. Long text files are read in chunks of about 256 KiB, so that no
file has to fit in memory. A chunk ends at a line end, if it contains one. The concatenated chunks equal the file,
character for character. Long documents of other file types are read in chunks that have the same tokens as the whole
document ([Note: safe boundaries] in records.py).

Guarantees:
- The same files give the same chunks in the same order on every machine.
- A fault in a file raises one `InputError`. Its message is one line, with the name of the file and, in a file of
  records, the line or row number.
"""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.hub_cache import hub_snapshot, is_hub_name
from meshwright.core.messages import Message
from meshwright.data.records import (
    ARROW_SUFFIXES,
    JSON_LINES_SUFFIXES,
    MAX_LINE_BYTES,
    PARQUET_BUFFER_BYTES,
    LongJsonLine,
    chunk_text,
    iter_table_rows,
    parse_json_object,
    rows_per_read,
    saved_dataset_files,
)

TABLE_SUFFIXES = (".parquet",)
ARRAY_SUFFIXES = (".npy", ".bin")
RECORD_SUFFIXES = (*TABLE_SUFFIXES, ARROW_SUFFIXES, *JSON_LINES_SUFFIXES)
STDLIB_SOURCE = "stdlib"

_READ_BYTES = 2**18
# The standard library is read without tests, tools and third-party packages. `encodings` is left out, because the
# tables of its code pages would make up a tenth of the validation data.
_EXCLUDED_FOLDERS = {
    "encodings",
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "__pycache__",
}


class DocumentChunk(NamedTuple):
    """A chunk of a document. `ends`: whether it is the last chunk of the document."""

    text: str
    ends: bool


def find_files(sources: tuple[str, ...]) -> list[Path]:
    """Returns the files that `sources` name, in the given order. The files of a folder or a pattern are sorted by path,
    without empty files. The files of a folder that Hugging Face `datasets` saved are in the order of its state.json.

    Raises:
        InputError: a source does not exist, cannot be read, is an empty file, or has only empty files.
    """
    files: list[Path] = []
    for source in sources:
        try:
            found = _stdlib_files() if source == STDLIB_SOURCE else _source_files(source, Path(source).expanduser())
        except OSError as error:
            raise InputError(
                Message(
                    "data source {source!r} cannot be read: {reason}", source=source, reason=error.strerror or error
                )
            ) from None
        if not found:
            raise InputError(
                Message("data source {source!r} has no non-empty file; name another source", source=source)
            )
        files += found
    return files


def _source_files(source: str, path: Path) -> list[Path]:
    if path.is_dir() and (saved := saved_dataset_files(path)) is not None:
        return _nonempty_files(saved)
    if path.is_dir():
        return _nonempty_files(sorted(_visible_files(path)))
    if path.is_file():
        if not path.stat().st_size:
            raise InputError(Message("data file {source!r} is empty", source=source))
        return [path]
    if any(sign in source for sign in "*?["):
        return _nonempty_files(
            sorted(item for item in Path(path.anchor).glob(str(path.relative_to(path.anchor))) if item.is_file())
        )
    if is_hub_name(source) and path.suffix.lower() not in (*RECORD_SUFFIXES, *ARRAY_SUFFIXES, ".txt", ".csv", ".md"):
        return _hub_files(source)
    near = [item.name for item in path.parent.iterdir()] if path.parent.is_dir() else []
    raise InputError(
        Message(
            "data source {source!r} does not exist{hint}; name a file, a folder or a pattern such as 'texts/*.txt' "
            "with --data",
            source=source,
            hint=did_you_mean(path.name, near),
        )
    )


def _hub_files(name: str) -> list[Path]:
    """Returns the files of records of a data set of the Hugging Face hub in the local cache: those of its training
    split, if their paths name one. Raises InputError if it was not downloaded or has no such files."""
    snapshot = hub_snapshot(name, "datasets")
    if snapshot is None:
        raise InputError(
            Message(
                "data source {name!r} is neither a file nor a data set in the local cache of the Hugging Face hub: "
                "download it with `hf download --repo-type dataset {name}`",
                name=name,
            )
        )
    files = [path for path in sorted(_visible_files(snapshot)) if path.suffix.lower() in RECORD_SUFFIXES]
    return _nonempty_files([path for path in files if "train" in str(path.relative_to(snapshot))] or files)


def _nonempty_files(files: list[Path]) -> list[Path]:
    return [path for path in files if path.stat().st_size]


def _visible_files(folder: Path) -> Iterator[Path]:
    """Yields the files below a folder. Hidden files and folders are skipped, since a home directory may have a million
    hidden files."""
    for root, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _is_hidden(name)]
        yield from (path for name in names if not _is_hidden(name) and (path := Path(root, name)).is_file())


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _stdlib_files() -> list[Path]:
    """Returns Python's own sources, without tests, tools, installed packages, and files generated for this machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in _EXCLUDED_FOLDERS and not name.startswith("config-")]
        files += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("_sysconfigdata")
        ]
    if not files:
        raise InputError(
            Message("data source 'stdlib': no Python sources under {root!r}; name text files instead", root=str(root))
        )
    return _nonempty_files(sorted(files, key=lambda path: path.relative_to(root).as_posix()))


def iter_document_chunks(files: list[Path], field: str) -> Iterator[DocumentChunk]:
    """Yields the text of `files` in chunks. `field` is the name of the JSON field, or of the table column, that has the
    text.

    Raises:
        InputError: a file cannot be read, does not have the format of its suffix, or has no text in `field`.
    """
    for path in files:
        suffix = path.suffix.lower()
        try:
            if suffix in JSON_LINES_SUFFIXES:
                yield from _json_lines_chunks(path, field)
            elif suffix in TABLE_SUFFIXES:
                yield from _parquet_chunks(path, field)
            elif suffix == ARROW_SUFFIXES:
                yield from _arrow_chunks(path, field)
            else:
                yield from _text_file_chunks(path)
        except OSError as error:
            raise InputError(
                Message("data file {path!r} cannot be read: {reason}", path=str(path), reason=error.strerror or error)
            ) from None


def _text_file_chunks(path: Path) -> Iterator[DocumentChunk]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest, at = "", 0
    with path.open("rb") as file:
        while True:
            block = file.read(_READ_BYTES)
            waiting = len(decoder.getstate()[0])
            try:
                rest += decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                raise InputError(
                    Message(
                        "data file {path!r} is not UTF-8 text (byte {at})",
                        path=str(path),
                        at=at - waiting + error.start,
                    )
                ) from None
            if not block:
                break
            at += len(block)
            if len(rest) >= _READ_BYTES:
                cut = rest.rfind("\n") + 1 or len(rest)
                yield DocumentChunk(rest[:cut], False)
                rest = rest[cut:]
    yield DocumentChunk(rest, True)


def _json_lines_chunks(path: Path, field: str) -> Iterator[DocumentChunk]:
    with path.open("rb") as file:
        for number, line in enumerate(iter(partial(file.readline, MAX_LINE_BYTES), b""), 1):
            place = f"{path}:{number}"
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                yield from _document_chunks(LongJsonLine(line, file, place).text_of(field), field, place)
            elif line.strip():
                yield from _document_chunks([_json_text(line, field, place)], field, place)


def _json_text(line: bytes, field: str, place: str) -> str:
    found = parse_json_object(line, place, field)
    if field not in found:
        raise InputError(
            Message(
                "{place}: no field {field!r}{field_hint}",
                place=place,
                field=field,
                field_hint=_field_hint(field, list(found)),
            )
        )
    return _check_text(found[field], field, place)


def _field_hint(field: str, known: list[str]) -> str:
    return did_you_mean(field, known) or Message(
        "; it has {known}: set data.field to the one with the text", known=", ".join(known[:8]) or Message("none")
    )


def _check_text(text: Any, field: str, place: str) -> str:
    if not isinstance(text, str):
        raise InputError(
            Message("{place}: field {field!r} is {type}, not text", place=place, field=field, type=type(text).__name__)
        )
    return text


def _document_chunks(parts: Iterable[str], field: str, place: str) -> Iterator[DocumentChunk]:
    """Yields the chunks of one document, whose text is the concatenation of `parts`. An empty text has no chunk."""
    before, read = "", 0
    for piece in chunk_text(parts):
        try:
            piece.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                Message(
                    "{place}: field {field!r} holds half a character (a lone surrogate at {read})",
                    place=place,
                    field=field,
                    read=read + error.start,
                )
            ) from None
        read += len(piece)
        if before:
            yield DocumentChunk(before, False)
        before = piece
    if before:
        yield DocumentChunk(before, True)


def _parquet_chunks(path: Path, field: str) -> Iterator[DocumentChunk]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            Message(
                "data file {path!r} is Parquet, which needs pyarrow: pip install 'meshwright[parquet]'", path=str(path)
            )
        ) from None
    with path.open("rb") as file:
        try:
            yield from _column_chunks(
                pyarrow.parquet.ParquetFile(file, buffer_size=PARQUET_BUFFER_BYTES), field, str(path)
            )
        except pyarrow.ArrowInvalid as error:
            raise InputError(
                Message(
                    "data file {path!r} is not a complete Parquet file: {error}",
                    path=str(path),
                    error=str(error).splitlines()[0],
                )
            ) from None


def _arrow_chunks(path: Path, field: str) -> Iterator[DocumentChunk]:
    for place, fields in iter_table_rows(path):
        if field not in fields:
            raise InputError(
                Message(
                    "data file {path!r} has no column {field!r}{field_hint}",
                    path=str(path),
                    field=field,
                    field_hint=_field_hint(field, list(fields)),
                )
            )
        yield from _document_chunks([_check_text(fields[field], field, place)], field, place)


def _column_chunks(table: Any, field: str, name: str) -> Iterator[DocumentChunk]:
    known = table.schema_arrow.names
    if field not in known:
        raise InputError(
            Message(
                "data file {name!r} has no column {field!r}{field_hint}",
                name=name,
                field=field,
                field_hint=_field_hint(field, known),
            )
        )
    row = 0
    for batch in table.iter_batches(rows_per_read(table), columns=[field]):
        for value in batch.column(0):
            row += 1
            place = Message("{name}, row {row}", name=name, row=row)
            yield from _document_chunks([_check_text(value.as_py(), field, place)], field, place)
