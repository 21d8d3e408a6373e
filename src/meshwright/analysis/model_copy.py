"""Copies a model and the user's loss so that the copy never reaches the original. The preflight checks run a copy on
the meta device, and the proof of the first step (train/proof) runs a copy in one process.

`copy.deepcopy` does not copy functions. So hooks, losses, and methods that were replaced on an instance could still
reach the original model through their closures, their defaults, or global variables. Such functions are rebuilt so that
they reference the copies. Copied lists, dictionaries and objects then reference the rebuilt functions. The code of a
class may reach the model through a global variable or a class attribute. Such code cannot be rebuilt, so `isolated_run`
raises if the copy reaches the original model at run time.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.core.printable_text import reason_of

OPAQUE_TYPES = (nn.Module, torch.Tensor, type, types.ModuleType)
"""Types whose objects are not searched for references to the model. deepcopy copies such an object as a whole, or not
at all.
"""

REBUILT_TYPES = (tuple, types.MethodType, functools.partial)
"""Types whose objects are rebuilt, like functions, if they reference the model."""


@dataclass(frozen=True)
class ModelCopy:
    """A copy of a model and of the user's loss (None without one). The loss may reference the model."""

    model: nn.Module
    loss: Callable[..., torch.Tensor] | None = None

    def with_parameters(self, make: Callable[[torch.Tensor], torch.Tensor]) -> ModelCopy:
        """Returns a copy in which each parameter is replaced by the result of `make` for it. Tied parameters stay tied.
        Gradient hooks are copied. Random generators are shared with the copy.
        """
        memo: dict[int, Any] = {}
        parameters = list(self.model.parameters())
        for parameter in parameters:
            memo[id(parameter)] = nn.Parameter(make(parameter.detach()), requires_grad=parameter.requires_grad)
        for module in self.model.modules():
            for value in vars(module).values():  # deepcopy rejects non-leaf tensors, such as those of weight_norm
                if isinstance(value, torch.Tensor) and not value.is_leaf:
                    memo[id(value)] = value.detach().clone()
                elif isinstance(value, torch.Generator):  # the copy draws the numbers that the model would draw next
                    memo[id(value)] = value
        model = copy.deepcopy(self.model, memo)
        again = FunctionRebinder(memo)
        loss = again(self.loss)
        for parameter in parameters:
            for hook in (parameter._backward_hooks or {}).values() if parameter.requires_grad else ():
                memo[id(parameter)].register_hook(again(hook))
            for hook in (parameter._post_accumulate_grad_hooks or {}).values() if parameter.requires_grad else ():
                memo[id(parameter)].register_post_accumulate_grad_hook(again(hook))
        again.rebind_copies()
        return ModelCopy(model, loss)


def copy_to_meta(model: nn.Module, loss: Callable[..., torch.Tensor] | None = None) -> ModelCopy:
    """Returns a copy of the model and the loss. The parameters of the copy are on the meta device. Its buffers have
    real values.

    Raises:
        InputError: the model cannot be copied.
    """
    try:
        return ModelCopy(model, loss).with_parameters(lambda parameter: torch.empty_like(parameter, device="meta"))
    except Exception as error:
        raise InputError(
            Message(
                "{type} cannot be copied ({reason_of}): make it work with copy.deepcopy",
                type=type(model).__name__,
                reason_of=reason_of(error),
            )
        ) from None


