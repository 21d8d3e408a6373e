"""Describes the content of a checkpoint of Meshwright as a state dict of torch: weights, optimizer states and parameter
groups by parameter name. The writers of other forms (dcp.py, deepspeed.py) use it.

A tensor is described by its shape and dtype and is read when it is written, so one tensor is in memory at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshwright.checkpoint.formats.source import OPTIMIZER_PREFIX
from meshwright.checkpoint.hf_weights import BUFFER_PREFIX, WEIGHT_PREFIX
from meshwright.checkpoint.load import read_full_tensor
from meshwright.checkpoint.verify import CheckpointReader
from meshwright.core.errors import InputError
from meshwright.core.messages import Message


class LazyTensor(NamedTuple):
    """A full tensor that `read` reads."""

    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]

    @property
    def numel(self) -> int:
        """Returns the number of elements."""
        return math.prod(self.shape)


class TorchState(NamedTuple):
    """The content of a checkpoint.

    `weights` also contains the buffers and every name of shared tensors. `states` has the elementwise optimizer states
    by parameter and kind, `scalars` the scalar states by parameter, and `groups` the parameter groups: options, and
    parameter names under 'params'. `buffers` are the names of those weights that are buffers, `config` is the
    config.json of the model if it is known, and `samples` the number of sequences that the run has read.
    """

    step: int
    weights: Mapping[str, LazyTensor]
    states: Mapping[str, Mapping[str, LazyTensor]]
    scalars: Mapping[str, Mapping[str, float]]
    groups: list[dict[str, Any]]
    buffers: frozenset[str] = frozenset()
    config: Mapping[str, Any] | None = None
    samples: int = 0


def read_torch_state(path: Path, weights_only: bool = False) -> TorchState:
    """Returns the content of the checkpoint of Meshwright at `path`.

    Raises:
        InputError: the checkpoint is damaged, has no weights, or has optimizer states that are not elementwise.
    """
    reader = CheckpointReader(path)
    weights: dict[str, LazyTensor] = {}
    states: dict[str, dict[str, LazyTensor]] = {}
    for name, entry in reader.manifest.tensors.items():
        lazy = LazyTensor(entry.shape, entry.dtype, partial(read_full_tensor, reader, name))
        if name.startswith((WEIGHT_PREFIX, BUFFER_PREFIX)):
            weights[name.partition("/")[2]] = lazy
        elif name.startswith(OPTIMIZER_PREFIX) and not weights_only:
            kind, _, parameter = name.removeprefix(OPTIMIZER_PREFIX).partition("/")
            states.setdefault(parameter, {})[kind] = lazy
    if not weights:
        raise InputError(Message("checkpoint {path!r} has no model weights", path=str(path)))
    state = reader.manifest.state
    weights |= {name: weights[one] for name, one in state.get("shared", {}).items() if one in weights}
    optimizer = state.get("optimizer", {})
    _check_elementwise(path, optimizer, states, weights)
    members = _group_members(optimizer, states, weights)
    by_group = optimizer.get("by_group", {})
    scalars = {
        name: optimizer.get("skipped", {}).get(name)
        or by_group.get(str((members or {}).get(name, 0)))
        or optimizer.get("scalars", {})
        for name in states
    }
    buffers = frozenset(
        name.removeprefix(BUFFER_PREFIX) for name in reader.manifest.tensors if name.startswith(BUFFER_PREFIX)
    )
    groups = _param_groups(path, optimizer, states, members)
    samples = int(state.get("run", {}).get("samples", 0))
    return TorchState(reader.manifest.step, weights, states, scalars, groups, buffers, samples=samples)


def save_durably(file: Path, content: Any) -> None:
    """Writes a file of `torch.save`, and waits until it is durable."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("wb") as stream:
        torch.save(content, stream)
        stream.flush()
        os.fsync(stream.fileno())


def _check_elementwise(
    path: Path, optimizer: Mapping[str, Any], states: Mapping[str, Any], weights: Mapping[str, LazyTensor]
) -> None:
    for name, kinds in states.items():
        for kind, lazy in kinds.items():
            if optimizer.get("states") or name not in weights or lazy.shape != weights[name].shape:
                raise InputError(
                    Message(
                        "{path}: the optimizer state {kind} of {name} is not elementwise, so other systems cannot read "
                        "it; export the weights alone with --weights-only",
                        path=path,
                        kind=kind,
                        name=name,
                    )
                )


def _group_members(
    optimizer: Mapping[str, Any], states: Mapping[str, Any], weights: Mapping[str, LazyTensor]
) -> Mapping[str, int] | None:
    """Returns the parameter group of each parameter by name, None if the checkpoint does not record it."""
    if optimizer.get("by_ndim"):
        return {name: 0 if len(weights[name].shape) > 1 else 1 for name in states if name in weights}
    members: Mapping[str, int] | None = optimizer.get("members")
    return members


def _param_groups(
    path: Path, optimizer: Mapping[str, Any], states: Mapping[str, Any], members: Mapping[str, int] | None
) -> list[dict[str, Any]]:
    """Returns the parameter groups with the names of their parameters."""
    if not states:
        return []
    options = optimizer.get("groups") or [{}]
    if len(options) > 1 and members is None:
        raise InputError(
            Message(
                "{path} does not record which parameters are in its {count} optimizer groups; export the weights alone "
                "with --weights-only",
                path=path,
                count=len(options),
            )
        )
    groups: list[dict[str, Any]] = [{**one, "params": []} for one in options]
    for name in states:
        groups[members.get(name, 0) if members else 0]["params"].append(name)
    return groups
