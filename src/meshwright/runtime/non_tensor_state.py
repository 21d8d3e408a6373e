"""Converts state that is not a parameter to the form that checkpoints store, and back: optimizer states of any
structure, options of parameter groups, and the extra state of modules. `ExtraState` also lists the buffers.

An optimizer may store values of any type for a parameter: tensors, Python numbers, lists of matrices, strings.
`describe_state` describes such a state as JSON. The tensors of the state are saved separately, under their path in the
state (`GG.0`). `restore_state` makes the state from its description, and the tensors are then loaded into it. If a
state cannot be described, saving a checkpoint fails, because the state would be lost.

The result of a module's `get_extra_state` is an entry of the model's state dict, and of a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.shard.optimizer_shard import ScalarState, scalar_type

StateDescription = dict[str, Any]

EXTRA_STATE_KEY = "_extra_state"
"""The last component of the state-dict keys whose values come from `get_extra_state`."""


@dataclass(frozen=True)
class ExtraState:
    """Describes the entries of the model's state dict that are not parameters, and the additional names of shared
    parameters."""

    shared_names: dict[str, str] = field(default_factory=dict)
    """For a parameter with several names, maps each name after the first to the first name."""
    buffer_stages: dict[str, int] = field(default_factory=dict)
    """The stage to which each buffer belongs: the stage that updates the buffer, if there is one. On other stages the
    buffer may be stale or missing."""
    module_keys: tuple[str, ...] = ()
    """State-dict keys whose values come from `get_extra_state`."""


def iter_tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields (path, tensor) for each tensor in the state `value`. The path is the keys and indices that lead to the
    tensor, joined by dots.

    >>> [path for path, _ in iter_tensors({"m": torch.zeros(2), "GG": [torch.zeros(1), 3]})]
    ['m', 'GG.0']
    """
    if isinstance(value, torch.Tensor):
        yield path, value
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in parts:
        yield from iter_tensors(part, f"{path}.{key}" if path else str(key))


def describe_state(value: Any, name: str) -> StateDescription:
    """Returns a JSON description of the state `value` of the parameter `name`.

    Raises:
        InputError: The state contains something that a checkpoint cannot store.

    >>> describe_state({"step": 3, "Q": [torch.zeros(2)]}, "w")
    {'dict': {'step': {'plain': 3}, 'Q': {'list': [{'tensor': ['float32', [2]]}]}}}
    """
    if isinstance(value, torch.Tensor):
        return {"tensor": [scalar_type(value), list(value.shape)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: describe_state(part, name) for key, part in value.items()}}
    if type(value) in (list, tuple):
        return {type(value).__name__: [describe_state(part, name) for part in value]}
    raise InputError(
        Message(
            "a checkpoint cannot store the optimizer state of {name}, which contains a {type}: use only tensors, "
            "numbers, and lists and dicts of them",
            name=name,
            type=type(value).__name__,
        )
    )


def restore_state(description: StateDescription, device: Callable[[str, int], torch.device], key: str = "") -> Any:
    """Returns the state that `describe_state` described, with zeros in its tensors.

    `device(key, dims)` returns the device for a tensor with `dims` dimensions under the dict key `key`. `key` is '' in
    a list or tuple.
    """
    ((kind, content),) = description.items()
    if kind == "tensor":
        dtype, shape = content
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device(key, len(shape)))
    if kind == "plain":
        return content
    if kind == "dict":
        return {name: restore_state(part, device, name) for name, part in content.items()}
    parts = [restore_state(part, device) for part in content]
    return tuple(parts) if kind == "tuple" else parts


def encode_option(value: Any) -> Any:
    """Returns an option of a parameter group, such as a learning rate, in the form that a checkpoint stores. Returns
    Ellipsis if the option cannot be stored.

    A number in the option may be a Python number, a tensor of one element, or a numpy scalar.

    >>> encode_option((0.9, torch.tensor(0.5))), encode_option(object())
    ((0.9, {'number': 0.5, 'kind': 'float32'}), Ellipsis)
    """
    if isinstance(value, tuple | list):
        parts = tuple(map(encode_option, value))
        return ... if ... in parts else parts
    if isinstance(value, torch.Tensor):
        return (
            {"number": float(value), "kind": scalar_type(value)}
            if value.numel() == 1 and not value.is_complex()
            else ...
        )
    if type(value).__module__ == "numpy" and callable(getattr(value, "item", None)) and not getattr(value, "shape", ()):
        return value.item()
    return value if value is None or isinstance(value, int | float | str) else ...


def decode_option(encoded: Any, current: Any) -> Any:
    """Returns the option that `encode_option` encoded. A tensor is on the device of the option's `current` value, or on
    the CPU if this value is not a tensor."""
    if isinstance(encoded, list | tuple):
        is_same_length = isinstance(current, list | tuple) and len(current) == len(encoded)
        return tuple(map(decode_option, encoded, current if is_same_length else [None] * len(encoded)))
    if isinstance(encoded, dict):
        return ScalarState(encoded["number"], encoded["kind"]).create(
            current.device if isinstance(current, torch.Tensor) else torch.device("cpu")
        )
    return encoded


def collect_extra_states(model: nn.Module, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the extra states of this rank's modules, by state-dict key. Replicas have equal extra states."""
    return {name: module.get_extra_state() for name, module in _modules_with_extra_state(model, keys).items()}


def serializable_extra_states(model: nn.Module, keys: Sequence[str]) -> dict[str, Any]:
    """Returns the extra states of this rank's modules in the form that a checkpoint stores.

    Raises:
        InputError: A state contains a value that is not a number, a string, or a list or dict of these.
    """
    states = collect_extra_states(model, keys)
    for name, value in states.items():
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise InputError(
                Message(
                    "a checkpoint cannot store {name}, which is a {type}: let get_extra_state return numbers, "
                    "strings, and lists and dicts of them, or keep tensors as buffers",
                    name=name,
                    type=type(value).__name__,
                )
            )
    return states


def load_extra_states(model: nn.Module, keys: Sequence[str], saved: Mapping[str, Any]) -> None:
    """Loads the extra states `saved` into this rank's modules."""
    for name, module in _modules_with_extra_state(model, keys).items():
        if name in saved:
            module.set_extra_state(saved[name])


def _modules_with_extra_state(model: nn.Module, keys: Sequence[str]) -> dict[str, nn.Module]:
    paths = {name: name.removesuffix(EXTRA_STATE_KEY).removesuffix(".") for name in keys}
    modules = dict(model.named_modules(remove_duplicate=False)) if paths else {}
    inherited = nn.Module.get_extra_state
    return {
        name: modules[path]
        for name, path in paths.items()
        if path in modules and type(modules[path]).get_extra_state is not inherited
    }
