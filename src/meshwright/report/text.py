"""Plain text: columns that line up, and a curve in one line of characters, data as strict JSON. The same on a terminal, in a pipe and in a file.

>>> print(columns([("kind", "bytes"), ("parameters", "4.00 MiB")]))
kind           bytes
parameters  4.00 MiB
>>> sparkline([8, 6, 4, 2, 1])
'█▆▄▂▁'
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from meshwright.base.codec import Noun

_BARS = "▁▂▃▄▅▆▇█"


def columns(rows: Sequence[Sequence[str]], indent: str = "") -> str:
    """Lines of cells: the first column to the left, the others to the right. Rows may be short; no line ends in a blank."""
    width = [max(len(row[at]) for row in rows if at < len(row)) for at in range(max((len(row) for row in rows), default=0))]
    lines = []
    for row in rows:
        cells = [cell.ljust(width[at]) if at == 0 else cell.rjust(width[at]) for at, cell in enumerate(row)]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def lines(facts: Sequence[tuple[str, str]], indent: str = "") -> str:
    """Names and what is said of them, both to the left."""
    width = max((len(name) for name, _ in facts), default=0)
    return "\n".join(f"{indent}{name.ljust(width)}  {words}".rstrip() for name, words in facts)


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """`values` as at most `width` bars, each the mean of its share; what is not a finite number shows as a blank."""
    count = min(width, len(values))
    shares = [values[len(values) * at // count : len(values) * (at + 1) // count] for at in range(count)]
    means = []
    for share in shares:
        finite = [value for value in share if math.isfinite(value)]
        means.append(sum(finite) / len(finite) if finite else math.nan)
    known = [mean for mean in means if math.isfinite(mean)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = (high - low) / (len(_BARS) - 1) or 1.0
    return "".join(_BARS[round((mean - low) / step)] if math.isfinite(mean) else " " for mean in means)


def plain(noun: Noun) -> Any:
    """`noun` as strict JSON data: what is not a finite number becomes null."""
    return json.loads(noun.to_json(), parse_constant=lambda _: None)
