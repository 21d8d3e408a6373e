"""Blocks of tokens that are not what they were: found before a row is made of them, replaced alike by everyone, and
said."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.data.packing import CorruptBlock, DocumentIndex, PackedRows, split_validation
from meshwright.data.token_arrays import DIGEST_BLOCK_TOKENS, ChecksummedArray, block_digests

COUNT, SEQUENCE = 5 * DIGEST_BLOCK_TOKENS + 100, 64


def rows_of(
    tokens: np.ndarray, digests: np.ndarray, report_corruption: Callable[[str], None] = lambda line: None
) -> PackedRows:
    documents = DocumentIndex(
        np.zeros(1, np.int64), np.zeros(1, np.int64), np.array([len(tokens)]), np.ones(1, np.uint64)
    )
    return PackedRows(
        [ChecksummedArray(tokens, digests, "a.bin")],
        split_validation(documents, SEQUENCE, 0.0, "a")[0],
        SEQUENCE,
        report_corruption,
    )


def test_a_row_of_a_corrupt_block_is_replaced_identically_and_reported_once() -> None:
    tokens = np.random.default_rng(1).integers(0, 60_000, COUNT).astype(np.uint16)
    whole, digests = tokens.copy(), block_digests(tokens)
    tokens[2 * DIGEST_BLOCK_TOKENS + 5] ^= 1 << 3
    said: list[str] = []
    first, second = rows_of(tokens, digests, said.append), rows_of(tokens, digests)
    per = DIGEST_BLOCK_TOKENS // SEQUENCE
    wanted = np.array([0, 2 * per - 1, 2 * per, 3 * per - 1, 3 * per, 2 * per])
    assert (first.read(wanted) == second.read(wanted[::-1])[::-1]).all()
    expected = np.array([0, 2 * per - 1, 3 * per, 3 * per, 3 * per, 3 * per])
    assert (first.read(wanted) == np.stack([whole[row * SEQUENCE : (row + 1) * SEQUENCE] for row in expected])).all()
    assert len(said) == 1 and said[0].startswith(
        f"data a.bin: tokens {2 * DIGEST_BLOCK_TOKENS} to {3 * DIGEST_BLOCK_TOKENS - 1} are damaged: xxh3 "
    )


@pytest.mark.parametrize("seed", range(20))
def test_every_flipped_bit_and_every_zeroed_or_swapped_block_is_found(seed: int) -> None:
    chance = np.random.default_rng(seed)
    tokens = chance.integers(0, 60_000, COUNT).astype(np.uint32)
    digests, block = block_digests(tokens), int(chance.integers(0, 5))
    start = block * DIGEST_BLOCK_TOKENS
    if seed % 3 == 0:
        tokens[start + int(chance.integers(0, DIGEST_BLOCK_TOKENS))] ^= 1 << int(chance.integers(0, 32))
    elif seed % 3 == 1:
        tokens[start : start + DIGEST_BLOCK_TOKENS] = 0
    else:
        other = (block + 1) % 5 * DIGEST_BLOCK_TOKENS
        tokens[start : start + DIGEST_BLOCK_TOKENS], tokens[other : other + DIGEST_BLOCK_TOKENS] = (
            tokens[other : other + DIGEST_BLOCK_TOKENS].copy(),
            tokens[start : start + DIGEST_BLOCK_TOKENS].copy(),
        )
    with pytest.raises(CorruptBlock, match=f"tokens {start} to {start + DIGEST_BLOCK_TOKENS - 1} are damaged"):
        ChecksummedArray(tokens, digests, "a.bin")[start + 7 : start + 9]


def test_data_of_which_nothing_is_whole_is_refused_in_one_line() -> None:
    tokens = np.arange(DIGEST_BLOCK_TOKENS, dtype=np.uint16)
    with pytest.raises(InputError, match=r"all 256 rows contain damaged tokens: data a\.bin: tokens 0 to"):
        rows_of(tokens, block_digests(tokens + 1)).read(np.array([3]))
