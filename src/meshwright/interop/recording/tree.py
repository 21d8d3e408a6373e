"""Stores the arguments of a model as plain data, with tensors by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import xxhash

from meshwright.interop.recording.layout import local_tensor

UNKNOWN = "unknown"
"""The key of a value that is neither a tensor nor plain data. A comparison passes None for it."""


def encode_tree(value: Any, store: Callable[[str, torch.Tensor], str]) -> tuple[Any, str]:
    """Returns `value` as plain data, and a hash of its tensors. `store` stores a tensor under a name and returns the
    full name."""
    hashed, count = xxhash.xxh3_64(), 0

    def encode(each: Any) -> Any:
        nonlocal count
        if isinstance(each, torch.Tensor):
            local = local_tensor(each)
            hashed.update(str((tuple(local.shape), local.dtype)).encode())
            hashed.update(local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
            count += 1
            return {"tensor": store(str(count), local)}
        if each is None or isinstance(each, bool | int | float | str):
            return {"plain": each}
        if isinstance(each, Mapping):
            return {"map": {str(key): encode(item) for key, item in each.items()}}
        if isinstance(each, tuple | list):
            return {"tuple" if isinstance(each, tuple) else "list": [encode(item) for item in each]}
        return {UNKNOWN: type(each).__qualname__}

    return encode(value), hashed.hexdigest()


def decode_tree(data: Any, load: Callable[[str], torch.Tensor]) -> Any:
    """Returns the value of plain data made by `encode_tree`. `load` returns a tensor by its full name."""
    ((kind, content),) = data.items()
    if kind == "tensor":
        return load(content)
    if kind == "map":
        return {key: decode_tree(item, load) for key, item in content.items()}
    if kind in ("tuple", "list"):
        items = [decode_tree(item, load) for item in content]
        return tuple(items) if kind == "tuple" else items
    return content if kind == "plain" else None


def first_tensor(output: Any) -> torch.Tensor | None:
    """Returns the tensor that represents the output of a module: its logits, else its first floating-point tensor with
    a dimension."""
    if isinstance(output, torch.Tensor):
        return output if output.is_floating_point() else None
    if isinstance(output, Mapping):
        if isinstance(logits := output.get("logits"), torch.Tensor):
            return logits
        output = tuple(output.values())
    if isinstance(output, tuple | list):
        return next((found for each in output if (found := first_tensor(each)) is not None and found.ndim), None)
    return None
