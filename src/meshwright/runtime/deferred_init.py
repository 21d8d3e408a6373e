"""Builds a model on the meta device for users and `train/`, and materialises each rank's shards of parameters later.

    with deferred_init():                            # the model's code runs unchanged
        model = AutoModelForCausalLM.from_config(config)
    trainer = parallelize(model, optimizer, plan)        # each rank materialises only its shards

Guarantees: under any plan, the parameters are bit for bit those of an ordinary build. Random numbers that the caller
draws after the build are also those that it would draw after an ordinary build.

Inside the context, parameters are meta tensors. Each operation that writes to a parameter is recorded with its inputs
and the state of the random generator. Random numbers are drawn and discarded, so that the generator advances as in an
ordinary build. To materialise a parameter, the recorded operations are replayed. Slicing is recorded too. So a rank
stores only its slice, and the full tensor exists only during the replay.

[Note: recipes] A `StorageRecipe` describes how the content of a storage is computed. Recipes are immutable: an
operation that writes to a storage gives the storage a new recipe. A recorded operation refers to the recipes that its
inputs had when it ran, so it is replayed with the contents of that time. The device of a deferred parameter reads as
`cpu`, because many functions skip meta tensors. If an operation cannot be recorded, such as a read of values, the
context raises an error, and `build_deferred` builds the full model. Idea: torchdistx, `deferred_init` (2022).

A write after the end of the context is not recorded and would be lost. So `check_unchanged_after_recording` raises if a
parameter was written to or converted after the context. It does not check a new parameter that replaces a recorded one.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import xxhash
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from meshwright.core.errors import InputError
from meshwright.core.messages import Message, mark_msgid
from meshwright.runtime.backend import backend_of

EMPTY_OPS = {"aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided"}
"""Operations that allocate a tensor without writing to it."""
OVERWRITING_OPS = {
    f"aten::{name}_"
    for name in (
        "normal",
        "uniform",
        "zero",
        "fill",
        "copy",
        "random",
        "exponential",
        "log_normal",
        "cauchy",
        "geometric",
        "bernoulli",
    )
}
"""Operations that overwrite all previous content of the tensor that they write to."""
SMALL_TENSOR_SIZE = 1 << 16
"""If a tensor has more than this number of elements and all are equal, only one element is stored. Temporary memory of
at least this number of bytes is allocated outside of the heap."""
RECORDER_ATTRIBUTE, RECIPE_ATTRIBUTE = "_meshwright_later", "_meshwright_origin"
"""Attribute of a module for its `DeferredInit`; attribute of a parameter for the `TensorRef` of its local shard."""

LOST_WRITE_TEXT = mark_msgid(
    "{func} writes to the memory of a deferred parameter, so the write would be lost: write to the parameter itself"
)
ReplayMemo = dict[int, torch.Tensor]
"""The contents of the storages that were already replayed, by the id of their recipe."""


@dataclass(frozen=True, eq=False)
class StorageRecipe:
    """Describes how a storage of `numel` elements gets its content.

    The first content is the tensor `initial`, or output `index` of the operation `made`, or uninitialised. `form` is
    its size, strides and offset. Then the operations `steps` write to the storage.
    """

    numel: int
    dtype: torch.dtype
    form: tuple[Any, ...] = ()
    initial: torch.Tensor | None = None
    made: RecordedOp | None = None
    index: int = 0
    steps: tuple[RecordedOp, ...] = ()

    @property
    def known(self) -> bool:
        """Whether anything was written to the storage."""
        return self.initial is not None or self.made is not None or bool(self.steps)

    def play(self, memo: ReplayMemo) -> torch.Tensor:
        """Returns the content of the storage as a flat tensor (`numel`). Replays the recipe if `memo` lacks it."""
        if id(self) in memo:
            return memo[id(self)]
        flat = _temporary_storage(self.numel, self.dtype)
        if self.initial is not None:
            flat.as_strided(*self.form).copy_(self.initial)
        elif self.made is not None:
            result = tree_leaves(self.made.play(memo, flat))[self.index]
            if result.is_contiguous() and result.untyped_storage().nbytes() == flat.untyped_storage().nbytes():
                flat = result.view(-1)
            else:
                flat.as_strided(*self.form).copy_(result)
        elif flat.is_floating_point() and not (self.steps and self.steps[0].overwrites):
            flat.fill_(torch.nan)
        for step in self.steps:
            step.play(memo, flat)
        memo[id(self)] = flat
        return flat


@dataclass(frozen=True, eq=False)
class TensorRef:
    """Refers to a tensor that an operation used: a view of a storage, with the size, strides and offset `form`.
    `origin`: the recipe of the storage, or None for the storage to which the operation writes."""

    origin: StorageRecipe | None
    form: tuple[Any, ...]

    def play(self, memo: ReplayMemo, own: torch.Tensor) -> torch.Tensor:
        """Returns the real tensor. `own` is the storage that the operation writes to."""
        return (own if self.origin is None else self.origin.play(memo)).as_strided(*self.form)

    @torch.no_grad()
    def value(self) -> torch.Tensor:
        """Replays the recipe and returns the real tensor."""
        assert self.origin is not None
        return self.origin.play({}).as_strided(*self.form)


@dataclass(frozen=True, eq=False)
class RecordedOp:
    """One recorded operation, with `TensorRef`s instead of meta tensors. `drawn`: the generator's state before it, or
    None if it draws no random numbers. `overwrites`: whether it overwrites all previous content of its storage."""

    operation: Any
    args: Any
    kwargs: Any
    drawn: torch.Tensor | None
    overwrites: bool = False

    def play(self, memo: ReplayMemo, own: torch.Tensor) -> Any:
        """Runs the operation on real tensors with the recorded random state and returns its result."""
        generator = torch.Generator()
        if self.drawn is not None:
            generator.set_state(self.drawn)

        def real(value: Any) -> Any:
            if isinstance(value, torch.Generator):
                return generator
            return value.play(memo, own) if isinstance(value, TensorRef) else value

        args, kwargs = tree_map(real, (self.args, self.kwargs))
        before = torch.default_generator.get_state()
        try:
            if self.drawn is not None:
                torch.default_generator.set_state(self.drawn)
            return self.operation(*args, **kwargs)
        finally:
            torch.default_generator.set_state(before)


@dataclass
class OpLog:
    """The recipes of meta storages (`origins`), and the real storages that are still uninitialised (`untouched`)."""

    origins: dict[int, tuple[torch.UntypedStorage, StorageRecipe]] = field(default_factory=dict)
    untouched: dict[int, StorageWeakRef] = field(default_factory=dict)
    given: dict[int, tuple[weakref.ref[nn.Parameter], nn.Parameter, StorageWeakRef]] = field(default_factory=dict)
    """By storage of a replaced parameter: the parameter, the meta parameter that replaces it, and the storage."""
    digest: Any = field(default_factory=xxhash.xxh3_64)
    """Digest of the generator state before each draw."""
    ended: dict[int, tuple[torch.Tensor, int]] = field(default_factory=dict)
    """By id of each meta parameter: the parameter, and its version counter at the end of the context."""

    def origin(self, tensor: torch.Tensor) -> StorageRecipe | None:
        """Returns the recipe of the storage of `tensor`, None if the storage has no recipe."""
        found = self.origins.get(_storage_key(tensor))
        return found[1] if found is not None else None

    def put(self, tensor: torch.Tensor, origin: StorageRecipe) -> None:
        """Sets the recipe of the storage of `tensor`."""
        self.origins[_storage_key(tensor)] = (tensor.untyped_storage(), origin)


class DeferredInit(TorchDispatchMode):
    """Records operations while this mode is active; see the module docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.notes = OpLog()
        self.busy = False

    def __deepcopy__(self, memo: Any) -> DeferredInit:
        """Returns this same object, so that a copied module shares the record."""
        return self

    # --- parameters

    def register(self, module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        """torch calls this hook. Returns the meta parameter that replaces `parameter`, or None if it is not replaced. A
        shared parameter gets one for all its names. Raises InputError if two different parameters share memory."""
        if parameter is None or self.notes.origin(parameter) is not None or parameter.is_meta:
            return None
        key = _storage_key(parameter)
        known = self.notes.given.get(key)
        if known is not None and not known[2].expired():
            if known[0]() is not parameter:
                raise InputError(
                    Message(
                        "{type}.{name} shares its memory with another parameter", type=type(module).__name__, name=name
                    )
                )
            return known[1]
        shape = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        origin = StorageRecipe(shape.untyped_storage().nbytes() // shape.element_size(), shape.dtype, _geometry(shape))
        raw = self.notes.untouched.get(key)
        if raw is None or raw.expired():
            origin = replace(origin, initial=_compact_clone(parameter.detach()))
        self.notes.put(shape, origin)
        self.notes.given[key] = (weakref.ref(parameter), shape, StorageWeakRef(parameter.untyped_storage()))
        vars(module)[RECORDER_ATTRIBUTE] = self
        return shape

    def seen(self, tensor: torch.Tensor) -> TensorRef | None:
        """Returns the reference to the meta `tensor`. Returns None if nothing was recorded for its storage."""
        origin = self.notes.origin(tensor) if tensor.is_meta else None
        return None if origin is None or not origin.known else TensorRef(origin, _geometry(tensor))

    @property
    def number(self) -> float:
        """Returns a checksum that is equal on ranks whose draws were equal."""
        return float(self.notes.digest.intdigest() >> 12)

    def whole(
        self, function: Callable[..., torch.Tensor], tensor: torch.Tensor, *given: Any, **named: Any
    ) -> torch.Tensor:
        """Calls `function`, which fills `tensor`. Records the call as one operation, because of rejection sampling."""
        if self.notes.origin(tensor) is None:
            return function(tensor, *given, **named)
        state = self._draw(function, (tensor, *given), named)
        self._write(tensor, RecordedOp(function, (TensorRef(None, _geometry(tensor)), *given), named, state, True))
        return tensor

    def end(self) -> None:
        """Ends the recording. Stores the version counters of the parameters, which later reveal writes."""
        self.notes.ended = {id(shape): (shape, shape._version) for _, shape, _ in self.notes.given.values()}

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, self.busy = self.busy, True
        try:
            return self._follow(func, args, kwargs or {})
        finally:
            self.busy = before

    def _follow(self, func: Any, args: Any, kwargs: Any) -> Any:
        followed = [tensor for tensor in _tensor_leaves((args, kwargs)) if self.notes.origin(tensor) is not None]
        written = _mutated_tensors(func, args, kwargs)
        if not followed:
            return self._on_real(func, args, kwargs, written)
        drawn = None
        if torch.Tag.nondeterministic_seeded in func.tags:
            if not written and not func._schema.name.endswith("_like"):
                raise InputError(Message("{func} draws random numbers that depend on a parameter", func=func))
            drawn = self._draw(func, args, kwargs)
        own = {_storage_key(tensor) for tensor in written}
        if len(own) > 1:
            raise InputError(Message("{func} writes to several parameters at once", func=func))
        given = tree_map(lambda value: self._frozen(value, own), (args, kwargs))
        result = func(*args, **kwargs)
        step = RecordedOp(func, given[0], given[1], drawn, func._schema.name in OVERWRITING_OPS)
        for tensor in written[:1]:
            self._write(tensor, step)
        for index, tensor in enumerate(tree_leaves(result) if not written else ()):
            if isinstance(tensor, torch.Tensor) and tensor.is_meta and self.notes.origin(tensor) is None:
                origin = StorageRecipe(
                    tensor.untyped_storage().nbytes() // tensor.element_size(), tensor.dtype, _geometry(tensor)
                )
                self.notes.put(tensor, replace(origin, made=step, index=index))
        return result

    def _on_real(self, func: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Runs an operation on real tensors. Raises if it writes to a parameter that a meta tensor replaces."""
        for tensor in written:
            self.notes.untouched.pop(_storage_key(tensor), None)
            if (known := self.notes.given.get(_storage_key(tensor))) is not None and not known[2].expired():
                raise InputError(Message(LOST_WRITE_TEXT, func=func))
        result = func(*args, **kwargs)
        if func._schema.name in EMPTY_OPS:
            self.notes.untouched[_storage_key(result)] = StorageWeakRef(result.untyped_storage())
        return result

    def _draw(self, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Returns the generator's state before `func`. Runs `func` on temporary memory to advance the generator."""
        chosen = [value for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Generator)]
        generator = chosen[0] if chosen else torch.default_generator
        if not backend_of(generator.device).memory_is_host:
            raise InputError(Message("{func} draws random numbers on {device}", func=func, device=generator.device))
        state = generator.get_state()
        self.notes.digest.update(state.numpy().tobytes())

        def scratch(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or self.notes.origin(value) is None:
                return value
            return _temporary_storage(_extent(value), value.dtype).as_strided(value.size(), value.stride())

        real_args, real_kwargs = tree_map(scratch, (args, kwargs))
        func(*real_args, **real_kwargs)
        return state

    def _frozen(self, value: Any, own: set[int]) -> Any:
        """Returns a real tensor as a copy, and a recorded meta tensor as a `TensorRef`. `own`: the written storage."""
        if not isinstance(value, torch.Tensor):
            return value
        origin = self.notes.origin(value)
        if origin is None:
            return value.detach().clone() if not value.is_meta else value
        return TensorRef(None if _storage_key(value) in own else origin, _geometry(value))

    def _write(self, tensor: torch.Tensor, step: RecordedOp) -> None:
        numel = tensor.untyped_storage().nbytes() // tensor.element_size()
        before = self.notes.origin(tensor) or StorageRecipe(numel, tensor.dtype)
        if before.dtype != tensor.dtype:
            raise InputError(
                Message(
                    "{operation} writes {dtype} to a parameter of dtype {parameter_dtype}",
                    operation=step.operation,
                    dtype=tensor.dtype,
                    parameter_dtype=before.dtype,
                )
            )
        others = [
            value
            for value in tree_leaves((step.args[1:], step.kwargs))
            if isinstance(value, TensorRef) and value.origin is None
        ]
        if step.overwrites and tensor.numel() == before.numel and not others:
            origin = StorageRecipe(before.numel, before.dtype, steps=(step,))
        else:
            origin = replace(before, steps=(*before.steps, replace(step, overwrites=False)))
        self.notes.put(tensor, origin)


class _ReportAsCpuTensors(TorchFunctionMode):
    """Makes deferred parameters report that they are CPU tensors, because many functions skip meta tensors."""

    def __init__(self, later: DeferredInit) -> None:
        super().__init__()
        self.later = later
        self.answers = {torch.Tensor.is_meta.__get__: False, torch.Tensor.device.__get__: torch.device("cpu")}  # type: ignore[attr-defined]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.answers and not self.later.busy and self.later.notes.origin(args[0]) is not None:
            return self.answers[func]
        return func(*args, **(kwargs or {}))


@contextmanager
def deferred_init() -> Iterator[DeferredInit]:
    """Defers the initialisation of the parameters of modules that are built inside the context.

    These parameters are meta tensors with a recipe. `parallelize` materialises each rank's shards. Buffers are real.

    Raises:
        InputError: an operation cannot be recorded. (A read of parameter values raises torch's error for meta tensors.)
    """
    later = DeferredInit()
    hook = register_module_parameter_registration_hook(later.register)  # type: ignore[arg-type]
    truncated = nn.init._no_grad_trunc_normal_
    nn.init._no_grad_trunc_normal_ = lambda *given, **named: later.whole(truncated, *given, **named)
    try:
        with later, _ReportAsCpuTensors(later):
            yield later
        later.end()
    finally:
        nn.init._no_grad_trunc_normal_ = truncated
        hook.remove()


def build_deferred(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Returns the model that `make` builds with the random seed `seed`. Its parameters are deferred if all operations
    of `make` can be recorded. Otherwise they are real."""
    torch.manual_seed(seed)
    try:
        with deferred_init() as later:
            model = make()
        different = [tensor for tensor in model.parameters() if tensor.is_meta and later.seen(tensor) is None]
        if not different and not any(buffer.is_meta for buffer in model.buffers()):
            return model
    except Exception:  # the full build repeats errors of the model's own code
        pass
    torch.manual_seed(seed)
    return make()


def deferred_init_of(model: nn.Module) -> DeferredInit:
    """Returns the record of the construction of `model`. The record is empty if the model was built in full."""
    return (
        next(
            (vars(module)[RECORDER_ATTRIBUTE] for module in model.modules() if RECORDER_ATTRIBUTE in vars(module)), None
        )
        or DeferredInit()
    )


def materialize(parameter: nn.Parameter) -> torch.Tensor:
    """Returns the initial content of `parameter`: its own values, or the replay of its recipe."""
    seen: TensorRef | None = getattr(parameter, RECIPE_ATTRIBUTE, None)
    return parameter.detach() if seen is None else seen.value()


# --- storages and arguments


def _storage_key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _geometry(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tuple(tensor.size()), tensor.stride(), tensor.storage_offset())


def _extent(tensor: torch.Tensor) -> int:
    """Returns the number of storage elements from the first to the last element of the tensor, both included."""
    return (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
        if tensor.numel()
        else 0
    )


def _temporary_storage(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Returns temporary memory. Large blocks are outside of the heap, because freed heap blocks leave holes: 2.4 GB
    after 1.1 billion parameters were initialised."""
    size = numel * dtype.itemsize
    if size < SMALL_TENSOR_SIZE:
        return torch.empty(numel, dtype=dtype)
    return torch.frombuffer(mmap.mmap(-1, size), dtype=dtype, count=numel)


def _compact_clone(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.numel() > SMALL_TENSOR_SIZE and bool((tensor == tensor.flatten()[0]).all()):
        return tensor.flatten()[:1].clone().expand(tensor.shape) if tensor.is_contiguous() else tensor.clone()
    return tensor.clone()


def _tensor_leaves(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _mutated_tensors(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Returns the tensors that `func` writes to in place."""
    if not func._schema.is_mutable:
        return []
    arguments = func._schema.arguments
    named = {argument.name: argument for argument in arguments}
    pairs = [
        *zip(arguments, args, strict=False),
        *((named[name], value) for name, value in kwargs.items() if name in named),
    ]
    return [
        tensor
        for argument, value in pairs
        if argument.alias_info and argument.alias_info.is_write
        for tensor in _tensor_leaves(value)
    ]


def check_unchanged_after_recording(model: nn.Module, later: DeferredInit) -> None:
    """Checks that no parameter of `model` changed after the recording `later` ended.

    Raises:
        InputError: a parameter was written to or converted after the recording.
    """
    ended, origin = later.notes.ended, later.notes.origin
    for name, parameter in model.named_parameters() if ended else ():
        _, version = ended.get(id(parameter), (parameter, parameter._version))
        lost = parameter.is_meta and id(parameter) in ended and origin(parameter) is None
        if lost or parameter._version != version:
            what = f"became {str(parameter.dtype).removeprefix('torch.')}" if lost else "was written to"
            raise InputError(
                Message(
                    "{name} {what} after `with deferred_init()`, where operations are no longer recorded: do that "
                    "inside the block (model.double() too), or leave it to parallelize, whose `precision` sets the "
                    "dtype",
                    name=name,
                    what=what,
                )
            )
