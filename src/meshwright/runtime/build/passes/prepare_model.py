"""The build pass that prepares the model for training. It is the first pass that changes the user's model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright.runtime.backend import backend_of
from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.spec.precision import Recipe


@build_pass(reads=("model", "base", "recipe", "deferred"))
def prepare_model(build: Build) -> None:
    """Moves buffers to the device, and disables the key-value cache of text generation. With exact sums, also makes
    kernels deterministic."""
    device = build.base.device
    if build.recipe.exact:
        backend_of(device).make_deterministic()
    with build.deferred:
        move_buffers(build.model, device, build.recipe)


def move_buffers(model: nn.Module, device: torch.device, recipe: Recipe) -> None:
    """Moves buffers, except meta tensors, to `device` and disables the key-value cache. A float64 recipe also converts
    the model to float64.

    Parameters are not moved, because the device may lack memory for all of them. Each rank later copies only its shards
    of parameters to its device.
    """
    for config in _configs_with_cache(model):
        config.use_cache = False  # with recompute, each block would append to a key-value cache twice
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device).contiguous()  # checkpoints save flat ranges of buffers
    if recipe.compute == "float64":
        model.double()


@contextmanager
def without_kv_cache(model: nn.Module) -> Iterator[None]:
    """Disables the key-value cache inside the context, as training does. Restores the setting on exit."""
    before = [(config, config.use_cache) for config in _configs_with_cache(model)]
    for config, _ in before:
        config.use_cache = False
    try:
        yield
    finally:
        for config, use_cache in before:
            config.use_cache = use_cache


def _configs_with_cache(model: nn.Module) -> list[Any]:
    """Returns the configurations, of the model and of its modules, that have an option for the key-value cache."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in configs if hasattr(config, "use_cache")}.values())
