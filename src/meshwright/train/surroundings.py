"""What the user's code has put around a step: another optimizer, other groups, hooks of a step, modes of torch.

The optimizer was tried before anything was sharded, and holds parts of the model's tensors. What is put in its place, or added to it, was not tried and
holds something else: a model's parameters have no gradient when an update runs, new ones have one of this rank's rows alone. Rates, decays and other options
of groups may change at any time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from meshwright.base.errors import InputError

if TYPE_CHECKING:
    from meshwright.parallel.zero.flat import FlatUnit
    from meshwright.parallel.zero.zero import Zero


class MadeOptimizer:
    """The optimizer as `parallelize` has made it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer, self._hooks = optimizer, _hooks(optimizer)

    def check(self, optimizer: torch.optim.Optimizer, zero: Zero) -> None:
        """Raises InputError where `optimizer` is another one, has other parameters, or hooks that were not tried."""
        if optimizer is not self._optimizer:
            raise InputError(
                f"trainer.optimizer is another {type(optimizer).__name__} than parallelize has made, and would update nothing of this rank's parts: give "
                "parallelize what makes it, `lambda params: ...`"
            )
        held, given = sum(len(group["params"]) for group in optimizer.param_groups), max(sum(map(_given, zero.trained)), 1)
        if held != given:
            raise InputError(
                f"the optimizer's groups have {held} parameters and parallelize has given it {given}: groups are made before anything is sharded; freeze with "
                "requires_grad_(False), and let what is trained later be a parameter of the model from the start"
            )
        if _hooks(optimizer) > self._hooks:
            raise InputError(
                "the optimizer got a hook around its step after parallelize, which would see parts of tensors: register it in what makes the optimizer, where "
                "it is tried"
            )


def check_modes(device: torch.device) -> None:
    """Raises InputError where torch is in a mode in which a step would train nothing, or compute in other types than the precision says."""
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        mode = "torch.inference_mode" if torch.is_inference_mode_enabled() else "torch.no_grad"
        raise InputError(f"the step is inside of {mode}, where no gradient comes to any parameter: call it outside")
    if torch.is_autocast_enabled(device.type):
        raise InputError(
            "the step is inside of torch.autocast, which keeps copies of weights and computes in other types than were proven: leave it out and give "
            "parallelize a precision, 'bf16' or 'fp16'"
        )


def _given(unit: FlatUnit) -> int:
    master = unit.master
    return len(master.runs) if master.tensors is None else len(master.tensors.parameters)


def _hooks(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
