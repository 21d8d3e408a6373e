"""Checks the inputs of `parallelize` and of a training step, and splits a batch into micro-batches. The trainer uses
it. If the inputs of ranks differ, all ranks raise InputError with a one-line message. Without these checks, such ranks
could run different collectives and wait for each other forever.

Before process groups are made, all ranks compare their plans, precisions and models with those of rank 0. At every step
that gets the global batch, they compare its names, types, shapes and values. This detects ranks that shuffle the data
differently, or that each read only their own rows (as in a script for DDP). A `LocalBatch` must be identical on the
ranks of a replica. It is compared only once, since the loader of a job makes it.

The comparison is a small all-gather of two numbers per rank. One is a digest of names, shapes and types. The other is a
digest of position-weighted sums over at most MAX_COMPARED_ELEMENTS values of each tensor. Details are gathered only
after a mismatch.

The last batch of an epoch may have any number of rows. Rows without valid labels pad it, so that it fills whole
micro-batches of all replicas. Padding rows change no sum and no count of labels. If the user has passed a loss function
(a mean over rows), the batch is not padded. The last micro-batches then have fewer rows, and each micro-batch is
weighted by its number of rows. A micro-batch without rows processes the first row of the batch with weight zero. If
rows interact (batch statistics, a load-balancing loss), such a batch is refused.

Guarantees: loss and gradients equal those of one device on the original rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.utils._pytree import tree_map

from meshwright.analysis.example_inputs import bind_inputs
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.models.model_io import IGNORE_INDEX
from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.async_collectives import all_reduce
from meshwright.runtime.deferred_init import deferred_init_of
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.loss import Batch, LossHead, ZeroWeightBatch, num_rows
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.spec.grid import micro_batch_rows
from meshwright.spec.plan import Plan

COMPARED_PARAMETERS = 8
"""The first and last values of about this number of parameters are compared between ranks."""

MAX_COMPARED_ELEMENTS = 1 << 16
"""At most this number of values of each tensor in a batch is compared at every step."""

WEIGHT_TOLERANCE = 1e-3
"""Weights of two ranks may differ by this fraction: on different types of devices, initial random values are equal only
up to rounding."""


@dataclass
class LocalBatch:
    """The rows of a global batch that this rank's replica reads, as micro-batches in order. `tokens`: the number of
    valid labels in the global batch, or None if it must be counted."""

    micro_batches: list[Batch]
    tokens: int | None = None


def check_model_across_ranks(model: nn.Module, plan: Plan, precision: str) -> None:
    """Raises InputError on all ranks if their plans, precisions, models or weights differ, or if the model has lazy
    layers that have not run. All ranks call it."""
    _check_initialized(model)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    shapes = [(name, tuple(tensor.shape), tensor.requires_grad) for name, tensor in model.named_parameters()]
    mine = (plan.name, plan.digest, precision, len(shapes), _repr_digest(shapes), _weight_samples(model))
    found = gather_objects(mine)
    first = found[0]
    for rank, other in enumerate(found):
        if other[:2] != first[:2]:
            details = (
                f"{first[0]} and {other[0]}"
                if first[0] != other[0]
                else f"different plans with the same name {first[0]}"
            )
            raise InputError(
                Message(
                    "ranks disagree on the plan: ranks 0 and {rank} were given {details}; give every rank the same",
                    rank=rank,
                    details=details,
                )
            )
        if other[2] != first[2]:
            raise InputError(
                Message(
                    "ranks disagree on the precision: {first} on rank 0, {other} on rank {rank}; give every rank the "
                    "same",
                    first=first[2],
                    other=other[2],
                    rank=rank,
                )
            )
        if other[3:5] != first[3:5]:
            raise InputError(
                Message(
                    "ranks disagree on the model: {first} parameters on rank 0, {other} on rank {rank}, or their "
                    "names or shapes differ; build the same model on every rank",
                    first=first[3],
                    other=other[3],
                    rank=rank,
                )
            )
        if not _is_close(other[5], first[5]):
            raise InputError(
                Message(
                    "ranks disagree on the weights: those of rank {rank} differ from those of rank 0; call "
                    "torch.manual_seed with the same number on every rank before the model is built, or load the "
                    "same weights",
                    rank=rank,
                )
            )


def _check_initialized(model: nn.Module) -> None:
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if torch.nn.parameter.is_lazy(tensor):
                raise InputError(
                    Message(
                        "{path} is a {type} whose {name} has no shape yet: run the model once on every rank with the "
                        "same batch before parallelize, or give the layer its input size",
                        path=path,
                        type=type(module).__name__,
                        name=name,
                    )
                )


def check_batch_across_ranks(batches: Sequence[Batch], mesh: ParallelContext, *, whole: bool) -> None:
    """Raises InputError on all ranks if batches differ between ranks that must read equal batches. `whole`: whether
    these are all ranks, since each gets the global batch; otherwise they are the ranks of one replica. All ranks call
    it."""
    group = mesh.world
    if group is None:
        return
    signature = [[(name, *_value_signature(value)) for name, value in sorted(batch.items())] for batch in batches]
    values = [
        _position_checksum(value) for batch in batches for _, value in sorted(batch.items()) if _is_comparable(value)
    ]
    mine = torch.tensor([_repr_digest(signature), _repr_digest(values)], dtype=torch.int64, device=mesh.device)
    table = torch.empty(group.size, 2, dtype=torch.int64, device=mesh.device)
    async_collectives.all_gather(table.view(-1), mine, group).wait()
    found = table.tolist()
    first_of = [0 if whole else _first_rank_of_replica(mesh, rank) for rank in range(group.size)]
    if all(found[rank] == found[first] for rank, first in enumerate(first_of)):
        return
    said = gather_objects(signature)
    rank, first = next((rank, first) for rank, first in enumerate(first_of) if found[rank] != found[first])
    readers = (
        Message(
            "pass the global batch on every rank (each rank uses its own rows; a DataLoader that shuffles needs "
            "generator=torch.Generator().manual_seed(N) with the same N on every rank), or a LocalBatch with the rows "
            "of its replica"
        )
        if whole
        else Message("give all ranks of a replica the same rows")
    )
    if said[rank] == said[first]:
        raise InputError(
            Message(
                "ranks disagree on the batch: rank {rank} was given other values than rank {first}; {readers}",
                rank=rank,
                first=first,
                readers=readers,
            )
        )
    one, other = next(
        ((a, b) for a, b in zip(said[first], said[rank], strict=False) if a != b), (said[first], said[rank])
    )
    raise InputError(
        Message(
            "ranks disagree on the batch: rank {first} was given {batch}, rank {rank} {other_batch}; {readers}",
            first=first,
            batch=_describe_batch(one),
            rank=rank,
            other_batch=_describe_batch(other),
            readers=readers,
        )
    )


def _first_rank_of_replica(mesh: ParallelContext, rank: int) -> int:
    """Returns the lowest rank of the replica to which `rank` belongs."""
    replica = mesh.grid.replica(rank)
    return next(other for other in range(rank + 1) if mesh.grid.replica(other) == replica)


def _value_signature(value: Any) -> tuple[Any, ...]:
    return (tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else (type(value).__name__,)


def _is_comparable(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not value.is_complex() and value.layout == torch.strided


def _position_checksum(value: torch.Tensor) -> float:
    """Returns a checksum that depends on the values and their order.

    >>> _position_checksum(torch.tensor([1, 2])), _position_checksum(torch.tensor([2, 1]))
    (5.0, 4.0)
    """
    flat = value.detach().reshape(-1)
    some = flat[:: max(1, -(-flat.numel() // MAX_COMPARED_ELEMENTS))].double()
    return float(some @ torch.arange(1, len(some) + 1, dtype=torch.float64, device=some.device))


def _describe_batch(batch: Any) -> str:
    """Returns one line that describes the signature of a batch: names, shapes and types.

    >>> _describe_batch([("input_ids", (8, 16), "torch.int64"), ("name", "str")])
    'input_ids [8, 16], name'
    """
    if batch and isinstance(batch[0], list):
        return f"{len(batch)} micro-batch{'es' if len(batch) > 1 else ''}"
    return (
        ", ".join(f"{name} {list(shape[0])}" if isinstance(shape[0], tuple) else name for name, *shape in batch)
        or "nothing"
    )


def _repr_digest(what: Any) -> int:
    return xxhash.xxh3_64_intdigest(repr(what).encode()) >> 1


def _weight_samples(model: nn.Module) -> list[float]:
    there = [
        tensor.detach()
        for tensor in model.parameters()
        if not tensor.is_meta and tensor.numel() and not tensor.is_complex()
    ]
    looked = [
        float(tensor.reshape(-1)[at])
        for tensor in there[:: max(1, len(there) // COMPARED_PARAMETERS)]
        for at in (0, -1)
    ]
    return [*looked, deferred_init_of(model).number]


def _is_close(one: Sequence[float], other: Sequence[float]) -> bool:
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=WEIGHT_TOLERANCE) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(one, other, strict=True)
    )


SEQUENCE_TYPES = (list, tuple)


def check_batch_rows(batch: Batch, pieces: int) -> None:
    """Raises InputError if `batch` has no rows. If `pieces` > 1, it also raises InputError for a list, tuple or NumPy
    array: only tensors can be divided by rows into `pieces` parts."""
    for name, value in batch.items():
        if isinstance(value, torch.Tensor) and value.ndim and not len(value):
            raise InputError(
                Message(
                    "the batch is empty: {name!r} has shape {shape}; give at least one row",
                    name=name,
                    shape=tuple(value.shape),
                )
            )
        is_array = type(value).__module__ == "numpy" and hasattr(value, "__len__")
        if pieces > 1 and (is_array or (isinstance(value, SEQUENCE_TYPES) and value)):
            raise InputError(
                Message(
                    "the batch's {name!r} is a {type}, which cannot be divided into the {pieces} parts of this plan: "
                    "give a tensor whose first dimension is the rows",
                    name=name,
                    type=type(value).__name__,
                    pieces=pieces,
                )
            )


def check_batch_names(batch: Batch, objective: LossHead) -> None:
    """Raises InputError if `batch` has names that the model's forward does not take."""
    own_loss = objective.loss is not None
    if not own_loss or not bind_inputs(objective.model, batch, own_loss):
        names = bind_inputs(objective.model, {name: None for name in batch if own_loss or name != "labels"}).keys()
        check_argument_names(objective.model, names, Message("the batch"))


