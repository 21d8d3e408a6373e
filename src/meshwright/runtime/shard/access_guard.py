"""Closed tensors: parameters whose whole values a rank does not hold at the moment, so that using one ends in one line.

A closed parameter tells its form (shape, type, device) and refuses every other operation: reading would give garbage or
end the process, and what
is written would be lost. Closing replaces the class of the object, as torch's `UninitializedParameter.materialize`
does, so that modules and user
code keep the same object and an open parameter is a plain one. Gradient hooks may come while it is closed: `grad`
belongs to the form.

Cost: 0.13 us a parameter to close and as much to open.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_leaves

from meshwright.core.errors import InputError

METADATA_ATTRIBUTES = frozenset(
    {
        *(
            "shape",
            "dtype",
            "device",
            "layout",
            "requires_grad",
            "grad",
            "is_leaf",
            "grad_fn",
            "ndim",
            "names",
            "itemsize",
            "nbytes",
        ),
        *(
            "is_meta",
            "is_cpu",
            "is_cuda",
            "is_mps",
            "is_xpu",
            "is_sparse",
            "is_sparse_csr",
            "is_quantized",
            "is_nested",
            "is_mkldnn",
        ),
        *(
            "_version",
            "_base",
            "_backward_hooks",
            "_post_accumulate_grad_hooks",
            "output_nr",
            "_is_view",
            "is_inference",
            "has_names",
        ),
        *(
            "size",
            "dim",
            "ndimension",
            "numel",
            "nelement",
            "element_size",
            "stride",
            "storage_offset",
            "is_contiguous",
            "get_device",
        ),
        *("is_floating_point", "is_complex", "is_signed", "is_same_size", "__len__", "__hash__", "__dir__"),
        *("requires_grad_", "register_hook", "register_post_accumulate_grad_hook"),
    }
)
"""Properties and methods that read or write no values."""

MAX_WATCHED_FORWARDS = 64
"""Blocks that are watched for a first use: closing costs, and a loss shows what it reads in its first passes."""

AccessErrorMessage = Callable[[str, torch.Size], str]
"""What to say of a parameter of this name and shape that is used while it is closed."""


class InaccessibleTensor:
    """Mixed into the class of a tensor while it is closed. `tensor_names`: by identity."""

    tensor_names: ClassVar[Mapping[int, str]] = {}
    used: ClassVar[Callable[[str, torch.Size], None]]
    """Raises InputError, or opens the tensor."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__"):  # of a property
            name = getattr(getattr(function, "__self__", None), "__name__", "")
        used = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, InaccessibleTensor))
        with torch._C.DisableTorchFunctionSubclass():
            if name in METADATA_ATTRIBUTES:
                return function(*args, **(kwargs or {}))
            own, shape = type(used).tensor_names.get(id(used), "a parameter"), used.shape  # type: ignore[attr-defined]
            if name == "__repr__":
                return f"{own} {tuple(shape)} {used.dtype}, closed"  # type: ignore[attr-defined]
        type(used).used(own, shape)  # type: ignore[attr-defined]
        return function(*args, **(kwargs or {}))


def make_inaccessible_class(kind: type, names: Mapping[int, str], used: Callable[[str, torch.Size], None]) -> Any:
    """The class that tensors of class `kind` have while they are closed; `names` by identity; `used` as in
    `InaccessibleTensor`."""
    return type(kind)(
        f"Closed{kind.__name__}", (InaccessibleTensor, kind), {"tensor_names": names, "used": staticmethod(used)}
    )


def _raise_access_error(line: AccessErrorMessage, name: str, shape: torch.Size) -> None:
    raise InputError(line(name, shape))


class AccessGuard:
    """Closes and opens the same tensors again and again."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], line: AccessErrorMessage) -> None:
        names = {id(tensor): name for name, tensor in tensors.items()}
        kinds = {
            kind: make_inaccessible_class(kind, names, partial(_raise_access_error, line))
            for kind in set(map(type, tensors.values()))
        }
        self._classes = [(tensor, type(tensor), kinds[type(tensor)]) for tensor in tensors.values()]
        self.is_denied = False

    def deny(self) -> None:
        if not self.is_denied:
            self.is_denied = True
            for tensor, _, closed in self._classes:
                tensor.__class__ = closed

    def allow(self) -> None:
        if self.is_denied:
            self.is_denied = False
            for tensor, kind, _ in self._classes:
                tensor.__class__ = kind


class ForwardAccessGuard:
    """Closes those of the same tensors that are open, while a block runs. With a `line` using one is refused; without,
    `is_used` says it from then on, and nothing
    is closed any more; PASSES of the block are watched so."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], line: AccessErrorMessage | None) -> None:
        self._tensors, self._message = list(tensors.values()), line
        self.is_used = False
        self._forwards = 0
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._classes: dict[type, Any] = {}
        self._replaced: list[tuple[torch.Tensor, type]] = []

    def __enter__(self) -> None:
        self._forwards += 1
        watches = self._message is not None or not (self.is_used or self._forwards > MAX_WATCHED_FORWARDS)
        for tensor in self._tensors if watches else ():
            kind = type(tensor)
            if issubclass(kind, InaccessibleTensor):
                continue
            if kind not in self._classes:
                self._classes[kind] = make_inaccessible_class(kind, self._names, self._used)
            self._replaced.append((tensor, kind))
            tensor.__class__ = self._classes[kind]

    def _used(self, name: str, shape: torch.Size) -> None:
        if self._message is not None:
            _raise_access_error(self._message, name, shape)
        self.is_used = True
        self.__exit__()

    def __exit__(self, *_: Any) -> None:
        for tensor, kind in self._replaced:
            tensor.__class__ = kind  # type: ignore[assignment]
        self._replaced.clear()


def sharded_weight_message(plan: str) -> AccessErrorMessage:
    """The line for weights of which each rank holds a shard outside of the forward of their module."""
    return lambda name, shape: (
        f"plan {plan}: {name} {tuple(shape)} is used outside of the forward of its module, where each rank holds a shard of it alone: "
        "read or change it inside `with trainer.full_parameters(write=...)`, or use z2 at most"
    )


def read_by_loss_message(plan: str) -> AccessErrorMessage:
    """The line for weights that a loss of the user's own uses where no rank holds them all."""
    return lambda name, shape: (
        f"plan {plan}: the loss uses {name} {tuple(shape)} beside the output of the model, and under this plan no rank holds the whole of all parameters: "
        "give the optimizer a weight_decay in place of a penalty, or use data parallelism with z2 at most"
    )


def stale_parameter_message(plan: str) -> AccessErrorMessage:
    """The line for parameters of before `parallelize` that are no part of the model any more."""
    return lambda name, shape: (
        f"plan {plan}: this {name} {tuple(shape)} was taken from the model before parallelize, which has put shards in its place or laid it on another "
        "stage: take it from `with trainer.full_parameters(write=...)`"
    )
