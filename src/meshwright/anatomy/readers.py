"""Where each parameter is read while the model runs: weights need not be read by the module that holds them.

MobileBERT multiplies by the table of its vocabulary and another matrix in one product, many models of one's own by `self.table.weight`: what gathers
weights where their own module runs must know. The analysis run (run.py) records it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple


class Reader(NamedTuple):
    """The innermost module that was running, and how many blocks had begun."""

    path: str
    begun: int


Reads = Mapping[str, set[Reader]]
"""By the name of a parameter."""


def inside(path: str, paths: Iterable[str]) -> bool:
    """
    >>> inside("head.dense", ["head"]), inside("header", ["head"]), inside("", ["head"])
    (True, False, False)
    """
    return any(f"{path}.".startswith(f"{one}.") for one in paths)
