"""Opens token arrays that the user provides (dataset.py): .npy files of integers, and .bin files of raw tokens.

An array counts as one document, since it does not mark the ends of documents. The .bin file of an indexed dataset of
Megatron-LM has the type that the .idx file of the same name states. Another .bin file has uint32 tokens if its name
ends in `.uint32.bin` or the vocabulary needs more than 16 bits, otherwise uint16.

Every array is divided into blocks of DIGEST_BLOCK_TOKENS tokens. The xxh3 digest of each block is computed at the first
use of the array and cached. A process verifies a block only when it first reads tokens of the block, so the start does
not read the whole array. A row that contains a corrupt block is replaced by the next row of the dataset without corrupt
blocks. The replacement depends only on the set of corrupt blocks. So all ranks that read the same files read the same
rows, under every plan.

Guarantees:
- Arrays are memory-mapped and never copied.
- An array is read completely only at its first use, for its digests and its largest token. The results are cached. A
  token outside the vocabulary is an error at the start.
- Training never uses a row whose tokens differ from those of the first use.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from meshwright.core.codec import StrictModel
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.data.cache import cached_folder
from meshwright.data.packing import CorruptBlock, DocumentIndex, TokenArray

_SCAN_BLOCK_TOKENS = 2**22
INDEX_SUFFIX = ".idx"
INDEX_MAGIC = b"MMIDIDX\0\0"
INDEX_HEADER = struct.Struct("<9sQBQQ")
"""The header of an index: magic, version, code of the type, number of sequences, number of document ends."""
INDEX_DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""The integer types of an index, by their codes (`DType`, likewise)."""


class ArrayInfo(StrictModel):
    """The result of scanning an array: its smallest and largest token, and the xxh3 digest of its bytes."""

    smallest: int
    largest: int
    digest: int


def open_token_array(path: Path, vocabulary: int) -> TokenArray:
    """Returns the tokens of `path`, as a flat, memory-mapped array.

    Raises:
        InputError: the file is not a complete array of integers.
    """
    try:
        if path.suffix.lower() == ".npy":
            array: Any = np.load(path, mmap_mode="r", allow_pickle=False)
            if array.dtype.kind not in "ui":
                raise InputError(
                    Message("data file {path!r} holds {dtype}, not integer tokens", path=str(path), dtype=array.dtype)
                )
            return array.reshape(-1)
        index = path.with_suffix(INDEX_SUFFIX)
        if index.is_file():
            return _open_indexed(path, index)
        wide = vocabulary > 2**16 or path.name.endswith(".uint32.bin")
        dtype = np.dtype("<u4" if wide else "<u2")
        if path.stat().st_size % dtype.itemsize:
            raise InputError(
                Message(
                    "data file {path!r}: {size:,} bytes are not a multiple of {itemsize}, the size of {dtype}",
                    path=str(path),
                    size=path.stat().st_size,
                    itemsize=dtype.itemsize,
                    dtype=dtype,
                )
            )
        return np.memmap(path, dtype=dtype, mode="r")
    except InputError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            Message(
                "data file {path!r} is not a complete array: {error}", path=str(path), error=str(error).splitlines()[0]
            )
        ) from None


def _open_indexed(path: Path, index: Path) -> TokenArray:
    """Returns the tokens of an indexed dataset of Megatron-LM, in the order of its sequences (`_IndexReader` in
    megatron/core/datasets/indexed_dataset.py: a header, then the length of each sequence and the byte at which it
    starts).

    Raises: InputError if the two files do not fit together, or if the tokens are not integers.
    """
    with index.open("rb") as file:
        header = file.read(INDEX_HEADER.size)
    magic, version, code, count, _ = INDEX_HEADER.unpack(header.ljust(INDEX_HEADER.size, b"\0"))
    if len(header) < INDEX_HEADER.size or magic != INDEX_MAGIC or version != 1 or code not in INDEX_DTYPES:
        raise InputError(
            Message("data file {path!r} is not an index of Megatron-LM with integer tokens", path=str(index))
        )
    dtype = np.dtype(INDEX_DTYPES[code])
    lengths = np.fromfile(index, "<i4", count, offset=INDEX_HEADER.size)
    starts = np.fromfile(index, "<i8", count, offset=INDEX_HEADER.size + lengths.nbytes)
    expected = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) * dtype.itemsize
    if len(starts) < count or path.stat().st_size != expected[-1] or (starts != expected[:-1]).any():
        raise InputError(
            Message(
                "data file {path!r} does not fit its index {index!r}: {size:,} bytes instead of {expected:,}",
                path=str(path),
                index=index.name,
                size=path.stat().st_size,
                expected=int(expected[-1]),
            )
        )
    return np.memmap(path, dtype=dtype, mode="r")


