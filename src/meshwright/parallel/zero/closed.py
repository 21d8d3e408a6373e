"""Closed tensors: parameters whose whole values a rank does not hold at the moment, so that using one ends in one line.

A closed parameter tells its form (shape, type, device) and refuses every other operation: reading would give garbage or end the process, and what
is written would be lost. Closing replaces the class of the object, as torch's `UninitializedParameter.materialize` does, so that modules and user
code keep the same object and an open parameter is a plain one. Gradient hooks may come while it is closed: `grad` belongs to the form.

Cost: 0.13 us a parameter to close and as much to open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves

from meshwright.base.errors import InputError

FORM = frozenset(
    {
        *("shape", "dtype", "device", "layout", "requires_grad", "grad", "is_leaf", "grad_fn", "ndim", "names", "itemsize", "nbytes"),
        *("is_meta", "is_cpu", "is_cuda", "is_mps", "is_xpu", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn"),
        *("_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks", "output_nr", "_is_view", "is_inference", "has_names"),
        *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous", "get_device"),
        *("is_floating_point", "is_complex", "is_signed", "is_same_size", "__len__", "__hash__", "__dir__"),
        *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    }
)
"""Properties and methods that read or write no values."""

Line = Callable[[str, torch.Size], str]
"""What to say of a parameter of this name and shape that is used while it is closed."""


class Closed:
    """Mixed into the class of a tensor while it is closed. `tensor_names`: by identity."""

    tensor_names: ClassVar[Mapping[int, str]] = {}
    line: ClassVar[Line]

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__"):  # of a property
            name = getattr(getattr(function, "__self__", None), "__name__", "")
        used = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, Closed))
        with torch._C.DisableTorchFunctionSubclass():
            if name in FORM:
                return function(*args, **(kwargs or {}))
            own, shape = type(used).tensor_names.get(id(used), "a parameter"), used.shape  # type: ignore[attr-defined]
            if name == "__repr__":
                return f"{own} {tuple(shape)} {used.dtype}, closed"  # type: ignore[attr-defined]
        raise InputError(type(used).line(own, shape))


class Closing:
    """Closes and opens the same tensors again and again."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], line: Line) -> None:
        names = {id(tensor): name for name, tensor in tensors.items()}
        members = {"tensor_names": names, "line": staticmethod(line)}
        kinds = {kind: type(kind)(f"Closed{kind.__name__}", (Closed, kind), dict(members)) for kind in set(map(type, tensors.values()))}
        self._held = [(tensor, type(tensor), kinds[type(tensor)]) for tensor in tensors.values()]
        self.is_closed = False

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            for tensor, _, closed in self._held:
                tensor.__class__ = closed  # type: ignore[assignment]

    def open(self) -> None:
        if self.is_closed:
            self.is_closed = False
            for tensor, kind, _ in self._held:
                tensor.__class__ = kind  # type: ignore[assignment]


def sharded(plan: str) -> Line:
    """The line for weights of which each rank holds a shard outside of the forward of their module."""
    return lambda name, shape: (
        f"plan {plan}: {name} {tuple(shape)} is used outside of the forward of its module, where each rank holds a shard of it alone: "
        "read or change it inside `with trainer.full_parameters(write=...)`, or use z2 at most"
    )
