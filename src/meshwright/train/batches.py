"""What `step` is given, checked before a collective begins: one line that names the value, the place and what to give instead."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from meshwright.base.errors import InputError, did_you_mean
from meshwright.parallel.engine import Parallel
from meshwright.parallel.exchange.exchange import all_reduce
from meshwright.parallel.objective import Batch, Objective

SEQUENCES = (list, tuple)


def check_batch(batch: Batch, objective: Objective, pieces: int) -> None:
    """Raises InputError where `batch` has no rows, holds values that cannot be divided into `pieces`, or names that forward does not take."""
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.ndim and not len(value):
            raise InputError(f"the batch is empty: {name!r} has shape {tuple(value.shape)}; give at least one row")
        is_array = type(value).__module__ == "numpy" and hasattr(value, "__len__")
        if pieces > 1 and (is_array or (isinstance(value, SEQUENCES) and value)):
            raise InputError(
                f"the batch's {name!r} is a {type(value).__name__}, which is not divided into the {pieces} parts that this plan makes of a batch: "
                "give a tensor with rows first"
            )
    names = batch.keys() if objective.loss is not None else batch.keys() - {"labels"}
    check_names(objective.model, names, "the batch")


def check_kind(batch: Any) -> Batch:
    """`batch` itself. Raises InputError where it is no dict."""
    if not isinstance(batch, dict):
        raise InputError(f"a batch is a dict of tensors by the names that forward takes, but a {type(batch).__name__} was given")
    return batch


def check_example(model: nn.Module, example: Any) -> None:
    """Raises InputError where an `example` is given that is no batch, or has names that forward does not take."""
    if example is None:
        return
    if not isinstance(example, Mapping) or not example:
        kind = "empty" if isinstance(example, Mapping) else f"a {type(example).__name__}"
        raise InputError(f"the example is {kind}: give a batch of a few rows, as step takes it")
    check_names(model, example.keys() - {"labels"}, "the example")


def check_names(model: nn.Module, names: Any, what: str) -> None:
    """Raises InputError where `names`, those of `what` is given, are none that the model's forward takes."""
    asked = inspect.signature(model.forward).parameters
    if any(each.kind is each.VAR_KEYWORD for each in asked.values()) or "" in names:
        return
    unknown = sorted(set(names) - asked.keys())
    if unknown:
        raise InputError(
            f"{what} has {unknown[0]!r}, which {type(model).__name__}.forward does not take (it takes {', '.join(asked)})"
            f"{did_you_mean(unknown[0], asked)}: leave it out, or give forward a parameter of that name"
        )


def on_device(batch: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
    """`batch` on `device`, floating-point tensors as `dtype`."""

    def move(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None, non_blocking=True)

    return type(batch)({name: move(value) for name, value in batch.items()})


def labels_here(engine: Parallel, batches: list[Batch]) -> int:
    """Valid labels that this rank's replica reads of a batch, where replicas go their own ways. All ranks call it."""
    outer, mesh = engine.outer, engine.mesh
    assert outer is not None
    mine = torch.tensor(float(sum(map(engine.objective.count, batches))), dtype=torch.float64, device=mesh.device)
    everyone = outer.apart(mine)
    all_reduce(everyone, mesh.world).wait()
    return round(float(everyone[outer.replica]) / (mesh.plan.pp * mesh.plan.tp * mesh.plan.cp))
