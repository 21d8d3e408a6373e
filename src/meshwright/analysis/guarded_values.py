"""Finds the Python values that the user's modules and loss may read in a forward, for the step guards
(train/step/guards.py), for proofs, and for pipeline stages (value_changes.py).

| value | what is compared in each step |
|---|---|
| number, bool, string, None | the value |
| function, class | the object |
| dict; object with attributes | the object, the number of its entries, and its entries |
| list, tuple | its plain entries, and the objects of the other entries |
| buffer; tensor of at most SMALL_ELEMENTS elements | its elements, if its version counter has changed |

A class attribute is compared on its class, and on each instance, where user code may set an attribute of the same name.
Containers are searched down to MAX_DEPTH levels, if they have at most MAX_ENTRIES entries. Modules of torch and of this
project, parameters and tensors with a gradient are left out.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

PLAIN_TYPES = (bool, int, float, str, type(None))
FUNCTION_TYPES = (types.FunctionType, types.BuiltinFunctionType, type)
MAX_DEPTH, MAX_ENTRIES = 3, 256
MAX_NESTED_VALUES = 4096
"""The number of values inside containers that are compared at most."""
SMALL_ELEMENTS = 64
MAX_SUMMED_ELEMENTS = 1 << 16
"""At most this number of elements of a buffer is compared."""
HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
MODULE_ATTRIBUTES = frozenset({*vars(nn.Module()), "forward", "_compiled_call_impl"})
"""Attributes that torch or this project sets on every module."""


class GuardedValue(NamedTuple):
    """A value that user code may read. `name`: a description. `stored`: what contains it, with the method `get` of a
    mapping. `key`: its key in `stored`."""

    name: str
    stored: Any
    key: Any


def is_users_class(kind: type) -> bool:
    """Returns whether a class belongs neither to torch, nor to this project, nor to Python.

    >>> is_users_class(nn.Linear), is_users_class(dict), is_users_class(type("Options", (), {"__module__": "job"}))
    (False, False, True)
    """
    return kind.__module__ != "builtins" and is_users_module(kind.__module__)


def is_users_module(name: str | None) -> bool:
    """Returns whether the code of a module belongs neither to torch nor to this project."""
    return name is not None and not name.startswith(("torch.", "meshwright."))


def is_same(one: Any, other: Any) -> bool:
    """Returns whether two values are the same object, or equal plain values.

    >>> is_same(1.5, 1.5), is_same(1, True), is_same(torch.ones(2), torch.ones(2)), is_same((1, 2), (1, 2))
    (True, False, False, True)
    """
    return one is other or (type(one) is type(other) and isinstance(one, (*PLAIN_TYPES, tuple)) and one == other)


def guarded_values(model: nn.Module, loss: Any) -> Iterator[GuardedValue]:
    """Yields the values that user code may read: those of modules, and those of the user's `loss` (None without
    one)."""
    search = _Search()
    for path, module in model.named_modules():
        own, name = vars(module), path or "the model"
        yield GuardedValue(f"{name}.training", own, "training")
        for hooks in HOOK_ATTRIBUTES:
            view = _View(own.get(hooks, {}), _count_hooks)
            yield GuardedValue(f"the number of hooks of {name} ({hooks})", view, "")
        if is_users_class(type(module)):
            yield from search.defaults(module, name)
            for key, value in list(own.items()):
                if key not in MODULE_ATTRIBUTES:
                    yield from search.found(GuardedValue(f"{name}.{key}", own, key), value)
            buffers = own["_buffers"]
            yield from (GuardedValue(f"{name}.{key}", _TensorView(buffers, key), "") for key in buffers)
    for holder in (loss, getattr(loss, "__self__", None)):
        stored = getattr(holder, "__dict__", {})
        for key, value in list(stored.items()):
            if not isinstance(holder, nn.Module) or key not in MODULE_ATTRIBUTES:
                yield from search.found(GuardedValue(f"{key} of the loss", stored, key), value)
    code = getattr(loss, "__code__", None)
    if code is not None:
        for name, cell in zip(code.co_freevars, loss.__closure__ or (), strict=True):
            view = _View(cell, _cell_contents)
            yield from search.found(GuardedValue(f"{name} of the loss", view, ""), view.get(""))
        around = loss.__globals__
        for name in code.co_names:
            if name in around:
                yield from search.found(GuardedValue(f"{name} of the loss", around, name), around[name])


def nested_containers(own: Mapping[str, Any], name: str, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yields the dicts and the attributes of the user's objects inside the attributes `own` of a module, as (name,
    dict). With `seen`, the ids of containers that were yielded, it yields each container once."""
    waiting = [(f"{name}.{key}", value, 1) for key, value in own.items() if key not in MODULE_ATTRIBUTES]
    known = set[int]() if seen is None else seen
    while waiting:
        at, value, depth = waiting.pop(0)
        entries = _entries(value)
        if entries is None or id(value) in known or len(entries) > MAX_ENTRIES:
            continue
        known.add(id(value))
        yield at, entries
        if depth < MAX_DEPTH:
            waiting += [(f"{at}.{key}", each, depth + 1) for key, each in entries.items()]


