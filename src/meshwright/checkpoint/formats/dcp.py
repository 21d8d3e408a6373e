"""Reads and writes the checkpoints of torch.distributed.checkpoint (DCP), as FSDP2 and torchtitan save them.

A DCP checkpoint is a folder with a pickled file `.metadata` and files `__R_S.distcp`. The metadata lists, for each key,
the chunks of its tensor: boxes of the full tensor, each stored by `torch.save` in a byte range of a file. Keys are the
paths of a nested state dict, joined by dots. torch/distributed/checkpoint/filesystem.py and metadata.py define the
form. The metadata is read by `inert_pickle`, and each chunk by torch.load with weights_only.

[Note: keys] The weights are the tensors below the key 'model', or at the top level (torchtitan). Optimizer states are
named as torch.distributed.checkpoint.state_dict names them: OPTIMIZER.state.PARAMETER.KIND.
"""

from __future__ import annotations

import io
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.checkpoint.formats.inert_pickle import PickledRecord, load_tensors, read_inert_pickle
from meshwright.checkpoint.formats.source import (
    STEP_KEY,
    ForeignState,
    ForeignTensor,
    StoredRange,
    check_dtype,
    full_range,
)
from meshwright.core.errors import InputError
from meshwright.core.messages import Message

METADATA_FILE = ".metadata"
_METADATA = "torch.distributed.checkpoint.metadata."
_DTYPES = (
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
    "complex64", "complex128", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64", "bool",
)  # fmt: skip
METADATA_CLASSES = frozenset(
    [_METADATA + name for name in (
        "Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    )]
    + ["torch.distributed.checkpoint.filesystem._StorageInfo", "torch.Size", "torch.serialization._get_layout"]
    + [f"megatron.core.dist_checkpointing.strategies.torch.{name}" for name in ("MCoreMetadata", "MCoreSavePlan")]
    + [f"torch.distributed.checkpoint.planner.{name}" for name in ("WriteItem", "WriteItemType", "TensorWriteData")]
    + [f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")]
    + [f"torch.{name}" for name in _DTYPES]
)  # fmt: skip
"""The names that the metadata of a DCP checkpoint may contain."""

WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module|module)\.")
"""Components that wrappers (torch.compile, FSDP1, DDP) add to the names of parameters."""
_FLAT_STATE = re.compile(r"(?:^|.*\.)optim\w*\.state\.(?P<name>.+)\.(?P<kind>\w+)")
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class DcpItem(NamedTuple):
    """A stored item: `length` bytes from `offset` of `file`."""

    file: Path
    offset: int
    length: int


class DcpChunk(NamedTuple):
    """A stored box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: DcpItem


class DcpTensor(NamedTuple):
    """A tensor of a DCP checkpoint."""

    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[DcpChunk, ...]


class DcpFolder:
    """The metadata of the DCP checkpoint in the folder `path`.

    `tensors` and `values` (other objects) are the entries by key, `paths` has the path of each key in the state dict.

    Raises:
        InputError: the metadata is missing, damaged or unsafe, or a file is missing or shorter than the metadata says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors: dict[str, DcpTensor] = {}
        self.values: dict[str, DcpItem] = {}
        self.paths: dict[str, tuple[str, ...]] = {}
        self._read(read_inert_pickle(path / METADATA_FILE, METADATA_CLASSES))
        self._check_files()

    def _read(self, root: Any) -> None:
        data = root.fields
        stored = {
            (key.fields["fqn"], _sizes(key.fields.get("offset"))): self._item(value.fields)
            for key, value in data["storage_data"].items()
        }
        for key, entry in data["state_dict_metadata"].items():
            if entry.kind.endswith(".BytesStorageMetadata"):
                self.values[key] = stored[key, None]
                continue
            properties = entry.fields["properties"].fields
            dtype = properties["state"][0] if "state" in properties else properties["dtype"]
            chunks = []
            for chunk in entry.fields["chunks"]:
                offsets, sizes = _sizes(chunk.fields["offsets"]), _sizes(chunk.fields["sizes"])
                if (key, offsets) not in stored:
                    raise InputError(
                        Message("{path}: no file holds the part of {key} at {offsets}",
                            path=self.path / METADATA_FILE, key=key, offsets=list(offsets or ()))
                    )  # fmt: skip
                chunks.append(DcpChunk(offsets or (), sizes or (), stored[key, offsets]))
            shape = _sizes(entry.fields["size"]) or ()
            for chunk in chunks:
                for offset, size, whole in zip(chunk.offsets, chunk.sizes, shape, strict=True):
                    if not 0 <= offset <= offset + size <= whole:
                        raise ValueError(f"a part of {key} at {chunk.offsets} is outside of {shape}")
            self.tensors[key] = DcpTensor(shape, dtype.kind.removeprefix("torch."), tuple(chunks))
        named = data.get("planner_data") or {}
        self.paths = {
            key: tuple(map(str, named[key])) if key in named else (key,) for key in (*self.tensors, *self.values)
        }

    def _item(self, fields: Mapping[str, Any]) -> DcpItem:
        name = fields["relative_path"]
        if not isinstance(name, str) or not _FILE_NAME.fullmatch(name):
            raise InputError(
                Message("{path} names the file {name!r}, which is not a file of this folder",
                    path=self.path / METADATA_FILE, name=str(name)[:80])
            )  # fmt: skip
        if fields.get("transform_descriptors"):
            raise InputError(
                Message("{path}: {name} is compressed ({kind}); save the checkpoint without stream extensions",
                    path=self.path, name=name, kind=str(fields["transform_descriptors"])[:80])
            )  # fmt: skip
        offset, length = int(fields["offset"]), int(fields["length"])
        if min(offset, length) < 0:
            raise ValueError(f"an item of {name} has offset {offset} and length {length}")
        return DcpItem(self.path / name, offset, length)

    def _check_files(self) -> None:
        ends: dict[Path, int] = {}
        items = [chunk.item for tensor in self.tensors.values() for chunk in tensor.chunks]
        for item in (*items, *self.values.values()):
            ends[item.file] = max(ends.get(item.file, 0), item.offset + item.length)
        missing = sorted(file.name for file in ends if not file.is_file())
        if missing:
            raise InputError(
                Message("{path}: {count} of {all} files are missing, the first is {name}: copy the files of all ranks",
                    path=self.path, count=len(missing), all=len(ends), name=missing[0])
            )  # fmt: skip
        for file, end in ends.items():
            if (size := file.stat().st_size) < end:
                raise InputError(
                    Message("{path} is truncated: it has {size} bytes, the metadata names {end}: copy it again",
                        path=file, size=size, end=end)
                )  # fmt: skip

    def add(self, other: DcpFolder) -> None:
        """Adds the entries of another folder, in which the same checkpoint continues."""
        self.tensors |= other.tensors
        self.values |= other.values
        self.paths |= other.paths

    def read_item(self, item: DcpItem, allowed: re.Pattern[str] | None = None) -> Any:
        """Returns a stored item, without executing code. Objects of classes that match `allowed` become records."""
        with item.file.open("rb") as stream:
            stream.seek(item.offset)
            data = io.BytesIO(stream.read(item.length))
        return load_tensors(data, item.file, allowed)

    def read_chunk(self, key: str, chunk: DcpChunk) -> torch.Tensor:
        """Returns a stored box of the tensor `key`. Raises InputError if its shape or dtype is not that of the
        metadata."""
        found, dtype = self.read_item(chunk.item), self.tensors[key].dtype
        if not isinstance(found, torch.Tensor) or tuple(found.shape) != chunk.sizes or str(found.dtype)[6:] != dtype:
            shown = f"{str(found.dtype)[6:]}{list(found.shape)}" if isinstance(found, torch.Tensor) else type(found)
            raise InputError(
                Message(
                    "{path}: {key} is {found}, but the metadata says {dtype}{sizes}: files of different checkpoints "
                    "are mixed",
                    path=chunk.item.file, key=key, found=shown, dtype=dtype, sizes=list(chunk.sizes),
                )
            )  # fmt: skip
        return found

    def read_full(self, key: str, row: int | None = None) -> torch.Tensor:
        """Returns the full tensor `key`, assembled from its boxes, or only the `row` of it along dimension 0."""
        tensor = self.tensors[key]
        full = torch.empty(tensor.shape if row is None else tensor.shape[1:], dtype=getattr(torch, tensor.dtype))
        for chunk in tensor.chunks:
            if row is not None and not chunk.offsets[0] <= row < chunk.offsets[0] + chunk.sizes[0]:
                continue
            stored = self.read_chunk(key, chunk)
            skipped = 0 if row is None else 1
            target = full
            for dim, (offset, size) in enumerate(zip(chunk.offsets[skipped:], chunk.sizes[skipped:], strict=True)):
                target = target.narrow(dim, offset, size)
            target.copy_(stored if row is None else stored[row - chunk.offsets[0]])
        return full

    def foreign_tensor(self, key: str) -> ForeignTensor:
        """Returns the description of the tensor `key`. Boxes of whole rows are ranges of the flattened tensor. If there
        are other boxes, the full tensor is one range."""
        shape, dtype, chunks = self.tensors[key]
        check_dtype(self.path, key, dtype)
        inner = math.prod(shape[1:])
        if not shape or any(chunk.sizes[1:] != shape[1:] for chunk in chunks):
            self.check_covered(key)
            return ForeignTensor(shape, dtype, full_range(shape, partial(self.read_full, key)))
        ranges = tuple(
            StoredRange(
                chunk.offsets[0] * inner,
                (chunk.offsets[0] + chunk.sizes[0]) * inner,
                partial(self.read_chunk, key, chunk),
            )
            for chunk in chunks
        )
        return ForeignTensor(shape, dtype, ranges)

    def check_covered(self, key: str) -> None:
        """Checks that the boxes of a tensor cover it. The edges of all boxes divide the tensor into cells."""
        shape, _, chunks = self.tensors[key]
        edges = [
            sorted({0, size} | {edge for c in chunks for edge in (c.offsets[dim], c.offsets[dim] + c.sizes[dim])})
            for dim, size in enumerate(shape)
        ]
        covered = {
            cell
            for c in chunks
            for cell in itertools.product(
                *(
                    range(edges[dim].index(offset), edges[dim].index(offset + size))
                    for dim, (offset, size) in enumerate(zip(c.offsets, c.sizes, strict=True))
                )
            )
        }
        if len(covered) < math.prod(len(edge) - 1 for edge in edges):
            raise InputError(
                Message("{path}: the {count} stored parts of {key} do not cover its shape {shape}: parts are missing",
                    path=self.path, count=len(chunks), key=key, shape=list(shape))
            )  # fmt: skip


def _sizes(size: Any) -> tuple[int, ...] | None:
    """Returns the sizes of a pickled torch.Size, None for None."""
    if size is None:
        return None
    values = size.values[0] if isinstance(size, PickledRecord) else size
    return tuple(int(value) for value in values)


class _StateName(NamedTuple):
    parameter: str
    kind: str


def _state_name(path: Sequence[str], nested: bool) -> _StateName | None:
    """Returns the parameter and the kind of an optimizer state from its path ([Note: keys]), None for other entries."""
    words = list(path)
    if len(words) > 1 and words[-1].startswith("state."):
        words = [*words[:-1], "state", *words[-1].removeprefix("state.").rpartition(".")[::2]]
    if "state" in words[:-2]:
        at = words.index("state")
        return _StateName(WRAPPERS.sub("", ".".join(words[at + 1 : -1])), words[-1])
    match = None if nested else _FLAT_STATE.fullmatch(".".join(words))
    return _StateName(WRAPPERS.sub("", match["name"]), match["kind"]) if match else None


def read_dcp(folder: DcpFolder, weights_only: bool = False) -> ForeignState:
    """Returns the content of the DCP checkpoint `folder`, with `weights_only` without optimizer states.

    Raises:
        InputError: the checkpoint is damaged or unsafe, it is unclear which tensors are the weights, or the optimizer
            states are not named by parameters.
    """
    groups, options = _param_groups(folder)
    states = {
        key: name for key, where in folder.paths.items() if (name := _state_name(where, where != (key,))) is not None
    }
    roots: dict[tuple[str, ...], list[str]] = {}
    for key in folder.tensors.keys() - states.keys() - options:
        roots.setdefault(folder.paths[key][:-1], []).append(key)
    root = _model_root(folder.path, list(roots))
    weights = {WRAPPERS.sub("", folder.paths[key][-1]): folder.foreign_tensor(key) for key in sorted(roots[root])}
    optimizer, steps = _optimizer_states(folder, {} if weights_only else states, weights)
    counters = {key for where, keys in roots.items() if where != root for key in keys if key.endswith(f".{STEP_KEY}")}
    used = {*states, *roots[root], *counters, *options}
    step = int(max([_number(folder, key) for key in counters] or [*steps.values(), 0]))
    left_out = sorted((folder.tensors.keys() | folder.values.keys()) - used)
    return ForeignState("dcp", weights, optimizer, steps, step, groups, left_out)


def _model_root(path: Path, roots: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Returns the path below which the weights are."""
    named = [root for root in roots if root and root[-1] in ("model", "module")]
    if len(named) == 1:
        return named[0]
    if () in roots:
        return ()
    if len(roots) == 1:
        return roots[0]
    shown = ", ".join(sorted(".".join(root) for root in roots)[:5]) or "-"
    raise InputError(
        Message("{path} holds tensors below {shown}: which are the weights is unclear; save them under the key 'model'",
            path=path, shown=shown)
    )  # fmt: skip


def _param_groups(folder: DcpFolder) -> tuple[list[dict[str, Any]], set[str]]:
    """Returns the parameter groups (options, and the names under 'params'), and the keys in which they are stored:
    OPTIMIZER.param_groups.INDEX.OPTION, or OPTIMIZER.param_groups.PARAMETER.OPTION as torchtitan flattens them."""
    nested: dict[str, dict[str, Any]] = {}
    flat: dict[str, dict[str, Any]] = {}
    keys = set()
    for key, path in folder.paths.items():
        words = [*path[:-1], *path[-1].split(".", 1)] if path[-1].startswith("param_groups.") else list(path)
        if "param_groups" not in words[:-1]:
            continue
        keys.add(key)
        tail = words[words.index("param_groups") + 1 :]
        value = folder.read_full(key) if key in folder.tensors else folder.read_item(folder.values[key])
        value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        if len(tail) == 2:
            nested.setdefault(tail[0], {})[tail[1]] = value
        else:
            name, _, option = ".".join(tail).rpartition(".")
            flat.setdefault(name, {})[option] = value
    groups = [nested[at] for at in sorted(nested, key=lambda at: (len(at), at))]
    for name, options in flat.items():
        same = next((one for one in groups if {k: v for k, v in one.items() if k != "params"} == options), None)
        if same is None:
            groups.append(same := {**options, "params": []})
        same["params"].append(WRAPPERS.sub("", name))
    return [group for group in groups if isinstance(group.get("params"), list)], keys


def _number(folder: DcpFolder, key: str) -> float:
    """Returns the number of steps that is stored as `key`, in a tensor of one element or as a number."""
    found = folder.read_full(key) if key in folder.tensors else folder.read_item(folder.values[key])
    number = found.item() if isinstance(found, torch.Tensor) and found.numel() == 1 else found
    if isinstance(number, int | float) and 0 <= number < 2**62:
        return number
    raise InputError(
        Message("{path}: {key} must be a number of steps, but it is {value}",
            path=folder.path, key=key, value=str(found)[:80])
    )  # fmt: skip


def _optimizer_states(
    folder: DcpFolder, states: Mapping[str, _StateName], weights: Mapping[str, ForeignTensor]
) -> tuple[dict[str, dict[str, ForeignTensor]], dict[str, float]]:
    """Returns the elementwise optimizer states by kind and parameter, and the number of updates of each parameter."""
    optimizer: dict[str, dict[str, ForeignTensor]] = {}
    steps: dict[str, float] = {}
    for key, (parameter, kind) in sorted(states.items()):
        if parameter not in weights:
            raise InputError(
                Message(
                    "{path}: the optimizer state {key} belongs to no weight of the checkpoint; name states by "
                    "parameters, as torch.distributed.checkpoint.state_dict.get_state_dict does",
                    path=folder.path, key=key,
                )
            )  # fmt: skip
        tensor = folder.tensors.get(key)
        if kind == STEP_KEY:
            steps[parameter] = _number(folder, key)
        elif tensor is not None and tensor.shape == weights[parameter].shape:
            optimizer.setdefault(kind, {})[parameter] = folder.foreign_tensor(key)
        elif tensor is not None:
            raise InputError(
                Message(
                    "{path}: optimizer state {key} has shape {shape}, its weight {other}: only elementwise states are "
                    "read",
                    path=folder.path, key=key, shape=list(tensor.shape), other=list(weights[parameter].shape),
                )
            )  # fmt: skip
    return optimizer, steps
