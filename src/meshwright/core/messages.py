"""Defines messages: the errors, notes and table entries that users read, in English and Simplified Chinese. All
packages create them, and the command line translates them.

A `Message` is an English string with its template and its fields. Code that does not translate may treat a message as a
plain string. `translate` looks the template up in the gettext catalogue `zh_CN.po` and formats the translation with the
fields of the message. A field may itself be a message, which is then also translated.

Fields are written `{name}` or `{name:format}`. The format is one of Python's formats, or a kind that shows a number
with a unit. Kinds are bytes, seconds, step (the seconds of a step), percent, times, count, `count NAME` (adds a plural
s), parameters and rate. A tuple with at least one string, or a list with at least one message, is shown as its elements
with a separator between them. Other lists and tuples are shown as in Python.

`pack_messages` turns the messages of JSON data into objects, so that another process can translate them. Text of torch,
of the operating system and of other libraries has no template and stays in English.

>>> fits = Message("fits, {spare:bytes} ({share:percent}) headroom", spare=8 * 2**30, share=0.1)
>>> fits
'fits, 8.00 GiB (10%) headroom'
>>> translate(fits, "zh")
'放得下，余量 8.00 GiB（10%）'
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from meshwright.core.i18n.terms import TERMS
from meshwright.core.units import show_bytes, show_count, show_rate, show_seconds, show_step

LANGUAGES = ("en", "zh")
PACKED_KEYS = {"text", "msgid", "context", "fields"}
"""The keys of a packed message."""
_QUANTITY_KINDS = {
    "bytes": show_bytes,
    "seconds": show_seconds,
    "step": show_step,
    "parameters": show_count,
    "rate": show_rate,
}
_KIND_FIELD = re.compile(r":(bytes|seconds|step|parameters|rate|percent|times|count)\b")
_PLAIN_TEMPLATE = re.compile(
    r"(?:[^{}]|\{\{|\}\}|\{\w+(?::(?:bytes|seconds|step|parameters|rate|percent|times|count))?\})*"
)
"""Matches templates whose fields are only names and kinds (without `count NAME`). If the catalogue does not translate
such a template, `translate` still translates its fields. With any other template the whole message then stays in
English."""
_CHINESE_SPACE = re.compile(r"(?<=[\u4e00-\u9fff]) (?=[\u4e00-\u9fff])")
"""Matches a space between two Chinese characters, which `translate` removes. Templates have spaces around fields that
may contain Latin letters."""


class Message(str):
    """English text with the template (`msgid`) and the fields from which it was formatted.

    `context` is the gettext context of a term that has several translations. `str(message)` returns the message itself,
    so that the template is not lost. The same holds for `str` of an exception with a message.
    """

    msgid: str
    context: str
    fields: Mapping[str, Any]

    def __new__(cls, msgid: str, /, **fields: Any) -> Message:
        fields = {name: str(value) if isinstance(value, BaseException) else value for name, value in fields.items()}
        return _make_message(_format_message(msgid, fields, "en"), msgid, "", fields)

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> Message:
        return join_messages("", (self, other))

    def __radd__(self, other: str) -> Message:
        return join_messages("", (other, self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _make_message, (str.__str__(self), self.msgid, self.context, dict(self.fields))


def _make_message(text: str, msgid: str, context: str, fields: Mapping[str, Any]) -> Message:
    message = str.__new__(Message, text)
    message.msgid, message.context, message.fields = msgid, context, fields
    return message


def mark_msgid(template: str) -> str:
    """Returns `template`. The call marks the template of a later `Message`, so that the catalogue includes it."""
    return template


def term(group: str, word: str) -> Message:
    """Returns the name that `group` in TERMS has for `word`, or `word` itself if the group does not have it."""
    msgid = TERMS[group].get(word, word)
    return _make_message(msgid, msgid, group, {})


SEPARATORS = (mark_msgid(", "), mark_msgid("; "))
"""The separators of `join_messages` that have a translation."""


def join_messages(separator: str, parts: Iterable[str]) -> Message:
    """Joins `parts` with a separator, which is translated too: in Chinese a comma or a semicolon has full width.

    >>> translate(join_messages(", ", [term("memory", "gradients"), "dp2"]), "zh")
    '梯度，dp2'
    """
    fields = {f"part{index}": part for index, part in enumerate(parts)}
    return Message("{separator}".join(f"{{{name}}}" for name in fields), separator=Message(separator), **fields)


def alternatives(parts: Iterable[str]) -> str:
    """Returns `parts` as alternatives, '' if there are none.

    >>> translate(alternatives(["z1", "z2", "z3"]), "zh")
    'z1 或 z2 或 z3'
    """
    first, *rest = [*parts] or [""]
    for part in rest:
        first = Message("{first} or {other}", first=first, other=part)
    return first


def translate(text: str, language: str = "en") -> str:
    """Returns `text` in `language` ("en" or "zh"). Text without a translation is returned in English."""
    if language == "en" or not isinstance(text, Message) or not text.msgid:
        return text
    from meshwright.core.i18n.catalogue import read_catalogue

    catalogue = read_catalogue(language)
    msgid = catalogue.pgettext(text.context, text.msgid) if text.context else catalogue.gettext(text.msgid)
    if msgid == text.msgid and not _PLAIN_TEMPLATE.fullmatch(msgid):
        return str.__str__(text)
    try:
        translated = _format_message(msgid, text.fields, language)
    # A message from another version of Meshwright may have other fields than the translation.
    except (KeyError, IndexError, ValueError, TypeError, AttributeError):
        return str.__str__(text)
    return _CHINESE_SPACE.sub("", translated)


def _format_message(msgid: str, fields: Mapping[str, Any], language: str) -> str:
    plain = language == "en" and not any(_is_text_list(value) for value in fields.values())
    if plain and not _has_kinds(msgid):
        return msgid.format_map(fields)
    return _MessageFormatter(language).vformat(msgid, (), fields)


def _is_text_list(value: Any) -> bool:
    """Returns whether `value` is shown as a list of texts: a plain tuple with a string, or a list with a message."""
    kind = str if type(value) is tuple else Message if isinstance(value, list) else None
    return kind is not None and any(isinstance(part, kind) for part in value)


@cache
def _has_kinds(msgid: str) -> bool:
    return _KIND_FIELD.search(msgid) is not None


class _MessageFormatter(string.Formatter):
    """Formats the fields of a message in one language."""

    def __init__(self, language: str) -> None:
        self.language = language

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, str):
            return format(translate(value, self.language), format_spec)
        if _is_text_list(value):
            return translate(LIST_SEPARATOR, self.language).join(self.format_field(part, format_spec) for part in value)
        kind, _, noun = format_spec.partition(" ")
        if kind == "percent":
            return f"{100 * value:,.0f}%" if abs(value) >= 0.0095 or not value else f"{100 * value:.1f}%"
        if kind == "count":
            return f"{value:,.0f}" + (f" {noun}{'' if value == 1 else 's'}" if noun else "")
        if kind == "times":
            return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"
        return _QUANTITY_KINDS[kind](value) if kind in _QUANTITY_KINDS else format(value, format_spec)


LIST_SEPARATOR = Message("; ")
"""The separator between the parts of a field that is a list."""


JSON_LEAVES = frozenset({str, int, float, bool, type(None)})
"""Types of JSON values that contain no message. The lines of a leader of 1,024 nodes have 100,000 of them a second."""


def pack_messages(data: Any) -> Any:
    """Returns JSON `data` with each message replaced by an object of its text, template and fields.

    >>> pack_messages({"why": Message("is a folder")})
    {'why': {'text': 'is a folder', 'msgid': 'is a folder', 'context': '', 'fields': {}}}
    """
    if isinstance(data, Message):
        fields = {name: _pack_field(value) for name, value in data.fields.items()}
        return {"text": str.__str__(data), "msgid": data.msgid, "context": data.context, "fields": fields}
    if isinstance(data, dict):
        return {name: value if type(value) in JSON_LEAVES else pack_messages(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [value if type(value) in JSON_LEAVES else pack_messages(value) for value in data]
    return data


def _pack_field(value: Any) -> Any:
    """Packs a field of a message. A value that JSON cannot represent, such as a path or a named tuple, becomes
    `str(value)`."""
    is_json = isinstance(value, str | int | float | dict | list | None) or type(value) is tuple
    return pack_messages(value if is_json else str(value))


def unpack_messages(data: Any) -> Any:
    """Returns JSON `data` with each packed message as a `Message`.

    Guarantees: no template is formatted, so the English text is that of the sender.
    """
    if isinstance(data, list):
        return [value if type(value) in JSON_LEAVES else unpack_messages(value) for value in data]
    if not isinstance(data, dict):
        return data
    values = {name: value if type(value) in JSON_LEAVES else unpack_messages(value) for name, value in data.items()}
    if values.keys() == PACKED_KEYS and isinstance(values["fields"], dict):
        return _make_message(str(values["text"]), str(values["msgid"]), str(values["context"]), values["fields"])
    return values
