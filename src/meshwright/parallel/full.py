"""Whole parameters outside of the forward: every rank reads them all, and what it changes is written back to the shards.

    with trainer.full_parameters(model.head) as full:             # all ranks; reads
        norm = full["head.weight"].norm()
    with trainer.full_parameters(write=True), torch.no_grad():    # all ranks make the same change
        for parameter in model.parameters():
            parameter.clamp_(-1, 1)

Inside, the parameters of the model are whole under every plan, those of other pipeline stages too, in the type of the master weights. After FSDP's
`summon_full_params`. Costs the memory of the requested parameters on every rank, and one all-gather of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from meshwright.base.errors import InputError
from meshwright.parallel import state
from meshwright.parallel.engine import Parallel
from meshwright.parallel.exchange.calls import gather_objects
from meshwright.parallel.pipeline.absent import Absent
from meshwright.parallel.zero.closed import Closed
from meshwright.parallel.zero.written import checksum
from meshwright.spec.piece import Piece

KIND = "model/"


@contextmanager
def full_parameters(engine: Parallel, module: nn.Module | None, write: bool) -> Iterator[dict[str, nn.Parameter]]:
    """Parameters of `module`, by default of the whole model, by their names in the model; see the module's docstring. All ranks call it.

    Raises InputError where replicas have weights of their own, and where parameters were changed without `write`.
    """
    names = _names(engine, module)
    if engine.recipe.local is not None and write:
        raise InputError(
            "full_parameters: replicas that make local steps have weights of their own: read them, or write a checkpoint and load it"
        )
    engine.zero.written.settle(engine)
    engine.zero.settle()
    values = _gathered(engine, names)
    full = {name: nn.Parameter(values[name].to(engine.mesh.device), requires_grad=False) for name in names}
    before = {name: checksum(parameter) for name, parameter in full.items()}
    with engine.zero.written.ours(), _installed(engine, full) as installed:
        yield installed
        values = {name: parameter.detach() for name, parameter in installed.items()}
    after = {name: checksum(value) for name, value in values.items()}
    changed = [name for name in full if after[name] != before[name]]
    if not write:
        if changed:
            raise InputError(f"full_parameters: {changed[0]} was changed, and the change is lost: call full_parameters(write=True)")
        return
    _check_equal(engine, after)
    _write(engine, {name: values[name] for name in changed})


def _names(engine: Parallel, module: nn.Module | None) -> list[str]:
    """Parameters of `module` by their names in the model, in the order of the model."""
    paths = [path for path, each in engine.model.named_modules(remove_duplicate=False) if module is None or each is module]
    if not paths:
        raise InputError(f"full_parameters: {type(module).__name__} is no module of this model")
    names = [*engine.shapes, *engine.beside.second]
    inside = [name for name in names if any(not path or name.startswith(f"{path}.") for path in paths)]
    return list(dict.fromkeys(engine.beside.second.get(name, name) for name in inside))


def _gathered(engine: Parallel, names: list[str]) -> dict[str, torch.Tensor]:
    """Whole tensors on every rank."""
    wanted = set(names)
    held = [
        (item.piece, item.data.detach())
        for item in state.weight_pieces(engine, saving=True)
        if item.piece.name.removeprefix(KIND) in wanted
    ]
    if engine.mesh.world is None:
        return {name: tensor.clone() for name, tensor in state.assemble(held).items()} | state.empty_ones(engine)
    found = gather_objects([(piece, data.to("cpu", copy=True)) for piece, data in held])
    return state.assemble(item for part in found for item in part) | state.empty_ones(engine)


@contextmanager
def _installed(engine: Parallel, full: dict[str, nn.Parameter]) -> Iterator[dict[str, nn.Parameter]]:
    """The model's own parameters hold the values of `full`; those that this rank has no parameter for are registered meanwhile."""
    own = {name: each for unit in engine.zero.units for name, each in unit.parameters.items()}
    units = [unit for unit in engine.zero.units if unit.parameters.keys() & full.keys()]
    closed = [unit for unit in units if unit.closing.is_closed]
    for unit in closed:
        unit.closing.open()
    swapped: list[tuple[nn.Parameter, torch.Tensor]] = []
    registered: list[tuple[nn.Module, str, dict[str, Any]]] = []
    installed: dict[str, nn.Parameter] = {}
    second: dict[str, list[str]] = {}
    for name, one in engine.beside.second.items():
        second.setdefault(one, []).append(name)
    try:
        for name, parameter in full.items():
            held = [unit.parameters[name] for unit in units if name in unit.parameters]
            for each in held:
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
            unit.closing.close()


def _check_equal(engine: Parallel, after: dict[str, tuple[tuple[int, ...], int]]) -> None:
    """Raises InputError on every rank where ranks made different changes, or changed a shape."""
    found = gather_objects(after)
    for rank, other in enumerate(found):
        for name, (shape, bits) in other.items():
            if shape != tuple(engine.shapes[name]):
                raise InputError(f"full_parameters: {name} of shape {tuple(engine.shapes[name])} was given shape {shape} on rank {rank}")
            if (shape, bits) != found[0][name]:
                raise InputError(
                    f"full_parameters: {name} was changed in another way on rank {rank} than on rank 0: make the same change on every rank"
                )


@torch.no_grad()
def _write(engine: Parallel, full: dict[str, torch.Tensor]) -> None:
    """Into the shards of this rank, and from there to all that hold a copy."""
    engine.zero.settle()
    for piece, data in state.weight_pieces(engine, saving=False):
        name = piece.name.removeprefix(KIND)
        if name in full:
            data.copy_(_local(full[name], piece).to(data.device))
    for unit in engine.zero.units:
        unit.write_back()
        unit.share().wait()


def _local(full: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The elements of `full` that `piece` is of."""
    if piece.split is not None:
        full = torch.cat([full.narrow(piece.split, start, stop - start) for start, stop in piece.intervals], piece.split)
    return full.reshape(-1)[piece.start : piece.stop]


def watch_loads(model: nn.Module, plan: str) -> None:
    """`load_state_dict` of the model or a part of it says in one line what of the given state does not fit, and where this rank holds a shard or nothing of
    a tensor."""
    for module in model.modules():
        module.register_load_state_dict_pre_hook(partial(_check_loaded, plan))


def _check_loaded(plan: str, module: nn.Module, given: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `module` takes its own tensors from `given`."""
    way = "load inside `with trainer.full_parameters(write=True)`, or use trainer.load_weights(folder)"
    own = {**module._parameters, **module._buffers}
    for name in [name for name in given if isinstance(module, Absent) and name.startswith(prefix)]:
        if "." not in name.removeprefix(prefix) and name.removeprefix(prefix) not in own:
            raise InputError(f"plan {plan}: load_state_dict: {name} is on another pipeline stage than this rank's: {way}")
    for leaf, tensor in own.items():
        name, value = f"{prefix}{leaf}", given.get(f"{prefix}{leaf}")
        if isinstance(tensor, Closed):
            raise InputError(f"plan {plan}: load_state_dict: this rank holds a shard of {name} {tuple(tensor.shape)} alone: {way}")
        if isinstance(value, torch.Tensor) and tensor is not None and value.shape != tensor.shape:
            raise InputError(
                f"plan {plan}: load_state_dict: {name} has shape {tuple(value.shape)} in the given state, this rank holds {tuple(tensor.shape)}: "
                f"give the state of this model; under tensor parallelism {way}"
            )
