"""Describes the state of a sharded training run as pieces of full tensors ([Note: pieces] in spec/layout.py).
Checkpoints save and load the pieces, and other functions here assemble full tensors from them.

When a checkpoint is saved, each element is written once, and replicas divide the work. When a checkpoint is loaded,
each rank restores all of its pieces. If a run has float32 main weights, checkpoints store these instead of the rounded
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import gather_objects, interruptible_wait
from meshwright.runtime.non_tensor_state import (
    collect_extra_states,
    decode_option,
    describe_state,
    encode_option,
    iter_tensors,
    restore_state,
)
from meshwright.runtime.optim.full_tensor import FullTensorStep
from meshwright.runtime.optim.param_groups import FullParam
from meshwright.runtime.optim.updater import isolate_skipped_params, mark_skipped
from meshwright.runtime.shard.optimizer_shard import (
    ReadScalar,
    ScalarState,
    ScalarValues,
    ShardParam,
    nested_optimizers,
    scalar_device,
    scalar_states,
    scalar_types,
)
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.spec.layout import ShardMetadata

REPLICA_PREFIX, OUTER_PREFIX, BUFFER_PREFIX = "replica-", "outer/", "buffer/"
"""Prefixes of piece names for: the state of a DiLoCo replica other than the first, the state of the outer optimizer,
and buffers."""


class LocalPiece(NamedTuple):
    """A piece of a full tensor (`piece`), and the view of this rank's memory that stores it (`data`, flat)."""

    piece: ShardMetadata
    data: torch.Tensor


def _param_group_pieces(
    engine: Engine,
    kind: str,
    unit: FlatParamGroup,
    parts: Sequence[torch.Tensor],
    saving: bool,
    but: Set[str] = frozenset(),
) -> Iterator[LocalPiece]:
    """Yields the pieces of `parts`, named `kind/parameter`, except those of the parameters `but`. The tensors `parts`,
    concatenated, are this rank's shard of `unit`. `saving`: whether to yield each element on only one replica.

    With DiLoCo, the piece names of every replica except the first have a prefix. The pieces of the outer optimizer have
    no prefix, because its state is equal on all replicas.
    """
    if not kind.startswith(OUTER_PREFIX):
        kind = f"{_replica_prefix(unit)}{kind}"
    elif saving and _replica_prefix(unit):
        return
    first, last = unit.shard_range.start, unit.shard_range.stop
    if saving:
        length, copies, copy = last - first, unit.placement.replicas, unit.placement.replica
        first, last = first + length * copy // copies, first + length * (copy + 1) // copies
    for name, offset in unit.layout.offsets.items():
        spec = engine.shards.params[name]
        split, before = spec.tp_split, spec.expert_offset(unit.parameters[name].numel())
        if name in but or (saving and split is None and spec.tp_index):
            continue
        shape, stored = tuple(spec.global_shape), spec.intervals()
        location = unit.shard_range.start
        for part in parts:
            begin, end = (
                max(offset, first, location),
                min(offset + unit.parameters[name].numel(), last, location + len(part)),
            )
            if begin < end:
                dtype = str(part.dtype).removeprefix("torch.")
                piece = ShardMetadata(
                    f"{kind}/{name}",
                    shape,
                    dtype,
                    split.dim if split else None,
                    stored,
                    before + begin - offset,
                    before + end - offset,
                )
                yield LocalPiece(piece, part[begin - location : end - location])
            location += len(part)


def _replica_prefix(unit: FlatParamGroup) -> str:
    """Returns the prefix of the names of this DiLoCo replica's pieces. Returns '' for the first replica and without
    DiLoCo."""
    copy = unit.placement.diloco.replica if unit.placement.diloco is not None else 0
    return f"{REPLICA_PREFIX}{copy}/" if copy else ""


def _param_groups(engine: Engine, saving: bool) -> Iterator[FlatParamGroup]:
    copies = {id(unit) for unit, tied in engine.zero.tied if not tied.counted_in_norm}
    for unit in engine.zero.units:
        if not (saving and id(unit) in copies):
            yield unit


