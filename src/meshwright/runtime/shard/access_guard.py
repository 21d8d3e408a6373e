"""Makes parameters inaccessible while a rank does not store their full values. ZeRO 1 to 3 (zero/group_weights.py) and
parameter_access.py use the guards.

Without a guard, a read would return garbage or crash the process, and a write would be lost. An inaccessible parameter
still returns its metadata (shape, dtype, device) and its `repr`. Every other operation raises an InputError with a
one-line message, or waits until the values have arrived. To deny access, the guard replaces the class of the parameter
object, as torch's `UninitializedParameter.materialize` does. So references to the parameter in modules and user code
stay valid. To allow access, the guard restores the original class. Gradient hooks may run while a parameter is
inaccessible, so `grad` is part of the metadata.

Cost: 0.13 us per parameter to deny access, and 0.13 us to allow access.
"""

from __future__ import annotations

import copy
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
"""Properties and methods that neither read nor write values."""

MAX_WATCHED_FORWARDS = 64
"""Number of runs of its `with` block in which a guard without message detects accesses. Detection costs time, and a
loss that reads parameters already does so in its first calls."""

AccessErrorMessage = Callable[[str, torch.Size], str]
"""A function that returns the error message for a parameter, given its name and shape."""


class InaccessibleTensor:
    """Base class of the classes that tensors have while they are inaccessible. `tensor_names` maps the `id` of each
    tensor to its name."""

    tensor_names: ClassVar[Mapping[int, str]] = {}
    used: ClassVar[Callable[[str, torch.Size], None]]
    """Function that is called at an access with the name and the shape of the tensor. It raises InputError, or makes
    the tensor accessible."""
    opens: ClassVar[bool]
    """Whether `used` makes the tensor accessible."""

    def __deepcopy__(self, memo: Any) -> Any:
        """Copies the tensor as one of its original class, where torch would copy the class of this object."""
        type(self).used(type(self).tensor_names.get(id(self), "a parameter"), self.shape)  # type: ignore[attr-defined]
        return copy.deepcopy(self, memo)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__"):  # `function` is the accessor of a property
            name = getattr(getattr(function, "__self__", None), "__name__", "")
        used = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, InaccessibleTensor))
        with torch._C.DisableTorchFunctionSubclass():
            if name in METADATA_ATTRIBUTES:
                return function(*args, **(kwargs or {}))
            own_name, shape = type(used).tensor_names.get(id(used), "a parameter"), used.shape  # type: ignore[attr-defined]
            if name == "__repr__" and not type(used).opens:  # type: ignore[attr-defined]
                return f"{own_name} {tuple(shape)} {used.dtype}, closed"  # type: ignore[attr-defined]
        type(used).used(own_name, shape)  # type: ignore[attr-defined]
        return function(*args, **(kwargs or {}))


def make_inaccessible_class(
    tensor_class: type, names: Mapping[int, str], used: Callable[[str, torch.Size], None], opens: bool
) -> Any:
    """Returns the class that tensors of class `tensor_class` have while they are inaccessible. `names`, `used` and
    `opens` become the attributes of `InaccessibleTensor`."""
    return type(tensor_class)(
        f"Closed{tensor_class.__name__}",
        (InaccessibleTensor, tensor_class),
        {"tensor_names": names, "used": staticmethod(used), "opens": opens},
    )


def _raise_access_error(message: AccessErrorMessage, name: str, shape: torch.Size) -> None:
    raise InputError(message(name, shape))


class AccessGuard:
    """Denies and allows access to a set of tensors. `message` returns the error message of an access. If `wait` is
    given, an access calls `wait` instead, which must call `allow`."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        message: AccessErrorMessage,
        wait: Callable[[], None] | None = None,
    ) -> None:
        names = {id(tensor): name for name, tensor in tensors.items()}
        used = partial(_raise_access_error, message) if wait is None else lambda name, shape: wait()
        classes = {
            tensor_class: make_inaccessible_class(tensor_class, names, used, wait is not None)
            for tensor_class in set(map(type, tensors.values()))
        }
        self._classes = [(tensor, type(tensor), classes[type(tensor)]) for tensor in tensors.values()]
        self.is_denied = False

    def deny(self) -> None:
        """Makes the tensors inaccessible."""
        if not self.is_denied:
            self.is_denied = True
            for tensor, _, inaccessible in self._classes:
                tensor.__class__ = inaccessible

    def allow(self) -> None:
        """Makes the tensors accessible."""
        if self.is_denied:
            self.is_denied = False
            for tensor, tensor_class, _ in self._classes:
                tensor.__class__ = tensor_class


class ForwardAccessGuard:
    """Makes tensors inaccessible inside a `with` block, in which the loss runs. Skips tensors that are already
    inaccessible. With a `message`, an access raises InputError. Without a message, an access sets `is_used` and makes
    all tensors accessible again, and the guard has an effect only in the first MAX_WATCHED_FORWARDS runs of the
    block."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], message: AccessErrorMessage | None) -> None:
        self._tensors, self._message = list(tensors.values()), message
        self.is_used = False
        self._forwards = 0
        self._names = {id(tensor): name for name, tensor in tensors.items()}
        self._classes: dict[type, Any] = {}
        self._replaced: list[tuple[torch.Tensor, type]] = []

    def __enter__(self) -> None:
        self._forwards += 1
        watches = self._message is not None or not (self.is_used or self._forwards > MAX_WATCHED_FORWARDS)
        for tensor in self._tensors if watches else ():
            tensor_class = type(tensor)
            if issubclass(tensor_class, InaccessibleTensor):
                continue
            if tensor_class not in self._classes:
                self._classes[tensor_class] = make_inaccessible_class(
                    tensor_class, self._names, self._used, self._message is None
                )
            self._replaced.append((tensor, tensor_class))
            tensor.__class__ = self._classes[tensor_class]

    def _used(self, name: str, shape: torch.Size) -> None:
        if self._message is not None:
            _raise_access_error(self._message, name, shape)
        self.is_used = True
        self.__exit__()

    def __exit__(self, *_: Any) -> None:
        for tensor, tensor_class in self._replaced:
            tensor.__class__ = tensor_class  # type: ignore[assignment]
        self._replaced.clear()


def sharded_weight_message(plan: str) -> AccessErrorMessage:
    """Returns the message for sharded weights that are accessed outside of the forward of their module."""
    return lambda name, shape: (
        f"plan {plan}: {name} {tuple(shape)} is used outside of the forward of its module, where each rank stores "
        "only a shard of it: "
        "read or change it inside `with trainer.full_parameters(write=...)`, or use z2 at most"
    )


def read_by_loss_message(plan: str) -> AccessErrorMessage:
    """Returns the message for a user's loss that reads parameters although no rank stores all parameters in full."""
    return lambda name, shape: (
        f"plan {plan}: the loss reads the parameter {name} {tuple(shape)}, but under this plan no rank stores all "
        "parameters in full: "
        "give the optimizer a weight_decay in place of a penalty, or use data parallelism with z2 at most"
    )


def stale_parameter_message(plan: str) -> AccessErrorMessage:
    """Returns the message for parameters that user code took from the model before `parallelize`, and that no longer
    belong to the model."""
    return lambda name, shape: (
        f"plan {plan}: this {name} {tuple(shape)} was taken from the model before parallelize, which has replaced it "
        "by a shard or moved it to another pipeline stage: take it from `with trainer.full_parameters(write=...)`"
    )
