"""A sentence is a key and values; a language is a table from keys to texts with places for the values. Whoever finds
something out says it as
a `Message`; in which language it is read is decided where it is printed.

A place is `{name}` or `{name:kind}`; kinds show numbers with their unit: bytes, seconds, percent, times, count, count
NOUN (with a plural
s), parameters, rate; `line` is what a rule said by itself (`lines.py`). A value can be a sentence, or several, which
are said in the same language.

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
"""A blank between two Chinese words: a text has one where a value may be Latin."""
LIST_SEPARATOR_KEY = "list"
"""The key of what stands between the parts of a list."""


class Message(NamedTuple):
    """What is said, in no language yet."""

    key: str
    values: Mapping[str, Any]


def make_message(key: str, **values: Any) -> Message:
    return Message(key, values)


def make_term_message(group: str, word: str) -> Message:
    """What `word` is called: the text of 'group.word', or the word itself where a table has none."""
    return Message(f"{group}.{word}", {"otherwise": word})


def message_table(language: str) -> Mapping[str, str]:
    """Every text of a language."""
    texts: Mapping[str, str] = import_module(MESSAGE_TABLES[language]).TEXTS
    return texts


def render_message(sentence: Message, language: str = "en") -> str:
    """`sentence` as people read it."""
    texts = message_table(language)
    text = texts.get(sentence.key)
    if text is None:
        return str(sentence.values["otherwise"])
    said = _MessageFormatter(texts, language).format(text, **sentence.values)
    return SUPERFLUOUS_SPACE.sub("", said) if language == "zh" else said


class _MessageFormatter(string.Formatter):
    """Puts values into a text by the kind of their place."""

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
    """The language that was asked for, else that of the locale, else English.

    >>> choose_language(None, {"LANG": "zh_CN.UTF-8"}), choose_language("en", {"LANG": "zh_CN.UTF-8"}), choose_language(None, {})
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