def weight_pieces(engine: Engine, saving: bool) -> Iterator[LocalPiece]:
    """Yields this rank's pieces of the weights, named `model/parameter`. `saving`: whether only one rank (of a DiLoCo
    replica) yields each element, instead of all ranks that store it."""
    for unit in _param_groups(engine, saving):
        yield from _param_group_pieces(engine, "model", unit, unit.optim_shard.parts, saving)


def buffer_pieces(engine: Engine, saving: bool) -> Iterator[LocalPiece]:
    """Yields the buffers of the state dict (running means, router biases) in the modules of this rank.

    `saving`: whether to yield only buffers that belong to this rank's stages (`ExtraState.buffer_stages`). If channels
    are sharded, their statistics are sharded in the same way.
    """
    here = engine.mesh.plan.stages_of(engine.mesh.coords.pp)
    for name, buffer in engine.model.named_buffers(remove_duplicate=False):
        spec = engine.shards.buffers.get(name)
        if spec is None or (saving and engine.extra_state.buffer_stages[name] not in here):
            continue
        split = spec.tp_split
        piece = ShardMetadata(
            f"{BUFFER_PREFIX}{name}",
            tuple(spec.global_shape),
            str(buffer.dtype).removeprefix("torch."),
            split.dim if split else None,
            spec.intervals(),
            0,
            buffer.numel(),
        )
        yield LocalPiece(piece, buffer.detach().view(-1))


def gradient_pieces(engine: Engine) -> Iterator[LocalPiece]:
    """Yields pieces of this rank's gradients, named `gradient/parameter`. Only one rank (of a DiLoCo replica) yields
    each element."""
    for unit in _param_groups(engine, True):
        if not unit.frozen:
            yield from _param_group_pieces(engine, "gradient", unit, [unit.gradients.shard], True)


def selected_pieces(engine: Engine, kind: str, names: Set[str]) -> Iterator[LocalPiece]:
    """Yields pieces of the parameters `names`: weights (`kind` "model") or gradients ("gradient"). Only one rank (of a
    DiLoCo replica) yields each element."""
    for unit in _param_groups(engine, True):
        if names.isdisjoint(unit.layout.offsets) or (kind == "gradient" and unit.frozen):
            continue
        parts = unit.optim_shard.parts if kind == "model" else [unit.gradients.shard]
        for stored in _param_group_pieces(engine, kind, unit, parts, True):
            if stored.piece.name.rpartition(f"{kind}/")[2] in names:
                yield stored


def optimizer_pieces(engine: Engine, optimizer: torch.optim.Optimizer, saving: bool) -> Iterator[LocalPiece]:
    """Yields the pieces of elementwise optimizer states, named `optimizer/state/parameter`, and all tensor states of
    the parameters that the optimizer updates as full tensors. `optimizer_scalars` returns the scalar states."""
    for unit in _param_groups(engine, saving):
        if (full_tensors := engine.updater.full_tensor_step(unit)) is not None:
            yield from _full_tensor_states(unit, full_tensors, optimizer, saving)
            continue
        for key, parts in unit.optim_shard.state_parts(optimizer).items():
            yield from _param_group_pieces(engine, f"optimizer/{key}", unit, parts, saving, engine.updater.stateless)


def _full_tensor_states(
    unit: FlatParamGroup, full_tensors: FullTensorStep, optimizer: torch.optim.Optimizer, saving: bool
) -> Iterator[LocalPiece]:
    """Yields the tensor states, of any shape, of the full tensors that this rank owns. If several ranks have equal
    states, only one of these ranks saves them."""
    for part, parameter in zip(full_tensors.owned, full_tensors.parameters, strict=True):
        if saving and (unit.placement.replica or (not part.split and full_tensors.tensor_rank)):
            continue
        for key, value in sorted(iter_tensors(optimizer.state.get(parameter, {})), key=lambda found: found[0]):
            dtype = str(value.dtype).removeprefix("torch.")
            piece = ShardMetadata(
                f"{_replica_prefix(unit)}optimizer/{key}/{part.name}",
                tuple(value.shape),
                dtype,
                None,
                (),
                0,
                value.numel(),
            )
            yield LocalPiece(piece, value.view(-1))


