"""Reads and writes strict JSON and YAML for all files that users write or that a run stores. The result is plain data
(dictionaries with string keys, lists, strings, numbers, booleans and None), or a `StrictModel`.

A `StrictModel` is a frozen pydantic model that validates itself. An unknown field is an error that names the nearest
known field.

Guarantees: reading returns data or a model, or raises an `InputError` of one line. The line names the file, the line
number if it is known, and the path of the value (`$.device.memory: ...`). The size of the data is limited. YAML tags,
sets, keys that are lists or mappings, and values that contain themselves are rejected. Dates are read as text. Every
number fits in a float.

Source: YAML 1.1 as PyYAML resolves scalars, without timestamps and merge keys; RFC 8259 for JSON.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Annotated, Any, NoReturn, Self, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, WrapValidator

from meshwright.core.errors import MAX_SHOWN_CHARACTERS, InputError, did_you_mean
from meshwright.core.messages import Message, mark_msgid
from meshwright.core.printable_text import check_one_line
from meshwright.core.storage import read_text

MAX_TEXT_CHARACTERS = 2**24
"""Maximum number of characters of a text."""

MAX_TEXT_DEPTH = 100
"""Maximum depth of nested lists and mappings."""

MAX_INTEGER_DIGITS = 300
"""Maximum number of digits of an integer. The largest float has 309 digits."""

MAX_TEXT_VALUES = 10**6
"""Maximum number of values in one YAML text. Values that an alias repeats count each time."""

_EXPONENT_NUMBER = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
"""Matches numbers such as 1e-4, which YAML 1.1 reads as text but `parse_text` reads as numbers."""

_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class _TextError(Exception):
    """Reports an error `what` in line `line` of a text. Line 0 means that the line is unknown."""

    def __init__(self, what: str, line: int = 0) -> None:
        super().__init__(what)
        self.what, self.line = what, line


def parse_text(text: str, where: str) -> Any:
    """Returns the data of `text`, None if the text is empty. Text that begins with a brace is parsed as JSON, other
    text as YAML. `where` is the name of the file for messages.

    Raises: InputError whose message begins with `where` and the line.

    >>> parse_text("steps: 1e3\\ndate: 2001-01-01\\non: [yes, ~]", "job.yaml")
    {'steps': 1000.0, 'date': '2001-01-01', 'on': [True, None]}
    """
    try:
        if len(text) > MAX_TEXT_CHARACTERS:
            raise _TextError(
                Message(
                    "has {count:,} characters; at most {max_text_characters:,} are read",
                    count=len(text),
                    max_text_characters=MAX_TEXT_CHARACTERS,
                )
            )
        return _parse_json(text) if text.lstrip().startswith("{") else _YamlReader(text).document()
    except _TextError as wrong:
        place = f"{where}:{wrong.line}" if wrong.line else where
        raise InputError(Message("{place}: {what}", place=place, what=wrong.what)) from None


def _nesting_error() -> str:
    return Message(
        "lists or objects are nested more than {max_text_depth} levels deep",
        max_text_depth=MAX_TEXT_DEPTH,
    )


def _parse_json(text: str) -> Any:
    def line_of(literal: str) -> int:
        return text.count("\n", 0, text.find(literal)) + 1

    def whole(literal: str) -> int:
        if len(literal) > MAX_INTEGER_DIGITS:
            raise _TextError(
                Message(
                    "a number of {count:,} digits; write at most {max_integer_digits}",
                    count=len(literal),
                    max_integer_digits=MAX_INTEGER_DIGITS,
                ),
                line_of(literal),
            )
        return int(literal)

    def real(literal: str) -> float:
        return _finite_float(float(literal), literal, line_of(literal))

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _TextError(Message("key {key!r} is written twice", key=key))
            found[key] = value
        return found

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_int=whole, parse_float=real)
    except json.JSONDecodeError as error:
        raise _TextError(Message("not valid JSON: {msg}", msg=error.msg), error.lineno) from None
    except RecursionError:
        raise _TextError(_nesting_error()) from None
    waiting = [(data, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_TEXT_DEPTH:
            raise _TextError(_nesting_error())
        if isinstance(value, str):
            _check_text(value, 0)
        inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += ((each, depth + 1) for each in inner)
    return data


def _finite_float(value: float, literal: str, line: int) -> float:
    """Returns `value`. Raises _TextError if it is infinite because the number `literal` is too large for a float. A
    literal infinity is allowed."""
    if math.isinf(value) and any(letter.isdigit() for letter in literal):
        raise _TextError(
            Message(
                "the number {literal}{what} is too large", literal=literal[:20], what="..." if len(literal) > 20 else ""
            ),
            line,
        )
    return value


def _check_text(text: str, line: int) -> None:
    if _LONE_SURROGATE.search(text):
        raise _TextError(Message("a text contains a lone surrogate (half of a character)"), line)


class _YamlReader:
    """Builds the data of one YAML document from the events of PyYAML's parser. PyYAML's constructors are not used,
    because they build dates, sets and objects and are recursive."""

    def __init__(self, text: str) -> None:
        import yaml

        self._yaml, self._text = yaml, text
        self._named: dict[str, tuple[Any, int]] = {}
        self._count = 0

    def document(self) -> Any:
        yaml = self._yaml
        try:
            self._loader = yaml.SafeLoader(self._text)
            return self._whole()
        except yaml.reader.ReaderError as error:
            self._fail(
                Message(
                    "not valid YAML: the character U+{character:04X} is not allowed", character=int(error.character)
                ),
                self._text.count("\n", 0, error.position) + 1,
            )
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            self._fail(
                Message("not valid YAML: {problem}", problem=getattr(error, "problem", None) or error),
                mark.line + 1 if mark else 0,
            )
        except (ValueError, OverflowError):  # PyYAML raises these for an escape or a version number out of range
            self._fail(Message("not valid YAML: an invalid escape or number"), self._loader.line + 1)

    def _whole(self) -> Any:
        yaml, loader, data = self._yaml, self._loader, None
        loader.get_event()  # skips the start of the stream
        if not loader.check_event(yaml.StreamEndEvent):
            loader.get_event()
            data, _ = self._value(1)
            loader.get_event()
        if not loader.check_event(yaml.StreamEndEvent):
            self._fail(
                Message("the file has a second YAML document; write only one"), loader.get_event().start_mark.line + 1
            )
        return data

    def _fail(self, what: str, line: int) -> NoReturn:
        raise _TextError(what, line)

    def _value(self, depth: int) -> tuple[Any, int]:
        """Returns the next value, and how many values it consists of: itself and all values nested in it. `depth` is
        its nesting level."""
        yaml, event = self._yaml, self._loader.get_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            found, size = self._named.get(event.anchor) or self._fail(
                Message(
                    "alias {anchor!r} refers to a value that has not ended or does not exist",
                    anchor=event.anchor,
                ),
                line,
            )
            self._counted(size, line)
            return found, size
        if event.tag is not None:
            self._fail(
                Message("YAML tag {tag!r} is not supported; write the value without the tag", tag=event.tag), line
            )
        if depth > MAX_TEXT_DEPTH:
            self._fail(_nesting_error(), line)
        self._counted(1, line)
        found, size = (
            (self._scalar(event, line), 1) if isinstance(event, yaml.ScalarEvent) else self._collection(event, depth)
        )
        if event.anchor is not None:
            self._named[event.anchor] = found, size
        return found, size

    def _counted(self, size: int, line: int) -> None:
        self._count += size
        if self._count > MAX_TEXT_VALUES:
            self._fail(Message("more than {max_text_values:,} values", max_text_values=MAX_TEXT_VALUES), line)

    def _collection(self, event: Any, depth: int) -> tuple[Any, int]:
        yaml, loader, size = self._yaml, self._loader, 1
        if isinstance(event, yaml.SequenceStartEvent):
            entries = []
            while not loader.check_event(yaml.SequenceEndEvent):
                entry, count = self._value(depth + 1)
                entries.append(entry)
                size += count
            loader.get_event()
            return entries, size
        found: dict[str, Any] = {}
        while not loader.check_event(yaml.MappingEndEvent):
            key = loader.get_event()
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarEvent) or key.tag is not None:
                self._fail(Message("a key is a list, a mapping, an alias or has a tag; write plain text"), line)
            _check_text(key.value, line)
            if key.value in found:
                self._fail(Message("key {value!r} is written twice", value=key.value), line)
            found[key.value], count = self._value(depth + 1)
            size += count
        loader.get_event()
        return found, size

    def _scalar(self, event: Any, line: int) -> Any:
        node, text = self._yaml.ScalarNode("", event.value, event.start_mark, event.end_mark), event.value
        kind = self._loader.resolve(self._yaml.ScalarNode, text, event.implicit).rpartition(":")[2]
        if kind == "str" and event.implicit[0] and _EXPONENT_NUMBER.fullmatch(text):
            kind = "float"
        try:
            if kind == "int" and len(text) > MAX_INTEGER_DIGITS:
                self._fail(
                    Message(
                        "a number of {count:,} digits; write at most {max_integer_digits}",
                        count=len(text),
                        max_integer_digits=MAX_INTEGER_DIGITS,
                    ),
                    line,
                )
            if kind == "int":
                return self._loader.construct_yaml_int(node)
            if kind == "float":
                return _finite_float(self._loader.construct_yaml_float(node), text, line)
        except ValueError:
            pass  # text that resembles a number but cannot be converted, such as 0x_
        if kind in ("bool", "null"):
            return None if kind == "null" else self._loader.construct_yaml_bool(node)
        _check_text(text, line)
        return text


class StrictModel(BaseModel):
    """The base of all data types that are read or written. Instances are frozen, and unknown fields are rejected."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False, ser_json_inf_nan="constants")

    def to_json(self, indent: int | None = 2) -> str:
        """Returns this model as JSON text, on one line if `indent` is None."""
        return self.model_dump_json(indent=indent)

    def but(self, **changes: Any) -> Self:
        """Returns a copy with the changed fields `changes`. The copy is validated like a new object.

        Raises: InputError if a changed value is invalid or no such field exists.
        """
        return validate_data(type(self), {**{name: getattr(self, name) for name in type(self).model_fields}, **changes})


