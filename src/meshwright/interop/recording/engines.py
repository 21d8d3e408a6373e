"""Describes the engine of a recorded loop: its parameters, its replicas, and how its optimizer names parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from meshwright.interop.recording.layout import LocalPart, ShardedBy, clean, parts_of, unwrap
from meshwright.interop.recording.layout_deepspeed import describe_deepspeed, is_deepspeed

OptimizerNames = Callable[[torch.optim.Optimizer], "list[list[str]] | None"]
"""Returns the parameter names of each group of an optimizer, None if it has no parameter of the model."""


class EngineFacts(NamedTuple):
    """`replica` identifies the data-parallel replica of this rank, '' if it is unknown. `clip` is the largest norm if
    the engine itself clips gradients."""

    name: str
    parts: list[LocalPart]
    replica: str
    peers: tuple[int, ...]
    optimizer_names: OptimizerNames
    clip: float | None
    versions: dict[str, str]


def describe_engine(models: list[nn.Module], by: ShardedBy | None) -> EngineFacts:
    """Describes the engine that wraps `models`, the stages of this rank."""
    model = models[0]
    if is_deepspeed(model):
        return EngineFacts(**describe_deepspeed(model))
    name, replica, first = "plain modules", "", True
    flat = next((module for module in model.modules() if getattr(module, "_handle", None) is not None), None)
    if isinstance(model, DistributedDataParallel):
        name, replica = "DDP", str(dist.get_rank(model.process_group))
        first = replica == "0"
    elif flat is not None:
        name, replica = "FSDP1", str(dist.get_rank(flat.process_group))  # type: ignore[arg-type]
    elif (mesh := _fsdp2_mesh(models)) is not None:
        name, replica = "FSDP2", str(tuple(mesh.get_coordinate() or ()))
    elif any(isinstance(parameter, DTensor) for each in models for parameter in each.parameters()):
        name = "DTensor"
    parts = [part for each in models for part in parts_of(unwrap(each) if flat is None else each, by, first)]
    peers = by.peers if by is not None else _tensor_peers(models)
    ids = _names_by_id(models)

    def names(optimizer: torch.optim.Optimizer) -> list[list[str]] | None:
        found = [[name for p in group["params"] for name in ids.get(id(p), ())] for group in optimizer.param_groups]
        return found if any(found) else None

    return EngineFacts(name, parts, replica, peers, names, None, {})


def _names_by_id(models: list[nn.Module]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for model in models:
        inner = unwrap(model)
        for name, parameter in inner.named_parameters():
            found.setdefault(id(parameter), []).append(clean(name))
        for path, module in model.named_modules():
            flat = getattr(getattr(module, "_handle", None), "flat_param", None)
            if flat is not None:
                path = path.removeprefix("_fsdp_wrapped_module").removeprefix(".")
                found[id(flat)] = [clean(f"{path}.{fqn}" if path else fqn) for fqn in flat._fqns]
    return found


def _fsdp2_mesh(models: list[nn.Module]) -> Any:
    """Returns the data-parallel mesh of FSDP2, None if the model does not use it."""
    for model in models:
        for module in model.modules():
            state = getattr(module, "_get_fsdp_state", None)
            group = state()._fsdp_param_group if callable(state) else None
            if group is not None:
                return group.mesh_info.mesh
    return None


def _tensor_peers(models: list[nn.Module]) -> tuple[int, ...]:
    """Returns the ranks of the tensor-parallel dimension of a DTensor mesh, () if there is none."""
    for model in models:
        for parameter in model.parameters():
            if isinstance(parameter, DTensor) and "tp" in (names := parameter.device_mesh.mesh_dim_names or ()):
                return tuple(dist.get_process_group_ranks(parameter.device_mesh.get_group(names.index("tp"))))
    return ()
