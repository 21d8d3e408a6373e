"""Parameters that a model's own code writes to when it runs: an EMA teacher, `nn.Embedding(max_norm=)`, weights that are normalised in the forward.

Every operation that writes in place goes through torch's dispatcher, whatever the code says (`no_grad`, `.data`, `_foreach_mul_`, an autograd hook):
there the value of a parameter is saved before the first write to it. Nothing is copied of parameters that nobody writes to.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

P = ParamSpec("P")
R = TypeVar("R")


class Span(NamedTuple):
    """Elements of the storage `of` a tensor, whose memory may come and go."""

    of: torch.Tensor
    first: int
    stop: int


def spans_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, Span]:
    """Where `tensors` lie."""
    found = {}
    for name, each in tensors.items():
        if each.numel() and each.layout is torch.strided:
            first = int(each.storage_offset())
            extent = sum((size - 1) * stride for size, stride in zip(each.shape, each.stride(), strict=True))
            found[name] = Span(each, first, first + int(extent) + 1)
    return found


class Writes(TorchDispatchMode):
    """While it is entered, writes to `spans` are noted by name; `restore` undoes them. Tensors without memory are passed over."""

    supports_higher_order_operators = True

    def __init__(self, spans: Mapping[str, Span]) -> None:
        super().__init__()
        self.before: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        """By name: the elements, and their values before the first write."""
        self._held: dict[int, list[tuple[str, Span]]] = defaultdict(list)
        for name, span in spans.items():
            with torch._C.DisableTorchFunctionSubclass():  # closed parameters of ZeRO 3 refuse to say it
                if not span.of.is_meta:
                    self._held[span.of.untyped_storage()._cdata].append((name, span))

    @property
    def has_spans(self) -> bool:
        """Whether there is anything to write to."""
        return bool(self._held)

    def values(self) -> dict[str, torch.Tensor]:
        """Returns the current value of each tensor that was written to; the earlier one where its memory has been freed since."""
        return {
            name: (tensor if tensor.untyped_storage().nbytes() else value).detach().clone() for name, (tensor, value) in self.before.items()
        }

    def restore(self) -> None:
        """The values of before; of weights that ZeRO 3 has freed meanwhile nothing is left to restore."""
        for tensor, value in self.before.values():
            if tensor.untyped_storage().nbytes():
                with torch.no_grad():
                    tensor.copy_(value)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = getattr(function, "_schema", None)
        if schema is not None and schema.is_mutable:
            for tensor in _written(schema, args, kwargs):
                self._note(tensor)
        return function(*args, **kwargs)

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta or tensor.layout is not torch.strided or not tensor.untyped_storage().nbytes():
            return
        held = self._held.get(tensor.untyped_storage()._cdata, ())
        first = tensor.storage_offset()
        for name, span in held:
            if name not in self.before and span.first <= first < span.stop:
                with torch._C.DisableTorchFunctionSubclass():
                    elements = span.of.detach().as_strided((span.stop - span.first,), (1,), span.first)
                self.before[name] = (elements, elements.clone())


def _written(schema: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    given = dict(zip((argument.name for argument in schema.arguments), args, strict=False)) | dict(kwargs)
    for argument in schema.arguments:
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (each for each in tree_leaves(given.get(argument.name)) if isinstance(each, torch.Tensor))


def unseen(function: Callable[P, R]) -> Callable[P, R]:
    """Writes inside of `function` are not the model's own: no `Writes` notes them."""

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return run
