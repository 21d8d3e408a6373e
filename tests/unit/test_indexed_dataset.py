"""Indexed datasets of Megatron-LM (.bin with .idx) as token arrays."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from meshwright.core.errors import InputError
from meshwright.data.dataset import TextDataset, open_dataset
from meshwright.data.token_arrays import open_token_array
from meshwright.spec.workload import DataConfig

SEQUENCES = [[5, 6, 7], [8], [9, 10, 11, 12]]
CODES = {"uint8": 1, "int32": 4, "int64": 5, "uint16": 8}
"""`DType` of megatron/core/datasets/indexed_dataset.py, version 0.15."""


def write_indexed(prefix: Path, sequences: list[list[int]], dtype: str, code: int | None = None) -> Path:
    """Writes the two files as `_IndexWriter` of the same module does."""
    np.concatenate([np.array(each, dtype) for each in sequences]).tofile(prefix.with_suffix(".bin"))
    lengths = np.array([len(each) for each in sequences], np.int32)
    starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(dtype).itemsize
    ends = np.arange(len(sequences) + 1, dtype=np.int64)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code or CODES[dtype], len(sequences), len(ends))
    prefix.with_suffix(".idx").write_bytes(header + lengths.tobytes() + starts.tobytes() + ends.tobytes())
    return prefix.with_suffix(".bin")


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("vocabulary", [0, 100, 100_000])
def test_an_indexed_dataset_has_the_type_of_its_index(dtype: str, vocabulary: int, tmp_path: Path) -> None:
    """Whatever the vocabulary: Megatron stores int32 from 65,500 tokens on, and int64 if it is told to."""
    found = open_token_array(write_indexed(tmp_path / "text", SEQUENCES, dtype), vocabulary)
    assert found.tolist() == [*range(5, 13)] and found.dtype == dtype


def test_an_index_of_something_else_is_one_line(tmp_path: Path) -> None:
    path = write_indexed(tmp_path / "floats", SEQUENCES, "int32", code=7)
    with pytest.raises(InputError, match="is not an index of Megatron-LM with integer tokens"):
        open_token_array(path, 0)
    path = write_indexed(tmp_path / "cut", SEQUENCES, "uint16")
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(InputError, match=r"does not fit its index 'cut\.idx': 14 bytes instead of 16"):
        open_token_array(path, 0)
    index = write_indexed(tmp_path / "short", SEQUENCES, "uint16").with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:20])
    with pytest.raises(InputError, match="is not an index of Megatron-LM"):
        open_token_array(index.with_suffix(".bin"), 0)


def test_a_folder_with_an_indexed_dataset_is_a_source(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_indexed(tmp_path / "data" / "text", [list(range(100))], "int32")
    found = open_dataset(DataConfig(source=str(tmp_path / "data"), held_out=0.0), 8)
    assert isinstance(found, TextDataset) and (found.rows, found.validation_rows) == (12, 0)
