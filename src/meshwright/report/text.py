"""Formats plain text for all reports: aligned columns, a curve as one line of characters, and data as strict JSON. The
text is identical on a terminal, in a pipe and in a file, except that a terminal of less than 100 columns gets shorter
lines.

>>> print(align_columns([("kind", "bytes"), ("parameters", "4.00 MiB")]))
kind           bytes
parameters  4.00 MiB
>>> sparkline([8, 6, 4, 2, 1])
'█▆▄▂▁'
"""

from __future__ import annotations

import json
import math
import re
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from meshwright.core.codec import StrictModel

TEXT_COLUMNS = 100
MIN_TEXT_COLUMNS = 60
_SPARK_BARS = "▁▂▃▄▅▆▇█"
_CLOSING_PUNCTUATION = "，。；：、）？！"
_WIDE_CHARACTERS = "\u2e80-\u9fff\uff00-\uff60"


def align_columns(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Returns lines of cells. The first column is aligned to the left, the other columns to the right. Rows may have
    fewer cells. No line ends with a space."""
    width = [
        max(display_width(row[at]) for row in rows if at < len(row))
        for at in range(max((len(row) for row in rows), default=0))
    ]
    lines = []
    for row in rows:
        blanks = [" " * (width[at] - display_width(cell)) for at, cell in enumerate(row)]
        cells = [cell + blanks[at] if at == 0 else blanks[at] + cell for at, cell in enumerate(row)]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def display_width(text: str) -> int:
    """Returns the number of columns of `text` on a terminal. A Chinese character has two columns.

    >>> display_width("plan"), display_width("方案")
    (4, 4)
    """
    if text.isascii():
        return len(text)
    from unicodedata import east_asian_width

    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def terminal_width() -> int:
    """Returns the maximum columns of a line: 100, or fewer on a narrower terminal, but at least 60.

    >>> TEXT_COLUMNS >= terminal_width() >= MIN_TEXT_COLUMNS
    True
    """
    return (
        max(MIN_TEXT_COLUMNS, min(TEXT_COLUMNS, shutil.get_terminal_size((TEXT_COLUMNS, 24)).columns))
        if sys.stdout.isatty()
        else TEXT_COLUMNS
    )


def wrap_text(text: str, width: int | None = None, indent: str = "    ") -> str:
    """Wraps `text` to lines of at most `width` columns (default: `terminal_width`). All lines after the first are
    indented. Lines break at spaces and between Chinese characters, but not before closing punctuation.

    >>> print(wrap_text("plan 放得下，余量 3 GiB", 12, ""))
    plan 放得
    下，余量 3
    GiB
    """
    width = terminal_width() if width is None else width
    words = re.findall(rf"（*(?:[{_WIDE_CHARACTERS}]|[^{_WIDE_CHARACTERS}\s]+)[{_CLOSING_PUNCTUATION}]*|\s+", text)
    lines, line = [], ""
    for word in words:
        if line.strip() and display_width(line) + display_width(word.rstrip()) > width:
            lines.append(line.rstrip())
            line = indent
            if word.isspace():
                continue
        line += word
    return "\n".join([*lines, line.rstrip()])


def round_to_sum(values: Sequence[float], step: float) -> list[int]:
    """Rounds `values` to multiples of `step`, and returns how many steps each rounded value has. These integers add up
    to the rounded sum of `values` / `step`. The values with the largest remainders are rounded up.

    >>> round_to_sum([0.34, 0.33, 0.33], 0.1)
    [4, 3, 3]
    """
    exact = [value / step for value in values]
    floors = [math.floor(value) for value in exact]
    missing = round(math.fsum(exact)) - sum(floors)
    order = sorted(range(len(exact)), key=lambda at: floors[at] - exact[at])
    return [floors[at] + (at in order[:missing]) for at in range(len(exact))]


def align_facts(facts: Sequence[tuple[str, str]], indent: str = "") -> str:
    """Returns lines of names and texts, both aligned to the left."""
    width = max((display_width(name) for name, _ in facts), default=0)
    return "\n".join(f"{indent}{name}{' ' * (width - display_width(name))}  {words}".rstrip() for name, words in facts)


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """Returns a curve of at most `width` bars. Each bar shows the mean of one interval of `values`. An interval without
    finite values is a space."""
    count = min(width, len(values))
    shares = [values[len(values) * at // count : len(values) * (at + 1) // count] for at in range(count)]
    means = []
    for share in shares:
        finite = [value for value in share if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    known = [mean for mean in means if math.isfinite(mean)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = (high - low) / (len(_SPARK_BARS) - 1) or 1.0
    return "".join(_SPARK_BARS[round((mean - low) / step)] if math.isfinite(mean) else " " for mean in means)


def strict_json_data(value: StrictModel) -> Any:
    """Returns a model as strict JSON data: a number that is not finite becomes null."""
    return json.loads(value.to_json(), parse_constant=lambda _: None)
