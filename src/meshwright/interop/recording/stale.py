"""Tests whether a module computes with weights that miss the last update, in whole or in the shard of a rank."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn

from meshwright.interop.recording.digest import Digest, distance
from meshwright.interop.recording.intercept import observe
from meshwright.interop.recording.layout import fill_region, slice_region
from meshwright.interop.recording.reference import OneDevice
from meshwright.interop.recording.topology import OutputNeed, Source
from meshwright.interop.recording.trace_format import TensorRegion


class StaleWeight(NamedTuple):
    """A weight of which `region` has not changed by the last update."""

    name: str
    region: TensorRegion


class WrongOutput(NamedTuple):
    """A recorded output `found` of call `call` of module `path`, which differs from one device. `limit` is relative."""

    source: Source
    path: str
    call: int
    need: OutputNeed
    found: Digest
    limit: float


class _Reached(Exception):
    """Ends a forward at the module that is tested. Its arguments are those of the module."""


@torch.no_grad()
def find_stale_weight(device: OneDevice, step: int, wrong: WrongOutput) -> StaleWeight | None:
    """Returns the weight of the module that explains a wrong output of step `step` if it has the values before the last
    update, None if there is none. `device` has run this step last."""
    if not step or len(device.weights) < 2 or wrong.path not in dict(device.model.named_modules()):
        return None
    before, now = device.weights
    _copy(device, now)
    module = device.model.get_submodule(wrong.path)
    names = {id(parameter): name for name, parameter in device.names.items()}
    given = _arguments_of(device, module, step, wrong)
    if given is None:
        return None
    for parameter in module.parameters(recurse=False):
        name = names[id(parameter)]
        for region in [TensorRegion(shape=tuple(parameter.shape)), *device.topology.regions()[name]]:
            if region.flat == (0, 0):
                continue
            fill_region(parameter, region, slice_region(before[name], region))
            output = module(*given[0], **given[1])
            fill_region(parameter, region, slice_region(now[name], region))
            for _, part in device.slices(output, wrong.need)[1] if isinstance(output, torch.Tensor) else ():
                truth = device.digest(part)
                if distance(wrong.found, truth) <= 4 * wrong.limit * float(truth[-1]):
                    return StaleWeight(name, region)
    return None


def _copy(device: OneDevice, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in device.names.items():
        parameter.copy_(weights[name])


def _arguments_of(device: OneDevice, module: nn.Module, step: int, wrong: WrongOutput) -> tuple[Any, Any] | None:
    """Returns the arguments of the wrong call of a module on one device."""
    calls = 0

    def stop(_: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == wrong.call + 1:
            raise _Reached(args, kwargs)

    args, kwargs = device.arguments(step, wrong.source)
    handle = module.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        with observe(device.observer):
            device.start(step, wrong.source)
            device.model(*args, **kwargs)
    except _Reached as reached:
        return reached.args[0], reached.args[1]
    finally:
        handle.remove()
    return None
