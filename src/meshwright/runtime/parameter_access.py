"""Gives user code access to full parameters outside of the forward. Denies access to parameters that this rank does not
store in full. The trainer calls `full_parameters` and `guard_stale_parameters`. The build installs the other checks.

    with trainer.full_parameters(model.head) as full:             # all ranks call it; read only
        norm = full["head.weight"].norm()
    with trainer.full_parameters(write=True), torch.no_grad():    # all ranks call it and make the same change
        for parameter in model.parameters():
            parameter.clamp_(-1, 1)

Inside the context every rank can read the full parameters of the model under every plan, in the dtype of the main
weights. Parameters of other pipeline stages are included. With `write=True`, changes are written back to the shards on
exit. The interface follows FSDP's `summon_full_params`. The cost is the memory of the requested parameters on every
rank, plus one all-gather.

`loss_access_guard` prevents the user's loss from reading parameters, unless every rank stores all parameters.
`guard_stale_parameters` denies access to parameter objects that user code took from the model before `parallelize`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime import state_dict
from meshwright.runtime.engine import Engine
from meshwright.runtime.error_propagation import gather_objects
from meshwright.runtime.loss import LossFunction
from meshwright.runtime.shard.access_guard import (
    AccessGuard,
    ForwardAccessGuard,
    InaccessibleTensor,
    read_by_loss_message,
    stale_parameter_message,
)
from meshwright.runtime.stage_placeholder import StagePlaceholder
from meshwright.runtime.zero.external_writes import tensor_checksum
from meshwright.spec.layout import ShardMetadata
from meshwright.spec.plan import Plan

MODEL_PREFIX = "model/"


@contextmanager
def full_parameters(engine: Engine, module: nn.Module | None, write: bool) -> Iterator[dict[str, nn.Parameter]]:
    """Yields the full parameters of `module` by their names in the model (see the module docstring). If `module` is
    None, yields all parameters of the model. All ranks call this function.

    Raises:
        InputError: `module` is not part of the model; `write` is set but replicas have different weights (DiLoCo);
            parameters were changed without `write`; a parameter has a new shape; or ranks made different changes.
    """
    names = _parameter_names(engine, module)
    if engine.recipe.local is not None and write:
        raise InputError(
            Message(
                "full_parameters: replicas that take local steps have different weights, which cannot be written "
                "together: only read them, or write a checkpoint and load it"
            )
        )
    engine.zero.external_writes.sync(engine)
    engine.zero.quiesce()
    values = _gather_parameters(engine, names)
    full = {name: nn.Parameter(values[name].to(engine.mesh.device), requires_grad=False) for name in names}
    before = {name: tensor_checksum(parameter) for name, parameter in full.items()}
    with engine.zero.external_writes.internal_writes(), _install_full_parameters(engine, full) as installed:
        yield installed
        values = {name: parameter.detach() for name, parameter in installed.items()}
    after = {name: tensor_checksum(value) for name, value in values.items()}
    changed = [name for name in full if after[name] != before[name]]
    if not write:
        if changed:
            raise InputError(
                Message(
                    "full_parameters: {changed} was changed, and the change is lost: call full_parameters(write=True)",
                    changed=changed[0],
                )
            )
        return
    _check_identical(engine, after)
    _write_shards(engine, {name: values[name] for name in changed})


def _parameter_names(engine: Engine, module: nn.Module | None) -> list[str]:
    """Returns the full names of the parameters of `module`, in the model's order."""
    paths = [
        path for path, each in engine.model.named_modules(remove_duplicate=False) if module is None or each is module
    ]
    if not paths:
        raise InputError(Message("full_parameters: {type} is not a module of this model", type=type(module).__name__))
    names = [*engine.shapes, *engine.extra_state.shared_names]
    inside = [name for name in names if any(not path or name.startswith(f"{path}.") for path in paths)]
    return list(dict.fromkeys(engine.extra_state.shared_names.get(name, name) for name in inside))


def _gather_parameters(engine: Engine, names: list[str]) -> dict[str, torch.Tensor]:
    """Returns the full tensors `names` on every rank."""
    wanted = set(names)
    stored = [
        (item.piece, item.data.detach())
        for item in state_dict.weight_pieces(engine, saving=True)
        if item.piece.name.removeprefix(MODEL_PREFIX) in wanted
    ]
    if engine.mesh.world is None:
        return {
            name: tensor.clone() for name, tensor in state_dict.assemble_tensors(stored).items()
        } | state_dict.empty_parameters(engine)
    found = gather_objects([(piece, data.to("cpu", copy=True)) for piece, data in stored])
    return state_dict.assemble_tensors(item for part in found for item in part) | state_dict.empty_parameters(engine)


