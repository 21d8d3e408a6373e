"""Reads Hugging Face weights shard by shard, from one safetensors file or from a folder of several files with an index.
The trainer initialises models with it, and `meshwright checkpoint` imports weights.

Guarantees:
- Only the rows or columns that a shard needs are read, one tensor at a time. A rank never has more than its shard of
  the model in memory.
- If weights are missing, unexpected, truncated or pickled, or have a wrong shape, every rank raises the same InputError
  before it reads the first weight.

[Note: names] A parameter is looked up in the files by its name. If this name is not found, the name without its first
component is looked up. If that is also not found, a stored name is used that equals the parameter's name with one more
component in front, if there is exactly one such name. In some model families, the files divide the weights into tensors
differently than the modules. For these families, a `WeightSource` lists the stored tensors that form one tensor of the
model. They are concatenated along dimension 0. Tensors of experts are stacked. Source: huggingface/transformers,
`conversion_mapping.py`. `train/meta_init.py` converts the rules in that file to `WeightSource` objects.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from meshwright.checkpoint.load import load_checkpoint
from meshwright.checkpoint.manifest import MANIFEST_FILE
from meshwright.checkpoint.reshard import contiguous_runs
from meshwright.checkpoint.save import LocalShard
from meshwright.core.codec import parse_text, read_text_file
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.spec.layout import ShardMetadata

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
WEIGHT_PREFIX, BUFFER_PREFIX = "model/", "buffer/"
"""In a checkpoint, the names of weights begin with WEIGHT_PREFIX, and those of buffers with BUFFER_PREFIX."""
_FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9._-]+\.safetensors")
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth")


class WeightSource(NamedTuple):
    """Describes how one tensor of a model is formed from stored tensors.

    Each element of `keys` is a tuple of stored names, whose tensors are concatenated along the first dimension. If
    `stacked` is True, the results are then stacked along a new first dimension. Otherwise `keys` has one element.
    """

    keys: tuple[tuple[str, ...], ...]
    stacked: bool = False


class StoredTensor(NamedTuple):
    """Shape, type and file of a stored tensor."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


