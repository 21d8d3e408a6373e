"""Matrix products in fewer bits than the weights have: checks whether the device supports them, and implements the
float8 linear layer. The build pass `low_precision_matmul` installs the layer.

Rule of float8: each factor of a product is multiplied by a scale that maps the factor's largest magnitude to the
largest number of its float8 dtype. Forward multiplies input and weight, both in e4m3. Backward multiplies the output
gradient in e5m2 with the weight in e4m3, and with the input in e4m3. Sums are float32, and results are bfloat16. Scales
are computed anew in each step, so no scale is stored between steps. Everything else, including weights and their
gradients, is the same as with precision bf16. Results differ from those of bf16 by the rounding of the factors: to 3
bits of mantissa in e4m3, and to 2 bits in e5m2.

[Note: equal scales] A factor may be divided over ranks: a weight over tensor ranks, and the input or output gradient of
a layer over tensor and context ranks. The scale is that of the whole factor: the ranks exchange the largest magnitudes
of their parts. So all ranks round each number as one device rounds it.

[Note: cached casts] The weights of a block are cast when the block first runs in a step, and all micro-batches of the
step use the result (`Float8Casts`). The scales of all weights of the block need one exchange. Backward transposes the
cast, because the kernel requires contiguous columns. At ZeRO 3, and if weights are offloaded, only the scales are
stored, and each pass casts the gathered weights again, because the casts would take half the memory of full weights.

Source: Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433; the products are torch's own `_scaled_mm`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from meshwright.analysis.dry_run import without_write_recording
from meshwright.analysis.graph import ModelGraph, TpSplit
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.runtime.backend import backend_of, platform_names
from meshwright.runtime.comm import async_collectives
from meshwright.runtime.comm.graph_collectives import sum_gradient
from meshwright.runtime.comm.group import CommGroup
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.spec.enums import offloads_weights
from meshwright.spec.precision import FLOAT8_SIZE_MULTIPLE, Recipe

MIN_COMPUTE_CAPABILITY = {"CUDA": {"tf32": (8, 0), "fp8": (8, 9)}, "ROCm": {"fp8": (9, 5)}}
"""By platform, the lowest compute capability that supports matrix products in each precision. Sources: CUDA C++
Programming Guide, table of capabilities; ROCm documentation, precision support: from gfx950 on, AMD devices multiply
_FORWARD_DTYPE, while gfx942 has its own format of float8."""

_FORWARD_DTYPE, _BACKWARD_DTYPE = torch.float8_e4m3fn, torch.float8_e5m2
SCALE_ALIGNMENT = 16
"""Bytes. cuBLAS refuses a scale at another address: CUBLAS_STATUS_NOT_SUPPORTED (H100, CUDA 13.0)."""


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


class Float8Factor(NamedTuple):
    """A factor of a product: `values` (m, k) in a float8 dtype with contiguous rows, and the scalar `undo`, by which a
    multiplication reverts the scaling."""

    values: torch.Tensor
    undo: torch.Tensor

    @property
    def transposed(self) -> Float8Factor:
        """Returns the factor (k, m)."""
        return Float8Factor(self.values.t().contiguous(), self.undo)


@torch.library.custom_op("meshwright::largest_magnitude", mutates_args=(), schema="(Tensor x, int[] keys) -> Tensor")
def largest_magnitude(x: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
    """Returns the largest of the magnitudes `x` (n) of this rank and of the ranks of the groups with the keys `keys`,
    element by element."""
    found = x.clone()
    for key in keys:
        async_collectives.all_reduce(found, CommGroup.by_key[key], use_max=True).wait()
    return found


@largest_magnitude.register_fake
def _like(x: torch.Tensor, keys: Sequence[int]) -> torch.Tensor:
    return torch.empty_like(x)


def _undo(largest: torch.Tensor, kind: torch.dtype, keys: Sequence[int]) -> torch.Tensor:
    """Returns the scalars that revert the scaling of factors with the largest magnitudes `largest` (n) on this rank."""
    wide = largest if largest.dtype == torch.float64 else largest.float()
    wide = largest_magnitude(wide, list(keys)) if keys else wide
    return wide.clamp_min(1e-12) / torch.finfo(kind).max


def _aligned(scales: torch.Tensor) -> Sequence[torch.Tensor]:
    """Returns the scalars of `scales` (n) at addresses that are multiples of SCALE_ALIGNMENT."""
    spread = scales.new_empty(len(scales), SCALE_ALIGNMENT // scales.itemsize)
    spread[:, 0] = scales
    return spread[:, 0].unbind()


def to_float8(
    factor: torch.Tensor, kind: torch.dtype, keys: Sequence[int] = (), undo: torch.Tensor | None = None
) -> Float8Factor:
    """Returns `factor` (m, k), scaled and rounded to the float8 dtype `kind`. `keys`: the keys of the groups whose
    ranks store other parts of the factor ([Note: equal scales]). `undo`: the scale if it is known."""
    if undo is None:
        undo = _undo(torch.linalg.vector_norm(factor, float("inf")).view(1), kind, keys).view(())
    return Float8Factor((factor.to(undo.dtype) / undo).to(kind).contiguous(), undo)


def scaled_product(one: Float8Factor, other: Float8Factor, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """Returns the product (m, n) of `one` (m, k) and the transpose of `other` (n, k) in `dtype`. `fast`: whether the
    device may sum in fewer bits than those of float32. In float64 the factors are exact and the product is float64,
    which compares plans."""
    if dtype == torch.float64:
        return (one.values.to(dtype) * one.undo) @ (other.values.to(dtype) * other.undo).t()
    left, right = _padded(one.values, 1), _padded(other.values, FLOAT8_SIZE_MULTIPLE)
    found = torch._scaled_mm(
        left, right.t(), scale_a=one.undo, scale_b=other.undo, out_dtype=dtype, use_fast_accum=fast
    )
    return found if len(right) == len(other.values) else found[:, : len(other.values)]


def _padded(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Returns `values` (m, k) with zeros after its rows and columns: m becomes a multiple of `rows`, and k of
    FLOAT8_SIZE_MULTIPLE, as the kernel requires."""
    below, behind = -values.shape[0] % rows, -values.shape[1] % FLOAT8_SIZE_MULTIPLE
    if not (below or behind):
        return values
    return F.pad(values.view(torch.uint8), (0, behind, 0, below)).view(values.dtype)


