"""float64 throughout: models that cast to float32 inside (norms, softmax, rotary tables) compute in float64 there too.

For comparisons to 1e-10: what a model rounds to float32 on shares differs in its last bits from what it rounds on the whole. Both sides of a
comparison run so. Blocks are wrapped by themselves, so that a block that is computed again in backward is computed alike.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from meshwright.anatomy import find_lists


class Precise(TorchFunctionMode):
    """What asks for float32 gets float64."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__name__", "") == "float":
            return args[0].double()
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        return function(*args, **{key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()})


def precise(model: nn.Module) -> nn.Module:
    """`model`, changed in place. Its weights must be float64 when it is called."""
    for module in (model, *(block for path in find_lists(model) for block in model.get_submodule(path).children())):
        module.forward = _in_double(module.forward)  # type: ignore[method-assign]
    return model


def _in_double(forward: Any) -> Any:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            with Precise():
                return forward(*args, **kwargs)
        finally:
            torch.set_default_dtype(before)

    return run
