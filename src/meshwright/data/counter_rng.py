"""Counter-based random numbers: every draw is a pure function of (key, counter), so any rank can draw for any sample.

The generator applies the finaliser of SplitMix64 to key + counter x golden ratio, modulo 2^64. Source: Steele, Lea,
Flood, Fast splittable pseudorandom number generators, OOPSLA 2014. The idea of counters in place of states is from
Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_MULTIPLIER_1, _MIX_MULTIPLIER_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UINT64_MASK = 2**64 - 1


def derive_key(*parts: int) -> int:
    """Returns one 64-bit key from several integers. Their order counts.

    >>> derive_key(1, 2) != derive_key(2, 1)
    True
    """
    state = 0
    for part in parts:
        state = (state + (part & _UINT64_MASK) + GOLDEN_GAMMA) & _UINT64_MASK
        state = ((state ^ (state >> 30)) * _MIX_MULTIPLIER_1) & _UINT64_MASK
        state = ((state ^ (state >> 27)) * _MIX_MULTIPLIER_2) & _UINT64_MASK
        state ^= state >> 31
    return state


def splitmix64(words: UInt64Array) -> UInt64Array:
    """Applies the finaliser of SplitMix64 to each element.

    The generator with seed 0 gives 0xe220a8397b1dcdaf first:

    >>> hex(splitmix64(np.array([GOLDEN_GAMMA], dtype=np.uint64))[0])
    '0xe220a8397b1dcdaf'
    """
    words = (words ^ (words >> np.uint64(30))) * np.uint64(_MIX_MULTIPLIER_1)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(_MIX_MULTIPLIER_2)
    return words ^ (words >> np.uint64(31))


def random_words(key: int, counters: NDArray[np.int64], columns: int) -> UInt64Array:
    """Returns (len(counters), columns) words. Row i depends on `key` and counters[i] alone."""
    rows = splitmix64(counters.astype(np.uint64) * np.uint64(GOLDEN_GAMMA) + np.uint64(key))
    return splitmix64(rows[:, None] + np.arange(1, columns + 1, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA))


def random_uniform(key: int, counters: NDArray[np.int64], columns: int) -> NDArray[np.float64]:
    """Returns (len(counters), columns) uniform numbers in [0, 1), drawn as in `random_words`."""
    return (random_words(key, counters, columns) >> np.uint64(11)).astype(np.float64) * 2.0**-53