def inspect_array(array: TokenArray, name: str) -> ArrayInfo:
    """Returns the result of a scan of `array`. The result is cached under `name`, so that an array is scanned once."""

    def make(folder: Path) -> None:
        smallest, largest, digest = int(array[0]), int(array[0]), xxhash.xxh3_64()
        for start in range(0, len(array), _SCAN_BLOCK_TOKENS):
            block = np.ascontiguousarray(array[start : start + _SCAN_BLOCK_TOKENS])
            smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
            digest.update(block.tobytes())
        (folder / "inspected.json").write_text(
            ArrayInfo(smallest=smallest, largest=largest, digest=digest.intdigest()).to_json()
        )

    folder = cached_folder(name, make, lambda folder: (folder / "inspected.json").exists())
    return ArrayInfo.model_validate_json((folder / "inspected.json").read_text())


def open_token_arrays(
    files: list[Path], names: list[str], vocabulary: int
) -> tuple[list[TokenArray], DocumentIndex, int]:
    """Opens `files` and checks that their tokens are less than `vocabulary`, the number of tokens of the tokenizer (0:
    unknown). `names`: for each file, the name under which the result of its scan (`inspect_array`) is cached. Returns
    the arrays, their documents, and the largest token.

    Raises:
        InputError: an array is empty, incomplete, or has a token outside the vocabulary.
    """
    arrays = [open_token_array(path, vocabulary) for path in files]
    found: list[ArrayInfo] = []
    for path, array, name in zip(files, arrays, names):
        if not len(array):
            raise InputError(Message("data file {path!r} holds no token", path=str(path)))
        found.append(inspect_array(array, name))
        if found[-1].smallest < 0 or (vocabulary and found[-1].largest >= vocabulary):
            wrong = found[-1].smallest if found[-1].smallest < 0 else found[-1].largest
            raise InputError(
                Message(
                    "data file {path!r} holds token {wrong}, the vocabulary ends at {vocabulary}",
                    path=str(path),
                    wrong=wrong,
                    vocabulary=vocabulary - 1,
                )
            )
    length = np.array([len(array) for array in arrays], dtype=np.int64)
    digests = np.array([item.digest for item in found], dtype=np.uint64)
    return (
        arrays,
        DocumentIndex(np.arange(len(arrays)), np.zeros_like(length), length, digests),
        max(item.largest for item in found),
    )


DIGEST_BLOCK_TOKENS = 1 << 14
DIGESTS_FILE = "blocks.npy"


def block_digests(array: TokenArray) -> NDArray[np.uint64]:
    """Returns the digest of each block."""
    starts = range(0, len(array), DIGEST_BLOCK_TOKENS)
    return np.array([_block_digest(array[start : start + DIGEST_BLOCK_TOKENS]) for start in starts], dtype=np.uint64)


def write_block_digests(array: TokenArray, folder: Path) -> None:
    """Writes the digest of each block into `folder`."""
    np.save(folder / DIGESTS_FILE, block_digests(array))


def has_block_digests(folder: Path) -> bool:
    """Returns whether `folder` has block digests."""
    return (folder / DIGESTS_FILE).is_file()


def _block_digest(block: TokenArray) -> int:
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(block).data)


class ChecksummedArray:
    """An array whose blocks are verified when they are first read. It can be indexed only by slices."""

    def __init__(self, array: TokenArray, digests: NDArray[np.uint64], name: str) -> None:
        self.array, self.digests, self.name = array, digests, name
        self._whole = np.zeros(len(digests), dtype=np.bool_)

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, part: slice) -> TokenArray:
        """Returns the tokens of the slice.

        Raises:
            CorruptBlock: a block differs from its digest.
        """
        if part.start < part.stop:
            for block in range(part.start // DIGEST_BLOCK_TOKENS, (part.stop - 1) // DIGEST_BLOCK_TOKENS + 1):
                if not self._whole[block]:
                    self._compare(block)
        return self.array[part]

    def _compare(self, block: int) -> None:
        start, stop = block * DIGEST_BLOCK_TOKENS, min((block + 1) * DIGEST_BLOCK_TOKENS, len(self.array))
        found, expected = _block_digest(self.array[start:stop]), int(self.digests[block])
        if found != expected:
            raise CorruptBlock(
                Message(
                    "data {name}: tokens {start} to {stop} are damaged: xxh3 digest {found:016x}, but "
                    "{expected:016x} at the first use",
                    name=self.name,
                    start=start,
                    stop=stop - 1,
                    found=found,
                    expected=expected,
                )
            )
        self._whole[block] = True
