"""Norms with statistics over the samples that pass together: their loss depends on how a batch is divided."""

from __future__ import annotations

from torch import nn


def over_batch(model: nn.Module) -> str:
    """Path of the first module with statistics over the batch; '' where there is none."""
    return next((path for path, module in model.named_modules() if _keeps(module)), "")


def _keeps(module: nn.Module) -> bool:
    kept = isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.track_running_stats
    return kept or isinstance(module, nn.modules.batchnorm._BatchNorm)
