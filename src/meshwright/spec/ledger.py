"""The ledger of samples: which of them a step read, as few words that any number of ranks can add up, and what they must come to.

Sample number n is the n-th of the data's order; batch b of B rows are the samples b B to b B + B - 1. What was read is a count and the sum of (n + 1)^2
modulo 2^64 over the samples: a sample read twice or missed, or one in place of another, changes it; the sum over a whole batch has a
closed form, so that a ledger of any length is proven at once.

>>> samples_read([(3, 2), (0, 3)]) == samples_read([(0, 5)]), samples_read([(0, 4), (5, 1)]) == samples_read([(0, 5)])
(True, False)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

WORD = 2**64


class Samples(NamedTuple):
    """How many, and the sum of their squares."""

    number: int
    squares: int

    @property
    def text(self) -> str:
        return f"{self.number}:{self.squares:016x}"


def samples_read(runs: Iterable[tuple[int, int]]) -> Samples:
    """Of runs of samples, each a first number and a count."""
    listed = list(runs)
    squares = sum(_squares_to(first + count) - _squares_to(first) for first, count in listed)
    return Samples(sum(count for _, count in listed), squares % WORD)


def batch_read(batch: int, rows: int) -> Samples:
    """What a step that reads a whole batch reads."""
    return samples_read([(batch * rows, rows)])


def _squares_to(number: int) -> int:
    """1 + 4 + ... + number^2."""
    return number * (number + 1) * (2 * number + 1) // 6
