"""Strict JSON and YAML in and out. A `Noun` is frozen data that checks itself; unknown fields are errors that name the nearest known one.

Promise: reading ends in the noun or in one `InputError` line that begins with the place (`$.device.memory: ...`); never in a traceback.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from meshwright.base.errors import InputError, did_you_mean


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
        return f"{place}: {message[:1].lower() + message[1:]}, got {first['input']!r}{near}"
    got = first.get("input")
    shown = f", got {got!r}" if isinstance(got, str | int | float | bool | None) and repr(got) not in message else ""
    return f"{place}: {message[:1].lower() + message[1:] if message.startswith('Input') else message}{shown}"


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


def parse(text: str, where: str) -> Any:
    """JSON or YAML text as plain data. A key written twice is an error, not a silent choice."""
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text, object_pairs_hook=lambda pairs: _unique(pairs, where))
        except json.JSONDecodeError as error:
            raise InputError(f"{where}:{error.lineno}: not valid JSON: {error.msg}") from None
    import yaml

    class Loader(yaml.SafeLoader):
        """Safe YAML 1.1 with unique keys and numbers such as 1e-4 read as numbers."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            seen: set[Any] = set()
            for key, _ in node.value:
                if key.value in seen:
                    raise InputError(f"{where}:{key.start_mark.line + 1}: key {key.value!r} is written twice")
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    Loader.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789"))
    try:
        return yaml.load(text, Loader)
    except RecursionError:
        raise InputError(f"{where}: lists or objects inside of each other, too deep to be read") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise InputError(f"{where}{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None


def _unique(pairs: list[tuple[str, Any]], where: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise InputError(f"{where}: key {key!r} is written twice")
        result[key] = value
    return result


def read_text(path: Path | str, what: str = "file") -> str:
    """The text of `path`; every way in which that can fail is one InputError."""
    try:
        return Path(path).read_text(encoding="utf-8")
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
