"""JSON and YAML text as plain data: dictionaries with text as keys, lists, text, numbers, truth values and nothing; each limited in size.

Guarantees: reading ends in such data or in one `InputError` line with the file and, where it is known, the line. YAML tags, dates, sets, keys that are
lists or mappings, and values that contain themselves do not exist here. A number is one that a float can hold.
Source: YAML 1.1 as PyYAML resolves scalars, without timestamps and merge keys; RFC 8259 for JSON.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

from meshwright.base.errors import InputError

LARGEST = 2**24
"""Characters of a text."""

DEEPEST = 100
"""Lists and mappings inside of each other."""

DIGITS = 300
"""Of a whole number: a float holds 308."""

MANY = 10**6
"""Values of one text; what an alias repeats counts each time."""

_EXPONENT = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+")
"""Numbers such as 1e-4, which YAML 1.1 takes for text."""

_HALF = re.compile("[\ud800-\udfff]")


class _Wrong(Exception):
    """What is wrong, and on which line; 0 where that is not known."""

    def __init__(self, what: str, line: int = 0) -> None:
        super().__init__(what)
        self.what, self.line = what, line


def parse(text: str, where: str) -> Any:
    """Returns the data of `text`, JSON where it begins with a brace and YAML else; None for a text without any.

    Raises: InputError that begins with `where` and the line.

    >>> parse("steps: 1e3\\ndate: 2001-01-01\\non: [yes, ~]", "job.yaml")
    {'steps': 1000.0, 'date': '2001-01-01', 'on': [True, None]}
    """
    try:
        if len(text) > LARGEST:
            raise _Wrong(f"has {len(text):,} characters; at most {LARGEST:,} are read")
        return _json(text) if text.lstrip().startswith("{") else _Yaml(text).document()
    except _Wrong as wrong:
        place = f"{where}:{wrong.line}" if wrong.line else where
        raise InputError(f"{place}: {wrong.what}") from None


def _too_deep() -> str:
    return f"more than {DEEPEST} lists or objects inside of each other, too deep to be read"


def _json(text: str) -> Any:
    def line_of(literal: str) -> int:
        return text.count("\n", 0, text.find(literal)) + 1

    def whole(literal: str) -> int:
        if len(literal) > DIGITS:
            raise _Wrong(f"a number of {len(literal):,} digits; write at most {DIGITS}", line_of(literal))
        return int(literal)

    def real(literal: str) -> float:
        return _finite(float(literal), literal, line_of(literal))

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise _Wrong(f"key {key!r} is written twice")
            found[key] = value
        return found

    try:
        data = json.loads(text, object_pairs_hook=unique, parse_int=whole, parse_float=real)
    except json.JSONDecodeError as error:
        raise _Wrong(f"not valid JSON: {error.msg}", error.lineno) from None
    except RecursionError:
        raise _Wrong(_too_deep()) from None
    waiting = [(data, 1)]
    while waiting:
        value, depth = waiting.pop()
        if depth > DEEPEST:
            raise _Wrong(_too_deep())
        if isinstance(value, str):
            _check_text(value, 0)
        inner = [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ()
        waiting += ((each, depth + 1) for each in inner)
    return data


def _finite(value: float, literal: str, line: int) -> float:
    """Refuses what is written as a number and too large for one. Infinity itself has a word of its own."""
    if math.isinf(value) and any(letter.isdigit() for letter in literal):
        raise _Wrong(f"the number {literal[:20]}{'...' if len(literal) > 20 else ''} is too large", line)
    return value


def _check_text(text: str, line: int) -> None:
    if _HALF.search(text):
        raise _Wrong("a text holds half a character (a lone surrogate)", line)


class _Yaml:
    """One document of YAML, built from the events of PyYAML's parser. Its own constructors know dates, sets and objects, and follow nesting by recursion."""

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
                f"not valid YAML: the character U+{int(error.character):04X} is not allowed", self._text.count("\n", 0, error.position) + 1
            )
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            self._fail(f"not valid YAML: {getattr(error, 'problem', None) or error}", mark.line + 1 if mark else 0)
        except (ValueError, OverflowError):  # an escape, or the number of a version, beyond what there is
            self._fail("not valid YAML: an escape or a number that does not exist", self._loader.line + 1)

    def _whole(self) -> Any:
        yaml, loader, data = self._yaml, self._loader, None
        loader.get_event()  # the beginning of the stream
        if not loader.check_event(yaml.StreamEndEvent):
            loader.get_event()
            data, _ = self._value(1)
            loader.get_event()
        if not loader.check_event(yaml.StreamEndEvent):
            self._fail("a second document; write one", loader.get_event().start_mark.line + 1)
        return data

    def _fail(self, what: str, line: int) -> NoReturn:
        raise _Wrong(what, line)

    def _value(self, depth: int) -> tuple[Any, int]:
        """Returns the next value, and of how many values it is made."""
        yaml, event = self._yaml, self._loader.get_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            found, size = self._named.get(event.anchor) or self._fail(f"alias {event.anchor!r} stands before what it names has ended", line)
            self._counted(size, line)
            return found, size
        if event.tag is not None:
            self._fail(f"the tag {event.tag!r} is not read; write the value alone", line)
        if depth > DEEPEST:
            self._fail(_too_deep(), line)
        self._counted(1, line)
        found, size = (self._scalar(event, line), 1) if isinstance(event, yaml.ScalarEvent) else self._collection(event, depth)
        if event.anchor is not None:
            self._named[event.anchor] = found, size
        return found, size

    def _counted(self, size: int, line: int) -> None:
        self._count += size
        if self._count > MANY:
            self._fail(f"more than {MANY:,} values", line)

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
                self._fail("a key is a list, a mapping, an alias or has a tag; write plain text", line)
            _check_text(key.value, line)
            if key.value in found:
                self._fail(f"key {key.value!r} is written twice", line)
            found[key.value], count = self._value(depth + 1)
            size += count
        loader.get_event()
        return found, size

    def _scalar(self, event: Any, line: int) -> Any:
        node, text = self._yaml.ScalarNode("", event.value, event.start_mark, event.end_mark), event.value
        kind = self._loader.resolve(self._yaml.ScalarNode, text, event.implicit).rpartition(":")[2]
        if kind == "str" and event.implicit[0] and _EXPONENT.fullmatch(text):
            kind = "float"
        try:
            if kind == "int" and len(text) > DIGITS:
                self._fail(f"a number of {len(text):,} digits; write at most {DIGITS}", line)
            if kind == "int":
                return self._loader.construct_yaml_int(node)
            if kind == "float":
                return _finite(self._loader.construct_yaml_float(node), text, line)
        except ValueError:
            pass  # what looks like a number and is none, such as 0x_, is text
        if kind in ("bool", "null"):
            return None if kind == "null" else self._loader.construct_yaml_bool(node)
        _check_text(text, line)
        return text
