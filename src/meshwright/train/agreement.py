"""Ranks that disagree are refused in one line by all of them, before one waits for ever for a message that nobody sends.

Before the mesh is made all ranks hold their plans, precisions and models against those of rank 0. At every step that is given the whole batch they do so
with its names, types, shapes and numbers: ranks that each read their own part, as under DDP, or shuffle it by generators of their own, would train on other
rows than one device. Numbers count by their places; of more than SOME so many are looked at. What a `Share` holds must be alike on the ranks of a replica, and is looked at once: the loader of a job makes it.
One small gather of two numbers a rank; what differs is asked for only when something does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from meshwright.base.errors import InputError
from meshwright.parallel.exchange import exchange
from meshwright.parallel.exchange.calls import gather_objects
from meshwright.parallel.later import later_of
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.objective import Batch
from meshwright.spec.plan import Plan

LOOKED_AT = 8
"""Parameters whose first and last numbers are compared."""

SOME = 1 << 16
"""Numbers of each tensor of a batch that are compared at every step."""

NEAR = 1e-3
"""Relative: devices of other kinds draw the same numbers up to rounding."""


def agree_on_model(model: nn.Module, plan: Plan, precision: str) -> None:
    """InputError where ranks were given other plans, precisions, models or weights. Every rank calls it."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    shapes = [(name, tuple(tensor.shape), tensor.requires_grad) for name, tensor in model.named_parameters()]
    mine = (plan.name, plan.digest, precision, len(shapes), _digest(shapes), _numbers(model))
    found = gather_objects(mine)
    first = found[0]
    for rank, other in enumerate(found):
        if other[:2] != first[:2]:
            details = f"{first[0]} and {other[0]}" if first[0] != other[0] else f"two of the name {first[0]}"
            raise InputError(f"ranks disagree on the plan: ranks 0 and {rank} were given {details}; give every rank the same")
        if other[2] != first[2]:
            raise InputError(f"ranks disagree on the precision: {first[2]} on rank 0, {other[2]} on rank {rank}; give every rank the same")
        if other[3:5] != first[3:5]:
            raise InputError(
                f"ranks disagree on the model: {first[3]} parameters on rank 0, {other[3]} on rank {rank}, or of other names and shapes; "
                "build the same model on every rank"
            )
        if not _near(other[5], first[5]):
            raise InputError(
                f"ranks disagree on the weights: those of rank {rank} are others than those of rank 0; "
                "call torch.manual_seed with one number on every rank before the model is built, or load the same weights"
            )


def agree_on_batch(batches: Sequence[Batch], mesh: Mesh, *, whole: bool) -> None:
    """InputError where ranks that should read the same were given something else. Every rank calls it."""
    group = mesh.world
    if group is None:
        return
    signature = [[(name, *_seen(value)) for name, value in sorted(batch.items())] for batch in batches]
    values = [_by_place(value) for batch in batches for _, value in sorted(batch.items()) if _counts(value)]
    mine = torch.tensor([_digest(signature), _digest(values)], dtype=torch.int64, device=mesh.device)
    table = torch.empty(group.size, 2, dtype=torch.int64, device=mesh.device)
    exchange.all_gather(table.view(-1), mine, group).wait()
    found = table.tolist()
    first_of = [0 if whole else _first(mesh, rank) for rank in range(group.size)]
    if all(found[rank] == found[first] for rank, first in enumerate(first_of)):
        return
    said = gather_objects(signature)
    rank, first = next((rank, first) for rank, first in enumerate(first_of) if found[rank] != found[first])
    readers = (
        "every rank gives the whole batch, of which it takes its part; or give a Share of what its replica reads"
        if whole
        else "ranks of one replica read the same"
    )
    if said[rank] == said[first]:
        raise InputError(f"ranks disagree on the batch: rank {rank} was given other numbers than rank {first}; {readers}")
    one, other = next(((a, b) for a, b in zip(said[first], said[rank], strict=False) if a != b), (said[first], said[rank]))
    raise InputError(f"ranks disagree on the batch: rank {first} was given {_words(one)}, rank {rank} {_words(other)}; {readers}")


def _first(mesh: Mesh, rank: int) -> int:
    """The first rank of the replica of `rank`."""
    replica = mesh.grid.replica(rank)
    return next(other for other in range(rank + 1) if mesh.grid.replica(other) == replica)


def _seen(value: Any) -> tuple[Any, ...]:
    return (tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else (type(value).__name__,)


def _counts(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_complex() and value.layout == torch.strided


def _by_place(value: torch.Tensor) -> float:
    """A number of the values and their order.

    >>> _by_place(torch.tensor([1, 2])), _by_place(torch.tensor([2, 1]))
    (5.0, 4.0)
    """
    flat = value.detach().reshape(-1)
    some = flat[:: max(1, -(-flat.numel() // SOME))].double()
    return float(some @ torch.arange(1, len(some) + 1, dtype=torch.float64, device=some.device))


def _words(batch: Any) -> str:
    """
    >>> _words([("input_ids", (8, 16), "torch.int64"), ("name", "str")])
    'input_ids [8, 16], name'
    """
    if batch and isinstance(batch[0], list):
        return f"{len(batch)} micro-batch{'es' if len(batch) > 1 else ''}"
    return ", ".join(f"{name} {list(shape[0])}" if isinstance(shape[0], tuple) else name for name, *shape in batch) or "nothing"


def _digest(what: Any) -> int:
    return xxhash.xxh3_64_intdigest(repr(what).encode()) >> 1


def _numbers(model: nn.Module) -> list[float]:
    there = [tensor.detach() for tensor in model.parameters() if not tensor.is_meta and tensor.numel() and not tensor.is_complex()]
    looked = [float(tensor.reshape(-1)[at]) for tensor in there[:: max(1, len(there) // LOOKED_AT)] for at in (0, -1)]
    return [*looked, later_of(model).number]


def _near(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=NEAR) or (math.isnan(a) and math.isnan(b)) for a, b in zip(one, other, strict=True)
    )
