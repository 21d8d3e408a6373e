"""Masked-language labels: 15 % of the tokens are to be guessed; of those 80 % are hidden, 10 % replaced by a random token, 10 % left alone.

Promise: what is masked is a pure function of (seed, sample number), so the same row is masked anew in every epoch and alike under every plan.
At least one token of a row is masked (a row without labels says nothing); special tokens never are.
Source: Devlin, Chang, Lee, Toutanova, BERT, NAACL 2019, section 3.1 and appendix A.1.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from meshwright.data.randomness import draw, key_of, uniform

SHARE, HIDDEN, REPLACED = 0.15, 0.8, 0.1
IGNORED = -100

Integers = NDArray[np.int64]


def mask_rows(tokens: Integers, numbers: Integers, seed: int, mask: int, special: list[int], vocabulary: int) -> tuple[Integers, Integers]:
    """The inputs and labels of `tokens` (rows, sequence); row i is sample numbers[i]."""
    length = tokens.shape[1]
    chance = uniform(key_of(seed, 1), numbers, length)
    chance[np.isin(tokens, special)] = 1.0
    smallest = chance.min(axis=1, keepdims=True)
    chosen = ((chance < SHARE) | (chance == smallest)) & (chance < 1.0)
    action = uniform(key_of(seed, 2), numbers, length)
    other = (draw(key_of(seed, 3), numbers, length) % np.uint64(vocabulary)).astype(np.int64)
    inputs = np.where(chosen & (action < HIDDEN), mask, tokens)
    inputs = np.where(chosen & (action >= HIDDEN) & (action < HIDDEN + REPLACED), other, inputs)
    return inputs, np.where(chosen, tokens, IGNORED)
