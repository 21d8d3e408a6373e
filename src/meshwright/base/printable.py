"""Text that may be shown on a terminal: names in files, messages of ranks and what a model writes may hold characters that control it."""

from __future__ import annotations

import re

CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Control characters of both sets but tabs and ends of lines, marks that turn the direction of text, and halves of characters."""


def printable(text: str) -> str:
    """`text` with every character that controls a terminal written as its number.

    >>> printable("a\\x9b31m\\u202eb\\n")
    'a\\\\x9b31m\\\\u202eb\\n'
    """
    return CONTROLS.sub(
        lambda found: found[0].encode("ascii", "backslashreplace").decode() if found[0] >= "\x80" else repr(found[0])[1:-1], text
    )