def check_nested_tensors(batch: Batch, plan: Plan) -> None:
    """Raises InputError if a container in `batch` has a tensor whose first dimension is the rows. Such rows can neither
    be divided into micro-batches nor be repeated by a check.

    It is not called if a step is one forward on one device without recompute, which neither divides nor repeats rows.
    Nested tensors with another first dimension are allowed: they are used for all rows. A batch of one row is not
    checked.
    """
    nested = {name: value for name, value in batch.items() if not isinstance(value, torch.Tensor)}
    for name, value in nested.items():
        if any(len(tensor) == num_rows(batch) > 1 for tensor in _nested_tensors(value) if tensor.ndim):
            raise InputError(
                Message(
                    "the batch's {name!r} is a {type} with tensors, whose rows plan {plan} cannot divide or check: "
                    "put each tensor into the batch under its own name",
                    name=name,
                    type=type(value).__name__,
                    plan=plan.name,
                )
            )


def _nested_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Yields the tensors in `value`: in mappings and sequences at any depth, and among the attributes of an object."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inside in value.values():
            yield from _nested_tensors(inside)
    elif isinstance(value, SEQUENCE_TYPES):
        for inside in value:
            yield from _nested_tensors(inside)
    elif not isinstance(value, type | nn.Module):
        attributes = getattr(value, "__dict__", {}).values()
        yield from (inside for inside in attributes if isinstance(inside, torch.Tensor))


