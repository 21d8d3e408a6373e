"""Writes a file of tensors in the safetensors format: eight bytes of header length, a JSON header, then the data.
Checkpoints and Hugging Face exports use it.

This module replaces the writer of the safetensors library for three reasons. It copies tensors from their device one at
a time. On a full disk it raises an OSError with an errno, while a memory-mapped file would raise SIGBUS. It returns the
offset of every tensor. Any safetensors library can read the files. Source: the description of the format in the README
of huggingface/safetensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import xxhash

from meshwright.core import storage

SHARD_NAME_PATTERN = re.compile(r"rank-\d{5,10}\.safetensors")

DTYPE_BY_NAME: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
        "int64", "int32", "int16", "int8", "uint8", "bool",
    )
}  # fmt: skip
_SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8",
    "bool": "BOOL",
}  # fmt: skip
NAME_BY_SAFETENSORS_DTYPE = {stored: name for name, stored in _SAFETENSORS_DTYPES.items()}
MAX_METADATA_BYTES = 4096
"""Number of bytes at the beginning of a file that are searched for its metadata."""

_METADATA_PATTERN = re.compile(rb'\{"__metadata__":(\{[^{}]*\})')


class PendingTensor(NamedTuple):
    """A tensor to be written under the name `key`. `size` is in bytes. `tensor` returns the tensor, and is called when
    its data are written."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    tensor: Callable[[], torch.Tensor]


class WrittenFile(NamedTuple):
    """Describes a written file: the offset where its data begin, its size, the xxh3 of its header, and the offset of
    each tensor by key. Offsets and size are in bytes.
    """

    data: int
    size: int
    header_xxh3: str
    offsets: dict[str, int]


def shard_name(rank: int) -> str:
    """Returns the name of the file of `rank`.

    >>> shard_name(3)
    'rank-00003.safetensors'
    """
    return f"rank-{rank:05d}.safetensors"


def dtype_name(dtype: torch.dtype) -> str:
    """Returns the name that manifests use for a dtype, such as 'float32'."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """Returns the bytes of `tensor`, as a view of it if it is contiguous on the CPU, otherwise as a copy."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def tensor_digest(tensor: torch.Tensor) -> str:
    """Returns the xxh3 of the bytes of `tensor`."""
    return xxhash.xxh3_64(tensor_bytes(tensor)).hexdigest()


def write_shard(path: Path, items: Iterable[PendingTensor], metadata: dict[str, str]) -> WrittenFile:
    """Writes `items` to the new file `path` and syncs it. Tensors with wider dtypes come first, so that every tensor is
    aligned.

    Raises:
        OSError: the file exists, or the disk is full or fails.
    """
    ordered = sorted(items, key=lambda item: (-DTYPE_BY_NAME[item.dtype].itemsize, item.key))
    header: dict[str, object] = {"__metadata__": metadata}
    offsets = {}
    end = 0
    for item in ordered:
        offsets[item.key] = end
        header[item.key] = {
            "dtype": _SAFETENSORS_DTYPES[item.dtype],
            "shape": item.shape,
            "data_offsets": [end, end + item.size],
        }
        end += item.size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text

    def blocks() -> Iterator[memoryview | bytes]:
        yield head
        for item in ordered:
            block = tensor_bytes(item.tensor())
            assert len(block) == item.size, f"{item.key}: {len(block)} bytes for {item.size}"
            yield block

    size = storage.write_file(path, blocks())
    return WrittenFile(
        len(head), size, xxhash.xxh3_64(head).hexdigest(), {key: len(head) + begin for key, begin in offsets.items()}
    )


def parse_metadata(head: bytes) -> dict[str, str]:
    """Returns the metadata in `head`, the first bytes of a file, or {} if it cannot be parsed."""
    match = _METADATA_PATTERN.match(head, 8)
    try:
        found = json.loads(match[1]) if match else {}
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in found.items()}
