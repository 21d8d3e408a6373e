"""To and from Hugging Face's form: a folder of safetensors files with the full tensors under the model's own names.

Out: `export`, one tensor in memory at a time; above 5 GB several files and an index, as `from_pretrained` reads them.
In: `load_weights` fills wanted pieces from such a folder, reading only the rows or columns that a piece needs; `import_weights` makes it a
checkpoint. Pickle files (`.bin`, `.pt`) are never read.
Source: huggingface/transformers, `save_pretrained` (max_shard_size, `model.safetensors.index.json`).
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from meshwright.base.codec import parse, read_text
from meshwright.base.errors import InputError, did_you_mean
from meshwright.checkpoint import disk
from meshwright.checkpoint.assemble import rows_of
from meshwright.checkpoint.load import full, load
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.save import Held, save
from meshwright.checkpoint.shard import DTYPES, Item, dtype_name, write_shard
from meshwright.checkpoint.verify import Reader
from meshwright.spec.piece import Piece

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_FILE = 5 * 10**9
_PREFIX = "model/"
_FILE = re.compile(r"[A-Za-z0-9._-]+\.safetensors")


def export(
    path: Path | str,
    folder: Path | str,
    config: dict[str, Any] | None = None,
    *,
    dtype: str | None = None,
    turned: tuple[str, ...] = (),
    largest: int = LARGEST_FILE,
) -> list[Path]:
    """Writes the full weights of the checkpoint `path` into `folder` and returns the files.

    `dtype` rounds floating-point weights to another type; matrices whose name ends in one of `turned` are transposed.
    """
    folder = Path(folder)
    reader = Reader(path)
    weights = {name: entry for name, entry in reader.manifest.tensors.items() if name.startswith(_PREFIX)}
    if not weights:
        raise InputError(f"{path}: holds no weights of a model")
    if dtype is not None and (dtype not in DTYPES or not DTYPES[dtype].is_floating_point):
        raise InputError(f"dtype {dtype!r} is not a floating-point type{did_you_mean(dtype, DTYPES)}; such are float32, bfloat16, float16")
    if folder.exists() and any(folder.glob("model*.safetensors*")):
        raise InputError(f"folder {str(folder)!r} already holds weights; name another, or remove them first")
    items = []
    for name, entry in sorted(weights.items()):
        kind = dtype if dtype and DTYPES[entry.dtype].is_floating_point else entry.dtype
        shown = name.removeprefix(_PREFIX)
        turn = shown.endswith(turned) and len(entry.shape) == 2
        shape = entry.shape[::-1] if turn else entry.shape
        items.append(Item(shown, kind, shape, entry.numel * DTYPES[kind].itemsize, partial(_full, reader, name, kind, turn)))
    disk.make_folder(folder)
    return _write(folder, items, config, largest)


def _full(reader: Reader, name: str, dtype: str, turn: bool) -> torch.Tensor:
    tensor = full(reader, name).to(DTYPES[dtype])
    return tensor.T if turn else tensor


def _write(folder: Path, items: list[Item], config: dict[str, Any] | None, largest: int) -> list[Path]:
    """Everything under temporary names, then renamed, the index last: a folder cut short is no model."""
    groups: list[list[Item]] = [[]]
    room = largest
    for item in items:
        if groups[-1] and item.size > room:
            groups.append([])
            room = largest
        groups[-1].append(item)
        room -= item.size
    one = len(groups) == 1
    names = [WEIGHTS if one else f"model-{index:05d}-of-{len(groups):05d}.safetensors" for index in range(1, len(groups) + 1)]
    total = sum(item.size for item in items)
    texts: dict[str, Any] = {} if config is None else {"config.json": config}
    if not one:
        where = {item.key: name for name, group in zip(names, groups, strict=True) for item in group}
        texts[INDEX] = {"metadata": {"total_size": total}, "weight_map": where}
    if total > disk.free_bytes(folder):
        raise InputError(f"folder {str(folder)!r}: the weights need {total} bytes, {disk.free_bytes(folder)} are free")
    done: list[Path] = []
    try:
        for name, group in zip(names, groups, strict=True):
            done.append(folder / f".{name}.tmp")
            done[-1].unlink(missing_ok=True)
            write_shard(done[-1], group, {"format": "pt"})
        for name, content in texts.items():
            done.append(folder / f".{name}.tmp")
            done[-1].unlink(missing_ok=True)
            disk.write_file(done[-1], [json.dumps(content, indent=2).encode()])
        for index, name in enumerate([*names, *texts]):
            os.replace(done[index], folder / name)
            done[index] = folder / name
    except BaseException as error:
        for path in done:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise InputError(f"folder {str(folder)!r}: {error.strerror}; nothing is exported") from None
        raise
    disk.sync_folder(folder)
    return done


class Weights:
    """The tensors of a safetensors file or folder, by name; nothing is read before it is asked for."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.files: dict[str, Path] = {}
        self.entries: dict[str, tuple[tuple[int, ...], Path]] = {}
        for file in _files_of(self.path):
            with _opened(file) as handle:
                for key in list(handle.keys()):
                    self.entries[key] = (tuple(handle.get_slice(key).get_shape()), file)

    def find(self, name: str) -> str:
        """The key of `name`; one leading part more or less (`transformer.h.0` for `h.0`) is the same tensor."""
        tail = name.partition(".")[2]
        longer = [key for key in self.entries if key.partition(".")[2] == name]
        for key in (name, tail, longer[0] if len(longer) == 1 else ""):
            if key in self.entries:
                return key
        raise InputError(f"{self.path}: has no tensor {name!r}{did_you_mean(name, self.entries)}: of another model?")

    def fill(self, piece: Piece, tensor: torch.Tensor) -> None:
        """`tensor` becomes `piece`, converted to its own type. Reads only what the piece needs."""
        key = self.find(piece.name.removeprefix(_PREFIX))
        shape, file = self.entries[key]
        if shape != tuple(piece.shape):
            raise InputError(f"{self.path}: {key} has shape {list(shape)}, this model's is {list(piece.shape)}: of another model?")
        with _opened(file) as handle, torch.no_grad():
            if piece.start < piece.stop:
                tensor.copy_(_cut_from(handle, key, piece))


