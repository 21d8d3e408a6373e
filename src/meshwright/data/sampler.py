"""The order of samples: the row of sample n is a pure function of (seed, n). There is no state to save.

With batch size B, step s reads the samples from s B to s B + B - 1. Sample n belongs to epoch n // size. It is the row
at position n % size of a permutation of all rows, keyed by (seed, epoch). The plan is not an input: the parallel layout
only decides which samples a rank reads. So the order is the same on one device, on any number of ranks, and after a
restart at any step.

The permutation is a Feistel network over the smallest even number of bits that covers `size`. The network is applied
repeatedly until the result is inside [0, size). The permutation is a bijection by construction and takes O(1) time and
memory. Source: Black, Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from meshwright.data.counter_rng import derive_key, splitmix64

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
    numbers = np.arange(first, first + count, dtype=np.int64)
    epochs = numbers // size
    rows = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        rows[chosen] = permute_indices(numbers[chosen] % size, size, derive_key(seed, int(epoch)))
    return rows
