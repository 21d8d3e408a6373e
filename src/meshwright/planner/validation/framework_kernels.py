"""Describes what the kernels of other frameworks save for backward and move through memory.

The table is in elements of the compute type per token. Sources: Korthikanti et al. (arXiv 2205.05198), table 2, for
fused kernels with dropout: 10 and 24 bytes s b h per layer, and 5 a s^2 b for attention that is not fused (s tokens,
batch b, hidden size h, a heads). For all other operations the rules of autograd apply
(planner/inputs/activation_formulas.py).

| operation | fused: saves, moves | not fused: saves, moves |
|---|---|---|
| norm of width h | h, 2 h | as in this project's runtime |
| rotation of q and k | 0, 2 (q + k) | 0, 10 (q + k) |
| gelu of width f | f, 2 f | f, 2 f and the bias 2 f |
| gated product of width f | 2 f, 3 f | 3 f, 5 f |
| residual | 0, 3 h | 0, 3 h |
| dropout of width h | a byte each, 0 | a byte each, 2.5 h |
| scores, a token of context and head | 5 bytes with dropout, 6.5 elements | the same, 10 elements |
"""

from __future__ import annotations

from typing import NamedTuple

from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
from meshwright.spec.model import LayerSpec, ModelSpec


class FrameworkKernels(NamedTuple):
    """The kernels of a framework. `flash`: whether attention is one fused kernel. `loss`: the elements per logit that
    the forward of the loss moves."""

    norm: bool = True
    rotation: bool = True
    product: bool = True
    residual: bool = True
    flash: bool = True
    dropout: bool = False
    loss: float = 8.0
    operand: float = 1.0
    """Saved elements per operand element of an 8-bit product, in elements of the compute type. Transformer Engine saves
    its 8-bit copy; other frameworks save the original."""
    passing: float = 1.0
    """Transient elements of the compute type per logit while the loss runs. The value is 4 if logits are first
    converted to float32 (8 of 12 bytes)."""
    chunked: bool = False
    """Whether logits stay in the compute type and are converted to float32 chunk by chunk."""
    logits: float = 0.0
    """Additional saved bytes per logit, for copies that the loss makes."""
    gathered: int = 1
    """The number of tensor ranks if each rank saves the complete gathered inputs of column-parallel products, otherwise
    1."""
    again: bool = False
    """Whether selective recompute is used. With it, the block's input, the attention output and the output of every
    second matrix product are saved."""
    labelled: float = 1.0
    """Fraction of the tokens whose logits are computed. It is below 1 for masked language models whose head reads only
    masked positions."""


def framework_model_spec(name: str, sizes: ArchitectureSizes, kernels: FrameworkKernels) -> ModelSpec:
    """Returns the model spec with the kernels of the framework."""
    spec = model_spec(name, sizes)
    return spec.but(layers=tuple(_framework_layer(layer, sizes, kernels) for layer in spec.layers))


def _framework_layer(layer: LayerSpec, sizes: ArchitectureSizes, kernels: FrameworkKernels) -> LayerSpec:
    if layer.name == "block":
        return _framework_block(layer, sizes, kernels)
    if layer.name == "head":
        return _framework_head(layer, sizes, kernels)
    if layer.name == "front" and kernels.dropout:
        return layer.but(fixed_whole=layer.fixed_whole + sizes.hidden, moved=layer.moved + 2.5 * sizes.hidden)
    if layer.name == "back" and kernels.norm and layer.fixed_whole:
        return layer.but(
            saved_whole=sizes.hidden, fixed_whole=8.0, moved=2.0 * sizes.hidden, transient=2.0 * sizes.hidden
        )
    return layer


def _framework_head(layer: LayerSpec, sizes: ArchitectureSizes, kernels: FrameworkKernels) -> LayerSpec:
    part = kernels.labelled
    if kernels.chunked:
        layer = layer.but(fixed_split=layer.fixed_split / 2, transient=layer.transient / 4)
    return layer.but(
        flops=layer.flops * part,
        moved=kernels.loss * sizes.vocab * part,
        fixed_split=(layer.fixed_split + kernels.logits * sizes.vocab) * part,
        transient=kernels.passing * layer.transient * part,
    )


def _framework_block(layer: LayerSpec, sizes: ArchitectureSizes, kernels: FrameworkKernels) -> LayerSpec:
    h, q, k = sizes.hidden, sizes.query_width, sizes.key_width
    experts = layer.routed > 0
    f = float(sizes.moe_ffn * (sizes.top_k + sizes.shared_experts) if experts else sizes.ffn)
    eager_norm = sizes.norm == "rms" and not kernels.norm
    whole = (sizes.norms + 2.0 * kernels.operand) * h
    fixed_whole = 8.0 * sizes.norms + (sizes.norms * (2.0 * h) if eager_norm else 0.0)
    moved = sizes.norms * h * (12.0 if eager_norm else 2.0) + 2 * 3.0 * h
    split = 2.0 * q + 2.0 * k
    product = kernels.operand * f
    if sizes.pos == "rope":
        moved += (2.0 if kernels.rotation else 10.0) * (q + k)
    moved += 2.0 * (q + 2 * k)
    if sizes.gated:
        split += (2.0 if kernels.product else 3.0) * f + product
        moved += (3.0 if kernels.product else 5.0) * f
    else:
        split += f + product
        moved += (2.0 if kernels.product else 4.0) * f
    if kernels.dropout:
        fixed_whole += 2.0 * h
        moved += 1.0 * h if kernels.residual else 5.0 * h
    fixed_whole += 8.0 * sizes.experts if experts else 0.0
    whole += 2.0 * sizes.top_k * h if experts else 0.0
    moved += 8.0 * sizes.top_k * h if experts else 0.0
    if kernels.gathered > 1:
        whole -= 2.0 * kernels.operand * h
        split += 2.0 * kernels.operand * h * kernels.gathered
    core = {"core_fixed": 4.0 * sizes.heads, "core_context": 0.0, "context_moved": 0.0}
    flops = layer.attention_flops
    if not kernels.flash:
        core = {
            "core_fixed": 0.0,
            "core_context": (5.0 if kernels.dropout else 2.0) * sizes.heads,
            "context_moved": (4.0 + 2.5 * kernels.dropout) * sizes.heads * (1.0 if kernels.residual else 1.5),
        }
        flops = 4.0 * q
    return (
        layer.but(
            attention_flops=flops,
            moved=moved,
            saved_split=split,
            saved_whole=whole,
            fixed_split=core["core_fixed"],
            fixed_whole=fixed_whole,
            **core,
            transient=h + (2 if sizes.gated else 1) * f,
        )
        if not kernels.again
        else layer.but(
            attention_flops=flops,
            moved=moved,
            saved_split=2.0 * q + k + f,
            saved_whole=2.0 * h,
            fixed_split=core["core_fixed"],
            fixed_whole=0.0,
            **core,
            transient=whole + split + h + f,
        )
    )