class Float8Layer:
    """Replaces the forward of a linear layer, whose products it computes in float8. Tensor-parallel layers call
    `multiply` or its parts instead.

    `input_keys` and `gradient_keys`: the keys of the groups whose ranks have other parts of the layer's input, or of
    its output gradient.
    """

    is_traceable = True

    def __init__(
        self, module: nn.Module, input_keys: tuple[int, ...] = (), gradient_keys: tuple[int, ...] = ()
    ) -> None:
        self.module, self.input_keys, self.gradient_keys = module, input_keys, gradient_keys
        self.undo: torch.Tensor | None = None
        self.cast: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """The weight (out, in) of this rank."""
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight

    def prepare(self, undo: torch.Tensor | None, is_cached: bool) -> None:
        """Stores the scale `undo` of the weight, and its cast if `is_cached`. None drops both."""
        self.undo, self.cast = undo, None
        if undo is not None and is_cached:
            self.cast = to_float8(self.weight.detach(), _FORWARD_DTYPE, undo=undo).values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x W^T + b."""
        output, bias = self.multiply(x), self.module._parameters.get("bias")
        return output if bias is None else output + bias

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x W^T."""
        options = self.input_keys, self.gradient_keys
        output: torch.Tensor = _Float8Matmul.apply(x, self.weight, *self.operand(), *options)
        return output

    def multiply_replicated(self, x: torch.Tensor, group: CommGroup) -> torch.Tensor:
        """Returns x W^T for a layer of which each rank of `group` uses some outputs, maybe those that other ranks use
        too. One device rounds the sum of the ranks' gradients. So backward first sums them, and then each of the ranks
        has 1 / ranks of the gradients of x and W."""
        x, weight = (_ScaleGradient.apply(each, 1 / group.size) for each in (x, self.weight))
        options = self.input_keys, self.gradient_keys
        return sum_gradient(_Float8Matmul.apply(x, weight, *self.operand(), *options), group)

    def operand(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the cast of the weight, or the weight if there is none, and the scale."""
        weight, undo = self.weight.detach(), self.undo
        if undo is None:
            undo = _undo(torch.linalg.vector_norm(weight, float("inf")).view(1), _FORWARD_DTYPE, ()).view(())
        return (weight if self.cast is None else self.cast), undo


def float8_layer(module: nn.Module) -> Float8Layer | None:
    """Returns the float8 products of a linear layer, or None if it multiplies in the compute dtype."""
    return getattr(module, "float8_products", None)


def input_factor(x: torch.Tensor, keys: Sequence[int] = (), undo: torch.Tensor | None = None) -> Float8Factor:
    """Returns the input `x` (N, in) of a layer as a factor. `undo`: its scale if it is known."""
    return to_float8(x, _FORWARD_DTYPE, keys, undo)


def gradient_factor(gradient: torch.Tensor, keys: Sequence[int] = ()) -> Float8Factor:
    """Returns the output gradient (N, out) of a layer as a factor."""
    return to_float8(gradient, _BACKWARD_DTYPE, keys)


def weight_factor(stored: torch.Tensor, undo: torch.Tensor) -> Float8Factor:
    """Returns the weight (out, in) as a factor. `stored` is the cast or the weight itself."""
    if stored.dtype == _FORWARD_DTYPE:
        return Float8Factor(stored, undo)
    return to_float8(stored, _FORWARD_DTYPE, undo=undo)


class _Float8Matmul(torch.autograd.Function):
    """Computes x W^T for x (..., in) and W (out, in). `stored` and `undo` are the result of `Float8Layer.operand`."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        stored: torch.Tensor,
        undo: torch.Tensor,
        input_keys: tuple[int, ...],
        gradient_keys: tuple[int, ...],
    ) -> torch.Tensor:
        rows = input_factor(x.flatten(0, -2), input_keys)
        ctx.save_for_backward(x, stored, undo, rows.undo)
        ctx.gradient_keys = gradient_keys
        product = scaled_product(rows, weight_factor(stored, undo), x.dtype, fast=True)
        # A row layer adds to the result in place, so that it must not be an autograd view.
        return product.reshape(*x.shape[:-1], -1).data

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        x, stored, undo, x_undo = ctx.saved_tensors
        factor = gradient_factor(gradient.flatten(0, -2), ctx.gradient_keys)
        of_input = of_weight = None
        if ctx.needs_input_grad[0]:
            of_input = scaled_product(factor, weight_factor(stored, undo).transposed, x.dtype).reshape(x.shape)
        if ctx.needs_input_grad[1]:
            rows = input_factor(x.flatten(0, -2), undo=x_undo)
            of_weight = scaled_product(factor.transposed, rows.transposed, x.dtype)
        return of_input, of_weight, None, None, None, None


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.factor, None


