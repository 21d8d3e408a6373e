"""Computes the order of samples for the loader. Sample n is the n-th row that training reads, counted over all epochs.
The index of its row in the data set is a pure function of (seed, n), so there is no state to save.

With batch size B, step s reads the samples from B * s to B * s + B - 1. In a data set of `size` rows, sample n belongs
to epoch n // size. Its row is at position n % size of a permutation of all rows, keyed by (seed, epoch). The plan is
not an input: the parallel layout only decides which samples a rank reads. So the order is the same on one device, on
any number of ranks, and after a restart at any step.

The permutation is a Feistel network over the smallest even number of bits that covers `size`. The network is applied
repeatedly until the result is inside [0, size). This is a bijection by construction, and takes O(1) time and memory per
sample. Source: Black, Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002, section 4.

Counter-based random numbers: every random number is a pure function of (key, counter), so any rank can compute the
random numbers of any sample.

The generator applies the finaliser of SplitMix64 to key + counter x golden ratio, modulo 2^64. Source: Steele, Lea,
Flood, Fast splittable pseudorandom number generators, OOPSLA 2014. The use of counters in place of states is from
Salmon et al., Parallel random numbers: as easy as 1, 2, 3, SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

UInt64Array = NDArray[np.uint64]

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MIX_MULTIPLIER_1, _MIX_MULTIPLIER_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_UINT64_MASK = 2**64 - 1


def derive_key(*parts: int) -> int:
    """Returns one 64-bit key from several integers. The key depends on the order of the integers.

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
    """Returns random 64-bit words (len(counters), columns). Row i depends on `key` and counters[i] alone."""
    rows = splitmix64(counters.astype(np.uint64) * np.uint64(GOLDEN_GAMMA) + np.uint64(key))
    return splitmix64(rows[:, None] + np.arange(1, columns + 1, dtype=np.uint64) * np.uint64(GOLDEN_GAMMA))


def random_uniform(key: int, counters: NDArray[np.int64], columns: int) -> NDArray[np.float64]:
    """Returns uniform random numbers in [0, 1), (len(counters), columns), from the words of `random_words`."""
    return (random_words(key, counters, columns) >> np.uint64(11)).astype(np.float64) * 2.0**-53


_FEISTEL_ROUNDS = 8

Int64Array = NDArray[np.int64]


def permute_indices(places: Int64Array, size: int, key: int) -> Int64Array:
    """Returns the rows at positions `places` of the permutation of range(size) that `key` selects."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [np.uint64(derive_key(key, number)) for number in range(_FEISTEL_ROUNDS)]
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)

    def encipher(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = words >> shift, words & mask
        for round_key in keys:
            left, right = right, left ^ (splitmix64(right + round_key) & mask)
        return (left << shift) | right

    rows = encipher(places.astype(np.uint64))
    while (outside := rows >= np.uint64(size)).any():
        rows[outside] = encipher(rows[outside])
    return rows.astype(np.int64)


def batch_index(step: int, left_out: Sequence[tuple[int, int]]) -> int:
    """Returns the index of the batch, in data order, that `step` (from 0) reads. The batches [start, stop) of each
    interval in `left_out` are skipped.

    The intervals are sorted.

    >>> [batch_index(step, [(2, 4), (5, 6)]) for step in range(4)]
    [0, 1, 4, 6]
    """
    for first, stop in left_out:
        step += stop - first if step >= first else 0
    return step


def sample_rows(seed: int, first: int, count: int, size: int) -> Int64Array:
    """Returns the rows of the samples from `first` to `first + count - 1` of a data set of `size` rows.

    >>> sorted(sample_rows(seed=1, first=0, count=5, size=5).tolist())
    [0, 1, 2, 3, 4]
    """
    assert size > 0, "there is no row to read"
    return rows_of_samples(seed, np.arange(first, first + count, dtype=np.int64), size)


def rows_of_samples(seed: int, numbers: Int64Array, size: int) -> Int64Array:
    """Returns the rows of the samples `numbers` of a data set of `size` rows."""
    epochs = numbers // size
    rows = np.empty(len(numbers), dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        rows[chosen] = permute_indices(numbers[chosen] % size, size, derive_key(seed, int(epoch)))
    return rows
