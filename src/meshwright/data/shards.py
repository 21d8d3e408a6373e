"""Token arrays whose every block is compared with its digest before a row is made of it: what a disk or a network gave back otherwise is never trained on.

Rule: an array is cut into blocks of BLOCK tokens; their xxh3 are taken once, when the array is first seen, and kept. A block is compared when a row of it is first read
in a process, so reading at random stays cheap. A row that touches a damaged block is replaced by the next row, in the order of the data
set, that touches none: a pure function of which blocks are damaged, so all ranks that read the same files agree, under every plan.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.data.packing import DamagedBlock, TokenArray

BLOCK = 1 << 14
BLOCKS = "blocks.npy"


def digests_of(array: TokenArray) -> NDArray[np.uint64]:
    """Of each block."""
    starts = range(0, len(array), BLOCK)
    return np.array([_digest(array[start : start + BLOCK]) for start in starts], dtype=np.uint64)


def write_digests(array: TokenArray, folder: Path) -> None:
    np.save(folder / BLOCKS, digests_of(array))


def has_digests(folder: Path) -> bool:
    return (folder / BLOCKS).is_file()


def _digest(block: TokenArray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(block).data)


class Checked:
    """An array that is read through its digests. It is indexed by slices alone."""

    def __init__(self, array: TokenArray, digests: NDArray[np.uint64], name: str) -> None:
        self.array, self.digests, self.name = array, digests, name
        self._whole = np.zeros(len(digests), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, part: slice) -> TokenArray:
        """Raises DamagedBlock."""
        if part.start < part.stop:
            for block in range(part.start // BLOCK, (part.stop - 1) // BLOCK + 1):
                if not self._whole[block]:
                    self._compare(block)
        return self.array[part]

    def _compare(self, block: int) -> None:
        start, stop = block * BLOCK, min((block + 1) * BLOCK, len(self.array))
        found, expected = _digest(self.array[start:stop]), int(self.digests[block])
        if found != expected:
            raise DamagedBlock(
                f"data {self.name}: tokens {start} to {stop - 1} are damaged: xxh3 {found:016x}, {expected:016x} was read before"
            )
        self._whole[block] = True
