"""Counter-based random numbers: every draw is a pure function of (key, counter), so that any rank can make any sample's numbers alone.

Rule: the finaliser of SplitMix64 applied to key + counter x golden ratio, in arithmetic modulo 2^64.
Source: Steele, Lea, Flood, Fast splittable pseudorandom number generators, OOPSLA 2014; the idea of counters instead of states from
Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = 2**64 - 1


def key_of(*parts: int) -> int:
    """One 64-bit key from several integers; their order counts.

    >>> key_of(1, 2) != key_of(2, 1)
    True
    """
    state = 0
    for part in parts:
        state = (state + (part & _WORD) + GOLDEN) & _WORD
        state = ((state ^ (state >> 30)) * _FIRST) & _WORD
        state = ((state ^ (state >> 27)) * _SECOND) & _WORD
        state ^= state >> 31
    return state


def mix(words: Words) -> Words:
    """SplitMix64's finaliser, element by element.

    The generator with seed 0 gives 0xe220a8397b1dcdaf first:

    >>> hex(mix(np.array([GOLDEN], dtype=np.uint64))[0])
    '0xe220a8397b1dcdaf'
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_FIRST)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_SECOND)
    return words ^ (words >> np.uint64(31))


def draw(key: int, counters: NDArray[np.int64], columns: int) -> Words:
    """(len(counters), columns) words: row i depends on `key` and counters[i] alone."""
    rows = mix(counters.astype(np.uint64) * np.uint64(GOLDEN) + np.uint64(key))
    return mix(rows[:, None] + np.arange(1, columns + 1, dtype=np.uint64) * np.uint64(GOLDEN))


def uniform(key: int, counters: NDArray[np.int64], columns: int) -> NDArray[np.float64]:
    """Like `draw`, as numbers in [0, 1)."""
    return (draw(key, counters, columns) >> np.uint64(11)).astype(np.float64) * 2.0**-53
