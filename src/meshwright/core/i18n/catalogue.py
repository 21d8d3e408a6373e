"""Reads the gettext catalogues in this folder (`zh_CN.po`) with Python's `gettext`. core/messages.py imports it for
output in another language than English.

The module reads the text form and not a compiled `.mo` file. So a wheel needs no build step, and a changed message is
one line of a diff.
"""

from __future__ import annotations

import gettext
import json
from functools import cache
from importlib.resources import files
from typing import Any

CATALOGUE_FILES = {"zh": "zh_CN.po", "zh help": "help_zh_CN.po"}
"""The catalogue file of each language except English, and that of `--help` in this language."""


class PoTranslations(gettext.NullTranslations):
    """The translations of a `.po` file without plural forms."""

    entries: dict[tuple[str, str], str]
    """Maps (context, msgid) to the translation. The context is '' if an entry has none."""

    def _parse(self, fp: Any) -> None:
        self.entries = {}
        entry: dict[str, str] = {}
        keyword = ""
        for line in [*fp.read().splitlines(), ""]:
            line = line.strip()
            if line.startswith("#"):
                continue
            if line.startswith('"'):
                entry[keyword] += json.loads(line)
                continue
            if line:
                keyword, _, quoted = line.partition(" ")
                entry[keyword] = json.loads(quoted)
            elif entry:
                self.entries[entry.get("msgctxt", ""), entry["msgid"]] = entry["msgstr"]
                entry = {}

    def gettext(self, message: str) -> str:
        """Returns the translation of `message`, or `message` if there is no translation."""
        return self.entries.get(("", message)) or message

    def pgettext(self, context: str, message: str) -> str:
        """Returns the translation of `message` in `context`, or `message` if there is no translation."""
        return self.entries.get((context, message)) or message


@cache
def read_catalogue(language: str) -> PoTranslations:
    """Returns the catalogue of `language`, a key of CATALOGUE_FILES."""
    with (files(__package__) / CATALOGUE_FILES[language]).open(encoding="utf-8") as file:
        return PoTranslations(file)  # type: ignore[arg-type]
