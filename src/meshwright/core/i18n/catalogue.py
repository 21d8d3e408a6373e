"""Reads the gettext catalogues, `LANGUAGE.po` in this folder, with Python's `gettext`.

The text form is read rather than a compiled `.mo`, so that a wheel needs no build step and a change of a message is one
line of a diff. Nothing here runs while output is in English.
"""

from __future__ import annotations

import gettext
import json
from functools import cache
from importlib.resources import files
from typing import Any

CATALOGUE_FILES = {"zh": "zh_CN.po"}
"""The catalogue of each language but English."""


class PoTranslations(gettext.NullTranslations):
    """The translations of a `.po` file without plural forms."""

    entries: dict[tuple[str, str], str]
    """Translations by context, empty where an entry has none, and msgid."""

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
        """Returns the translation of `message`, or `message` itself where there is none."""
        return self.entries.get(("", message)) or message

    def pgettext(self, context: str, message: str) -> str:
        """Returns the translation of `message` in `context`, or `message` itself where there is none."""
        return self.entries.get((context, message)) or message


@cache
def read_catalogue(language: str) -> PoTranslations:
    """Returns the catalogue of `language`, which is not English."""
    with (files(__package__) / CATALOGUE_FILES[language]).open(encoding="utf-8") as file:
        return PoTranslations(file)  # type: ignore[arg-type]
