"""What a model is called with to be traced: the batch that is given, or one made from what the model says of itself.

Rule: a batch given by the caller; else what the model's `dummy_inputs` holds (a dict of tensors, rows first), where it is the person's own; else
token ids where the model reads them or its first layer is an embedding, images where it is a convolution. Where a model reads token ids, a token is a token; anywhere
else a row of the batch is one token, and `Workload.sequence` is 1: parameters, FLOPs and kept bytes are those of a sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.anatomy import Anatomy
from meshwright.base.errors import InputError

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


def inputs_of(model: nn.Module, anatomy: Anatomy, sequence: int, batch: Mapping[str, Any] | None) -> Inputs:
    """What to call `model` with. Raises InputError where nothing says it."""
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", None)
    own = getattr(model, "dummy_inputs", None) if main is None else None
    if batch is None and isinstance(own, Mapping):
        batch = own
    if batch is not None:
        shapes = {
            name: (tuple(value.shape[1:]), value.dtype)
            for name, value in batch.items()
            if isinstance(value, torch.Tensor) and name != "labels"
        }
        return Inputs(shapes, next((shape[0] for shape, dtype in shapes.values() if dtype == torch.long and len(shape) == 1), 1))
    ids: tuple[tuple[int, ...], torch.dtype] = ((sequence,), torch.long)
    first = next((module for module in model.modules() if isinstance(module, nn.Embedding | nn.Conv2d)), None)
    reads_ids = anatomy.embedding is not None or isinstance(first, nn.Embedding)
    if main == "input_ids" or (main is None and reads_ids):
        if getattr(config, "is_encoder_decoder", False):
            return Inputs({"input_ids": ids, "decoder_input_ids": ids}, sequence)
        return Inputs({"input_ids" if main else "": ids}, sequence)
    if isinstance(first, nn.Conv2d) and main in (None, "pixel_values"):
        side = getattr(config, "image_size", None) or IMAGE
        sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
        return Inputs({"pixel_values" if main else "": ((first.in_channels, *sides), torch.float32)}, 1)
    raise InputError(
        f"model {type(model).__name__} says nothing of what it reads: give it an attribute dummy_inputs, a dict of tensors with the batch first"
    )
