"""Recognises the form of a checkpoint by its files and opens it. The trainer and `meshwright checkpoint` use this file.

| form | recognised by |
|---|---|
| Meshwright | `manifest.json` |
| torch DCP, also Megatron's torch_dist | `.metadata`; accelerate: `pytorch_model_fsdp_0/.metadata` |
| DeepSpeed, ZeRO or universal | `*_model_states.pt`, or a file `latest` that names such a folder |
| Hugging Face | `*.safetensors` |
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch

from meshwright.checkpoint.formats.dcp import METADATA_FILE, DcpFolder, read_dcp
from meshwright.checkpoint.formats.deepspeed import deepspeed_folder, read_deepspeed
from meshwright.checkpoint.formats.inert_pickle import READ_ERRORS, refuse_damaged
from meshwright.checkpoint.formats.megatron import is_megatron, megatron_folder, read_megatron
from meshwright.checkpoint.formats.source import (
    ForeignCheckpoint,
    ForeignState,
    ForeignTensor,
    check_dtype,
    convert_checkpoint,
    full_range,
)
from meshwright.checkpoint.hf_weights import HfWeights, weight_files
from meshwright.checkpoint.manifest import MANIFEST_FILE, parse_step, step_folder_name
from meshwright.checkpoint.retention import list_checkpoints
from meshwright.checkpoint.safetensors_writer import NAME_BY_SAFETENSORS_DTYPE, SHARD_NAME_PATTERN
from meshwright.checkpoint.verify import CheckpointReader
from meshwright.core import storage
from meshwright.core.errors import InputError
from meshwright.core.messages import Message

ACCELERATE_FOLDERS = ("pytorch_model_fsdp_0", "optimizer_0")
"""The DCP folders of the weights and of the optimizer states in a checkpoint of accelerate. Source:
huggingface/accelerate 1.15.0, utils/fsdp_utils.py."""


def open_checkpoint(path: Path) -> CheckpointReader | ForeignCheckpoint:
    """Opens the checkpoint at `path`, of Meshwright or of another system. If `path` is a run folder or a folder of
    checkpoints, opens the newest.

    Raises:
        InputError: there is no checkpoint at `path`, or it is damaged or unsafe.
    """
    state = read_foreign(path)
    if state is not None:
        return ForeignCheckpoint(path, state)
    if parse_step(path) is None and path.is_dir() and not (path / MANIFEST_FILE).exists():
        found = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
        path = found[0] if found else _refuse_unknown(path)
    return CheckpointReader(path)


def _refuse_unknown(path: Path) -> NoReturn:
    raise InputError(
        Message(
            "{path!r} holds no checkpoint: manifest.json (Meshwright), .metadata (torch DCP, Megatron), latest or "
            "*_model_states.pt (DeepSpeed) and *.safetensors are missing",
            path=str(path),
        )
    )


def read_foreign(path: Path, weights_only: bool = False) -> ForeignState | None:
    """Returns the content of the checkpoint of another system at `path`, None for any other path.

    `weights_only`: whether to leave out the optimizer states. The step is then 0.

    Raises:
        InputError: the checkpoint is damaged or unsafe.
    """
    if (path / MANIFEST_FILE).exists():
        return None
    path = megatron_folder(path)
    try:
        state = _read_folder(path, weights_only)
    except InputError:
        raise
    except READ_ERRORS as error:  # an entry is missing or of another type
        refuse_damaged(path, ValueError(f"{type(error).__name__} {error}"))
    if state is not None:
        return state._replace(optimizer={}, steps={}, step=0, groups=()) if weights_only else state
    if path.is_file() or any(not SHARD_NAME_PATTERN.fullmatch(file.name) for file in path.glob("*.safetensors")):
        return _read_safetensors(path)
    return None


def _read_folder(path: Path, weights_only: bool) -> ForeignState | None:
    if (path / METADATA_FILE).is_file() or (path / ACCELERATE_FOLDERS[0] / METADATA_FILE).is_file():
        first, *others = [path / name for name in ("", *ACCELERATE_FOLDERS) if (path / name / METADATA_FILE).is_file()]
        stored = DcpFolder(first)
        for other in others:
            stored.add(DcpFolder(other))
        return read_megatron(stored, weights_only) if is_megatron(stored) else read_dcp(stored, weights_only)
    folder = deepspeed_folder(path)
    return None if folder is None else read_deepspeed(folder, weights_only)


def import_checkpoint(path: Path, folder: Path, weights_only: bool = False) -> tuple[Path, ForeignCheckpoint]:
    """Converts the checkpoint of another system at `path` to one of Meshwright in `folder`. Returns the path of the
    new checkpoint and the source.

    Raises:
        InputError: there is no checkpoint at `path`, it is damaged or unsafe, or `folder` has this step already.
    """
    state = read_foreign(path, weights_only)
    if state is None:
        if (path / MANIFEST_FILE).exists():
            raise InputError(Message("{path!r} is a checkpoint of Meshwright already", path=str(path)))
        if not path.is_dir() or any(path.glob("*.bin")):
            weight_files(path)  # states what is wrong with these weights
        _refuse_unknown(path)
    source = ForeignCheckpoint(path, state)
    target = folder / step_folder_name(source.manifest.step)
    if storage.path_exists(target):
        raise InputError(Message("{target!r} already exists; name another folder", target=str(target)))
    return convert_checkpoint(source, folder), source


def _read_safetensors(path: Path) -> ForeignState:
    weights = HfWeights(path)

    def read(name: str) -> torch.Tensor:
        found: Any = weights.read_full(name)
        return found

    tensors = {
        name: ForeignTensor(
            stored.shape,
            check_dtype(path, name, NAME_BY_SAFETENSORS_DTYPE.get(stored.dtype, stored.dtype)),
            full_range(stored.shape, partial(read, name)),
        )
        for name, stored in weights.entries.items()
    }
    return ForeignState("safetensors", tensors, {}, {}, 0)