OneLine = Annotated[str, AfterValidator(check_one_line)]
"""A string field of a `StrictModel` that is limited to one line."""

TranslatableText = Annotated[
    str, WrapValidator(lambda value, check: value if isinstance(value, Message) else check(value))
]
"""A string field of a `StrictModel` that may contain a `Message`, so that it can be translated later. JSON contains its
English text.
"""

StrictModelType = TypeVar("StrictModelType", bound=StrictModel)


def validate_data(kind: type[StrictModelType], data: Any, where: str = "$") -> StrictModelType:
    """Returns `data` (parsed JSON or YAML) as an instance of `kind`. `where` is the beginning of the path by which
    messages name a value.

    Raises: InputError with the path of the first wrong value, the reason and the nearest known name.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise InputError(_first_error_line(kind, error, where)) from None


_REASONS = {
    "literal_error": mark_msgid("input should be {expected}"),
    "greater_than": mark_msgid("input should be greater than {gt}"),
    "greater_than_equal": mark_msgid("input should be greater than or equal to {ge}"),
    "less_than": mark_msgid("input should be less than {lt}"),
    "less_than_equal": mark_msgid("input should be less than or equal to {le}"),
    "int_parsing": mark_msgid("input should be a valid integer, unable to parse string as an integer"),
    "float_parsing": mark_msgid("input should be a valid number, unable to parse string as a number"),
    "bool_parsing": mark_msgid("input should be a valid boolean, unable to interpret input"),
    "string_type": mark_msgid("input should be a valid string"),
}
"""Texts of pydantic for common errors, as templates that are translated."""


def _first_error_line(kind: type[BaseModel], error: ValidationError, where: str) -> str:
    first, *more = error.errors(include_url=False)
    fields = ("extra_forbidden", "missing")
    others = [
        one["msg"]
        for one in more
        if one["loc"][:-1] == first["loc"][:-1] and one["input"] is first["input"] and one["type"] not in fields
    ]
    # For a union, pydantic reports the errors of each member type and appends the type to the path.
    if others and first["type"] not in fields:
        first["loc"] = first["loc"][:-1]
        first.pop("ctx", None)  # `ctx` describes the error of the first member type only
        first["msg"] = ", or ".join([first["msg"], *(other.removeprefix("Input should be ") for other in others)])
    steps = [step for step in first["loc"] if not (isinstance(step, str) and step.startswith(("function-", "tagged-")))]
    if first["type"] in fields:
        owner = _model_at(kind, steps[:-1])
        place = where + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps[:-1])
        name = str(steps[-1])
        known = list(owner.model_fields) if owner else []
        if first["type"] == "missing":
            return Message(
                "{place}: {name} needs field {name_2!r}",
                place=place,
                name=owner.__name__ if owner else "object",
                name_2=name,
            )
        return Message(
            "{place}: {name} has no field {name_2!r}{hint}",
            place=place,
            name=owner.__name__ if owner else "object",
            name_2=name,
            hint=did_you_mean(name, known),
        )
    place = where + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    reason = validation_reason(first)
    got = first.get("input")
    if not isinstance(got, str | int | float | bool | None) or repr(got) in reason:
        return Message("{place}: {reason}", place=place, reason=reason)
    is_choice = first["type"] == "literal_error" and isinstance(got, str)
    hint = did_you_mean(str(got), re.findall(r"'([^']*)'", first["msg"])) if is_choice else ""
    return Message("{place}: {reason}, got {got}{hint}", place=place, reason=reason, got=_short_repr(got), hint=hint)


def validation_reason(error: Any) -> str:
    """Returns the reason of an error of pydantic: the message that a validator raised, or pydantic's own text."""
    raised = error.get("ctx", {}).get("error")
    if isinstance(raised, ValueError) and raised.args and isinstance(raised.args[0], Message):
        return raised.args[0]
    text = re.sub(r"^(Value error|Assertion failed), ", "", error["msg"])
    text = text[:1].lower() + text[1:] if text.startswith("Input") else text
    fields = dict(error.get("ctx", {}))
    first, joined, last = str(fields.get("expected", "")).rpartition(" or ")
    if joined:
        fields["expected"] = Message("{first} or {other}", first=first, other=last)
    template = _REASONS.get(error["type"])
    # A union has several reasons in one text. Such a text has no template and stays in English.
    known = template and fields.keys() >= set(re.findall(r"{(\w+)}", template)) and Message(template, **fields)
    return known if known and known == text else text


