"""Token arrays that somebody made before: .npy files of integers, and .bin files of nothing but uint16 or uint32 tokens.

Promise: they are read through memory maps and never copied. Each is read once to the end, when it is first seen, for its digest and its
largest token, so that a token outside the vocabulary is an error at the start and not after a day; what was found is kept.
A .bin file holds uint32 when its name ends in `.uint32.bin` or the vocabulary needs more than 16 bits, otherwise uint16.
An array counts as one document: where its documents end is known to whoever made it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from meshwright.base.codec import Noun
from meshwright.base.errors import InputError
from meshwright.data.cache import kept
from meshwright.data.packing import Documents, TokenArray

_BLOCK = 2**22


class Inspected(Noun):
    """What one reading of an array found."""

    smallest: int
    largest: int
    digest: int


def open_array(path: Path, vocabulary: int) -> TokenArray:
    """The tokens of `path`, flat and memory-mapped."""
    try:
        if path.suffix.lower() == ".npy":
            array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
            if array.dtype.kind not in "ui":
                raise InputError(f"data file {str(path)!r} holds {array.dtype}, not integer tokens")
            return array.reshape(-1)
        wide = vocabulary > 2**16 or path.name.endswith(".uint32.bin")
        dtype = np.dtype("<u4" if wide else "<u2")
        if path.stat().st_size % dtype.itemsize:
            raise InputError(
                f"data file {str(path)!r}: {path.stat().st_size:,} bytes are not a multiple of {dtype.itemsize}, the size of {dtype}"
            )
        return np.memmap(path, dtype=dtype, mode="r")
    except InputError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"data file {str(path)!r} is not a whole array: {str(error).splitlines()[0]}") from None


def inspect(array: TokenArray, name: str) -> Inspected:
    """One reading of `array`; `name` names what it is in the cache."""

    def make(folder: Path) -> None:
        smallest, largest, digest = int(array[0]), int(array[0]), xxhash.xxh3_64()
        for start in range(0, len(array), _BLOCK):
            block = np.ascontiguousarray(array[start : start + _BLOCK])
            smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
            digest.update(block.tobytes())
        (folder / "inspected.json").write_text(Inspected(smallest=smallest, largest=largest, digest=digest.intdigest()).to_json())

    folder = kept(name, make, lambda folder: (folder / "inspected.json").exists())
    return Inspected.model_validate_json((folder / "inspected.json").read_text())


def open_arrays(files: list[Path], names: list[str], vocabulary: int) -> tuple[list[TokenArray], Documents, int]:
    """All `files`, checked against `vocabulary` (0: unknown), their documents and the largest token."""
    arrays = [open_array(path, vocabulary) for path in files]
    found: list[Inspected] = []
    for path, array, name in zip(files, arrays, names):
        if not len(array):
            raise InputError(f"data file {str(path)!r} holds no token")
        found.append(inspect(array, name))
        if found[-1].smallest < 0 or (vocabulary and found[-1].largest >= vocabulary):
            wrong = found[-1].smallest if found[-1].smallest < 0 else found[-1].largest
            raise InputError(f"data file {str(path)!r} holds token {wrong}, the vocabulary ends at {vocabulary - 1}")
    length = np.array([len(array) for array in arrays], dtype=np.int64)
    digests = np.array([item.digest for item in found], dtype=np.uint64)
    return arrays, Documents(np.arange(len(arrays)), np.zeros_like(length), length, digests), max(item.largest for item in found)