def check_batch_type(batch: Any) -> Batch:
    """Returns `batch` unchanged. Raises InputError if it is not a dict."""
    if not isinstance(batch, dict):
        raise InputError(
            Message(
                "a batch must be a dict of tensors by the argument names of forward, but a {type} was given",
                type=type(batch).__name__,
            )
        )
    return batch


def check_example(model: nn.Module, example: Any, own_loss: bool = False) -> Batch | None:
    """Returns `example` by the parameter names of forward (`bind_inputs`), None for None. Raises InputError if it is
    neither None nor a mapping with entries, or has names (except `labels`) that forward does not take. `own_loss`:
    whether a user-defined loss reads the entries that forward does not take."""
    if example is None:
        return None
    if not isinstance(example, Mapping) or not example:
        kind = "empty" if isinstance(example, Mapping) else f"a {type(example).__name__}"
        raise InputError(Message("the example is {kind}: give a batch of a few rows, as step takes it", kind=kind))
    bound = bind_inputs(model, example, own_loss) or dict(example)
    check_argument_names(model, bound.keys() - {"labels"}, Message("the example"))
    return bound


def check_argument_names(model: nn.Module, names: Any, what: str) -> None:
    """Raises InputError if the model's forward does not take one of `names`. `what` says in the error where the names
    come from."""
    requested = inspect.signature(model.forward).parameters
    if any(each.kind is each.VAR_KEYWORD for each in requested.values()) or "" in names:
        return
    unknown = sorted(set(names) - requested.keys())
    if unknown:
        raise InputError(
            Message(
                "{what} has {unknown!r}, which {type}.forward does not take (it takes {requested}){hint}: leave it "
                "out, or give forward a parameter of that name",
                what=what,
                unknown=unknown[0],
                type=type(model).__name__,
                requested=", ".join(requested),
                hint=did_you_mean(unknown[0], requested),
            )
        )