class Float8Casts:
    """The float8 layers of this rank, by the index of their block, and the casts of their weights ([Note: cached
    casts])."""

    def __init__(self, layers: Mapping[int, Sequence[Float8Layer]], keys: Sequence[int], is_cached: bool) -> None:
        """`keys`: the keys of the groups whose ranks store other parts of the weights. `is_cached`: whether casts are
        stored, and not only their scales."""
        self.layers, self.keys, self.is_cached = layers, tuple(keys), is_cached
        self._ready: set[int] | None = None
        """The blocks whose casts are valid. None outside of `reused`, when weights may change between passes."""

    @contextmanager
    def reused(self) -> Iterator[None]:
        """Reuses casts inside the context, in which no weight changes, and frees them at its end."""
        self._ready = set()
        try:
            yield
        finally:
            self._ready = None
            for layers in self.layers.values():
                for layer in layers:
                    layer.prepare(None, False)

    def around(self, forward: Callable[..., Any], index: int) -> Callable[..., Any]:
        """Returns `forward`, the forward of the block `index`, with a function that casts its weights before it."""
        if not self.layers.get(index):
            return forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._ready is None or index not in self._ready:
                self._prepare(index)
            return forward(*args, **kwargs)

        return run

    @without_write_recording
    @torch.no_grad()
    def _prepare(self, index: int) -> None:
        layers = self.layers[index]
        found = torch.stack([torch.linalg.vector_norm(layer.weight.detach(), float("inf")) for layer in layers])
        for layer, undo in zip(layers, _aligned(_undo(found, _FORWARD_DTYPE, self.keys)), strict=True):
            layer.prepare(undo, self.is_cached)
        if self._ready is not None:
            self._ready.add(index)


