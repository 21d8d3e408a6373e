"""Formats quantities in base units for messages and reports, as a number with about three digits and a unit. The module
also parses abbreviated counts.

Guarantees: importing this module does not import pydantic. If pydantic is loaded before the options of a command are
converted, cyclopts also builds a pydantic validator for each option.
"""

from __future__ import annotations

import re
from typing import Any


def _show_scaled(value: float, step: float, units: tuple[str, ...]) -> str:
    index = 0
    while abs(value) >= step * 0.9995 and index < len(units) - 1:
        value, index = value / step, index + 1
    digits = 0 if index == 0 and float(value).is_integer() else 1 if abs(value) >= 10 else 2
    return f"{value:.{digits}f} {units[index]}"


def show_bytes(value: float) -> str:
    """Returns a number of bytes as text with a binary prefix.

    >>> show_bytes(80 * 2**30)
    '80.0 GiB'
    """
    return _show_scaled(value, 1024.0, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def show_rate(value: float, unit: str = "B/s") -> str:
    """Returns a rate as text with a decimal prefix. `unit` is the unit of `value`.

    >>> show_rate(450e9)
    '450.0 GB/s'
    """
    return _show_scaled(value, 1000.0, tuple(prefix + unit for prefix in ("", "k", "M", "G", "T", "P", "E")))


def show_count(value: float) -> str:
    """Returns a count as text with a decimal prefix (B means 10^9).

    >>> show_count(6_738_415_616)
    '6.74 B'
    """
    return _show_scaled(value, 1000.0, ("", "k", "M", "B", "T")).strip()


def show_step(seconds: float) -> str:
    """Returns the time of a step as text. A time of at least 60 s and less than 1000 s is in seconds with one decimal.

    >>> show_step(75.26), show_step(0.5), show_step(4200.0)
    ('75.3 s', '500.0 ms', '1 h 10 min')
    """
    return f"{seconds:.1f} s" if 60.0 <= seconds < 1000.0 else show_seconds(seconds)


def show_seconds(value: float) -> str:
    """Returns a duration in seconds as text with a suitable unit.

    >>> show_seconds(0.0034), show_seconds(4200)
    ('3.40 ms', '1 h 10 min')
    """
    if value >= 3600:
        return f"{int(value // 3600)} h {int(value % 3600 // 60)} min"
    if value >= 60:
        return f"{int(value // 60)} min {int(value % 60)} s"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= factor * 0.9995 or unit == "us":
            number = value / factor
            return f"{number:.{2 if number < 10 else 1}f} {unit}"
    raise AssertionError


_COUNT = re.compile(r"\s*([0-9]+)\s*([kKmM])\s*")
_COUNT_FACTORS = {"k": 2**10, "m": 2**20}


def parse_count(value: Any) -> Any:
    """Returns the whole number that the text `value` abbreviates: k is 1,024 and m is 1,048,576. Returns any other
    value unchanged.

    >>> parse_count("4k"), parse_count("8K"), parse_count("1m"), parse_count("3.5"), parse_count(7)
    (4096, 8192, 1048576, '3.5', 7)
    """
    match = _COUNT.fullmatch(value) if isinstance(value, str) else None
    return int(match[1]) * _COUNT_FACTORS[match[2].lower()] if match else value