def move_batch(batch: Batch, device: torch.device, dtype: torch.dtype, uncast: Sequence[str] = ()) -> Batch:
    """Returns `batch` on `device`, with floating-point tensors cast to `dtype`, except those of the entries `uncast`.
    Nested tensors are included."""

    def move(value: Any, dtype: torch.dtype | None) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.to(device, dtype if value.is_floating_point() else None, non_blocking=True)

    kinds = {name: None if name in uncast else dtype for name in batch}
    return type(batch)({name: tree_map(partial(move, dtype=kinds[name]), value) for name, value in batch.items()})


def count_replica_labels(engine: Engine, batches: list[Batch]) -> int:
    """With DiLoCo, returns the number of valid labels in the rows of this rank's replica. All ranks call it."""
    outer, mesh = engine.outer, engine.mesh
    assert outer is not None
    mine = torch.tensor(float(sum(map(engine.objective.count, batches))), dtype=torch.float64, device=mesh.device)
    everyone = outer.scatter_by_replica(mine)
    all_reduce(everyone, mesh.world).wait()
    return round(float(everyone[outer.replica]) / (mesh.plan.pp * mesh.plan.tp * mesh.plan.cp))


def count_tokens(batch: Batch) -> int:
    """Returns the number of tokens in `batch`, whether or not they have a label: rows times sequence. `input_ids`, or
    else the first matrix of integers, has the sequence. Without such an entry, such as for images, a row is a token.

    >>> count_tokens({"input_ids": torch.zeros(4, 8, dtype=torch.int64), "labels": torch.full((4, 8), IGNORE_INDEX)})
    32
    >>> count_tokens({"pixel_values": torch.zeros(4, 3, 8, 8), "labels": torch.zeros(4, dtype=torch.int64)})
    4
    """
    ids = (batch.get(name) for name in ("input_ids", *batch))
    matrices = (each for each in ids if isinstance(each, torch.Tensor) and each.ndim == 2)
    sequences = next((each for each in matrices if not each.is_floating_point()), None)
    return num_rows(batch) if sequences is None else sequences.numel()


def padded_rows(plan: Plan, rows: int) -> int:
    """Returns the smallest number of rows that is at least `rows` and fills whole micro-batches of all replicas.

    >>> from meshwright.spec.plan import parse_plan
    >>> cases = {"dp2.mb2": 7, "dp2.z1.ga3-1": 3, "pp2.interleaved2": 3}
    >>> tuple(padded_rows(parse_plan(plan), rows) for plan, rows in cases.items())
    (8, 4, 4)
    """
    if plan.shares:
        return plan.uneven_batch
    each, multiple = plan.rows_per_round, plan.schedule_rules.multiple_of(plan.pp)
    micro_batches = max(-(-rows // each), plan.schedule_rules.min_micro_batches(plan.pp))
    return each * (-(-micro_batches // multiple) * multiple)


def is_one_pass(plan: Plan, rows: int) -> bool:
    """Returns whether one pass of one replica runs all `rows` rows. Rows may then depend on each other."""
    return plan.dp == 1 and padded_rows(plan, rows) == plan.rows_per_round


def pad_batch(batch: Batch, plan: Plan) -> Batch:
    """Returns `batch` padded to `padded_rows` rows. Each padding row is the first row with all labels masked. A batch
    of one pass is not padded, because its rows may depend on each other."""
    rows = num_rows(batch)
    lacking = padded_rows(plan, rows) - rows
    if lacking <= 0 or is_one_pass(plan, rows):
        return batch

    def longer(name: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return value
        more = value[:1].expand(lacking, *value.shape[1:])
        return torch.cat([value, torch.full_like(more, IGNORE_INDEX) if name == "labels" else more])

    return {name: longer(name, value) for name, value in batch.items()}


def split_micro_batches(batch: Batch, plan: Plan, replica: int, is_odd: bool) -> list[Batch]:
    """Returns the micro-batches of `replica` in the global batch `batch`. `is_odd`: whether the rows may leave
    micro-batches incomplete. The last micro-batches then have fewer rows, and a micro-batch without rows is a
    `ZeroWeightBatch`."""
    rows = num_rows(batch)
    is_odd = is_odd or is_one_pass(plan, rows)

    def part(first: int, size: int) -> Batch:
        return {
            name: value[first : first + size] if isinstance(value, torch.Tensor) and value.ndim else value
            for name, value in batch.items()
        }

    ranges = micro_batch_rows(plan, padded_rows(plan, rows) if is_odd else rows, replica)
    return [
        part(first, min(size, rows - first)) if first < rows else ZeroWeightBatch(part(0, 1)) for first, size in ranges
    ]