def without_place(error: InputError) -> str:
    """Returns the message of `error`, which `validate_data` has raised, without the path at its beginning."""
    message = error.args[0]
    is_placed = isinstance(message, Message) and {"place", "reason"} <= message.fields.keys()
    return message.fields["reason"] if is_placed else message


def without_file(error: InputError, file: str) -> str:
    """Returns the message of `error`, which `validate_data` has raised, without the file name `file`."""
    message = error.args[0]
    if not isinstance(message, Message) or "place" not in message.fields:
        return str(message).replace(f"{file}: ", "")
    return Message(message.msgid, **{**message.fields, "place": str(message.fields["place"]).replace(f"{file}: ", "")})


def _short_repr(value: Any) -> str:
    """Returns the repr of `value`, shortened to its beginning if it is long."""
    shown = repr(value)
    return shown if len(shown) <= 2 * MAX_SHOWN_CHARACTERS else f"{shown[:MAX_SHOWN_CHARACTERS]}[...]"


def _model_at(kind: type[BaseModel], steps: list[Any]) -> type[BaseModel] | None:
    """Returns the model class at the path `steps` inside `kind`, None if there is no model class."""
    current: Any = kind
    for step in steps:
        if isinstance(step, int):
            continue
        field = current.model_fields.get(step) if isinstance(current, type) and issubclass(current, BaseModel) else None
        current = _model_in_annotation(field.annotation) if field else None
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None