def storage_addresses(engine: Engine, optimizer: torch.optim.Optimizer) -> list[int]:
    """Returns the memory addresses of weights and optimizer states. A caller that has views of them must replace the
    views if an address changes.
    """
    found = [part.data_ptr() for unit in engine.zero.units for part in unit.optim_shard.parts]
    found += [
        part.data_ptr()
        for unit in engine.zero.trainable
        for parts in unit.optim_shard.state_parts(optimizer).values()
        for part in parts
    ]
    for parameter in engine.updater.full_params():
        found += [value.data_ptr() for _, value in iter_tensors(optimizer.state.get(parameter, {}))]
    return found


def optimizer_scalars(engine: Engine, optimizer: torch.optim.Optimizer, read: ReadScalar = float) -> dict[str, Any]:
    """Returns the state of the optimizer that is not elementwise. `read` returns the values of scalar states. The keys:

        kinds    dtypes of the elementwise states        groups    options of the parameter groups
        types    types of the scalar states              own       counters of the optimizer itself
        states   descriptions of the states of parameters that are updated as full tensors
        whole    True if there are such states
        skipped  scalar states, by name, of parameters that an update has skipped
        scalars  scalar states of all other parameters (`by_group`: of each group, if there are several)
        empty    groups without parameters on this rank, where their options may be out of date
        by_ndim  True if there are two groups: parameters with several dimensions, and all others

    Raises:
        InputError: a state cannot be saved.
    """
    kinds: dict[str, str] = {}
    scalars: dict[str, Any] = {}
    owned = engine.updater.full_params()
    whole = any(optimizer.state.get(parameter) for parameter in owned)
    for unit in engine.zero.trainable:
        kinds |= {
            key: str(parts[0].dtype).removeprefix("torch.")
            for key, parts in unit.optim_shard.state_parts(optimizer).items()
            if parts
        }
    # The loop reads only the first group that has scalars, because each read synchronises with the device.
    for unit in reversed(engine.zero.trainable):
        scalars = scalars or dict(unit.optim_shard.scalar_states(optimizer, read))
    single = [run for unit in engine.zero.trainable for run in unit.optim_shard.isolated if not run.has_no_state]
    skipped = {run.path: dict(scalar_states(optimizer, run, read)) for run in single}
    groups = optimizer.param_groups
    options = [{key: encode_option(value) for key, value in group.items() if key != "params"} for group in groups]
    first = {
        str(at): run
        for at, group in enumerate(groups)
        if (run := _param_with_scalars(optimizer, group["params"])) is not None
    }
    found = {
        "whole": whole,
        "skipped": skipped,
        "types": {
            key: kind for run in (*single, *first.values()) for key, kind in scalar_types(optimizer, run).items()
        },
        "by_group": {at: dict(scalar_states(optimizer, run, read)) for at, run in first.items() if len(groups) > 1},
        "by_ndim": len(groups) == 2
        and all(_is_matrix(run) is (at == 0) for at, group in enumerate(groups) for run in group["params"]),
        "empty": [at for at, group in enumerate(groups) if not group["params"]],
        "own": own if any(own := [_optimizer_counters(one) for one in nested_optimizers(optimizer)]) else [],
        "states": {
            each.path: describe_state(optimizer.state[each], each.path) for each in owned if optimizer.state.get(each)
        },
    }
    plain = [{key: value for key, value in group.items() if value is not ...} for group in options]
    return {
        "kinds": kinds,
        "scalars": scalars,
        "groups": plain,
        **{key: value for key, value in found.items() if value},
    }


def _param_with_scalars(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]
) -> ShardParam | None:
    """Returns the first of `parameters` that has states and that no update has skipped, None if there is none."""
    return next(
        (run for run in parameters if isinstance(run, ShardParam) and not run.isolated and optimizer.state.get(run)),
        None,
    )


def _is_matrix(parameter: torch.nn.Parameter) -> bool:
    return bool(getattr(parameter, "is_matrix", parameter.ndim > 1))


