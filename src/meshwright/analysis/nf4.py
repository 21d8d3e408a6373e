"""Stores the frozen linear layers of a model in 4 bits (QLoRA). `meshwright train --lora base=nf4` and
`meshwright.quantize_base` use it.

[Note: NF4 format] A weight (out, in) becomes a uint8 parameter (out, in / 64 x 34). Each block of 64 neighbouring
weights of a row has 34 bytes: 32 bytes with two codes each, the first weight in the high bits, and then its largest
absolute value as bfloat16, the scale. A code is the index of one of the 16 values of `NF4_VALUES`, which is multiplied
by the scale. So a weight takes 4.25 bits. QLoRA stores scales as float32 (4.5 bits), or quantises them again (4.13
bits). As blocks never cross a row, a slice by rows, or by whole blocks of columns, consists of the bytes of the slice.
Source: Dettmers et al., QLoRA, 2023, section 3 and appendix E.

`Nf4Linear` converts its weight to the dtype of its input in forward, and once more in backward, and frees it after the
product. Only the bytes are saved for backward. The engine stores, gathers and checkpoints the bytes as it does with
any frozen parameter.

Guarantees:
- Equal weights have equal bytes, on every device and under every plan.
- Conversion of converted weights changes nothing if the weights were converted in float32 or float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import gcd
from typing import Any

import torch
from torch import nn

from meshwright.analysis.block_lists import find_block_lists
from meshwright.analysis.graph import ModelGraph, TpSplit
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.spec.layout import NF4_BLOCK_BYTES, NF4_BLOCK_NUMEL

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""The values of the codes 0 to 15: quantiles of a normal distribution, in [-1, 1]. Source: QLoRA, appendix E."""

CODE_BYTES = NF4_BLOCK_NUMEL // 2
"""Bytes of the codes of a block. The two bytes of its scale follow."""


@torch.library.custom_op("meshwright::pack_nf4", mutates_args=())
def pack_nf4(weight: torch.Tensor) -> torch.Tensor:
    """Returns the bytes (out, in / 64 x 34) of a weight (out, in). One operation, so that a deferred initialisation
    records it as one."""
    blocks = weight.to(torch.promote_types(weight.dtype, torch.float32)).reshape(len(weight), -1, NF4_BLOCK_NUMEL)
    scale = blocks.abs().amax(-1, keepdim=True).to(torch.bfloat16)
    values = torch.tensor(NF4_VALUES, dtype=blocks.dtype, device=blocks.device)
    relative = (blocks / torch.where(scale == 0, 1, scale)).nan_to_num_(0.0)
    codes = torch.bucketize(relative, (values[1:] + values[:-1]) / 2).to(torch.uint8)
    pairs = codes[..., 0::2] << 4 | codes[..., 1::2]
    return torch.cat([pairs, scale.view(torch.uint8)], -1).view(len(weight), -1)


@pack_nf4.register_fake
def _(weight: torch.Tensor) -> torch.Tensor:
    return weight.new_empty(nf4_shape(weight.shape), dtype=torch.uint8)