class HfWeights:
    """The tensors of a safetensors file or folder, by name.

    Raises:
        InputError: there are no weights at `path`, or a file is pickled, truncated or unreadable.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.entries: dict[str, StoredTensor] = {}
        self.sources: dict[str, WeightSource] = {}
        for file in weight_files(self.path):
            with _open_safetensors(file) as handle:
                for key in list(handle.keys()):
                    tensor = handle.get_slice(key)
                    self.entries[key] = StoredTensor(tuple(tensor.get_shape()), str(tensor.get_dtype()), file)
        self._by_suffix: dict[str, list[str]] = {}
        for key in self.entries:
            self._by_suffix.setdefault(key.partition(".")[2], []).append(key)

    def find(self, name: str) -> WeightSource | None:
        """Returns the source of the model's tensor `name` ([Note: names]), None if the files do not have the tensor."""
        if name in self.sources:
            return self.sources[name]
        longer = self._by_suffix.get(name, ())
        for key in (name, name.partition(".")[2], longer[0] if len(longer) == 1 else ""):
            if key in self.entries:
                return WeightSource(((key,),))
        return None

    def shape(self, source: WeightSource) -> tuple[int, ...]:
        """Returns the shape of the tensor that `source` describes."""
        row = [self.entries[key].shape for key in source.keys[0]]
        shape = (sum(part[0] for part in row), *row[0][1:]) if len(row) > 1 else row[0]
        return (len(source.keys), *shape) if source.stacked else shape

    def check(
        self, shapes: Mapping[str, Sequence[int]], known: Collection[str] = (), passed_over: Collection[str] = ()
    ) -> None:
        """Checks that the files have the weights of a model whose parameters have `shapes`.

        `known` are the names of other tensors of the model, such as buffers, which the files may contain. `passed_over`
        are regular expressions of stored names that the model does not need.

        Raises:
            InputError: a tensor is missing or unexpected, has a wrong shape, or is not of a floating-point type with at
                least 16 bits.
        """
        used: set[str] = set()
        missing = []
        for name, shape in shapes.items():
            source = self.find(name)
            if source is None:
                missing.append(name)
                continue
            used |= {key for row in source.keys for key in row}
            self._check_tensor(name, source, shape)
        for name in known:
            source = self.find(name)
            used |= {key for row in source.keys for key in row} if source else set()
        patterns = [re.compile(pattern) for pattern in passed_over]
        others = [
            key for key in sorted(self.entries.keys() - used) if not any(pattern.search(key) for pattern in patterns)
        ]
        for what, names, pool in (
            (Message("has no tensor"), missing, self.entries),
            (Message("has a tensor that this model does not have:"), others, shapes),
        ):
            if names:
                more = Message(" and {count} more", count=len(names) - 1) if len(names) > 1 else ""
                raise InputError(
                    Message(
                        "{path} {what} {names!r}{more}{hint}: weights of another model?",
                        path=self.path,
                        what=what,
                        names=names[0],
                        more=more,
                        hint=did_you_mean(names[0], pool),
                    )
                )

    def _check_tensor(self, name: str, source: WeightSource, shape: Sequence[int]) -> None:
        found = self.shape(source)
        if found != tuple(shape):
            raise InputError(
                Message(
                    "{path}: {keys} has shape {found}, this model's {name} is {shape}: weights of another model?",
                    path=self.path,
                    keys=source.keys[0][0],
                    found=list(found),
                    name=name,
                    shape=list(shape),
                )
            )
        kind = self.entries[source.keys[0][0]].dtype
        if not kind.startswith(("F", "BF")) or kind.startswith("F8"):
            raise InputError(
                Message(
                    "{path}: {keys} has dtype {kind}, but only floating-point weights of at least 16 bits are "
                    "supported: dequantize the weights first",
                    path=self.path,
                    keys=source.keys[0][0],
                    kind=kind,
                )
            )

    def fill(self, piece: ShardMetadata, tensor: torch.Tensor) -> None:
        """Copies the elements of the shard `piece` into the flat `tensor`, converted to the dtype of `tensor`. Reads
        only the rows or columns of these elements.

        Raises:
            InputError: the files do not have the tensor, or its shape differs from that of `piece`, or it is not of a
                floating-point type with at least 16 bits.
        """
        name = piece.name.removeprefix(WEIGHT_PREFIX)
        source = self.find(name)
        if source is None:
            raise InputError(
                Message(
                    "{path} has no tensor {name!r}{hint}: weights of another model?",
                    path=self.path,
                    name=name,
                    hint=did_you_mean(name, self.entries),
                )
            )
        self._check_tensor(name, source, piece.shape)
        if piece.start < piece.stop:
            with self.open_source(source) as whole, torch.no_grad():
                tensor.copy_(_slice_from(whole, piece))

    @contextmanager
    def open_source(self, source: WeightSource) -> Iterator[Any]:
        """Yields the tensor that `source` describes, as an object that supports indexing by slices and reads only the
        indexed elements.

        On exit the files are closed, so that their pages no longer count as memory of this process.
        """
        with ExitStack() as stack:
            files = {self.entries[key].file for row in source.keys for key in row}
            handles = {file: stack.enter_context(_open_safetensors(file)) for file in files}
            rows = [[handles[self.entries[key].file].get_slice(key) for key in row] for row in source.keys]
            yield (
                rows[0][0]
                if len(rows) == len(rows[0]) == 1 and not source.stacked
                else ConcatTensor(rows, source.stacked)
            )

    def read_full(self, name: str) -> torch.Tensor | None:
        """Returns the full tensor `name` in its stored dtype, None if the files do not have the tensor."""
        source = self.find(name)
        if source is None:
            return None
        with self.open_source(source) as opened:
            result: torch.Tensor = opened[()] if isinstance(opened, ConcatTensor) else opened[...]
        return result


