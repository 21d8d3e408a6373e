"""States of an optimizer that are one number for many weights, such as the count of steps: how they are read, saved and made again as they were.

A count may be a tensor of any type or a number of Python: made again as another one it would be rounded otherwise, and the update with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from meshwright.parallel.zero.master import Run


class Number(NamedTuple):
    """One number of a state. `kind`: the type of a tensor without dimensions, or `int`, `float`, `bool` of Python."""

    value: float
    kind: str = "float32"

    def made(self, device: torch.device) -> Any:
        """The state itself.

        >>> Number(3.0, "int").made(torch.device("cpu")), Number(0.5, "float64").made(torch.device("cpu"))
        (3, tensor(0.5000, dtype=torch.float64))
        """
        if self.kind in PYTHON:
            return PYTHON[self.kind](self.value)
        return torch.tensor(self.value, dtype=getattr(torch, self.kind), device=device)


PYTHON: Mapping[str, type] = MappingProxyType({"int": int, "float": float, "bool": bool})

Numbers = Mapping[str, Number | float]

Scalars = Mapping[int, Numbers]
"""Scalars of states by the identity of runs."""

NONE: Scalars = MappingProxyType({})


def numbers_of(optimizer: torch.optim.Optimizer, run: Run) -> Iterator[tuple[str, float]]:
    """States of `run` that have one number for all of its elements."""
    for key, value in optimizer.state.get(run, {}).items():
        if isinstance(value, torch.Tensor | int | float) and not is_elementwise(value, run):
            yield key, float(value)


def number_kinds(optimizer: torch.optim.Optimizer, run: Run) -> dict[str, str]:
    """What each of `numbers_of` is, as `Number.kind` says it."""
    held = optimizer.state.get(run, {})
    return {
        key: kind_of(value)
        for key, value in held.items()
        if isinstance(value, torch.Tensor | int | float) and not is_elementwise(value, run)
    }


def kind_of(value: Any) -> str:
    """
    >>> kind_of(3), kind_of(True), kind_of(torch.tensor(3.0))
    ('int', 'bool', 'float32')
    """
    if isinstance(value, torch.Tensor):
        return str(value.dtype).removeprefix("torch.")
    return next(name for name in ("bool", "int", "float") if isinstance(value, PYTHON[name]))


def scalars_of(optimizer: torch.optim.Optimizer, run: torch.Tensor, scalars: Numbers) -> dict[str, Any]:
    """One number each, where the update of `run` reads it."""
    group = (
        {} if run.device.type == "cpu" else next(group for group in optimizer.param_groups if any(each is run for each in group["params"]))
    )
    numbers = {key: value if isinstance(value, Number) else Number(value) for key, value in scalars.items()}
    return {key: number.made(scalar_device(key, group, run.device)) for key, number in numbers.items()}


def scalar_device(key: str, group: dict[str, Any], device: torch.device) -> torch.device:
    """Where torch's rules hold a number of weights on `device` (`Optimizer.load_state_dict` lays it there too): the count of steps on the host,
    but for kernels that read it themselves.

    >>> cuda = torch.device("cuda", 1)
    >>> scalar_device("step", {"fused": True}, cuda), scalar_device("step", {"capturable": True}, cuda), scalar_device("eta", {}, cuda)
    (device(type='cuda', index=1), device(type='cuda', index=1), device(type='cuda', index=1))
    >>> scalar_device("step", {"fused": None}, cuda)
    device(type='cpu')
    """
    return device if key != "step" or group.get("fused") or group.get("capturable") else torch.device("cpu")


def is_elementwise(value: Any, run: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape == run.shape