def _optimizer_counters(optimizer: torch.optim.Optimizer) -> dict[str, float]:
    """Returns the numeric attributes of the optimizer object by name."""
    return {
        key: value
        for key, value in vars(optimizer).items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def merge_optimizer_scalars(given: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Merges `given`, the results of `optimizer_scalars` on all ranks in order of rank. Takes each entry from the first
    rank that has it, because a rank without trained parameters has no dtypes and no scalars. Takes the options of a
    group from the first rank that has parameters in this group."""
    one = given[0]
    for other in given[1:]:
        both = [
            what
            for what in ("kinds", "scalars", "skipped", "types", "by_group", "states")
            if what in other and what in one
        ]
        one = {**other, **one, **{what: {**other[what], **one[what]} for what in both}}
    one = {**one, "groups": list(one["groups"])}
    if not all(each.get("by_ndim") for each in given):
        one.pop("by_ndim", None)
    for at in one.pop("empty", ()):
        one["groups"][at] = next(
            (each["groups"][at] for each in given if at not in each.get("empty", ())), one["groups"][at]
        )
    return one


KERNEL_OPTIONS = ("fused", "foreach", "capturable")
"""Optimizer options that select kernels. Loading skips them, because a checkpoint may come from another machine."""


def prepare_optimizer(engine: Engine, optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Creates states with the dtypes and scalars of `saved`, a result of `merge_optimizer_scalars`. Loading then fills
    the states. Parameters without saved states get no states.

    Raises:
        InputError: the optimizer and the checkpoint have different numbers of parameter groups.
    """
    if saved["groups"] and len(saved["groups"]) != len(optimizer.param_groups):
        raise InputError(
            Message(
                "the optimizer of the checkpoint has {stored} parameter groups, but this one has {count}, so "
                "learning rates and weight decays would apply to the wrong parameters: create the groups that were "
                "saved",
                stored=len(saved["groups"]),
                count=len(optimizer.param_groups),
            )
        )
    stateless, skipped, states = engine.updater.stateless, saved.get("skipped", {}), saved.get("states")
    scalars, others = _typed_scalars(saved["scalars"], saved), {}
    for unit in engine.zero.trainable:
        if (full_tensors := engine.updater.full_tensor_step(unit)) is not None:
            for parameter in full_tensors.parameters:
                optimizer.state.pop(parameter, None)
                if states is not None and parameter.path in states and parameter.path not in stateless:
                    optimizer.state[parameter] = restore_state(
                        states[parameter.path], partial(_state_device, optimizer, parameter)
                    )
            if saved.get("whole") and states is None:
                full_tensors.make_states(optimizer, stateless)
            continue
        isolate_skipped_params(unit, stateless | skipped.keys(), optimizer)
        mark_skipped(unit, stateless, stateless)
    for number, group in enumerate(optimizer.param_groups):
        of_group = saved.get("by_group", {}).get(str(number))
        for run in (each for each in group["params"] if isinstance(each, ShardParam)):
            found = skipped.get(run.path, of_group) if run.isolated else of_group
            if found is not None:
                others[id(run)] = _typed_scalars(found, saved)
    for unit in engine.zero.trainable:
        if engine.updater.full_tensor_step(unit) is None:
            unit.optim_shard.init_states(optimizer, saved["kinds"], scalars, others)
    for group, options in zip(optimizer.param_groups, saved["groups"], strict=False):
        group.update(
            {key: decode_option(value, group.get(key)) for key, value in options.items() if key not in KERNEL_OPTIONS}
        )
    for one, numbers in zip(nested_optimizers(optimizer), saved.get("own", ()), strict=False):
        vars(one).update(numbers)


def _typed_scalars(numbers: dict[str, float], saved: dict[str, Any]) -> ScalarValues:
    """Returns the scalars `numbers` with their saved types, or as float32 if an older checkpoint has no types."""
    kinds = saved.get("types", {})
    return {key: ScalarState(value, kinds.get(key, "float32")) for key, value in numbers.items()}


def _state_device(optimizer: torch.optim.Optimizer, parameter: FullParam, key: str, dims: int) -> torch.device:
    """Returns the device on which the optimizer stores the state `key` of `parameter`."""
    if dims or backend_of(parameter.device).memory_is_host:
        return parameter.device
    return scalar_device(
        key,
        next(group for group in optimizer.param_groups if any(each is parameter for each in group["params"])),
        parameter.device,
    )


def strip_replica_prefix(local: LocalPiece) -> LocalPiece:
    """Returns `local`, with its piece named as in a run without DiLoCo."""
    name = local.piece.name
    return (
        local._replace(piece=local.piece._replace(name=name.partition("/")[2]))
        if name.startswith(REPLICA_PREFIX)
        else local
    )


def outer_pieces(engine: Engine, saving: bool) -> Iterator[LocalPiece]:
    """Yields the pieces of the outer optimizer of DiLoCo: the anchors and the velocity (zero/diloco.py)."""
    if engine.outer is not None:
        for unit, begun, velocity in zip(engine.outer.units, engine.outer.anchors, engine.outer.velocity, strict=True):
            yield from _param_group_pieces(engine, f"{OUTER_PREFIX}begun", unit, [begun], saving)
            yield from _param_group_pieces(engine, f"{OUTER_PREFIX}velocity", unit, [velocity], saving)


def assemble_tensors(pieces: Iterable[tuple[ShardMetadata, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Assembles full tensors from pieces that together cover them. Returns the tensors by name, without the prefixes of
    weights, gradients and buffers."""
    local: dict[tuple[str, Any], tuple[ShardMetadata, torch.Tensor]] = {}
    full: dict[str, torch.Tensor] = {}
    for piece, data in pieces:
        key = (piece.name, piece.intervals)
        if key not in local:
            local[key] = (piece, torch.empty(piece.local_shape, dtype=data.dtype))
        local[key][1].view(-1)[piece.start : piece.stop] = data
    for piece, tensor in local.values():
        name = (
            piece.name.partition("/")[2]
            if piece.name.startswith(("model/", "gradient/", BUFFER_PREFIX))
            else piece.name
        )
        if piece.split is None:
            full[name] = tensor
            continue
        target = full.setdefault(name, torch.empty(piece.shape, dtype=tensor.dtype))
        offset = 0
        for start, stop in piece.intervals:
            target.narrow(piece.split, start, stop - start).copy_(tensor.narrow(piece.split, offset, stop - start))
            offset += stop - start
    return full


def gather_state_dict(engine: Engine) -> dict[str, Any] | None:
    """Returns on rank 0 the full state dict that the model would have on one device, and None on other ranks. The state
    dict contains weights, buffers, extra state of modules, and every name of shared tensors. All ranks call this
    function."""
    engine.zero.external_writes.sync(engine)
    full = gather_full_tensors(engine, (*weight_pieces(engine, saving=True), *buffer_pieces(engine, saving=True)))
    extra = (
        {
            name: value
            for each in reversed(gather_objects(collect_extra_states(engine.model, engine.extra_state.module_keys)))
            for name, value in each.items()
        }
        if engine.extra_state.module_keys
        else {}
    )
    if full is None:
        return None
    full |= empty_parameters(engine) | extra
    return full | {name: full[one] for name, one in engine.extra_state.shared_names.items()}


def empty_parameters(engine: Engine) -> dict[str, torch.Tensor]:
    """Returns by name the parameters that have no elements, and therefore no pieces."""
    dtype = torch.float32 if engine.recipe.master else getattr(torch, engine.recipe.compute)
    return {name: torch.empty(shape, dtype=dtype) for name, shape in engine.shapes.items() if not shape.numel()}


def gather_full_tensors(engine: Engine, pieces: Iterable[LocalPiece]) -> dict[str, torch.Tensor] | None:
    """Returns on rank 0 the full tensors of `pieces` by name, on the CPU, and None on other ranks. Skips the pieces of
    DiLoCo replicas other than the first. All ranks call this function."""
    mine = ((item.piece, item.data.detach()) for item in pieces if not item.piece.name.startswith(REPLICA_PREFIX))
    if engine.mesh.world is None:
        return assemble_tensors(mine)
    # Pieces are copied before they are sent, because serialising a view would send its whole storage.
    sent = [(piece, data.to("cpu", copy=True)) for piece, data in mine]
    gathered: list[Any] | None = [None] * dist.get_world_size() if engine.mesh.rank == 0 else None
    with interruptible_wait():
        dist.gather_object(sent, gathered, dst=0)
    if gathered is None:
        return None
    return assemble_tensors(item for part in gathered for item in part)