def _model_in_annotation(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        found = _model_in_annotation(part)
        if found is not None:
            return found
    return None


def read_text_file(path: Path | str, what: str = "file") -> str:
    """Returns the text of the file `path`, but at most MAX_TEXT_CHARACTERS + 1 characters. `what` names the type of the
    file in messages.

    Raises: InputError if the file does not exist, cannot be read, or is not UTF-8 text.
    """
    try:
        with Path(path).open(encoding="utf-8") as file:
            # Reading one character more than the limit detects a longer file.
            return file.read(MAX_TEXT_CHARACTERS + 1)
    except FileNotFoundError:
        raise InputError(Message("{what} {path!r} does not exist", what=what, path=str(path))) from None
    except IsADirectoryError:
        raise InputError(Message("{what} {path!r} is a folder, not a file", what=what, path=str(path))) from None
    except UnicodeDecodeError as error:
        raise InputError(
            Message("{what} {path!r} is not UTF-8 text (byte {start})", what=what, path=str(path), start=error.start)
        ) from None
    except OSError as error:
        raise InputError(
            Message("{what} {path!r} cannot be read: {strerror}", what=what, path=str(path), strerror=error.strerror)
        ) from None


def read_run_file(kind: type[StrictModelType], path: Path) -> StrictModelType | None:
    """Returns the JSON file `path` of a run folder as an instance of `kind`, None if there is no such file.

    Raises: InputError if the content is invalid, StorageFailed if the file cannot be read.
    """
    text = read_text(path)
    return None if text is None else validate_data(kind, parse_text(text, str(path)), f"{path}: $")


def read_as(kind: type[StrictModelType], path: Path | str) -> StrictModelType:
    """Returns the JSON or YAML file `path` as an instance of `kind`.

    Raises: InputError if the file cannot be read or its content is invalid.
    """
    return validate_data(kind, parse_text(read_text_file(path, kind.__name__.lower()), str(path)), f"{path}: $")
