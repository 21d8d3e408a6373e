"""Finds the parameters and gradients of a DeepSpeed engine, without the collectives of its own accessors.

The attributes are those of DeepSpeed 0.16 to 0.19, deepspeed/runtime/zero/stage_1_and_2.py and stage3.py. ZeRO 1 and 2
divide the flattened parameters of a group over the ranks. ZeRO 3 divides each flattened parameter over the ranks.
Before the optimizer steps, the gradients of a rank's part are in `.grad` of its float32 partition, unscaled and
clipped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.interop.recording.layout import LocalPart, clean
from meshwright.interop.recording.trace_format import TensorRegion


def is_deepspeed(model: nn.Module) -> bool:
    """Returns whether `model` is a DeepSpeed engine."""
    return type(model).__name__ == "DeepSpeedEngine"


def describe_deepspeed(engine: Any) -> dict[str, Any]:
    """Returns the fields of EngineFacts for a DeepSpeed engine."""
    stage, optimizer = int(engine.zero_optimization_stage()), engine.optimizer
    named = {id(parameter): clean(name) for name, parameter in engine.module.named_parameters()}
    rank = dist.get_rank(engine.data_parallel_group)
    groups = _groups(optimizer, stage)
    parts = [
        *_weights(engine.module, stage, rank),
        *(part for at, group in enumerate(groups) for part in _gradients(optimizer, stage, at, group, named)),
    ]

    def names(inner: torch.optim.Optimizer) -> list[list[str]] | None:
        if stage:
            return [[named[id(parameter)] for parameter in group] for group in groups]
        found = [[named[id(p)] for p in group["params"] if id(p) in named] for group in inner.param_groups]
        return found if any(found) else None

    clip = float(engine.gradient_clipping() or 0.0)
    return {
        "name": f"DeepSpeed ZeRO {stage}",
        "parts": parts,
        "replica": str(rank),
        "peers": (),
        "optimizer_names": names,
        "clip": clip or None,
        "versions": {"deepspeed": getattr(sys.modules.get("deepspeed"), "__version__", "")},
    }


def _groups(optimizer: Any, stage: int) -> list[list[Any]]:
    if stage in (1, 2):
        return [list(group) for group in optimizer.round_robin_bit16_groups]
    return [list(group) for group in optimizer.fp16_groups] if stage == 3 else []


def _weights(module: Any, stage: int, rank: int) -> Iterator[LocalPart]:
    for name, parameter in module.named_parameters():
        if stage < 3:
            own = (lambda p: lambda: p.grad)(parameter) if stage == 0 else lambda: None
            yield LocalPart(
                clean(name),
                TensorRegion(shape=tuple(parameter.shape)),
                (lambda p: lambda: p.detach())(parameter),
                own,
                stored=rank == 0,
                trains=parameter.requires_grad,
            )
            continue
        shape, count = tuple(parameter.ds_shape), int(parameter.ds_numel)
        size = int(parameter.ds_tensor.ds_numel)
        start, end = min(rank * size, count), min((rank + 1) * size, count)
        yield LocalPart(
            clean(name),
            TensorRegion(shape=shape, flat=(start, end)),
            (lambda p, n: lambda: p.ds_tensor.detach().reshape(-1)[:n])(parameter, end - start),
            lambda: None,
            trains=parameter.requires_grad,
        )


def _gradients(optimizer: Any, stage: int, at: int, group: list[Any], named: dict[int, str]) -> Iterator[LocalPart]:
    """Yields the pieces of the gradients of a group, which have no weights of their own."""
    if stage == 3:
        flat, first = optimizer.fp32_partitioned_groups_flat[at], 0
        for parameter in group:
            size, count = int(parameter.ds_tensor.ds_numel), int(parameter.ds_numel)
            rank = dist.get_rank(optimizer.dp_process_group)
            start, end = min(rank * size, count), min((rank + 1) * size, count)
            region = TensorRegion(shape=tuple(parameter.ds_shape), flat=(start, end))
            yield _gradient_part(named[id(parameter)], region, flat, first, first + end - start)
            first += size
        return
    flat = optimizer.single_partition_of_fp32_groups[at]
    rank = dist.get_rank(optimizer.real_dp_process_group[at])
    own, first = (rank * flat.numel(), (rank + 1) * flat.numel()), 0
    for parameter in group:
        start, end = max(own[0], first), min(own[1], first + parameter.numel())
        if start < end:
            region = TensorRegion(shape=tuple(parameter.shape), flat=(start - first, end - first))
            yield _gradient_part(named[id(parameter)], region, flat, start - own[0], end - own[0])
        first += parameter.numel()


def _gradient_part(name: str, region: TensorRegion, flat: Any, start: int, end: int) -> LocalPart:
    def gradient() -> torch.Tensor | None:
        return None if flat.grad is None else flat.grad.reshape(-1)[start:end]

    return LocalPart(name, region, lambda: None, gradient, stored=False)