class ConcatTensor:
    """Presents stored tensors as one tensor. The tensors of each list in `rows` are concatenated, and if `stacked` is
    True, the results are stacked (`WeightSource`). Indexing reads only the indexed elements.
    """

    def __init__(self, rows: list[list[Any]], stacked: bool) -> None:
        self.rows, self.stacked = rows, stacked

    def __getitem__(self, index: slice | tuple[slice, ...]) -> torch.Tensor:
        cuts = index if isinstance(index, tuple) else (index,)
        if not self.stacked:
            return self._row(self.rows[0], cuts)
        chosen = self.rows[cuts[0]] if cuts else self.rows
        return torch.stack([self._row(row, cuts[1:]) for row in chosen])

    def _row(self, row: list[Any], cuts: tuple[slice, ...]) -> torch.Tensor:
        sizes = [part.get_shape()[0] for part in row]
        first, last, _ = (cuts[0] if cuts else slice(None)).indices(sum(sizes))
        parts, begin = [], 0
        for part, size in zip(row, sizes, strict=True):
            start, stop = max(first - begin, 0), min(last - begin, size)
            if start < stop:
                parts.append(part[(slice(start, stop), *cuts[1:])])
            begin += size
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _slice_from(source: Any, piece: ShardMetadata) -> torch.Tensor:
    if not piece.shape:
        return source[...].reshape(1)
    if piece.split in (None, 0):
        inner = math.prod(piece.shape[1:])
        parts = []
        for first, last, _ in contiguous_runs(piece):
            top, bottom = first // inner, -(-last // inner)
            parts.append(source[top:bottom].reshape(-1)[first - top * inner : last - top * inner])
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    inner = math.prod(piece.local_shape[1:])
    top, bottom = piece.start // inner, -(-piece.stop // inner)
    before = (slice(top, bottom), *(slice(None),) * (piece.split - 1))
    columns = [source[(*before, slice(first, last))] for first, last in piece.intervals]
    return torch.cat(columns, piece.split).reshape(-1)[piece.start - top * inner : piece.stop - top * inner]


def weight_files(path: Path) -> list[Path]:
    """Returns the safetensors files of the model at `path`, a file or a folder.

    Raises:
        InputError: there are no weights at `path`, the weights are pickled, or the index is invalid.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise InputError(
                Message(
                    "weights {path!r} are not a safetensors file; pickle files are not read: convert them first",
                    path=str(path),
                )
            )
        return [path]
    if not path.is_dir():
        raise InputError(Message("weights {path!r} do not exist", path=str(path)))
    if (path / INDEX_FILE).exists():
        index = parse_text(read_text_file(path / INDEX_FILE), str(path / INDEX_FILE))
        files = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(files, dict) or not all(
            isinstance(name, str) and _FILE_NAME_PATTERN.fullmatch(name) for name in files.values()
        ):
            raise InputError(
                Message("{path}: 'weight_map' must name safetensors files beside it", path=path / INDEX_FILE)
            )
        return [path / name for name in sorted(set(files.values()))]
    found = [path / WEIGHTS_FILE] if (path / WEIGHTS_FILE).exists() else sorted(path.glob("*.safetensors"))
    if not found:
        other = next((name for name in sorted(os.listdir(path)) if name.endswith(_PICKLE_SUFFIXES)), None)
        more = Message("; {other} is pickle and is not read: {hint}", other=other, hint=CONVERT_HINT) if other else ""
        raise InputError(Message("folder {path!r} holds no safetensors file{more}", path=str(path), more=more))
    return found


CONVERT_HINT = Message("convert it once, if you trust it, with transformers' from_pretrained(...).save_pretrained(...)")


def has_weights(folder: Path) -> bool:
    """Returns whether a model folder has safetensors weights.

    Raises:
        InputError: the folder has only pickled weights. Without the error, training would start from random weights.
    """
    if any(folder.glob("*.safetensors")):
        return True
    pickled = sorted(
        name for name in os.listdir(folder) if re.fullmatch(r"(pytorch_model|model|consolidated).*\.(bin|pt|pth)", name)
    )
    if pickled:
        raise InputError(
            Message(
                "model folder {folder!r}: {pickled} is pickle and is not read: {hint}; or remove it to train from "
                "random weights",
                folder=str(folder),
                pickled=pickled[0],
                hint=CONVERT_HINT,
            )
        )
    return False


@contextmanager
def _open_safetensors(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as handle:
            yield handle
    except (SafetensorError, OSError) as error:
        reason = str(error).partition(chr(10))[0]
        short = Message(" (the file is truncated: copy it again)") if "not fully covered" in reason else ""
        raise InputError(
            Message("{file} cannot be read: {reason}{short}", file=file, reason=reason, short=short)
        ) from None


def load_weights(path: Path | str, wanted: Iterable[LocalShard], weights: HfWeights | None = None) -> None:
    """Fills the tensor of each shard in `wanted` from the Hugging Face weights or the checkpoint at `path`. Values are
    converted to the dtype of the tensor. The name of a shard is 'model/NAME'; Hugging Face weights also accept NAME.
    `weights` are the opened Hugging Face weights at `path`, None to open them.

    Raises:
        InputError: a tensor is missing or has a wrong shape, or a file cannot be read.
    """
    if (Path(path) / MANIFEST_FILE).exists():
        load_checkpoint(path, wanted, cast=True)
        return
    weights = weights or HfWeights(path)
    for piece, tensor in wanted:
        weights.fill(piece, tensor)
