"""Parses quantities that users write as text with units. In code, all quantities are in base units (bytes, seconds,
FLOP/s), as the field types of this module validate.

A number without a unit is already in base units. A text has a unit: '80 GiB', '450 GB/s', '3 us', '312 TFLOP/s'.
Decimal prefixes are powers of 1000, binary prefixes (KiB, MiB, GiB, TiB) are powers of 1024.
"""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from meshwright.core.messages import Message
from meshwright.core.units import parse_count

_DECIMAL = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40}
_TIME = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_BIT = 1 / 8
_UNIT_SUFFIXES = {
    "B": {"B": 1.0},
    "B/s": {"B/s": 1.0, "Bps": 1.0, "bit/s": _BIT, "b/s": _BIT, "bps": _BIT, "bit": _BIT, "b": _BIT},
    "FLOP/s": {"FLOP/s": 1.0, "FLOPS": 1.0, "flop/s": 1.0},
}
"""Maps each kind of quantity ('B', 'B/s', 'FLOP/s') to its unit symbols without prefix, each with the factor to base
units. Network rates are often in bits per second: 200Gb is 25 GB/s."""

_QUANTITY = re.compile(r"\s*([-+0-9.eE]+)\s*([A-Za-zµ/]*)\s*")


def _unit_factor(unit: str, kind: str) -> float | None:
    """Returns the factor of `unit` for a quantity of `kind` ('B', 'B/s', 'FLOP/s', 's'). Returns None if `unit` is not
    a unit of this kind."""
    if kind == "s":
        return _TIME.get(unit)
    for suffix, part in _UNIT_SUFFIXES[kind].items():
        if unit.endswith(suffix):
            prefix = unit[: -len(suffix)]
            factor = _BINARY.get(prefix) or _DECIMAL.get(prefix)
            return factor * part if factor else None
    return None


def parse_quantity(value: Any, kind: str) -> float:
    """Returns `value`, a number in base units or a text with a unit, as a number in base units. `kind` is 'B', 'B/s',
    'FLOP/s' or 's'.

    Raises: ValueError if `value` is not a quantity of this kind.

    >>> parse_quantity("80 GiB", "B") == 80 * 2**30
    True
    >>> parse_quantity("3 us", "s"), parse_quantity("200Gb", "B/s"), parse_quantity("100 Mb/s", "B/s")
    (3e-06, 25000000000.0, 12500000.0)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(
            Message(
                "expected a quantity such as '{example}', got {value!r}",
                example=_EXAMPLE_QUANTITIES[kind],
                value=value,
            )
        )
    if isinstance(value, int | float):
        return float(value)
    match = _QUANTITY.fullmatch(value)
    try:
        number = float(match.group(1)) if match else None
    except ValueError:
        number = None
    if match is None or number is None:
        raise ValueError(
            Message(
                "expected a quantity such as '{example}', got {value!r}",
                example=_EXAMPLE_QUANTITIES[kind],
                value=value,
            )
        )
    factor = 1.0 if not match.group(2) else _unit_factor(match.group(2), kind)
    if factor is None:
        raise ValueError(
            Message(
                "unit {unit!r} does not fit this quantity; write it like '{example}'",
                unit=match.group(2),
                example=_EXAMPLE_QUANTITIES[kind],
            )
        )
    return number * factor


_EXAMPLE_QUANTITIES = {"B": "80 GiB", "B/s": "450 GB/s", "FLOP/s": "312 TFLOP/s", "s": "3 us"}


def _quantity_validator(kind: str) -> BeforeValidator:
    return BeforeValidator(lambda value: parse_quantity(value, kind), json_schema_input_type=float | str)


Count = Annotated[int, BeforeValidator(parse_count, json_schema_input_type=int | str)]
"""A whole number, also as a text such as '4k' (`parse_count`)."""

MAX_QUANTITY = 1e21
"""Maximum quantity in base units. No real machine exceeds it, and the product of several such quantities still fits in
a float."""
Bytes = Annotated[float, _quantity_validator("B"), Field(ge=0, le=MAX_QUANTITY)]
BytesPerSecond = Annotated[float, _quantity_validator("B/s"), Field(ge=0, le=MAX_QUANTITY)]
FlopsPerSecond = Annotated[float, _quantity_validator("FLOP/s"), Field(ge=0, le=MAX_QUANTITY)]
Seconds = Annotated[float, _quantity_validator("s"), Field(ge=0, le=MAX_QUANTITY)]