class FunctionRebinder:
    """Rebuilds functions that reference copied objects, so that they reference the copies. `memo` is the memo of
    `copy.deepcopy`: it maps the id of each copied object to the copy.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self.memo = memo
        self.made: dict[int, types.FunctionType] = {}
        self.unrelated: set[int] = set()
        """Ids of objects that do not reference the model."""
        self.copies: set[int] = set()
        """Ids of copies, which `rebind_copies` visits."""
        self.known = 0

    def __call__(self, value: Any) -> Any:
        """Returns the copy of `value` if it was copied. Returns a rebuilt `value` if it references a copied object,
        otherwise `value` itself.
        """
        if id(value) in self.memo:
            return self.memo[id(value)]
        if not self._references_copied(value):
            return value
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self(value.__func__), self(value.__self__))
        if isinstance(value, functools.partial):
            return functools.partial(
                self(value.func), *map(self, value.args), **{key: self(each) for key, each in value.keywords.items()}
            )
        if type(value) in (list, tuple):
            return type(value)(map(self, value))
        return copy.deepcopy(value, self.memo)

    def rebind_copies(self) -> None:
        """Replaces functions in copied lists, dictionaries and objects by rebuilt functions."""
        done: set[int] = {id(self.memo)}  # deepcopy stores the originals under this key
        while fresh := [key for key in self.memo if key not in done]:
            done.update(fresh)
            for holder in [self.memo[key] for key in fresh]:
                target: Any = holder if isinstance(holder, dict | list) else getattr(holder, "__dict__", {})
                for key, value in list(enumerate(target) if isinstance(target, list) else target.items()):
                    if isinstance(value, (types.FunctionType, *REBUILT_TYPES)):
                        target[key] = self(value)

    def _function(self, value: types.FunctionType) -> types.FunctionType:
        if id(value) in self.made:
            return self.made[id(value)]
        names = {name: self.memo[id(target)] for name, target in _referenced_globals(value) if id(target) in self.memo}
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        around = {**value.__globals__, **names} if names else value.__globals__
        made = types.FunctionType(value.__code__, around, value.__name__, value.__defaults__, cells or None)
        self.made[id(value)] = made
        functools.update_wrapper(made, value)
        del made.__wrapped__  # type: ignore[attr-defined]
        for cell, before in zip(cells, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell has no value
                cell.cell_contents = self(before.cell_contents)
        made.__defaults__ = self(value.__defaults__)
        made.__kwdefaults__ = {key: self(each) for key, each in (value.__kwdefaults__ or {}).items()} or None
        made.__dict__.update({key: self(each) for key, each in vars(value).items()})
        return made

    def _references_copied(self, value: Any) -> bool:
        """Returns whether `value` references a copied object, directly or through functions, containers and objects."""
        waiting, seen = [value], set[int]()
        if self.known != len(self.memo):
            self.copies = {id(each) for each in self.memo.values() if not isinstance(each, REBUILT_TYPES)}
            self.known = len(self.memo)
        while waiting:
            each = waiting.pop()
            if id(each) in self.memo:
                return True
            if (
                id(each) not in seen
                and id(each) not in self.unrelated
                and id(each) not in self.copies
                and not isinstance(each, OPAQUE_TYPES)
            ):
                seen.add(id(each))
                waiting += _referenced_values(each)
        self.unrelated |= seen
        return False


def _referenced_values(value: Any) -> Iterable[Any]:
    """Yields the objects that `value` references and that its code may use."""
    if isinstance(value, types.FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__, vars(value))
        yield from (target for _, target in _referenced_globals(value) if isinstance(target, nn.Module | torch.Tensor))
        for cell in value.__closure__ or ():
            with suppress(ValueError):
                yield cell.cell_contents
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    else:
        yield from getattr(value, "__dict__", {}).values()


def _referenced_globals(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yields name and value of the global variables that the code of a function uses."""
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        yield from ((name, function.__globals__[name]) for name in code.co_names if name in function.__globals__)


class ParamAccessGuard(TorchFunctionMode):
    """A mode for runs of a copy of `model`. Raises an InputError if a torch function reads a parameter of `model`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.live = {id(parameter): name for name, parameter in model.named_parameters()}
        self.reached = ""
        """Describes how the copy reached the original model, '' if it did not. It stays set even if the code catches
        the error.
        """

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in args:
            if id(value) in self.live and isinstance(value, nn.Parameter):
                self.refuse(
                    Message(
                        "the copy of the model or the loss reads {live} of the original model",
                        live=self.live[id(value)],
                    )
                )
        return function(*args, **(kwargs or {}))

    def refuse(self, line: str) -> None:
        """Records that the copy reached the original model. `line` describes how.

        Raises:
            InputError: always.
        """
        self.reached = self.reached or line
        raise InputError(line)


@contextmanager
def isolated_run(model: nn.Module) -> Iterator[ParamAccessGuard]:
    """Guards a run of a copy of `model`.

    Raises:
        InputError: the copy calls a module of `model`, which may start collectives, or it reads a parameter of `model`.
    """
    live, guard = {id(module): path for path, module in model.named_modules()}, ParamAccessGuard(model)

    def check(module: nn.Module, args: Any) -> None:
        if id(module) in live:
            guard.refuse(
                Message(
                    "the copy of the model calls {live} of the original model",
                    live=live[id(module)] or Message("the forward"),
                )
            )

    handle = register_module_forward_pre_hook(check)
    try:
        with guard:
            yield guard
    finally:
        handle.remove()
