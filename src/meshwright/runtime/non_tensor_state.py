"""States and options of an optimizer as text beside tensors, and made again from it as they were.

The rules of others keep whatever they like of a tensor: counts of Python, lists of matrices, words. What is no tensor
is described; tensors are written as
pieces, by the way to them (`GG.0`). What can be neither is refused where a checkpoint is written: it would be lost.

What modules give to a state dict themselves (`get_extra_state`): part of the plain model's state, and of a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from meshwright.core.errors import InputError
from meshwright.runtime.shard.optimizer_shard import ScalarState, scalar_type

if TYPE_CHECKING:
    from meshwright.runtime.engine import Engine

StateDescription = dict[str, Any]


def iter_tensors(value: Any, way: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a state and the way to each.

    >>> [way for way, _ in iter_tensors({"m": torch.zeros(2), "GG": [torch.zeros(1), 3]})]
    ['m', 'GG.0']
    """
    if isinstance(value, torch.Tensor):
        yield way, value
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in parts:
        yield from iter_tensors(part, f"{way}.{key}" if way else str(key))


def describe_state(value: Any, what: str) -> StateDescription:
    """`what` says whose it is. Raises InputError where it holds something that a checkpoint cannot hold.

    >>> describe_state({"step": 3, "Q": [torch.zeros(2)]}, "w")
    {'dict': {'step': {'plain': 3}, 'Q': {'list': [{'tensor': ['float32', [2]]}]}}}
    """
    if isinstance(value, torch.Tensor):
        return {"tensor": [scalar_type(value), list(value.shape)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: describe_state(part, what) for key, part in value.items()}}
    if type(value) in (list, tuple):
        return {type(value).__name__: [describe_state(part, what) for part in value]}
    raise InputError(
        f"a checkpoint cannot hold the optimizer's state of {what}, which has a {type(value).__name__}: keep tensors, numbers, and lists and dicts of them there"
    )


def restore_state(description: StateDescription, device: Callable[[str, int], torch.device], key: str = "") -> Any:
    """What was described, its tensors zeros. `device`: of a tensor under this key with so many dimensions."""
    ((kind, held),) = description.items()
    if kind == "tensor":
        dtype, shape = held
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device(key, len(shape)))
    if kind == "plain":
        return held
    if kind == "dict":
        return {name: restore_state(part, device, name) for name, part in held.items()}
    parts = [restore_state(part, device) for part in held]
    return tuple(parts) if kind == "tuple" else parts


def encode_option(value: Any) -> Any:
    """An option of a group for a checkpoint; Ellipsis where it cannot be held. Rates are numbers, tensors of one
    number, or numpy's.

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


def decode_option(text: Any, now: Any) -> Any:
    """The option that `encode_option` described; a tensor where the option that the group has `now` lies."""
    if isinstance(text, list | tuple):
        return tuple(
            map(
                decode_option,
                text,
                now if isinstance(now, list | tuple) and len(now) == len(text) else [None] * len(text),
            )
        )
    if isinstance(text, dict):
        return ScalarState(text["number"], text["kind"]).create(
            now.device if isinstance(now, torch.Tensor) else torch.device("cpu")
        )
    return text


EXTRA_STATE_KEY = "_extra_state"


def collect_extra_states(engine: Engine) -> dict[str, Any]:
    """Of the modules that this rank holds, by the keys of the plain model's state dict; replicas hold the same."""
    return {name: module.get_extra_state() for name, module in _modules_with_extra_state(engine).items()}


def serializable_extra_states(engine: Engine) -> dict[str, Any]:
    """The same for a checkpoint. Raises InputError where one is not made of numbers, words, lists and dicts of
    these."""
    found = collect_extra_states(engine)
    for name, value in found.items():
        try:
            same = json.loads(json.dumps(value)) == value
        except (TypeError, ValueError):
            same = False
        if not same:
            raise InputError(
                f"a checkpoint cannot hold {name}, which is a {type(value).__name__}: let get_extra_state give numbers, words, and lists and dicts of them, "
                "or keep tensors as buffers"
            )
    return found


def load_extra_states(engine: Engine, saved: Mapping[str, Any]) -> None:
    """Give the modules of this rank what was saved of them."""
    for name, module in _modules_with_extra_state(engine).items():
        if name in saved:
            module.set_extra_state(saved[name])


def _modules_with_extra_state(engine: Engine) -> dict[str, nn.Module]:
    wanted = {name: name.removesuffix(EXTRA_STATE_KEY).removesuffix(".") for name in engine.beside.extra}
    held = dict(engine.model.named_modules(remove_duplicate=False)) if wanted else {}
    has = nn.Module.get_extra_state
    return {
        name: held[path]
        for name, path in wanted.items()
        if path in held and type(held[path]).get_extra_state is not has
    }
