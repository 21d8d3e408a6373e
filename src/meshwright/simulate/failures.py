"""`--failures`: how often a device fails. A name of the catalog, failures per device hour (`2e-5`), or the time between two of one device (`5 y`)."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from meshwright.base.errors import InputError, did_you_mean
from meshwright.base.units import parse_quantity
from meshwright.catalog import read as catalog
from meshwright.simulate.fleet import HOUR

USUAL = "llama3"
YEAR_DAYS = 365.25


class Rate(NamedTuple):
    """Failures per device hour, and whose they are."""

    per_device_hour: float
    words: str


def read_failures(text: str) -> Rate:
    """
    >>> read_failures("2e-5").per_device_hour, round(read_failures("5 y").per_device_hour, 9)
    (2e-05, 2.2815e-05)
    """
    rows = catalog.failures()
    row = catalog.find(rows, text)
    if row is not None:
        return Rate(row["per_device_hour"], f"{row['name']}: {row['source']}")
    ways = f"one of {', '.join(rows)}, failures per device hour such as 2e-5, or the time between two of one device such as '5 y'"
    try:
        rate = float(text)
    except ValueError:
        years = re.fullmatch(r"\s*([0-9.eE+-]+)\s*y\s*", text)
        try:
            seconds = float(years[1]) * YEAR_DAYS * 24 * HOUR if years else parse_quantity(text, "s")
        except ValueError:
            raise InputError(f"failures {text!r} is not {ways}{did_you_mean(text, rows)}") from None
        rate = HOUR / seconds if seconds > 0 else math.inf
    if not 0 < rate < math.inf:
        raise InputError(f"failures {text!r}: must be above 0; write {ways}")
    return Rate(rate, "as given")
