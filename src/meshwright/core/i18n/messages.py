"""Separates a message from its language. A message is a key and values; a language is a table from keys to texts with
placeholders for the values. Code returns a `Message`; the language is chosen where it is printed.

A placeholder is `{name}` or `{name:kind}`. Kinds format numbers with their unit: bytes, seconds, percent, times, count,
count NAME (with a plural s), parameters, rate. The kind `line` is a line of a rule (line_patterns.py). A value can be a
message, or several, which are rendered in the same language.

>>> render_message(Message("verdict.fits", {"spare": 8 * 2**30, "share": 0.1}))
'fits, 8.00 GiB (10%) headroom'
>>> render_message(Message("verdict.fits", {"spare": 8 * 2**30, "share": 0.1}), "zh")
'放得下，余量 8.00 GiB（10%）'
"""

from __future__ import annotations

import re
import string
from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.i18n.line_patterns import translate_line
from meshwright.core.units import show_bytes, show_count, show_rate, show_seconds

MESSAGE_TABLES = {"en": "meshwright.core.i18n.messages_en", "zh": "meshwright.core.i18n.messages_zh"}
SUPERFLUOUS_SPACE = re.compile(r"(?<=[\u4e00-\u9fff]) (?=[\u4e00-\u9fff])")
"""A blank between two Chinese words. A text has one where a value may be Latin."""
LIST_SEPARATOR_KEY = "list"
"""The key of the separator between the parts of a list."""


class Message(NamedTuple):
    """A message independent of the language."""

    key: str
    values: Mapping[str, Any]


def make_message(key: str, **values: Any) -> Message:
    """Returns the message `key` with `values`."""
    return Message(key, values)


def make_term_message(group: str, word: str) -> Message:
    """Returns the name of `word`: the text of 'group.word', or the word itself if a table has none."""
    return Message(f"{group}.{word}", {"otherwise": word})


def message_table(language: str) -> Mapping[str, str]:
    """Returns every text of a language."""
    texts: Mapping[str, str] = import_module(MESSAGE_TABLES[language]).TEXTS
    return texts


def render_message(sentence: Message, language: str = "en") -> str:
    """Returns `sentence` as text in `language`."""
    texts = message_table(language)
    text = texts.get(sentence.key)
    if text is None:
        return str(sentence.values["otherwise"])
    said = _MessageFormatter(texts, language).format(text, **sentence.values)
    return SUPERFLUOUS_SPACE.sub("", said) if language == "zh" else said


class _MessageFormatter(string.Formatter):
    """Formats values by the kind of their placeholder."""

    def __init__(self, texts: Mapping[str, str], language: str) -> None:
        self.texts, self.language = texts, language

    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, Message):
            return render_message(value, self.language)
        if isinstance(value, tuple | list):
            return self.texts[LIST_SEPARATOR_KEY].join(self.format_field(part, format_spec) for part in value)
        kind, _, noun = format_spec.partition(" ")
        if kind == "line":
            return translate_line(str(value), self.language)
        if kind == "percent":
            return f"{100 * value:,.0f}%" if abs(value) >= 0.0095 or not value else f"{100 * value:.1f}%"
        if kind == "count":
            return f"{value:,.0f}" + (f" {noun}{'' if value == 1 else 's'}" if noun else "")
        if kind == "times":
            return f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"
        shown = {"bytes": show_bytes, "seconds": show_seconds, "parameters": show_count, "rate": show_rate}
        return shown[kind](value) if kind else str(value)


def choose_language(asked: str | None, environment: Mapping[str, str]) -> str:
    """Returns the requested language, else that of the locale, else English.

    >>> (choose_language(None, {"LANG": "zh_CN.UTF-8"}), choose_language("en", {"LANG": "zh_CN.UTF-8"}),
    ...     choose_language(None, {}))
    ('zh', 'en', 'en')
    """
    if asked is not None:
        if asked not in MESSAGE_TABLES:
            raise InputError(
                f"--lang {asked!r} is not one of {', '.join(MESSAGE_TABLES)}{did_you_mean(asked, MESSAGE_TABLES)}"
            )
        return asked
    locale = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := environment.get(name))), "")
    return locale[:2] if locale[:2] in MESSAGE_TABLES else "en"
