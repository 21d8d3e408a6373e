"""Reads whole records of JSON lines, Parquet and Arrow files in order, for instruction data and text. Each record comes
with its position in the files, for error messages.

Arrow files come from a folder that Hugging Face `datasets` saved (`save_to_disk`). They are streams of record batches,
which pyarrow reads without `datasets`.

`LongJsonLine` streams long JSON lines. `chunk_text` splits documents of any size into chunks of bounded size, and cuts
text only where no token crosses the cut.

[Note: safe boundaries] A text is cut before a space or a line end that follows another character. If there is no such
boundary, the text is cut between a letter and a punctuation mark. A byte-level BPE first splits text into words by the
pattern of GPT-2. In this pattern a space or a line end belongs to the following word, and a word has only letters. So
no word, and no token, crosses a safe boundary, and the chunks have the same tokens as the whole text. Byte tokenizers
may cut anywhere. More than MAX_CHUNK_CHARS characters without a safe boundary are cut at that length, which may add one
token. A tokenizer from a user's `tokenizer.json` may treat the beginning of a text specially. Such a tokenizer encodes
a document of more than MAX_CHUNK_CHARS characters as several texts. Source: Radford et al., Language models are
unsupervised multitask learners, 2019, section 2.2, and the pattern published with it.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from meshwright.core.errors import InputError
from meshwright.core.messages import Message, alternatives

MAX_CHUNK_CHARS = 2**18
"""Maximum characters of one chunk."""

MAX_LINE_BYTES = 2**22
"""Maximum bytes of a JSON line that is parsed as a whole. Longer lines are streamed."""

_BLANK_PATTERN = re.compile(r"(?<=\S)[ \n\t\r]")
_PUNCTUATION_PATTERN = re.compile(
    r"(?<=[A-Za-z\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3])[!-@\[-`{-~\u3001\u3002\uff0c]"
)
_STRING_BODY_PATTERN = re.compile(
    r'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt]|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}'
    r"|\\u(?![dD][89a-fA-F])[0-9a-fA-F]{4})*+"
)
"""The pattern of the longest prefix of a JSON string without incomplete escapes or surrogate pairs."""

_SEPARATOR_PATTERN = re.compile(r'[^"\[\]{},]*')
_MAX_ESCAPE_CHARS = 12
_MAX_KEY_CHARS = 2**16


def chunk_text(parts: Iterable[str], most: int = MAX_CHUNK_CHARS) -> Iterator[str]:
    """Yields the text of `parts` in chunks of at most `most` characters, cut at safe boundaries ([Note: safe
    boundaries]).

    >>> list(chunk_text(["one two", " three"], 8))
    ['one two', ' three']
    """
    rest = ""
    for part in parts:
        rest += part
        start = 0
        while len(rest) - start > most:
            at = _last_safe_boundary(rest, start, start + most)
            yield rest[start:at]
            start = at
        rest = rest[start:]
    if rest:
        yield rest


def _last_safe_boundary(text: str, start: int, end: int) -> int:
    """Returns the last safe position in (start, end] to cut `text`, or `end` if there is none."""
    for pattern in (_BLANK_PATTERN, _PUNCTUATION_PATTERN):
        width = 1024
        while True:
            low = max(start + 1, end - width)
            last = max((match.start() for match in pattern.finditer(text, low, end + 1)), default=0)
            if last or low == start + 1:
                break
            width *= 16
        if last:
            return last
    return end


class LongJsonLine:
    """A line of JSON that is streamed: an object whose fields are visited in order. `head` is the beginning of the
    line.

    For skipped values, only balanced nesting is checked.

    Raises:
        InputError: the line is not a JSON object. The message begins with `place`.
    """

    def __init__(self, head: bytes, file: BinaryIO, place: str) -> None:
        self._place = place
        self._chunks = self._decoded(head, file)
        self._text, self._at = "", 0

    def text_of(self, field: str) -> Iterator[str]:
        """Yields the text of `field` in parts. Raises InputError if the field is missing, occurs twice or is not
        text."""
        names = []
        for name in self._fields():
            if name != field:
                names.append(name)
                self._skip()
                continue
            if field in names:
                raise InputError(Message("{place}: field {field!r} is written twice", place=self._place, field=field))
            if self._peek() != '"':
                raise InputError(Message("{place}: field {field!r} is not text", place=self._place, field=field))
            names.append(name)
            yield from self._string()
        if field not in names:
            raise InputError(
                Message(
                    "{place}: no field {field!r}; it has {names}: set data.field to the one with the text",
                    place=self._place,
                    field=field,
                    names=", ".join(names[:8]) or Message("none"),
                )
            )

    def outline(self) -> dict[str, Any]:
        """Returns the fields of the object. An empty list, object or string replaces each value of this type. None
        replaces any other value."""
        found: dict[str, Any] = {}
        for name in self._fields():
            found[name] = {"[": [], "{": {}, '"': ""}.get(self._peek())
            self._skip()
        return found

    def _decoded(self, head: bytes, file: BinaryIO) -> Iterator[str]:
        decoder, block = codecs.getincrementaldecoder("utf-8")(), head
        try:
            while not block.endswith(b"\n") and (more := file.readline(MAX_CHUNK_CHARS)):
                yield decoder.decode(block)
                block = more
            yield decoder.decode(block, final=True)
        except UnicodeDecodeError:
            raise InputError(Message("{place}: not UTF-8 text", place=self._place)) from None

    def _fill(self) -> bool:
        for chunk in self._chunks:
            self._text, self._at = self._text[self._at :] + chunk, 0
            return True
        return False

    def _peek(self) -> str:
        """Returns the next character that is not a blank, '' at the end of the line."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in " \t\r\n":
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._fill():
                return ""

    def _take(self, signs: str) -> str:
        sign = self._peek()
        if not sign or sign not in signs:
            raise InputError(
                Message(
                    "{place}: not a line of JSON: {signs} is missing; write one JSON object on each line",
                    place=self._place,
                    signs=alternatives(signs),
                )
            )
        self._at += 1
        return sign

    def _fields(self) -> Iterator[str]:
        """Yields the name of each field, before its value."""
        self._take("{")
        if self._peek() == "}":
            self._at += 1
        else:
            sign = ","
            while sign == ",":
                name = ""
                for part in self._string():
                    name += part
                    if len(name) > _MAX_KEY_CHARS:
                        raise InputError(
                            Message(
                                "{place}: the name of a field has more than {max_key_chars:,} characters",
                                place=self._place,
                                max_key_chars=_MAX_KEY_CHARS,
                            )
                        )
                self._take(":")
                yield name
                sign = self._take(",}")
        if self._peek():
            raise InputError(
                Message(
                    "{place}: not a line of JSON: something follows the object; write one JSON object on each line",
                    place=self._place,
                )
            )

    def _string(self) -> Iterator[str]:
        """Yields a string in parts."""
        self._take('"')
        while True:
            match = _STRING_BODY_PATTERN.match(self._text, self._at)
            assert match is not None
            if match.end() > self._at:
                self._at = match.end()
                yield json.loads(f'"{match.group()}"')
            if self._text[self._at : self._at + 1] == '"':
                self._at += 1
                return
            if len(self._text) - self._at >= _MAX_ESCAPE_CHARS or not self._fill():
                raise InputError(
                    Message(
                        "{place}: not a line of JSON: a string does not end, or has a lone surrogate or an invalid "
                        "escape",
                        place=self._place,
                    )
                )

    def _skip(self) -> None:
        """Skips a value of any type."""
        depth, begun = 0, False
        while True:
            sign = self._peek()
            if begun and not depth and sign in ("", ",", "}"):
                return
            if sign == '"':
                for _ in self._string():
                    pass
            elif sign and sign in "[{":
                depth += 1
                self._at += 1
            elif not sign or (sign in ",]}" and not depth):
                raise InputError(
                    Message(
                        "{place}: not a line of JSON: a value is missing; write one JSON object on each line",
                        place=self._place,
                    )
                )
            elif sign in "]}":
                depth -= 1
                self._at += 1
            else:  # skip a comma in a container, or a number or literal up to the next delimiter
                match = _SEPARATOR_PATTERN.match(self._text, self._at + (sign == ","))
                assert match is not None
                self._at = match.end()
            begun = True


