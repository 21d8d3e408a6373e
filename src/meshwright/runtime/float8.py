"""Matrix products in fewer bits than the weights have: checks whether the device supports them, and implements the
float8 linear layer. The build pass `low_precision_matmul` installs the layer.

Rule of float8: each factor of a product is multiplied by a scale that maps the factor's largest magnitude to the
largest number of its float8 dtype. Forward multiplies input and weight, both in e4m3. Backward multiplies the output
gradient in e5m2 with the weight in e4m3, and with the input in e4m3. Sums are float32, and results are bfloat16. Scales
are computed anew for each product, so no scale is stored between steps. Everything else, including weights and their
gradients, is the same as with precision bf16. Results differ from those of bf16 by the rounding of the factors: to 3
bits of mantissa in e4m3, and to 2 bits in e5m2.

Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433; the products are torch's own `_scaled_mm`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from meshwright.analysis.graph import ModelGraph
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of, platform_names
from meshwright.spec.precision import Recipe

MIN_COMPUTE_CAPABILITY = {"CUDA": {"tf32": (8, 0), "fp8": (8, 9)}, "ROCm": {"fp8": (9, 5)}}
"""By platform, the lowest compute capability that supports matrix products in each precision. Sources: CUDA C++
Programming Guide, table of capabilities; ROCm documentation, precision support: from gfx950 on, AMD devices multiply
_FORWARD_DTYPE, while gfx942 has its own format of float8."""

_FORWARD_DTYPE, _BACKWARD_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
_SIZE_MULTIPLE = 16
"""The dimensions of both factors of a float8 product must be multiples of this number."""


def check_precision_support(recipe: Recipe, device: torch.device) -> None:
    """Checks that `device` supports the matrix products of the recipe, and enables tf32 if the recipe uses it.

    Raises:
        InputError: the device does not support the matrix products.
    """
    for kind in recipe.rates:
        own, found = platform_names(backend_of(device))[0], backend_of(device).properties(device).capability
        platform = own if kind in MIN_COMPUTE_CAPABILITY.get(own, {}) else "CUDA"
        least = MIN_COMPUTE_CAPABILITY[platform].get(kind)
        if least is None:
            continue
        if found is None or platform != own or found < least:
            here = (
                f"this {own} device has compute capability {found[0]}.{found[1]}"
                if found
                else f"this rank's device is {device.type}"
            )
            other = "fp32" if kind == "tf32" else "bf16"
            raise InputError(
                Message(
                    "precision {recipe} needs a {platform} device of capability {major}.{minor} or newer; {here}: use "
                    "--precision {other}",
                    recipe=recipe.name,
                    platform=platform,
                    major=least[0],
                    minor=least[1],
                    here=here,
                    other=other,
                )
            )
    if recipe.rate == "tf32":
        torch.set_float32_matmul_precision("high")


def apply_float8(model: nn.Module, anatomy: ModelGraph, recipe: Recipe) -> None:
    """Makes linear layers inside of blocks multiply in float8, if the recipe requires it. Skips layers with a dimension
    that is not a multiple of _SIZE_MULTIPLE, and subclasses of `nn.Linear`."""
    if recipe.products != "fp8" or anatomy.blocks is None:
        return
    for index in range(anatomy.count):
        for module in model.get_submodule(anatomy.block(index)).modules():
            if type(module) is nn.Linear and not (
                module.in_features % _SIZE_MULTIPLE or module.out_features % _SIZE_MULTIPLE
            ):
                module.forward = partial(_float8_forward, module)  # type: ignore[method-assign]


def _float8_forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    lacking = -rows.shape[0] % _SIZE_MULTIPLE
    rows = torch.nn.functional.pad(rows, (0, 0, 0, lacking)) if lacking else rows
    output: torch.Tensor = Float8Matmul.apply(rows, module.weight)
    output = output[: x.shape[:-1].numel()].view(*x.shape[:-1], -1)
    return output if module.bias is None else output + module.bias


class Float8Matmul(torch.autograd.Function):
    """Computes x W^T for x (N, in) and W (out, in)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return scaled_matmul(x, _FORWARD_DTYPE, weight.t(), _FORWARD_DTYPE)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        of_input = scaled_matmul(gradient, _BACKWARD_DTYPE, weight, _FORWARD_DTYPE) if ctx.needs_input_grad[0] else None
        of_weight = scaled_matmul(gradient.t(), _BACKWARD_DTYPE, x, _FORWARD_DTYPE) if ctx.needs_input_grad[1] else None
        return of_input, of_weight


def scaled_matmul(one: torch.Tensor, kind: torch.dtype, other: torch.Tensor, other_kind: torch.dtype) -> torch.Tensor:
    """Returns the bfloat16 product (m, n) of `one` (m, k) and `other` (k, n). Before the product, `one` is scaled and
    rounded to the float8 dtype `kind`, and `other` to `other_kind`. The kernel requires contiguous rows of `one` and
    contiguous columns of `other`, so both are copied."""
    left, left_scale = _to_float8(one, kind)
    right, right_scale = _to_float8(other.t(), other_kind)
    return torch._scaled_mm(left, right.t(), scale_a=left_scale, scale_b=right_scale, out_dtype=torch.bfloat16)


def _to_float8(factor: torch.Tensor, kind: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the scaled `factor` in the float8 dtype `kind` with contiguous rows. Also returns the float32 scalar by
    which a multiplication reverts the scaling."""
    largest = factor.abs().amax().float().clamp_min(1e-12)
    undo = largest / torch.finfo(kind).max
    return (factor.float() / undo).to(kind).contiguous(), undo
