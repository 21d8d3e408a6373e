"""States and options of an optimizer as text beside tensors, and made again from it as they were.

The rules of others keep whatever they like of a tensor: counts of Python, lists of matrices, words. What is no tensor is described; tensors are written as
pieces, by the way to them (`GG.0`). What can be neither is refused where a checkpoint is written: it would be lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from meshwright.base.errors import InputError
from meshwright.parallel.zero.numbers import Number, kind_of

Description = dict[str, Any]


def tensors_in(value: Any, way: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of a state and the way to each.

    >>> [way for way, _ in tensors_in({"m": torch.zeros(2), "GG": [torch.zeros(1), 3]})]
    ['m', 'GG.0']
    """
    if isinstance(value, torch.Tensor):
        yield way, value
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, part in parts:
        yield from tensors_in(part, f"{way}.{key}" if way else str(key))


def described(value: Any, what: str) -> Description:
    """`what` says whose it is. Raises InputError where it holds something that a checkpoint cannot hold.

    >>> described({"step": 3, "Q": [torch.zeros(2)]}, "w")
    {'dict': {'step': {'plain': 3}, 'Q': {'list': [{'tensor': ['float32', [2]]}]}}}
    """
    if isinstance(value, torch.Tensor):
        return {"tensor": [kind_of(value), list(value.shape)]}
    if value is None or isinstance(value, bool | int | float | str):
        return {"plain": value}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: described(part, what) for key, part in value.items()}}
    if type(value) in (list, tuple):
        return {type(value).__name__: [described(part, what) for part in value]}
    raise InputError(
        f"a checkpoint cannot hold the optimizer's state of {what}, which has a {type(value).__name__}: keep tensors, numbers, and lists and dicts of them there"
    )


def made_again(description: Description, device: Callable[[str, int], torch.device], key: str = "") -> Any:
    """What was described, its tensors zeros. `device`: of a tensor under this key with so many dimensions."""
    ((kind, held),) = description.items()
    if kind == "tensor":
        dtype, shape = held
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=device(key, len(shape)))
    if kind == "plain":
        return held
    if kind == "dict":
        return {name: made_again(part, device, name) for name, part in held.items()}
    parts = [made_again(part, device) for part in held]
    return tuple(parts) if kind == "tuple" else parts


def option_text(value: Any) -> Any:
    """An option of a group for a checkpoint; Ellipsis where it cannot be held. Rates are numbers, tensors of one number, or numpy's.

    >>> option_text((0.9, torch.tensor(0.5))), option_text(object())
    ((0.9, {'number': 0.5, 'kind': 'float32'}), Ellipsis)
    """
    if isinstance(value, tuple | list):
        parts = tuple(map(option_text, value))
        return ... if ... in parts else parts
    if isinstance(value, torch.Tensor):
        return {"number": float(value), "kind": kind_of(value)} if value.numel() == 1 and not value.is_complex() else ...
    if type(value).__module__ == "numpy" and callable(getattr(value, "item", None)) and not getattr(value, "shape", ()):
        return value.item()
    return value if value is None or isinstance(value, int | float | str) else ...


def option_of(text: Any, now: Any) -> Any:
    """The option that `option_text` described; a tensor where the option that the group has `now` lies."""
    if isinstance(text, list | tuple):
        return tuple(map(option_of, text, now if isinstance(now, list | tuple) and len(now) == len(text) else [None] * len(text)))
    if isinstance(text, dict):
        return Number(text["number"], text["kind"]).made(now.device if isinstance(now, torch.Tensor) else torch.device("cpu"))
    return text
