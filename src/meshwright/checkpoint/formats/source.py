"""Presents a checkpoint of another system as a source that `load_checkpoint` can load under any plan.

A reader of a form (dcp.py, deepspeed.py) describes each tensor as ranges of the flattened full tensor, and each range
has a function that reads it. `ForeignCheckpoint` makes the manifest of these ranges. So loading, resharding and the
conversion to Meshwright's own form (`convert_checkpoint`) use the same code for every form.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.checkpoint.formats.inert_pickle import refuse_damaged
from meshwright.checkpoint.hf_weights import WEIGHT_PREFIX
from meshwright.checkpoint.load import read_full_tensor
from meshwright.checkpoint.manifest import CheckpointManifest, SavedShard, TensorEntry, first_contradiction
from meshwright.checkpoint.safetensors_writer import DTYPE_BY_NAME, dtype_name
from meshwright.checkpoint.save import SaveFailed, save_checkpoint
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.spec.layout import ShardMetadata
from meshwright.spec.record import RunState

OPTIMIZER_PREFIX = "optimizer/"
STEP_KEY = "step"
MAX_LEFT_OUT = 8
"""Number of entries that are not carried over of which a checkpoint records the names."""


class StoredRange(NamedTuple):
    """The elements [start, stop) of a flattened full tensor. `read` returns them, in any shape."""

    start: int
    stop: int
    read: Callable[[], torch.Tensor]


class ForeignTensor(NamedTuple):
    """A tensor of a foreign checkpoint: the shape and the dtype of the full tensor, and the ranges that cover it."""

    shape: tuple[int, ...]
    dtype: str
    ranges: tuple[StoredRange, ...]


class ForeignState(NamedTuple):
    """The content of a foreign checkpoint.

    `weights` and `optimizer` contain the tensors by parameter name; the latter for each kind of state, such as
    'exp_avg'. `steps` has the number of updates of each parameter that has optimizer states. `step` is the number of
    completed training steps. `groups` are the optimizer's parameter groups: options, and parameter names under
    'params'. `left_out` are the entries that are not carried over.
    """

    form: str
    weights: Mapping[str, ForeignTensor]
    optimizer: Mapping[str, Mapping[str, ForeignTensor]]
    steps: Mapping[str, float]
    step: int
    groups: Sequence[Mapping[str, Any]] = ()
    left_out: Sequence[str] = ()


class ForeignCheckpoint:
    """A checkpoint of another system, with the interface of `load.CheckpointSource`.

    Raises:
        InputError: the ranges of a tensor do not cover it, or its dtype is not supported.
    """

    def __init__(self, path: Path, state: ForeignState) -> None:
        self.path, self.form, self.left_out = path, state.form, tuple(state.left_out)
        self.tensors = {WEIGHT_PREFIX + name: tensor for name, tensor in state.weights.items()}
        for kind, tensors in state.optimizer.items():
            self.tensors |= {f"{OPTIMIZER_PREFIX}{kind}/{name}": tensor for name, tensor in tensors.items()}
        if not state.weights:
            raise InputError(Message("{path} holds no weights of a model", path=path))
        try:
            entries = {name: _entry(tensor) for name, tensor in self.tensors.items()}
            problem = first_contradiction(entries)
        except ValueError as error:
            refuse_damaged(path, error)
        if problem:
            raise InputError(Message("{path}: {problem}", path=path, problem=problem))
        try:
            self.manifest = CheckpointManifest(
                version=1, step=state.step, serial=0, id="0" * 8, world=1, plan="", plan_digest="", files={},
                tensors=entries, state=_trainer_state(path, state),
            )  # fmt: skip
        except ValueError as error:
            refuse_damaged(path, error)

    @property
    def weight_count(self) -> int:
        """Returns the number of weights."""
        return sum(name.startswith(WEIGHT_PREFIX) for name in self.tensors)

    def read(self, name: str, part: SavedShard, out: torch.Tensor | None = None) -> torch.Tensor:
        """Returns the elements of the shard `part` of tensor `name` as a flat tensor, written to `out` if given.

        Raises:
            InputError: the stored tensor has another number of elements or another dtype than its description.
        """
        tensor = self.tensors[name]
        data = tensor.ranges[int(part.key)].read().detach().reshape(-1)
        if data.numel() != part.stop - part.start or dtype_name(data.dtype) != tensor.dtype:
            raise InputError(
                Message(
                    "{path}: {name} is described as {count} elements of {dtype}, but {found} elements of {other} are "
                    "stored: files of different checkpoints are mixed",
                    path=self.path,
                    name=name,
                    count=part.stop - part.start,
                    dtype=tensor.dtype,
                    found=data.numel(),
                    other=dtype_name(data.dtype),
                )
            )
        return data if out is None else out.copy_(data)


def _entry(tensor: ForeignTensor) -> TensorEntry:
    pieces = tuple(
        SavedShard(intervals=(), start=one.start, stop=one.stop, file="", key=str(at), offset=0, xxh3="0" * 16)
        for at, one in enumerate(tensor.ranges)
    )
    return TensorEntry(shape=tensor.shape, dtype=tensor.dtype, split=None, pieces=pieces)


def _trainer_state(path: Path, state: ForeignState) -> dict[str, Any]:
    """Returns the JSON state of a trainer with the step and the optimizer scalars of `state`."""
    kinds = {kind: next(iter(tensors.values())).dtype for kind, tensors in state.optimizer.items() if tensors}
    usual = Counter(state.steps.values()).most_common(1)
    scalars = {STEP_KEY: float(usual[0][0])} if usual else {}
    others = {name: {STEP_KEY: step} for name, step in state.steps.items() if step != usual[0][0]}
    return {
        "imported": {
            "path": str(path),
            "form": state.form,
            "left_out": list(state.left_out[:MAX_LEFT_OUT]),
            "left_out_count": len(state.left_out),
        },
        "run": RunState(step=state.step).model_dump(),
        "optimizer": {
            "kinds": kinds,
            "scalars": scalars,
            "groups": [{key: one for key, one in group.items() if _is_option(key, one)} for group in state.groups],
            "members": {str(name): at for at, group in enumerate(state.groups) for name in group["params"]},
            **({"skipped": others} if others else {}),
        },
        "extra": {},
        "modules": {},
    }


def _is_option(key: str, value: Any) -> bool:
    """Returns whether an entry of a parameter group is an option that JSON can represent."""
    parts = value if isinstance(value, list | tuple) else [value]
    plain = all(part is None or isinstance(part, bool | int | str) or _is_finite(part) for part in parts)
    return key != "params" and plain


def _is_finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


def full_range(shape: Sequence[int], read: Callable[[], torch.Tensor]) -> tuple[StoredRange, ...]:
    """Returns the single range of a tensor that is read as a whole."""
    return (StoredRange(0, math.prod(shape), read),)


def check_dtype(path: Path, name: str, dtype: str) -> str:
    """Returns `dtype`. Raises InputError if checkpoints cannot contain tensors of this dtype."""
    if dtype not in DTYPE_BY_NAME:
        raise InputError(
            Message(
                "{path}: {name} has dtype {dtype!r}; supported are {names}",
                path=path,
                name=name,
                dtype=dtype[:40],
                names=", ".join(DTYPE_BY_NAME),
            )
        )
    return dtype


def convert_checkpoint(source: ForeignCheckpoint, folder: Path) -> Path:
    """Writes `source` as a checkpoint of Meshwright into `folder` and returns its path. One tensor is in memory at a
    time.

    Raises:
        InputError: a tensor cannot be read.
        SaveFailed: the checkpoint cannot be written.
    """
    pieces = [
        (
            ShardMetadata(name, entry.shape, entry.dtype, None, (), 0, entry.numel),
            partial(source.read, name, entry.pieces[0])
            if len(entry.pieces) == 1
            else partial(read_full_tensor, source, name),
        )
        for name, entry in source.manifest.tensors.items()
    ]
    try:
        return save_checkpoint(folder, source.manifest.step, pieces, source.manifest.state)
    except SaveFailed as error:
        raise error.__cause__ if isinstance(error.__cause__, InputError) else error from None
