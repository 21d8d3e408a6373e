"""How numbers divide: devices into degrees, blocks into stages."""

from __future__ import annotations


def relieved(blocks: int, stages: int, less: int) -> tuple[int, ...]:
    """Blocks of each stage when the last one has `less` than an even share; what does not divide goes to the later of the others.

    >>> relieved(32, 4, 1), relieved(4, 4, 1)
    ((8, 8, 9, 7), ())
    """
    last = blocks // stages - less
    if last < 1:
        return ()
    return (*reversed(even(blocks - last, stages - 1)), last)


def divisors(number: int) -> list[int]:
    """
    >>> divisors(42)
    [1, 2, 3, 6, 7, 14, 21, 42]
    """
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


def even(blocks: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage, as `Plan.stage_layers` shares them out."""
    each, rest = divmod(blocks, stages)
    return tuple(each + (stage < rest) for stage in range(stages))
