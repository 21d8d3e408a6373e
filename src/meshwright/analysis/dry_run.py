"""Calls a model and a user's loss in dry runs, and restores everything that the call changed. The analysis, the
preflight checks and `meshwright verify` use it.

An analysis must not change the training. For example, a counter that the forward increments would otherwise be too
large by one in every training step. A dry run restores:
- the mode of each module (some modules may be frozen in eval mode);
- attributes of modules and of the loss, such as the expert capacity of NLLB-MoE, the weight layout of RWKV, and
  position caches. Elements of lists, dictionaries and sets are restored too, but nothing nested deeper;
- class attributes, global variables, and attributes of functions that the code of the model can name (code_state.py);
- states of the model's own random generators;
- hooks that the forward registers (transformers does, if a class requests hidden states);
- values of buffers;
- parameters that the forward writes to.

Forwards that write to parameters are, for example, an EMA teacher, `nn.Embedding(max_norm=)`, and weights that are
normalised in the forward. Every in-place operation goes through torch's dispatcher, regardless of the code that starts
it (`no_grad`, `.data`, `_foreach_mul_`, an autograd hook). In the dispatcher `ParamWriteRecorder` saves the value of a
parameter before the first write to it. Parameters without a write are not copied.

`limit_analysis_time` limits the time of an analysis. A forward that waits for a network or loops forever then ends in a
one-line error.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, wraps
from pathlib import Path
from types import CellType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from meshwright.analysis.code_state import CodeStateSnapshot, ContainerSnapshot, state_places
from meshwright.analysis.own_generators import GeneratorStates, own_generators
from meshwright.core.errors import InputError
from meshwright.core.messages import Message


class AttributeSnapshot:
    """Stores the items of `state` (an object's `__dict__`), except those whose keys are in `others`, and what is inside
    their containers and objects. `seen`: the ids of the containers that other snapshots store."""

    def __init__(self, state: dict[str, Any], others: Collection[str] = (), seen: set[int] | None = None) -> None:
        self.state, self.others = state, frozenset(others)
        self.before = {name: value for name, value in state.items() if name not in self.others}
        self.inside = ContainerSnapshot(self.before.values(), set() if seen is None else seen)

    def restore(self) -> None:
        """Restores the items and what is inside them."""
        for name in self.state.keys() - self.before.keys() - self.others:
            del self.state[name]
        self.state.update(self.before)
        self.inside.restore()


def snapshot_modules(modules: Iterable[nn.Module]) -> list[AttributeSnapshot]:
    """Returns snapshots of the attributes of `modules`, without their parameters, buffers and submodules."""
    seen = set[int]()
    return [AttributeSnapshot(vars(module), MODULE_DICT_KEYS, seen) for module in modules]


class ClosureSnapshot:
    """Stores the values of `cells`, the closure variables of a function."""

    def __init__(self, cells: Collection[CellType]) -> None:
        self.before: list[tuple[CellType, Any]] = []
        for cell in cells:
            with suppress(ValueError):  # an empty cell has no value
                self.before.append((cell, cell.cell_contents))
        self.inside = AttributeSnapshot({str(number): value for number, (_, value) in enumerate(self.before)})

    def restore(self) -> None:
        """Restores the closure variables and the elements of their containers."""
        for cell, value in self.before:
            cell.cell_contents = value
        self.inside.restore()


def snapshot_callable(function: Callable[..., Any] | None) -> Iterator[AttributeSnapshot | ClosureSnapshot]:
    """Yields snapshots of the state of `function`: its attributes, closure variables, mutable defaults, and the object
    that it is bound to. Modules are excluded.
    """
    if isinstance(function, partial):
        yield from snapshot_callable(function.func)
        yield AttributeSnapshot(
            {str(number): value for number, value in enumerate((*function.args, *function.keywords.values()))}
        )
    elif isinstance(function, MethodType):
        yield from snapshot_callable(function.__func__)
        if not isinstance(function.__self__, nn.Module) and isinstance(
            getattr(function.__self__, "__dict__", None), dict
        ):
            yield AttributeSnapshot(vars(function.__self__))
    elif isinstance(function, FunctionType):
        yield AttributeSnapshot(vars(function))
        yield ClosureSnapshot(function.__closure__ or ())
        defaults = enumerate((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
        yield AttributeSnapshot({str(number): value for number, value in defaults})
    elif (
        function is not None
        and not isinstance(function, nn.Module)
        and isinstance(getattr(function, "__dict__", None), dict)
    ):
        yield AttributeSnapshot(vars(function))


P = ParamSpec("P")
R = TypeVar("R")


class StorageSpan(NamedTuple):
    """The elements [`first`, `stop`) of the storage of tensor `of`. The storage may be freed and allocated again."""

    of: torch.Tensor
    first: int
    stop: int


def storage_spans(tensors: Mapping[str, torch.Tensor]) -> dict[str, StorageSpan]:
    """Returns the storage range of each of `tensors`, by name. Tensors that are empty or not strided are left out."""
    found = {}
    for name, each in tensors.items():
        if each.numel() and each.layout is torch.strided:
            first = int(each.storage_offset())
            extent = sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
            found[name] = StorageSpan(each, first, first + int(extent) + 1)
    return found


class ParamWriteRecorder(TorchDispatchMode):
    """A mode that saves the values of each of `spans` before the first write to it. `restore` undoes the writes.

    Meta tensors are ignored.
    """

    supports_higher_order_operators = True

    def __init__(self, spans: Mapping[str, StorageSpan]) -> None:
        super().__init__()
        self.before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """Maps each written parameter to a view of its elements, and to a copy of their values before the first
        write.
        """
        self._spans_by_storage: dict[int, list[tuple[str, StorageSpan]]] = defaultdict(list)
        for name, span in spans.items():
            # Torch functions are disabled because, at ZeRO 3, sharded parameters refuse access to their storage.
            with torch._C.DisableTorchFunctionSubclass():
                if not span.of.is_meta:
                    self._spans_by_storage[span.of.untyped_storage()._cdata].append((name, span))

    @property
    def has_spans(self) -> bool:
        """Returns whether there are parameters to record."""
        return bool(self._spans_by_storage)

    def values(self) -> dict[str, torch.Tensor]:
        """Returns the current value of each parameter that was written to, by name. For a parameter whose memory has
        been freed, returns the value before the first write.
        """
        return {
            name: (tensor if tensor.untyped_storage().nbytes() else value).detach().clone()
            for name, (tensor, value) in self.before.items()
        }

    def restore(self) -> None:
        """Restores the values from before the first write. Weights that ZeRO 3 has freed are not restored, because they
        are gathered again.
        """
        for tensor, value in self.before.values():
            if tensor.untyped_storage().nbytes():
                with torch.no_grad():
                    tensor.copy_(value)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(function, "_schema", None)
        if schema is not None and schema.is_mutable:
            for tensor in _written_arguments(schema, args, kwargs):
                self._save_before_write(tensor)
        return function(*args, **kwargs)

    def _save_before_write(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta or tensor.layout is not torch.strided or not tensor.untyped_storage().nbytes():
            return
        spans = self._spans_by_storage.get(tensor.untyped_storage()._cdata, ())
        first = tensor.storage_offset()
        for name, span in spans:
            if name not in self.before and span.first <= first < span.stop:
                with torch._C.DisableTorchFunctionSubclass():
                    elements = span.of.detach().as_strided((span.stop - span.first,), (1,), span.first)
                self.before[name] = (elements, elements.clone())


def _written_arguments(schema: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (each for each in tree_leaves(given.get(argument.name)) if isinstance(each, torch.Tensor))


def without_write_recording(function: Callable[P, R]) -> Callable[P, R]:
    """Returns `function` with its writes hidden from every `ParamWriteRecorder`. They are not writes of the model."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run


MODULE_DICT_KEYS = frozenset({"_parameters", "_buffers", "_modules"})
"""Dictionaries of tensors and submodules in a module, which `AttributeSnapshot` leaves out. `dry_run` restores buffers.
Code that replaces parameters or submodules must restore them itself."""


@contextmanager
def dry_run(
    model: nn.Module,
    parameters: Mapping[str, StorageSpan] | None = None,
    as_it_trains: bool = False,
    loss: Callable[..., Any] | None = None,
) -> Iterator[ParamWriteRecorder]:
    """Prepares `model` for a call. On exit restores the model and the state of the user's `loss`.

    `as_it_trains`: whether modules remain in their own train or eval modes. If False, the model runs in eval mode.
    `parameters` are storage ranges by name, by default those of the model's parameters. Yields the recorder of writes
    to them. With {} no write is recorded.
    """
    modules = _all_modules(model, loss)
    states: list[AttributeSnapshot | ClosureSnapshot | CodeStateSnapshot] = [
        *snapshot_modules(modules),
        *snapshot_callable(loss),
        CodeStateSnapshot(state_places(model)),
    ]
    buffers = [
        (module, name, buffer, _clone_buffer(buffer)) for module in modules for name, buffer in module._buffers.items()
    ]
    generators = GeneratorStates(own_generators(model))
    writes = ParamWriteRecorder(storage_spans(dict(model.named_parameters())) if parameters is None else parameters)
    if not as_it_trains:
        model.eval()
    try:
        with writes if writes.has_spans else nullcontext():  # a dispatch mode slows down each operation
            yield writes
    finally:
        writes.restore()
        generators.restore()
        for state in states:
            state.restore()
        for module, name, buffer, numbers in buffers:
            if buffer is not None and numbers is not None:
                with torch.no_grad():
                    buffer.copy_(numbers)
            module._buffers[name] = buffer


def _all_modules(model: nn.Module, loss: Any) -> list[nn.Module]:
    """Returns the modules of the model, and those of the loss if it is a module."""
    own = list(model.modules())
    return (
        [*own, *(module for module in loss.modules() if module not in set(own))] if isinstance(loss, nn.Module) else own
    )


def call_with_tensors(
    model: nn.Module, tensors: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Runs `model` with `tensors` (by name) in place of its parameters and buffers. Returns its output.

    torch's functional_call would leave these tensors in a module that has several parents. This function restores the
    module's original tensors.
    """
    slots: list[dict[str, Any]] = [
        entries for module in model.modules() for entries in (module._parameters, module._buffers)
    ]
    before = [entries.copy() for entries in slots]
    try:
        return functional_call(model, tensors, args, kwargs)
    finally:
        for entries, own in zip(slots, before, strict=True):
            entries.update(own)


class MetaTwins:
    """Creates meta tensors with the names and shapes of the parameters and buffers of `model`. `dtype` replaces
    floating-point dtypes, None preserves them.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype | None) -> None:
        def twin(tensor: torch.Tensor) -> torch.Tensor:
            kind = dtype if tensor.is_floating_point() else None
            return torch.empty_like(tensor, device="meta", dtype=kind, requires_grad=False)

        twins = {id(tensor): twin(tensor) for tensor in model.parameters()}
        self.names = {id(twins[id(tensor)]): name for name, tensor in model.named_parameters()}
        self.parameters = {name: twins[id(tensor)] for name, tensor in model.named_parameters(remove_duplicate=False)}
        self.buffers = {name: twin(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}
        for tensor in twins.values():
            tensor.requires_grad_(tensor.is_floating_point())

    def written_parameter(self) -> str | None:
        """Returns the name of the first parameter that a run wrote to, None if there is none."""
        return next((name for name, tensor in self.parameters.items() if tensor._version), None)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Sets eval mode inside the context. On exit restores the mode of each module. `model.train()` would instead put
    modules that the user has frozen into training mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def _clone_buffer(buffer: torch.Tensor | None) -> torch.Tensor | None:
    return None if buffer is None or buffer.is_meta else buffer.detach().clone()


TIME_LIMIT_VARIABLE = "MESHWRIGHT_ANALYSIS_SECONDS"
DEFAULT_LIMIT_SECONDS = 600.0
"""Default time limit of an analysis in seconds. The analysis of 1.1 B parameters takes 5 s on one core."""
INTERRUPT_INTERVAL_SECONDS = 5.0
"""Seconds between two interruptions, in case the forward catches the first one."""
POSTPONE_SECONDS = 0.01
"""Seconds until the next attempt to raise the timeout, if it must be postponed (`_must_postpone`)."""


class _AnalysisTimeout(BaseException):
    """Signals that the time limit is reached. It does not derive from Exception, because the analysis would mistake an
    Exception for a failure of the model and try a fallback.
    """


@contextmanager
def limit_analysis_time() -> Iterator[None]:
    """Limits the time of the analysis inside the context. If contexts are nested, only the limit of the outermost
    counts.

    Only the main thread can be interrupted, so other threads have no limit. There is also no limit if the process
    already uses the timer ITIMER_REAL.

    Raises:
        InputError: the analysis exceeded the limit, or TIME_LIMIT_VARIABLE is not a positive number.
    """
    seconds = analysis_time_limit()
    if threading.current_thread() is not threading.main_thread() or any(signal.getitimer(signal.ITIMER_REAL)):
        yield
        return
    where = ""

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal where
        if _must_postpone(frame):
            signal.setitimer(signal.ITIMER_REAL, POSTPONE_SECONDS, INTERRUPT_INTERVAL_SECONDS)
            return
        where = where or _describe_user_line(frame)
        raise _AnalysisTimeout

    before: Any = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, INTERRUPT_INTERVAL_SECONDS)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)
    except _AnalysisTimeout:
        raise InputError(
            Message(
                "the analysis of the model was stopped after {seconds:g} s{where}: if its forward waits for a "
                "network or a file, remove the wait; otherwise give a small batch as example=..., or set "
                "{time_limit_variable} to more seconds",
                seconds=seconds,
                where=where,
                time_limit_variable=TIME_LIMIT_VARIABLE,
            )
        ) from None