def apply_float8(
    model: nn.Module,
    anatomy: ModelGraph,
    recipe: Recipe,
    context: ParallelContext | None = None,
    shapes: Mapping[str, torch.Size] | None = None,
) -> Float8Casts | None:
    """Makes linear layers inside of blocks multiply in float8, if the recipe requires it. Skips layers with a dimension
    that is not a multiple of FLOAT8_SIZE_MULTIPLE, experts, and subclasses of `nn.Linear`.

    `context`: the context of a sharded model, whose tensor-parallel layers already have their forwards. `shapes`: the
    global shape of each parameter of such a model.

    Returns the casts of the weights. Without a context they are not cached. None if no layer is in float8.
    """
    if recipe.products != "fp8" or anatomy.blocks is None:
        return None
    tp, cp = (None, None) if context is None else (context.tp, context.group("cp"))
    splits = {} if tp is None else {**(cut := anatomy.for_tp(tp.size)).splits, **cut.partly_used}
    experts = tuple(f"{each.path}." for each in anatomy.experts)
    found: dict[int, list[Float8Layer]] = {}
    for index in range(anatomy.count):
        block = anatomy.block(index)
        for inside, module in model.get_submodule(block).named_modules():
            path = f"{block}.{inside}" if inside else block
            local = (module.out_features, module.in_features) if type(module) is nn.Linear else None
            sizes = local and ((shapes or {}).get(f"{path}.weight") or local)
            if not sizes or any(size % FLOAT8_SIZE_MULTIPLE for size in sizes) or path.startswith(experts):
                continue
            layer = _install(module, splits.get(f"{path}.weight"), tp, cp)
            found.setdefault(index, []).append(layer)
    if context is None:
        return None
    is_cached = context.plan.zero < 3 and not offloads_weights(context.plan.offload)
    return Float8Casts(found, [tp.key] if tp else [], is_cached)


def _install(module: nn.Module, split: TpSplit | None, tp: CommGroup | None, cp: CommGroup | None) -> Float8Layer:
    """Makes `module` multiply in float8. A column layer (a split along dimension 0) has the whole input and a part of
    the output features, and a row layer the reverse. Any other layer may have a part of the sequence."""
    keys = [group.key for group in (cp,) if group is not None]
    parts = [] if tp is None else [tp.key]
    column, row = (split is not None and split.dim == dim for dim in (0, 1))
    layer = Float8Layer(module, (*keys, *([] if column else parts)), (*keys, *([] if row else parts)))
    module.float8_products = layer  # type: ignore[assignment]
    if "forward" not in vars(module):
        module.forward = layer.forward  # type: ignore[method-assign]
    return layer