@contextmanager
def _install_full_parameters(engine: Engine, full: dict[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    """Inside the context, the model's parameters have the values of `full`. Parameters that this rank does not store
    are registered in their modules too. Yields the parameters by name."""
    own = {name: each for unit in engine.zero.units for name, each in unit.parameters.items()}
    units = [unit for unit in engine.zero.units if unit.parameters.keys() & full.keys()]
    closed = [unit for unit in units if unit.weights.access_guard.is_denied]
    for unit in closed:
        unit.weights.access_guard.allow()
    swapped: list[tuple[nn.Parameter, torch.Tensor]] = []
    registered: list[tuple[nn.Module, str, dict[str, Any]]] = []
    installed: dict[str, nn.Parameter] = {}
    second: dict[str, list[str]] = {}
    for name, one in engine.extra_state.shared_names.items():
        second.setdefault(one, []).append(name)
    try:
        for name, parameter in full.items():
            stored = [unit.parameters[name] for unit in units if name in unit.parameters]
            for each in stored:
                swapped.append((each, each.data))
                each.data = parameter.data
            installed[name] = own.get(name, parameter)
            for path in (name, *second.get(name, ())):
                owner, _, leaf = path.rpartition(".")
                module = engine.model.get_submodule(owner)
                if not isinstance(module._parameters.get(leaf), nn.Parameter):
                    registered.append((module, leaf, {leaf: vars(module).pop(leaf)} if leaf in vars(module) else {}))
                    module._parameters[leaf] = installed[name]
        yield installed
    finally:
        for each, data in swapped:
            each.data = data
        for module, leaf, before in registered:
            del module._parameters[leaf]
            vars(module).update(before)
        for unit in closed:
            unit.weights.access_guard.deny()


def _check_identical(engine: Engine, after: dict[str, tuple[tuple[int, ...], int]]) -> None:
    """Checks that all ranks made the same change and kept all shapes.

    Raises:
        InputError: a parameter differs between ranks, or its shape has changed. Every rank raises the error.
    """
    found = gather_objects(after)
    for rank, other in enumerate(found):
        for name, (shape, bits) in other.items():
            if shape != tuple(engine.shapes[name]):
                raise InputError(
                    Message(
                        "full_parameters: {name} of shape {shapes} was given shape {shape} on rank {rank}",
                        name=name,
                        shapes=tuple(engine.shapes[name]),
                        shape=shape,
                        rank=rank,
                    )
                )
            if (shape, bits) != found[0][name]:
                raise InputError(
                    Message(
                        "full_parameters: {name} was changed differently on rank {rank} than on rank 0: make the "
                        "same change on every rank",
                        name=name,
                        rank=rank,
                    )
                )


@torch.no_grad()
def _write_shards(engine: Engine, full: dict[str, torch.Tensor]) -> None:
    """Writes the full tensors into the shards of this rank, and then all-gathers the shards of all ranks."""
    engine.zero.quiesce()
    for piece, data in state_dict.weight_pieces(engine, saving=False):
        name = piece.name.removeprefix(MODEL_PREFIX)
        if name in full:
            data.copy_(_elements_of_piece(full[name], piece).to(data.device))
    for unit in engine.zero.units:
        unit.copy_to_params()
        unit.weights.all_gather().wait()


def _elements_of_piece(full: torch.Tensor, piece: ShardMetadata) -> torch.Tensor:
    """Returns the elements of `full` that belong to `piece`."""
    if piece.split is not None:
        full = torch.cat(
            [full.narrow(piece.split, start, stop - start) for start, stop in piece.intervals], piece.split
        )
    return full.reshape(-1)[piece.start : piece.stop]


def refuse_copies(model: nn.Module, plan: Plan) -> None:
    """Lets `copy.deepcopy` of the model raise InputError with one line if this rank stores only a part of the
    parameters. Such a copy, as torch's AveragedModel makes one, is not the model, and its forward would wait for other
    ranks."""
    if plan.pp == plan.tp == plan.ep == 1 and plan.zero < 3:
        return

    def refuse(memo: Any) -> NoReturn:
        raise InputError(
            Message(
                "plan {plan}: a copy of the model would have only this rank's part of the parameters: copy or average "
                "those of `with trainer.full_parameters()`, or use a plan with data parallelism and z2 at most",
                plan=plan.name,
            )
        )

    vars(model)["__deepcopy__"] = refuse


def install_load_checks(model: nn.Module, plan: str) -> None:
    """Adds checks to `load_state_dict` of the model and its modules. They raise InputError with one line if the given
    state has a tensor of a different shape, or a tensor that this rank does not store in full. `plan`: name of the
    plan."""
    for module in model.modules():
        module.register_load_state_dict_pre_hook(partial(_check_load, plan))


def _check_load(plan: str, module: nn.Module, given: dict[str, Any], prefix: str, *_: Any) -> None:
    """Checks the state `given` before `module` loads its own tensors from the state."""
    way = "load inside `with trainer.full_parameters(write=True)`, or use trainer.load_weights(folder)"
    own = {**module._parameters, **module._buffers}
    for name in [name for name in given if isinstance(module, StagePlaceholder) and name.startswith(prefix)]:
        if "." not in name.removeprefix(prefix) and name.removeprefix(prefix) not in own:
            raise InputError(
                Message(
                    "plan {plan}: load_state_dict: {name} is not on a pipeline stage of this rank: {way}",
                    plan=plan,
                    name=name,
                    way=way,
                )
            )
    for leaf, tensor in own.items():
        name, value = f"{prefix}{leaf}", given.get(f"{prefix}{leaf}")
        if isinstance(tensor, InaccessibleTensor) and not tensor.opens:
            raise InputError(
                Message(
                    "plan {plan}: load_state_dict: this rank holds only a shard of {name} {shape}: {way}",
                    plan=plan,
                    name=name,
                    shape=tuple(tensor.shape),
                    way=way,
                )
            )
        if isinstance(value, torch.Tensor) and tensor is not None and value.shape != tensor.shape:
            raise InputError(
                Message(
                    "plan {plan}: load_state_dict: {name} has shape {shape} in the given state, this rank holds "
                    "{stored}: give the state of this model; under tensor parallelism {way}",
                    plan=plan,
                    name=name,
                    shape=tuple(value.shape),
                    stored=tuple(tensor.shape),
                    way=way,
                )
            )


def loss_access_guard(
    model: nn.Module, plan: Plan, loss: LossFunction | None, has_expert_shards: bool
) -> ForwardAccessGuard:
    """Returns the context in which the user's loss runs.

    If the plan splits parameters over ranks or stages, the loss must not read parameters. A penalty on the weights
    would include only the parameters of one rank, and a parameter stored on several ranks could count more than once.
    If each rank stores all parameters, the loss may read them, and the guard only records that the loss has read them.
    A penalty then counts once, because the loss is a mean over rows.
    """
    if loss is None:
        return ForwardAccessGuard({}, None)
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters())
    for path, module in model.named_modules():
        if isinstance(module, StagePlaceholder):
            tensors |= {
                f"{path}.{name}": value for name, value in vars(module).items() if isinstance(value, torch.Tensor)
            }
    whole = plan.tp == plan.stages == 1 and plan.zero < 3 and not has_expert_shards
    return ForwardAccessGuard(tensors, None if whole else read_by_loss_message(plan.name))


ParameterRefs = list[tuple[str, "weakref.ref[nn.Parameter]"]]


def parameter_refs(model: nn.Module) -> ParameterRefs:
    """Returns the parameters of `model` by name, as weak references."""
    return [(name, weakref.ref(parameter)) for name, parameter in model.named_parameters()]


def guard_stale_parameters(engine: Engine, before: ParameterRefs) -> None:
    """Denies access to those parameter objects in `before` that the model no longer uses. User code may still have
    references to them from the time before sharding."""
    present = {id(parameter) for unit in engine.zero.units for parameter in unit.parameters.values()}
    present |= {id(parameter) for parameter in engine.model.parameters()}
    removed = {
        name: parameter for name, there in before if (parameter := there()) is not None and id(parameter) not in present
    }
    AccessGuard(removed, stale_parameter_message(engine.mesh.plan.name)).deny()
