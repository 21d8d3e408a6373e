"""Lists of numbers as names of plans write them: joined by dashes, and many equal ones after each other by their
count."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

MIN_RUN_LENGTH = 5
"""Equal numbers one after the other that a name does not list one by one."""


def format_number_list(numbers: Sequence[int]) -> str:
    """Numbers joined by dashes; the same one MANY times or more as `2x14`.

    >>> format_number_list((2,) * 14 + (3, 3, 1)), parse_number_list("2x14-3-3-1") == (2,) * 14 + (3, 3, 1)
    ('2x14-3-3-1', True)
    """
    runs = [(number, len(list(same))) for number, same in groupby(numbers)]
    return "-".join(
        f"{number}x{times}" if times >= MIN_RUN_LENGTH else "-".join([str(number)] * times) for number, times in runs
    )


def parse_number_list(text: str) -> tuple[int, ...]:
    """What `listed` wrote."""
    pairs = [part.partition("x") for part in text.split("-")]
    return tuple(int(number) for number, _, times in pairs for _ in range(int(times or 1)))