def nf4_shape(shape: torch.Size) -> torch.Size:
    """Returns the shape of the bytes of a weight of `shape`.

    >>> nf4_shape(torch.Size((8, 128)))
    torch.Size([8, 68])
    """
    return torch.Size((*shape[:-1], shape[-1] // NF4_BLOCK_NUMEL * NF4_BLOCK_BYTES))


def weight_shape(shape: torch.Size | tuple[int, ...]) -> torch.Size:
    """Returns the shape of the weight whose bytes have `shape`.

    >>> weight_shape((8, 68))
    torch.Size([8, 128])
    """
    return torch.Size((*shape[:-1], shape[-1] // NF4_BLOCK_BYTES * NF4_BLOCK_NUMEL))


def pair_table() -> torch.Tensor:
    """Returns the values of the two codes of each byte (256, 2)."""
    values = torch.tensor(NF4_VALUES)
    return torch.stack([values.repeat_interleave(16), values.repeat(16)], 1)


def unpack_nf4(packed: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns the weight (out, in) of the bytes `packed` in `dtype`. `table`: the result of `pair_table`, on the device
    of `packed`."""
    blocks = packed.view(len(packed), -1, NF4_BLOCK_BYTES)
    scale = blocks.view(torch.bfloat16)[..., CODE_BYTES // 2 :]
    values = table.to(dtype).index_select(0, blocks[..., :CODE_BYTES].reshape(-1).int())
    return values.view(len(packed), -1, NF4_BLOCK_NUMEL).mul_(scale).view(len(packed), -1)


class Nf4Product(torch.autograd.Function):
    """The product x W^T with the bytes of W. W itself is not saved for backward. It gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """Returns x W^T in the dtype of `x`."""
        ctx.save_for_backward(packed, table)
        return x @ unpack_nf4(packed, table, x.dtype).t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        """Returns the gradient of `x`."""
        packed, table = ctx.saved_tensors
        return gradient @ unpack_nf4(packed, table, gradient.dtype), None, None


class Nf4Linear(nn.Linear):
    """A frozen linear layer whose weight is stored as NF4 bytes ([Note: NF4 format])."""

    table: torch.Tensor

    def __init__(self, linear: nn.Linear) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(pack_nf4(linear.weight.detach()), requires_grad=False)
        self.bias = linear.bias
        self.register_buffer("table", pair_table(), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns x W^T + b."""
        output = self.product(input)
        return output if self.bias is None else output + self.bias

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """Returns x W^T."""
        product: torch.Tensor = Nf4Product.apply(x, self.weight, self.table)
        return product


def parameter_count(model: nn.Module) -> int:
    """Returns the number of parameters of `model`. Weights in 4 bits count as weights."""
    shapes = ((each.shape, each.dtype == torch.uint8) for each in model.parameters())
    return sum((weight_shape(shape) if is_packed else shape).numel() for shape, is_packed in shapes)


def nf4_layers(model: nn.Module) -> dict[str, Nf4Linear]:
    """Returns the layers that store their weight as NF4 bytes, by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, Nf4Linear)}


def is_nf4_weight(model: nn.Module, name: str) -> bool:
    """Returns whether the parameter `name` of `model` is the bytes of a weight in 4 bits."""
    path, _, leaf = name.rpartition(".")
    return leaf == "weight" and isinstance(model.get_submodule(path), Nf4Linear)


def quantize_base(model: nn.Module) -> nn.Module:
    """Replaces every `nn.Linear` of the repeated blocks of `model` by a layer that stores its weight in 4 bits, in
    place, and freezes all parameters. Returns `model`. `peft.inject_adapter_in_model` then adds the adapters.

    Raises:
        InputError: the model has no repeated blocks with linear layers, a layer already has an adapter, or a weight of
            the blocks cannot be stored as NF4.
    """
    blocks = tuple(f"{path}." for path in find_block_lists(model))
    inside = {path: module for path, module in model.named_modules() if path.startswith(blocks)}
    linear = {path: module for path, module in inside.items() if type(module) is nn.Linear}
    if not linear:
        raise InputError(Message("base=nf4: this model has no repeated blocks with an nn.Linear: leave base out"))
    if adapted := next((path for path, module in inside.items() if "lora_A" in module._modules), ""):
        raise InputError(
            Message("base=nf4: {path} has an adapter already: quantize the base before LoRA is added", path=adapted)
        )
    for path, module in inside.items():
        for name, parameter in module._parameters.items():
            fits = parameter is None or parameter.ndim < 2
            if not (fits or (path in linear and parameter.shape[1] % NF4_BLOCK_NUMEL == 0)):
                raise InputError(
                    Message(
                        "base=nf4: {name} {shape} of a {type} cannot be stored in 4 bits: it must be the weight of an "
                        "nn.Linear with a multiple of {block} inputs; leave base out",
                        name=f"{path}.{name}",
                        shape=list(parameter.shape),
                        type=type(module).__name__,
                        block=NF4_BLOCK_NUMEL,
                    )
                )
    for path, module in linear.items():
        _replace(model, path, Nf4Linear(module))
    return model.requires_grad_(False)


def nan_scalar(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a value that makes a weight NaN in every element: NaN, or for bytes 255, since a scale of 255 and 255 is
    NaN."""
    return torch.full((), torch.nan if dtype.is_floating_point else 255, dtype=dtype, device=device)


@contextmanager
def as_linear(model: nn.Module, layers: dict[str, Nf4Linear]) -> Iterator[None]:
    """Replaces each of `layers` by an `nn.Linear` with the same values, on the meta device if its bytes are there.
    Restores the layers on exit."""
    try:
        for path, layer in layers.items():
            shape = weight_shape(layer.weight.shape)
            linear = nn.Linear(shape[1], shape[0], False, device="meta")
            values = linear.weight if layer.weight.is_meta else unpack_nf4(layer.weight, layer.table, layer.table.dtype)
            linear.weight, linear.bias = nn.Parameter(values.detach(), requires_grad=False), layer.bias
            linear.training = layer.training
            _replace(model, path, linear)
        yield
    finally:
        for path, layer in layers.items():
            _replace(model, path, layer)


def add_nf4_to_graph(found: ModelGraph, layers: dict[str, Nf4Linear]) -> ModelGraph:
    """Returns the graph of the model with `layers`. `found` is its graph with `nn.Linear` in their place. A split by
    inputs must consist of whole blocks, so tp must divide the number of blocks of a row."""
    if not layers:
        return found
    blocks = 0
    for path, layer in layers.items():
        split = found.splits.get(f"{path}.weight", TpSplit(0))
        if split.dim == 1:
            blocks = gcd(blocks, 1 if split.parts else layer.weight.shape[1] // NF4_BLOCK_BYTES)
    more = {f"blocks of {NF4_BLOCK_NUMEL} inputs": blocks} if blocks else {}
    findings = (*found.findings, Message("{count} layers in 4 bits", count=len(layers)))
    return replace(found, divisible={**found.divisible, **more}, findings=findings)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    model.get_submodule(parent)._modules[name] = module
