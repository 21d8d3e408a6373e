"""Numbers lent to parameters without memory, so that what is proven with numbers is proven of a model that has none yet.

Promise: every rank lends the same, and when the loan ends the parameters are those of before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

LENT = 1 << 27
"""Parameters that are lent numbers at most where not all of them need be: half a gigabyte."""

READ = 512
"""Rows of the vocabulary that hold the proof's token ids."""


@contextmanager
def lent(model: nn.Module, needed: Callable[[str], bool], read: int = READ) -> Iterator[None]:
    """Parameters on the meta device, as far as they are `needed`, hold numbers for a while: the same on every rank. `read`: rows of tables that do."""
    random = torch.Generator().manual_seed(0)
    before: list[tuple[nn.Module, str, nn.Parameter]] = []
    numbers: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta and needed(f"{path}.{name}"):
                before.append((module, name, parameter))
    try:
        for module, name, parameter in before:
            if id(parameter) not in numbers:
                width = parameter.shape[-1] if parameter.ndim else 1
                kind = parameter.dtype if parameter.dtype == torch.float64 else torch.float32
                # Of a large vocabulary only the rows that the proof reads ever take memory.
                tensor = torch.zeros(parameter.shape, dtype=kind)
                rows = read * width if isinstance(module, nn.Embedding) else None
                tensor.view(-1)[:rows].normal_(0, width**-0.5, generator=random)
                numbers[id(parameter)] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
            module._parameters[name] = numbers[id(parameter)]
        yield
    finally:
        for module, name, parameter in before:
            module._parameters[name] = parameter