def _cut_from(handle: Any, key: str, piece: Piece) -> torch.Tensor:
    if not piece.shape:
        return handle.get_tensor(key).reshape(1)
    source = handle.get_slice(key)
    if piece.split in (None, 0):
        inner = math.prod(piece.shape[1:])
        parts = []
        for first, last, _ in rows_of(piece):
            top, bottom = first // inner, -(-last // inner)
            parts.append(source[top:bottom].reshape(-1)[first - top * inner : last - top * inner])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    before = (slice(None),) * piece.split
    columns = [source[(*before, slice(first, last))] for first, last in piece.intervals]
    return torch.cat(columns, piece.split).reshape(-1)[piece.start : piece.stop]


def _files_of(path: Path) -> list[Path]:
    """The safetensors files that make a model."""
    if path.is_file():
        if path.suffix != ".safetensors":
            raise InputError(f"weights {str(path)!r} are not a safetensors file; pickle files are not read: convert them first")
        return [path]
    if not path.is_dir():
        raise InputError(f"weights {str(path)!r} do not exist")
    if (path / INDEX).exists():
        index = parse(read_text(path / INDEX), str(path / INDEX))
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict) or not all(isinstance(name, str) and _FILE.fullmatch(name) for name in files.values()):
            raise InputError(f"{path / INDEX}: 'weight_map' must name safetensors files beside it")
        return [path / name for name in sorted(set(files.values()))]
    found = [path / WEIGHTS] if (path / WEIGHTS).exists() else sorted(path.glob("*.safetensors"))
    if not found:
        other = next((name for name in os.listdir(path) if name.endswith((".bin", ".pt", ".pth"))), None)
        more = f"; {other} is pickle and is not read: convert it first" if other else ""
        raise InputError(f"folder {str(path)!r} holds no safetensors file{more}")
    return found


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file}: cannot be read: {str(error).partition(chr(10))[0]}") from None


def load_weights(path: Path | str, wanted: Iterable[Held]) -> None:
    """Fills each wanted piece ('model/NAME', or NAME) from Hugging Face weights or from a checkpoint, converted to its tensor's type."""
    if (Path(path) / MANIFEST).exists():
        load(path, wanted, cast=True)
        return
    weights = Weights(path)
    for piece, tensor in wanted:
        weights.fill(piece, tensor)


def import_weights(source: Path | str, folder: Path | str) -> Path:
    """The weights of `source` as the checkpoint of step 0 in `folder`."""
    weights = Weights(source)
    pieces = []
    for key, (shape, file) in weights.entries.items():
        with _opened(file) as handle:
            tensor = handle.get_tensor(key)
        pieces.append((Piece(_PREFIX + key, shape, dtype_name(tensor.dtype), None, (), 0, tensor.numel()), tensor.reshape(-1)))
    return save(folder, 0, pieces, {"imported": str(source)})