def plain_leaves(value: Any, depth: int = MAX_DEPTH) -> Iterator[Any]:
    """Yields the plain values in `value`, a value of a batch: in mappings, sequences and attributes of the user's
    objects, and those of zero-dimensional tensors in them.

    >>> list(plain_leaves({"mix": 0.5, "sizes": [1, torch.tensor(2)], "x": torch.ones(3)}))
    [0.5, 1, 2]
    """
    if isinstance(value, PLAIN_TYPES):
        yield value
    elif isinstance(value, torch.Tensor):
        yield from () if value.ndim else (value.item(),)
    elif depth:
        entries = _entries(value)
        inside = value if isinstance(value, list | tuple) else () if entries is None else entries.values()
        for each in inside if len(inside) <= MAX_ENTRIES else ():
            yield from plain_leaves(each, depth - 1)


def plain_values(own: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns the plain values of a dict that stores values, and its lists and tuples of plain values, as copies.
    Leaves training modes out.

    >>> plain_values({"step": 3, "sizes": [1, (2, 3)], "training": True, "scale": torch.ones(2)})
    {'step': 3, 'sizes': [1, (2, 3)]}
    """

    def is_plain(value: Any) -> bool:
        return isinstance(value, PLAIN_TYPES) or (type(value) in (tuple, list) and all(map(is_plain, value)))

    def copied(value: Any) -> Any:
        return list(map(copied, value)) if type(value) is list else value

    return {key: copied(value) for key, value in own.items() if key != "training" and is_plain(value)}


def _entries(value: Any) -> Any:
    """Returns a dict itself, the attributes of a user's object, or None for any other value."""
    if isinstance(value, dict):
        return value
    if isinstance(value, nn.Module | torch.Tensor | types.ModuleType | type) or not is_users_class(type(value)):
        return None
    return None if isinstance(value, types.FunctionType) else getattr(value, "__dict__", None)


class _Search:
    """Searches containers for values. Each container and each class is searched once."""

    def __init__(self) -> None:
        self.seen = set[int]()
        self.left = MAX_NESTED_VALUES

    def defaults(self, holder: Any, name: str) -> Iterator[GuardedValue]:
        """Yields the plain class attributes of an object, and the places where the object may override them."""
        own = vars(holder)
        for kind in type(holder).__mro__:
            if not is_users_class(kind):
                continue
            keys = [k for k, v in vars(kind).items() if isinstance(v, PLAIN_TYPES) and not k.startswith("__")]
            yield from (GuardedValue(f"{name}.{key}", own, key) for key in keys if key not in own)
            if id(kind) not in self.seen:
                self.seen.add(id(kind))
                yield from (GuardedValue(f"{kind.__name__}.{key}", vars(kind), key) for key in keys)

    def found(self, at: GuardedValue, value: Any, depth: int = MAX_DEPTH) -> Iterator[GuardedValue]:
        """Yields the values to compare for `value`, which is at `at`."""
        if isinstance(value, (*PLAIN_TYPES, *FUNCTION_TYPES)):
            yield at
        elif isinstance(value, torch.Tensor):
            if value.numel() <= SMALL_ELEMENTS and not value.requires_grad:
                yield GuardedValue(at.name, _TensorView(at.stored, at.key), "")
        elif isinstance(value, list | tuple):
            if len(value) <= MAX_ENTRIES:
                yield GuardedValue(at.name, _View(at, _plain_items), "")
        elif (entries := _entries(value)) is not None:
            yield at
            if id(value) not in self.seen and len(entries) <= MAX_ENTRIES and depth and self.left > 0:
                self.seen.add(id(value))
                self.left -= len(entries)
                yield GuardedValue(f"the number of entries of {at.name}", _View(entries, len), "")
                if not isinstance(value, dict):
                    yield from self.defaults(value, at.name)
                for key, each in list(entries.items()):
                    yield from self.found(GuardedValue(f"{at.name}.{key}", entries, key), each, depth - 1)


class _View:
    """Computes a value from `of` when it is read."""

    def __init__(self, of: Any, compute: Callable[[Any], Any]) -> None:
        self.of, self.compute = of, compute

    def get(self, key: str, default: Any = None, /) -> Any:
        """Returns the computed value, whatever the key."""
        return self.compute(self.of)


def _count_hooks(hooks: Mapping[int, Any]) -> int:
    """Returns the number of hooks without those of this package, since the memory trace adds and removes hooks."""
    if not hooks:  # the usual case, in each step for each module
        return 0
    return sum(not str(getattr(hook, "__module__", "")).startswith("meshwright.") for hook in hooks.values())


def _cell_contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # Python raises it for an empty cell
        return None


def _plain_items(at: GuardedValue) -> Any:
    """Returns the plain entries of a list or tuple, and the ids of its other entries."""
    items = at.stored.get(at.key)
    if not isinstance(items, list | tuple) or len(items) > MAX_ENTRIES:
        return None
    return tuple(each if isinstance(each, PLAIN_TYPES) else id(each) for each in items)


class _TensorView:
    """The elements of a tensor, read again if the tensor was replaced or its version counter has changed."""

    def __init__(self, stored: Any, key: Any) -> None:
        self.stored, self.key = stored, key
        self.tensor: Any = None
        self.version, self.value = -1, ()

    def get(self, key: str, default: Any = None, /) -> Any:
        """Returns a tuple that describes the tensor, whatever the key."""
        tensor = self.stored.get(self.key)
        if not isinstance(tensor, torch.Tensor):
            return tensor
        version = 0 if tensor.is_inference() else tensor._version
        if tensor is not self.tensor or version != self.version:
            self.tensor, self.version, self.value = tensor, version, _described(tensor.detach())
        return self.value


def _described(tensor: torch.Tensor) -> Any:
    """Returns dtype, shape, and the elements of a small tensor, or two sums over elements of a large one."""
    form = (str(tensor.dtype), tuple(tensor.shape))
    if tensor.is_meta or tensor.is_complex() or tensor.layout != torch.strided:
        return form
    flat = tensor.reshape(-1)
    if flat.numel() <= SMALL_ELEMENTS:
        return (*form, *map(repr, flat.tolist()))
    some = flat[:: -(-flat.numel() // MAX_SUMMED_ELEMENTS)].double()
    weights = torch.arange(1, len(some) + 1, dtype=torch.float64, device=some.device)
    return (*form, repr(float(some.sum())), repr(float(some @ weights)))
