"""Where each parameter is read while the model runs: weights need not be read by the module that holds them.

Rule: one run on the meta device; each function that is given a parameter is noted with the path of the innermost module that is running, and with the
number of blocks that have begun. MobileBERT multiplies by the table of its vocabulary and another matrix in one product, many models of one's own
by `self.table.weight`: what gathers weights where their own module runs, or keeps a stage's own, must know. A model that does not run there says nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from meshwright.anatomy.experts import standing_in
from meshwright.anatomy.inputs import QUESTIONS, Example, Unasked, arguments, example_of, unasked
from meshwright.anatomy.observed import observed
from meshwright.anatomy.trace import tensors_in


class Reader(NamedTuple):
    """The innermost module that was running, and how many blocks had begun."""

    path: str
    begun: int


Reads = Mapping[str, set[Reader]]
"""By the name of a parameter."""


def inside(path: str, paths: Iterable[str]) -> bool:
    """
    >>> inside("head.dense", ["head"]), inside("header", ["head"]), inside("", ["head"])
    (True, False, False)
    """
    return any(f"{path}.".startswith(f"{one}.") for one in paths)


class Watch(TorchFunctionMode):
    """Notes readers of the tensors in `names`."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names, self.stack, self.begun = names, [""], 0
        self.found: dict[str, set[Reader]] = defaultdict(set)

    def __torch_function__(self, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := getattr(function, "__name__", "")) in QUESTIONS:
            return unasked(name, function, args, kwargs or {})
        result = function(*args, **(kwargs or {}))
        if any(True for _ in tensors_in(result)):
            for tensor in tensors_in((args, kwargs or {})):
                if (weight := self.names.get(id(tensor))) is not None:
                    self.found[weight].add(Reader(self.stack[-1], self.begun))
        return result


def readers(model: nn.Module, blocks: Sequence[str], example: Example | None = None) -> Reads:
    """By the name of each parameter that was read; nothing where the model does not run with its example. `blocks`: paths."""
    state = {name: torch.empty_like(tensor, device="meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    watch = Watch({id(state[name]): name for name, _ in model.named_parameters()})
    is_block = frozenset(blocks)

    def enter(path: str) -> Any:
        def note(module: nn.Module, args: Any) -> None:
            watch.begun += path in is_block
            watch.stack.append(path)

        return note

    handles = [handle for path, module in model.named_modules() if path for handle in (
        module.register_forward_pre_hook(enter(path)), module.register_forward_hook(lambda *_: watch.stack.pop() and None)
    )]  # fmt: skip
    try:
        args, kwargs = arguments(example_of(model, example))
        with observed(model), torch.no_grad(), torch.device("meta"), standing_in(model), watch:
            functional_call(model, state, args, kwargs)
    except Exception:
        return {}
    finally:
        for handle in handles:
            handle.remove()
    return watch.found


def entered_otherwise(model: nn.Module, blocks: Sequence[str], example: Example | None = None) -> set[int]:
    """Blocks that are given something else than what the block before returned: the model's code does something between them, such as the sum with a far
    block's output of a U-Net. A view of it is it. Nothing where the model does not run with its example."""
    left: dict[int, tuple[Any, int]] = {}
    other: set[int] = set()

    def enter(number: int) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any) -> None:
            given = next(tensors_in((args, kwargs)), None)
            if number not in left and number - 1 in left and given is not None and (_storage(given), given._version) != left[number - 1]:
                other.add(number)

        return note

    def leave(number: int) -> Any:
        def note(module: nn.Module, args: Any, output: Any) -> None:
            if (hidden := next(tensors_in(output), None)) is not None:
                left[number], alive[number] = (_storage(hidden), hidden._version), hidden

        return note

    alive: dict[int, torch.Tensor] = {}
    state = {name: torch.empty_like(tensor, device="meta") for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    handles = []
    for number, path in enumerate(blocks):
        block = model.get_submodule(path)
        handles += [block.register_forward_pre_hook(enter(number), with_kwargs=True), block.register_forward_hook(leave(number))]
    try:
        args, kwargs = arguments(example_of(model, example))
        with observed(model), torch.no_grad(), torch.device("meta"), standing_in(model), Unasked():
            functional_call(model, state, args, kwargs)
    except Exception:
        return set()
    finally:
        for handle in handles:
            handle.remove()
    return other


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
