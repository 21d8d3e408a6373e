"""Norms with statistics over the samples that pass together: their loss depends on how a batch is divided."""

from __future__ import annotations

from torch import nn


def over_batch(model: nn.Module) -> str:
    """Path of the first module that takes statistics over the batch in the mode that it is in; '' where there is none.

    A norm in eval mode reads its running statistics, which are the same for every row.
    """
    return next((path for path, module in model.named_modules() if _couples_rows(module)), "")


def _couples_rows(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.instancenorm._InstanceNorm):
        return module.track_running_stats and module.training
    return isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None)
