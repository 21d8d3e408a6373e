"""A copy of a model without memory, made before the model is sharded: it can be analysed again later, with another batch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def skeleton_of(model: nn.Module) -> nn.Module | None:
    """`model` with parameters on the meta device and buffers of its own; None where it cannot be copied."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    try:
        return copy.deepcopy(model, memo)
    except Exception:
        return None
