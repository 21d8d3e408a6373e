"""Balance without a loss: the bias by which a router chooses experts moves against each expert's load after every step.

    b_e <- b_e + rate x sign(mean load - load_e)          the load is that of the whole batch

The bias has no gradient and weighs nothing: it only says who is chosen. Loads are counts, so their sums are exact and the biases are the same to the
bit under every plan. The model asks for it (`model.expert_bias_rate`, `workload.expert_bias_rate`), for transformers' routers keep the bias as a buffer
and leave its update to whoever trains. Source: DeepSeek-V3, arXiv 2412.19437, section 2.1.2; Wang et al., arXiv 2408.15664.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from meshwright.anatomy import Anatomy, Experts
from meshwright.base.errors import InputError

RATE = "expert_bias_rate"
"""The attribute of a model that asks for it."""


def check_biases(model: nn.Module, anatomy: Anatomy) -> None:
    """InputError where the model asks for it and a router has no such bias, or there is none. The model must be whole."""
    rate: Any = getattr(model, RATE, None)
    if rate and not anatomy.experts:
        raise InputError(f"{RATE} {rate:g} moves the biases of routers; no experts were found: leave it out")
    for experts in anatomy.experts if rate else ():
        there = len(_biases(model, experts))
        if there != 1:
            raise InputError(
                f"{RATE} {rate:g}: the router of {experts.path} has {there} buffers of one number an expert, not 1: leave it out"
            )


@torch.no_grad()
def move_biases(model: nn.Module, anatomy: Anatomy, here: Collection[str], loads: Sequence[Sequence[float]]) -> None:
    """After a step. `here`: the paths of the modules of experts that this rank has; `loads`: of each mixture each expert's pairs over the mean."""
    rate: Any = getattr(model, RATE, None)
    for experts, load in zip(anatomy.experts, loads, strict=True) if rate else ():
        if experts.path in here:
            (bias,) = _biases(model, experts)
            bias += rate * (1.0 - torch.tensor(load, dtype=torch.float64, device=bias.device)).sign().to(bias.dtype)


def _biases(model: nn.Module, experts: Experts) -> list[torch.Tensor]:
    around = model.get_submodule(experts.path.rpartition(".")[0])
    return [buffer for buffer in around.buffers() if buffer.shape == (experts.count,) and buffer.is_floating_point()]
