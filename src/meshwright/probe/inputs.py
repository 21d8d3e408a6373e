"""What a model is called with to be traced: the example of anatomy/inputs.py, with as many rows as the trace asks for.

Rule: where a model reads token ids, a token is a token; anywhere else a row of the batch is one token, and `Workload.sequence` is 1: parameters, FLOPs and
kept bytes are those of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.anatomy.inputs import example_of

IMAGE = 224
"""Pixels a side where a model with convolutions does not say."""


@dataclass(frozen=True)
class Inputs:
    """Shapes and types by name, rows first; the one name '' is passed by place. `tokens` of a row."""

    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]]
    tokens: int

    def __str__(self) -> str:
        return ", ".join(f"{name or 'input'} {('rows', *shape)}" for name, (shape, _) in self.shapes.items()).replace("'", "")

    def make(self, rows: int, compute: torch.dtype) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
        """Arguments with `rows` rows, floating ones in the compute type, as the runtime gives them."""
        made = {
            name: torch.zeros(rows, *shape, dtype=compute if dtype.is_floating_point else dtype)
            for name, (shape, dtype) in self.shapes.items()
        }
        return ((made.pop(""),), made) if "" in made else ((), made)


def inputs_of(model: nn.Module, sequence: int, batch: Mapping[str, Any] | None) -> Inputs:
    """What to call `model` with."""
    example = example_of(model, batch, sequence, IMAGE)
    shapes = {name: (tuple(value.shape[1:]), value.dtype) for name, value in example.items() if isinstance(value, torch.Tensor)}
    return Inputs(shapes, next((shape[0] for shape, dtype in shapes.values() if dtype == torch.long and len(shape) == 1), 1))
