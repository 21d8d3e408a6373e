"""Implements selective recompute by a tape of one forward of a block. The tape records which saved tensors can be
recomputed from others by cheap operations. runtime/activation_recompute.py runs blocks under it, and the profile uses
it to find which bytes are not saved.

A `RematTape` records elementwise operations, norms, sums and copies (`RECOMPUTABLE_OPS`). The results of matrix
products, attention, random functions and custom functions cannot be recomputed. At the end of the forward, every tensor
that autograd passed to the tape is either saved or dropped. A dropped tensor is recomputed from saved tensors when
backward requests it.

Guarantees:
- A recomputed tensor is bitwise equal to the dropped one, because the same kernels read the same values.

[Note: tape memory] The tape references no memory that the block would have freed. The exception is an input that is
smaller than the tensor made from it (the 16-bit input of a float32 copy). A freed value can be recomputed as an
intermediate result, but cannot be saved.

[Note: freeing recomputed tensors] A recomputed tensor is freed when backward has requested the last saved tensor that
needs it. A tensor that only other recomputed values read is freed as soon as these values exist. Backward never
requests some tensors, such as those of a result that no loss reads. Of such a tensor, only the sources stay in memory.

[Note: in-place writes] If a value is written to after an operation has read it, recomputing the operation would read
the new value. Version counters detect this, and the result of the operation is saved. If a saved value is written to
after the block has run, backward raises an error, as autograd does. If other forwards write to a buffer, a copy of the
buffer is saved.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

from meshwright.analysis.recompute_min_cut import (
    RematPlan,
    RematPlanCache,
    RematValue,
    StorageView,
    plan_remat,
    version_probe_of,
)

OWN_CHECKPOINT_REASON = (
    "is recomputed in backward by the model's own activation checkpointing (turn it off and use rc-full in the plan)"
)


def active_saved_tensor_hooks() -> Any:
    """Returns the active saved-tensor hooks, None if there are none.

    This torch function is private. If torch moves it, the tests of models with their own activation checkpointing fail.
    """
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def saved_tensor_state() -> tuple[Any, bool]:
    """Returns the active saved-tensor hooks, and whether gradients are enabled. If one of the two changes inside a
    model, the model itself uses activation checkpointing.
    """
    return active_saved_tensor_hooks(), torch.is_grad_enabled()


# fmt: off
RECOMPUTABLE_OPS = frozenset([
    "add", "sub", "rsub", "mul", "div", "true_divide", "neg", "pow", "square", "sqrt", "rsqrt", "reciprocal", "exp",
    "expm1", "log", "log1p", "log2", "abs", "sign", "sin", "cos", "tanh", "sigmoid", "erf", "float_power", "silu",
    "gelu", "relu", "relu6", "elu", "selu", "celu", "leaky_relu", "mish", "hardswish", "hardsigmoid", "hardtanh",
    "softplus", "logsigmoid", "softsign", "glu", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where",
    "masked_fill", "lerp", "addcmul", "addcdiv", "float", "half", "bfloat16", "double", "to", "type", "type_as",
    "contiguous", "clone", "reshape", "flatten", "cat", "concat", "concatenate", "stack", "repeat",
    "repeat_interleave", "roll", "tile", "mean", "sum", "amax", "amin", "layer_norm", "rms_norm", "group_norm",
    "softmax", "log_softmax", "normalize", "pad", "index_select", "gather", "take_along_dim", "__getitem__",
    "__radd__", "__rsub__", "__rmul__", "__rdiv__", "__rtruediv__", "__rpow__", "__add__", "__sub__", "__mul__",
    "__truediv__", "__pow__", "__neg__",
])
# fmt: on
"""Names of torch functions that are cheap to recompute: they are deterministic, and read and write each tensor about
once.
"""

TENSOR_TYPES: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter)
PackHook = Callable[[torch.Tensor], Any]
UnpackHook = Callable[[Any], torch.Tensor]


class SavedTensor:
    """The object that autograd stores in place of a tensor. During the block's forward it contains the tensor.
    Afterwards it contains a view of a value on the tape (`view`), or the result of saving the tensor (`saved`).
    """

    __slots__ = ("probe", "recomputes", "saved", "tensor", "version", "view")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.probe, self.version = version_probe_of(tensor), tensor._version
        self.view: StorageView | None = None
        self.saved: Any = None
        self.recomputes: list[RematValue] = []


class RematTape(TorchFunctionMode):
    """The tape of one forward of a block, and of the backward of this block. `entering` are the inputs of the block.

    `keep` saves a tensor, for example to CPU memory, and `take` loads the result of `keep`. By default both return
    their argument. Only tensors of the types `plain` are recomputed. `weights` are the storages (`_cdata`) that are
    freed and gathered again (ZeRO 3).
    """

    def __init__(
        self,
        entering: Iterable[Any] = (),
        keep: PackHook | None = None,
        take: UnpackHook | None = None,
        plain: tuple[type, ...] = TENSOR_TYPES,
        weights: Collection[int] = (),
    ) -> None:
        super().__init__()
        self.weights = weights
        self.save, self.load, self.plain = keep or _identity, take or _identity, plain
        self.values: weakref.WeakKeyDictionary[Any, RematValue] = weakref.WeakKeyDictionary()
        self.saved: list[SavedTensor] = []
        self.small: list[torch.Tensor] = []
        self.is_cheap = False
        """Whether a recomputable function is running, so that autograd saves tensors only for this function."""
        self.entering = [tensor for tensor in entering if self._is_plain(tensor)]
        for tensor in self.entering:
            self.values.setdefault(tensor.untyped_storage(), RematValue(tensor, free=True, entered=True))

    # --- forward
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not (is_recomputable(function, kwargs) and torch.is_grad_enabled()):
            return function(*args, **kwargs)
        sources: list[StorageView] = []
        seen = self._replace_tensors([args, kwargs], sources)
        self.is_cheap = True
        try:
            result = function(*args, **kwargs)
        finally:
            self.is_cheap = False
        if seen is not None and sources and not torch.is_autocast_enabled(sources[0].value.probe.device.type):
            for place, tensor in enumerate(result if isinstance(result, tuple | list) else [result]):
                if self._is_plain(tensor) and tensor.untyped_storage() not in self.values:
                    self._record_result(tensor, function, seen, sources, place)
        return result

    def _record_result(
        self, tensor: torch.Tensor, function: Any, seen: Any, sources: list[StorageView], place: int
    ) -> None:
        value = self.values[tensor.untyped_storage()] = RematValue(tensor)
        value.function, (value.args, value.kwargs), value.sources, value.place = function, seen, sources, place
        given = {view.value: None for view in sources if not view.value.free}
        if value.nbytes > sum(each.nbytes for each in given):  # [Note: tape memory]
            self.small += [flat_storage_view(each) for each in given]

    def _replace_tensors(self, given: Any, sources: list[StorageView]) -> Any:
        """Returns `given` with a `StorageView` in place of each tensor, and appends the views to `sources`. Returns
        None if a tensor cannot be tracked.
        """
        if isinstance(given, torch.Tensor):
            if not self._is_plain(given):
                return None
            sources.append(self.view(given))
            return sources[-1]
        if isinstance(given, dict):
            values = self._replace_tensors([*given.values()], sources)
            return None if values is None else dict(zip(given, values, strict=True))
        if type(given) not in (tuple, list):
            return given
        found = [self._replace_tensors(each, sources) for each in given]
        return (
            None
            if any(one is None and each is not None for one, each in zip(found, given, strict=True))
            else type(given)(found)
        )

    def view(self, tensor: torch.Tensor) -> StorageView:
        """Returns the `StorageView` that describes `tensor`."""
        value = self.values.get(tensor.untyped_storage())
        if value is None:  # no recomputable function made the tensor, for example if it is a weight or a buffer
            storage = tensor.untyped_storage()
            value = self.values[storage] = RematValue(
                tensor, free=tensor.grad_fn is None, gathered=storage._cdata in self.weights
            )
        return StorageView(
            value, tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor._version
        )

    def _is_plain(self, tensor: Any) -> bool:
        if type(tensor) not in self.plain or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return False
        try:
            return bool(tensor.untyped_storage() is not None)
        except NotImplementedError:  # inside torch.vmap a tensor is a slice of a batch and has no storage
            return False

    def pack(self, tensor: torch.Tensor) -> Any:
        """Returns a `SavedTensor` for a tensor that autograd saves, or the tensor itself if it is not a plain strided
        tensor. This is the pack hook of `saved_tensors_hooks`."""
        if not self._is_plain(tensor):
            return tensor
        self.saved.append(SavedTensor(tensor.detach()))
        return self.saved[-1]

    # --- end of the forward
    def finish(self, cuts: RematPlanCache, moving: Collection[int] = ()) -> RematPlan:
        """Ends the forward of the block. Saves the tensors that must be saved and drops all others. Returns the plan.

        `cuts` caches plans by the graph of a block. `moving` are the storages (`_cdata`) of buffers that other forwards
        write to.
        """
        requested = self.requested_values(saved.tensor for saved in self.saved if saved.tensor is not None)
        cut = plan_remat(requested, cuts)
        for value in (*cut.saved, *cut.needed):
            whole = flat_storage_view(value)
            if whole.untyped_storage()._cdata in moving:
                whole = whole.clone()
                value.probe = version_probe_of(whole)
            value.saved, value.version = self.save(whole), value.probe._version
        for saved in self.saved:
            tensor, saved.tensor = saved.tensor, None
            assert tensor is not None
            if self.values.get(tensor.untyped_storage()) in requested:
                saved.view = self.view(tensor)
                saved.recomputes = cut.recomputed_for.get(saved.view.value, [])
                for value in saved.recomputes:
                    value.pending_tensors += 1
            else:
                saved.saved = self.save(tensor)
        for value in cut.recomputed:
            value.pending_values += value in requested  # backward itself also reads a requested value
            for source in value.reads:
                source.pending_values += 1
        for value in cut.saved:
            value.drop_function()
        self.saved, self.small, self.entering = [], [], []
        self.values.clear()
        return cut

    def requested_values(self, tensors: Iterable[torch.Tensor]) -> dict[RematValue, None]:
        """Returns the values on the tape that contain `tensors`, except values that are resident anyway."""
        found = (self.values.get(tensor.untyped_storage()) for tensor in tensors)
        return {value: None for value in found if value is not None and not value.is_resident}

    # --- backward
    def unpack(self, saved: Any) -> torch.Tensor:
        """Returns the tensor that `pack` received, recomputed if it was dropped. This is the unpack hook of
        `saved_tensors_hooks`.

        Raises:
            RuntimeError: the tensor was written to in place after the block had run.
        """
        if isinstance(saved, torch.Tensor):
            return saved
        if saved.tensor is not None:  # an error ended the forward before `finish`
            return saved.tensor  # type: ignore[no-any-return]
        if saved.probe._version != saved.version:
            raise modified_in_place_error(saved.probe.dtype, saved.probe._version, saved.version)
        if saved.view is None:
            return self.load(saved.saved)
        found = self._tensor(saved.view)
        for value in saved.recomputes:  # [Note: freeing recomputed tensors]
            value.pending_tensors -= 1
            if value.pending_tensors <= 0:
                value.recomputed = None
        return found

    def _tensor(self, view: StorageView) -> torch.Tensor:
        value = view.value
        if value.saved is not None:
            if value.is_written and not value.gathered:
                raise modified_in_place_error(view.dtype, value.probe._version, value.version)
            return view.of(self.load(value.saved))
        if value.recomputed is None:
            with torch.no_grad():
                result = value.function(*self._given(value.args), **self._given(value.kwargs))
            value.recomputed = result[value.place] if isinstance(result, tuple | list) else result
            for source in value.reads:
                source.pending_values -= 1
                if source.pending_values == 0:
                    source.recomputed = None
        return view.of(value.recomputed)

    def _given(self, seen: Any) -> Any:
        if isinstance(seen, StorageView):
            return self._tensor(seen)
        if isinstance(seen, dict):
            return {name: self._given(each) for name, each in seen.items()}
        return type(seen)(self._given(each) for each in seen) if type(seen) in (tuple, list) else seen


def modified_in_place_error(dtype: torch.dtype, now: int, then: int) -> RuntimeError:
    """Returns the error for a saved tensor that was written to in place. `then` and `now` are the version counters when
    it was saved and when backward requests it.
    """
    return RuntimeError(
        f"a tensor of {dtype} that a block's backward needs was modified in place after it was saved (version {now} "
        f"for {then}; rc-sac): "
        "let the model create a new tensor instead"
    )


def is_recomputable(function: Any, kwargs: dict[str, Any]) -> bool:
    """Returns whether the result of a torch function, called with `kwargs`, can be recomputed cheaply."""
    return (
        getattr(function, "__name__", "") in RECOMPUTABLE_OPS
        and "out" not in kwargs
        and not isinstance(function, OpOverload | OpOverloadPacket)
    )


def flat_storage_view(value: RematValue) -> torch.Tensor:
    """Returns the storage of a resident value as one flat tensor."""
    storage = value.storage()
    assert storage is not None
    dtype = value.probe.dtype
    whole: Any = torch.empty(0, dtype=dtype, device=value.probe.device)
    return whole.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))  # type: ignore[no-any-return]


def _identity(saved: Any) -> Any:
    return saved