def analysis_time_limit() -> float:
    """Returns the limit in seconds: TIME_LIMIT_VARIABLE of the environment, or DEFAULT_LIMIT_SECONDS.

    Raises:
        InputError: the environment variable is not a positive number.
    """
    text = os.environ.get(TIME_LIMIT_VARIABLE, "")
    try:
        seconds = float(text) if text else DEFAULT_LIMIT_SECONDS
    except ValueError:
        seconds = 0.0
    if not 0.0 < seconds < float("inf"):
        raise InputError(
            Message(
                "{time_limit_variable}={text!r} is not a number of seconds above 0",
                time_limit_variable=TIME_LIMIT_VARIABLE,
                text=text,
            )
        )
    return seconds


def _must_postpone(frame: FrameType | None) -> bool:
    """Returns whether the timeout must not be raised at `frame`.

    During an import the exception would leave a partially initialised module. In a callback of the garbage collector or
    in a `__del__`, Python would print and ignore the exception.
    """
    callbacks = [getattr(each, "__code__", None) for each in gc.callbacks]
    while frame is not None:
        code = frame.f_code
        if code.co_name == "__del__" or code in callbacks or code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _describe_user_line(frame: FrameType | None) -> str:
    """Returns a description of the innermost running line outside of torch, this package and the standard library."""
    while frame is not None and not _is_user_file(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f" in {Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def _is_user_file(name: str) -> bool:
    own = tuple(str(Path(each).parent) for each in (torch.__file__, sys.modules["meshwright"].__file__ or ""))
    library = str(Path(os.__file__).parent)
    return not name.startswith((*own, "<")) and (not name.startswith(library) or "site-packages" in name)


class ExternalFailure(NamedTuple):
    """Describes a forward that could not read a file or the network."""

    where: str
    """The line of the model, such as ' in model.py, line 7', or ''."""
    advice: Message


def external_failure(error: BaseException) -> ExternalFailure | None:
    """Returns where a file or the network failed, and what the user can do. Returns None if neither `error` nor its
    causes are an OSError.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    if cause is None:
        return None
    lines = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(cause.__traceback__)]
    users = [(name, line) for name, line in reversed(lines) if _is_user_file(name)]
    users.sort(key=lambda one: "site-packages" in one[0])  # prefers the user's file to a library such as requests
    return ExternalFailure(
        f" in {Path(users[0][0]).name}, line {users[0][1]}" if users else "",
        Message(
            "make what the forward reads available on every rank, or read it earlier, in __init__ or in the data loader"
        ),
    )
