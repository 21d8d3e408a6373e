"""The calling convention of blocks: where the hidden state is among the arguments and in the output."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Returns the hidden state: the keyword argument `hidden_states` if there is one, otherwise the first argument."""
    return args[0] if args else kwargs["hidden_states"] if "hidden_states" in kwargs else next(iter(kwargs.values()))


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with `hidden` in place of the hidden state."""
    if args:
        return (hidden, *args[1:]), kwargs
    name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
    return args, {**kwargs, name: hidden}


def map_first(function: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    """Returns `output` with `function` applied to its hidden state: the output itself, or its first element."""
    return type(output)([function(output[0]), *output[1:]]) if isinstance(output, tuple | list) else function(output)