JSON_LINES_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES, ARROW_SUFFIXES = ".parquet", ".arrow"
PARQUET_BUFFER_BYTES = 2**20
"""The number of bytes that one read of a Parquet file requests."""

_MAX_DECODED_BYTES = 2**24
"""The number of bytes of table rows that are decoded at a time."""


class SourceRecord(NamedTuple):
    """The fields of a record, and its position: path and line, or path and row."""

    place: str
    fields: dict[str, Any]


def iter_records(files: list[Path]) -> Iterator[SourceRecord]:
    """Yields every record of the JSON lines, Parquet and Arrow files in `files`. Files with other suffixes have no
    records.

    Raises:
        InputError: a record is malformed, a line is longer than MAX_LINE_BYTES, or a table cannot be read.
    """
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
    """Returns how many rows of a Parquet file are decoded at a time: at most 4096, and at most about
    _MAX_DECODED_BYTES. The size of a row is the mean over a row group, for the group with the largest mean."""
    groups = (table.metadata.row_group(at) for at in range(table.metadata.num_row_groups))
    largest = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=1.0)
    return max(1, min(4096, int(_MAX_DECODED_BYTES / max(largest, 1.0))))


def parse_json_object(line: bytes, place: str, field: str = "text") -> dict[str, Any]:
    """Returns the JSON object in one line.

    Raises:
        InputError: the line is not a JSON object. The message begins with `place`, and may name `field` as the required
            field.
    """
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
                "{place}: a line must hold an object with field {field!r}, but this one holds a {type}",
                place=place,
                field=field,
                type=type(found).__name__,
            )
        )
    return found


def iter_table_rows(path: Path) -> Iterator[SourceRecord]:
    """Yields the rows of a Parquet file or of an Arrow stream.

    Raises:
        InputError: pyarrow is not installed, or the file is incomplete.
    """
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
                "data file {path!r} is not a complete table: {error}", path=str(path), error=str(error).splitlines()[0]
            )
        ) from None


def saved_dataset_files(folder: Path) -> list[Path] | None:
    """Returns the files of a folder that Hugging Face `datasets` saved, or None for any other folder. If the folder has
    several splits, these are the files of 'train'.

    Raises:
        InputError: the folder has several splits, but no 'train'.
    """
    if (folder / "dataset_dict.json").is_file():
        if not (folder / "train" / "state.json").is_file():
            raise InputError(
                Message(
                    "data source {folder!r}: the data set has no split 'train'; name the folder of one split",
                    folder=str(folder),
                )
            )
        folder = folder / "train"
    state = folder / "state.json"
    if not (state.is_file() and (folder / "dataset_info.json").is_file()):
        return None
    listed = parse_json_object(state.read_bytes().replace(b"\n", b" "), str(state)).get("_data_files", [])
    return [folder / Path(entry["filename"]).name for entry in listed]
