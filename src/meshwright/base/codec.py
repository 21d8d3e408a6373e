"""Strict JSON and YAML in and out. A `Noun` is frozen data that checks itself; unknown fields are errors that name the nearest known one.

Promise: reading ends in the noun or in one `InputError` line that begins with the place (`$.device.memory: ...`); never in a traceback.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from meshwright.base.errors import SHOWN, InputError, did_you_mean
from meshwright.base.plain import LARGEST, parse

__all__ = ["Noun", "build", "parse", "read", "read_text"]


class Noun(BaseModel):
    """Frozen, strict data: no unknown fields, no silent casts beyond int to float."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=False, ser_json_inf_nan="constants")

    def to_json(self, indent: int | None = 2) -> str:
        return self.model_dump_json(indent=indent)

    def but(self, **changes: Any) -> Self:
        """A copy with `changes`, checked like a new one."""
        return build(type(self), {**{name: getattr(self, name) for name in type(self).model_fields}, **changes})


NounType = TypeVar("NounType", bound=Noun)


def build(kind: type[NounType], data: Any, where: str = "$") -> NounType:
    """`data` (what JSON or YAML gave) as a `kind`.

    Raises InputError with the place, the reason and the nearest known name.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise InputError(_first_line(kind, error, where)) from None


def _first_line(kind: type[BaseModel], error: ValidationError, where: str) -> str:
    first, *more = error.errors(include_url=False)
    fields = ("extra_forbidden", "missing")
    others = [
        one["msg"] for one in more if one["loc"][:-1] == first["loc"][:-1] and one["input"] is first["input"] and one["type"] not in fields
    ]
    if (
        others and first["type"] not in fields
    ):  # a value of several kinds: pydantic tells what each kind misses, and ends the place with the kind
        first["loc"] = first["loc"][:-1]
        first["msg"] = ", or ".join([first["msg"], *(other.removeprefix("Input should be ") for other in others)])
    steps = [step for step in first["loc"] if not (isinstance(step, str) and step.startswith(("function-", "tagged-")))]
    if first["type"] in fields:
        owner = _model_at(kind, steps[:-1])
        place = where + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps[:-1])
        name = str(steps[-1])
        known = list(owner.model_fields) if owner else []
        if first["type"] == "missing":
            return f"{place}: {owner.__name__ if owner else 'object'} needs field {name!r}"
        return f"{place}: {owner.__name__ if owner else 'object'} has no field {name!r}{did_you_mean(name, known)}"
    place = where + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    message = re.sub(r"^(Value error|Assertion failed), ", "", first["msg"])
    if first["type"] == "literal_error" and isinstance(first.get("input"), str):
        near = did_you_mean(first["input"], re.findall(r"'([^']*)'", first["msg"]))
        return f"{place}: {message[:1].lower() + message[1:]}, got {_short(first['input'])}{near}"
    got = first.get("input")
    shown = f", got {_short(got)}" if isinstance(got, str | int | float | bool | None) and repr(got) not in message else ""
    return f"{place}: {message[:1].lower() + message[1:] if message.startswith('Input') else message}{shown}"


def _short(value: Any) -> str:
    """Returns `value` as Python writes it, its beginning where it is long."""
    shown = repr(value)
    return shown if len(shown) <= 2 * SHOWN else f"{shown[:SHOWN]}[...]"


def _model_at(kind: type[BaseModel], steps: list[Any]) -> type[BaseModel] | None:
    """The noun that the path `steps` leads to inside `kind`."""
    current: Any = kind
    for step in steps:
        if isinstance(step, int):
            continue
        field = current.model_fields.get(step) if isinstance(current, type) and issubclass(current, BaseModel) else None
        current = _noun_in(field.annotation) if field else None
    return current if isinstance(current, type) and issubclass(current, BaseModel) else None


def _noun_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        found = _noun_in(part)
        if found is not None:
            return found
    return None


def read_text(path: Path | str, what: str = "file") -> str:
    """The text of `path`; every way in which that can fail is one InputError."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            return file.read(LARGEST + 1)  # one more than is read, so that a longer one is refused
    except FileNotFoundError:
        raise InputError(f"{what} {str(path)!r} does not exist") from None
    except IsADirectoryError:
        raise InputError(f"{what} {str(path)!r} is a folder, not a file") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{what} {str(path)!r} is not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise InputError(f"{what} {str(path)!r} cannot be read: {error.strerror}") from None


def read(kind: type[NounType], path: Path | str) -> NounType:
    """The file `path` (JSON or YAML) as a `kind`."""
    return build(kind, parse(read_text(path, kind.__name__.lower()), str(path)), f"{path}: $")
