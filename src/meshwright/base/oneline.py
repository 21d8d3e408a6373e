"""Names, addresses and paths as one line of text, and any text made visible on one line.

A name reaches terminals, comments of generated scripts and YAML files. A line break or a control character in it could end a comment or a
quoted value there, so such names are refused where they are read.
"""

from __future__ import annotations

import unicodedata
from typing import Annotated

from pydantic import AfterValidator

LONGEST = 4096
"""Characters of a name; the longest path that Linux takes."""

FORBIDDEN = ("Cc", "Cs", "Zl", "Zp")
"""Unicode categories: control characters, lone surrogates, line and paragraph separators."""

REORDERING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that make a terminal show text in another order than it has."""


def check_line(text: str) -> str:
    r"""Returns `text` if it is one line that shows what it holds.

    Raises: ValueError with the first character that is not allowed.

    >>> check_line("runs/a b's")
    "runs/a b's"
    >>> check_line("name\nrm -rf /")
    Traceback (most recent call last):
    ValueError: holds the character U+000A at place 4; write one line without control characters
    """
    if len(text) > LONGEST:
        raise ValueError(f"has {len(text):,} characters; write at most {LONGEST:,}")
    for place, letter in enumerate(text):
        if unicodedata.category(letter) in FORBIDDEN or letter in REORDERING:
            raise ValueError(f"holds the character U+{ord(letter):04X} at place {place}; write one line without control characters")
    return text


OneLine = Annotated[str, AfterValidator(check_line)]
"""A string field of a `Noun` that must be one line."""


def visible(text: str) -> str:
    r"""Returns `text` with every character that does not print written as an escape: always one line.

    >>> visible("a\n#SBATCH\u2028é")
    'a\\n#SBATCH\\u2028é'
    """
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)
