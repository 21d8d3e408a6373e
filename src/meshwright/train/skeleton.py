"""A copy of a model without the memory of its parameters, made before anything is changed: what one device would run.

`copy.deepcopy` leaves functions as they are, so that a forward that was replaced on an instance, a hook, or a loss would still lead to the modules of
the first model through its closure. Such functions are made again with the copies in their closures.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.anatomy.observed import HOOKS
from meshwright.base.errors import InputError
from meshwright.parallel.exchange.calls import gather_objects
from meshwright.parallel.fingerprint import project
from meshwright.parallel.objective import LossFunction
from meshwright.parallel.pipeline.absent import Absent


@dataclass(frozen=True)
class Skeleton:
    """A model and the user's loss, which may read the model."""

    model: nn.Module
    loss: LossFunction | None

    def with_parameters(self, make: Callable[[torch.Tensor], torch.Tensor]) -> Skeleton:
        """A copy whose parameters hold what `make` gives for each; shared ones stay shared, hooks of gradients stay."""
        memo: dict[int, Any] = {}
        for parameter in self.model.parameters():
            twin = nn.Parameter(make(parameter.detach()), requires_grad=parameter.requires_grad)
            for hook in (parameter._backward_hooks or {}).values() if parameter.requires_grad else ():
                twin.register_hook(hook)
            memo[id(parameter)] = twin
        for module in self.model.modules():
            for value in vars(module).values():  # such as the weight that old weight_norm computes
                if isinstance(value, torch.Tensor) and not value.is_leaf:
                    memo[id(value)] = value.detach().clone()
        model = copy.deepcopy(self.model, memo)
        again = Rebinding(memo)
        for module in model.modules():
            for name, value in list(vars(module).items()):
                if callable(value) and not isinstance(value, type):
                    vars(module)[name] = again(value)
            for name in (*HOOKS, "_backward_hooks", "_backward_pre_hooks"):
                hooks: dict[int, Any] = vars(module).get(name) or {}
                for key in hooks:
                    hooks[key] = again(hooks[key])
        return Skeleton(model, again(self.loss))

    def follow(self, changes: Plain) -> None:
        """Plain values that the model which is trained has now."""
        modules = dict(self.model.named_modules())
        for path, values in changes.items():
            if path in modules:
                modules[path].__dict__.update(values)


Plain = dict[str, dict[str, Any]]
"""Plain values of modules, by path and name."""
PLAIN = (bool, int, float, str, type(None))


def plain_of(model: nn.Module) -> Plain:
    """Numbers, words and tuples of these that modules hold, such as counters of steps; not modes."""

    def is_plain(value: Any) -> bool:
        return isinstance(value, PLAIN) or (type(value) is tuple and all(map(is_plain, value)))

    return {
        path: {name: value for name, value in vars(module).items() if name != "training" and is_plain(value)}
        for path, module in model.named_modules()
        if not isinstance(module, Absent)
    }


def changes_of(before: Plain, now: Plain) -> Plain:
    """What of `now` is not in `before`, on any rank; the first rank that has changed a value counts. All ranks call it."""
    none = object()
    own = {
        path: {name: value for name, value in values.items() if before.get(path, {}).get(name, none) != value}
        for path, values in now.items()
    }
    everyone = gather_objects({path: values for path, values in own.items() if values})
    found: Plain = {}
    for changes in reversed(everyone):
        for path, values in changes.items():
            found.setdefault(path, {}).update(values)
    return found


def skeleton_of(model: nn.Module, loss: LossFunction | None) -> Skeleton:
    """A copy of both with parameters on the meta device. Raises InputError where the model cannot be copied."""
    try:
        return Skeleton(model, loss).with_parameters(lambda parameter: torch.empty_like(parameter, device="meta"))
    except Exception as error:
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:120]}"
        raise InputError(
            f"{type(model).__name__} cannot be copied for the proof run ({reason}): let copy.deepcopy copy it, or train without the proof "
            "with prove='never'"
        ) from None


def fingerprints_of(model: nn.Module, compute: torch.dtype) -> dict[str, torch.Tensor]:
    """A few linear numbers of each parameter as the run computes with it; none of those without memory."""
    return {
        name: project(name, tensor.detach().to(compute))
        for name, tensor in model.named_parameters()
        if not tensor.is_meta and tensor.numel()
    }


class Rebinding:
    """Functions, methods and partial calls with what `memo` (of deepcopy) has for the objects in them."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.done: dict[int, Any] = {}

    def __call__(self, value: Any) -> Any:
        if id(value) in self.memo:
            return self.memo[id(value)]
        if id(value) in self.done:
            return self.done[id(value)]
        if isinstance(value, types.MethodType):
            owner = self(value.__self__)
            return value if owner is value.__self__ else types.MethodType(value.__func__, owner)
        if isinstance(value, functools.partial):
            return functools.partial(self(value.func), *map(self, value.args), **{key: self(each) for key, each in value.keywords.items()})
        if type(value) in (list, tuple):
            found = type(value)(map(self, value))
            return found if any(one is not other for one, other in zip(found, value, strict=True)) else value
        if isinstance(value, types.FunctionType) and (value.__closure__ or value.__defaults__):
            return self._function(value)
        return value

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        made = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells or None)
        made.__kwdefaults__ = value.__kwdefaults__
        functools.update_wrapper(made, value)
        self.done[id(value)] = made
        for cell, before in zip(cells, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # nothing is in it yet
                cell.cell_contents = self(before.cell_contents)
        made.__defaults__ = self(value.__defaults__)
        return made
