"""What a model is called with to be understood: an example that is given, or one made from what its forward asks for.

Rule: the names of forward's parameters tell it: token ids, token ids of a decoder, images. A model that names none of them is given token ids by
place where it has an embedding, images where it begins with a convolution.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

BATCH, LENGTH, SIDE = 2, 7, 32
IMAGES = ("pixel_values", "images", "image")


class Unasked(TorchFunctionMode):
    """Questions about values, such as 'is this batch packed?': without memory there are none, and the plain path is asked for."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return False if getattr(function, "__name__", "") == "__bool__" else function(*args, **(kwargs or {}))


def arguments(
    model: nn.Module, example: Mapping[str, Any] | None = None, dtype: torch.dtype | None = None, device: str = "meta", vocabulary: int = 1
) -> tuple[tuple[torch.Tensor, ...], dict[str, torch.Tensor]]:
    """Places and names of tensors to call `model` with: random small ids, random images, or the example."""
    if example is not None:
        tensors = {name: value.to(device) for name, value in example.items() if isinstance(value, torch.Tensor) and name != "labels"}
        return (), {name: value.to(dtype) if dtype and value.is_floating_point() else value for name, value in tensors.items()}
    names = [name for name, parameter in inspect.signature(model.forward).parameters.items() if parameter.kind < parameter.VAR_POSITIONAL]
    main = getattr(model, "main_input_name", None)
    image = next((name for name in names if name in IMAGES and main in (None, name)), None)
    if image is not None:
        return (), {image: _images(model, dtype, device)}
    ids = (torch.arange(BATCH * LENGTH, device=device) * 31 % max(vocabulary, 1)).view(BATCH, LENGTH)
    if "decoder_input_ids" in names and getattr(getattr(model, "config", None), "is_encoder_decoder", True):
        return (), {"input_ids": ids, "decoder_input_ids": ids}
    if "input_ids" in names:
        return (), {"input_ids": ids}
    first = next((module for module in model.modules() if isinstance(module, nn.Embedding | nn.Conv2d)), None)
    return ((_images(model, dtype, device) if isinstance(first, nn.Conv2d) else ids),), {}


def _images(model: nn.Module, dtype: torch.dtype | None, device: str) -> torch.Tensor:
    side = getattr(getattr(model, "config", None), "image_size", None) or SIDE
    height, width = side if isinstance(side, list | tuple) else (side, side)
    channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), 3)
    shape = (BATCH, channels, height, width)
    if device == "meta":
        return torch.empty(shape, device=device, dtype=dtype or torch.float32)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=dtype or torch.float32)
