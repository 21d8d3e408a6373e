"""Sizes to `ModelSpec`: the layers in forward order with every parameter the runtime will have, by name, shape and the dimension it is cut on.

Rules: weights are (out, in). Column weights (query, key, value, gate, up) are cut on the output, row weights (out, down) on the input; a
column's bias is cut, a row's bias and every norm are whole; the vocabulary is cut by rows. Source: Shoeybi et al., Megatron-LM (2019), section 3.
FLOPs count multiplications and additions. Attention executes two products of width q over the context, which a causal mask halves:
4 q a token and token of context for an encoder, 2 q for a decoder (Korthikanti et al. count 4 q for both).
"""

from __future__ import annotations

from collections.abc import Iterable

from meshwright.intake.activations import back_kept, block_kept, context_widths, embedding_moved, front_kept, head_kept, routed_kept
from meshwright.intake.convolution import convolution_spec
from meshwright.intake.names import FORMS, Names
from meshwright.intake.sizes import Sizes
from meshwright.spec.model import Layer, ModelSpec, Parameter


def model_spec(name: str, sizes: Sizes) -> ModelSpec:
    """The model as the planner sees it."""
    if sizes.kind == "convnet":
        return convolution_spec(name, sizes)
    names = FORMS[sizes.kind]
    layers = [embedding(sizes, names), *front(sizes, names), *blocks(sizes, names), *back(sizes, names), head(sizes, names)]
    return ModelSpec(
        name=name,
        layers=tuple(layers),
        hidden=sizes.hidden,
        context=sizes.seq if sizes.pos == "learned" else 0,
        divisible=divisible(sizes),
        vocabulary=sizes.vocab,
    )


def divisible(sizes: Sizes) -> dict[str, int]:
    """What a tensor degree must divide."""
    result = {"heads": sizes.heads}
    if sizes.kv_heads != sizes.heads and sizes.mla is None:
        result["kv_heads"] = sizes.kv_heads
    if not sizes.experts or sizes.dense_first_layers:
        result["ffn"] = sizes.ffn
    if sizes.experts:
        result["moe_ffn"] = sizes.moe_ffn
    return result


def embedding(sizes: Sizes, names: Names) -> Layer:
    table = Parameter(name=names.embedding, shape=(sizes.vocab, sizes.hidden), split=0)
    return Layer(name="embedding", parameters=(table,), moved=embedding_moved(sizes), output=sizes.hidden)


def front(sizes: Sizes, names: Names) -> Iterable[Layer]:
    """What is added to the words before the first block: learned positions, segment types, a norm. No layer when there is nothing."""
    parameters = []
    if sizes.pos_rows:
        parameters.append(Parameter(name=names.positions, shape=(sizes.pos_rows, sizes.hidden)))
    if sizes.types:
        parameters.append(Parameter(name=names.types, shape=(sizes.types, sizes.hidden)))
    if sizes.embedding_norm:
        parameters += norm(names.embedding_norm, sizes.hidden, sizes.norm_bias)
    if parameters:
        yield Layer(name="front", parameters=tuple(parameters), output=sizes.hidden, **front_kept(sizes))


def blocks(sizes: Sizes, names: Names) -> Iterable[Layer]:
    """The repeated block; in two runs where the first ones have no experts."""
    dense = sizes.layers if not sizes.experts else sizes.dense_first_layers
    if dense:
        yield block(sizes, names, dense, experts=False)
    if sizes.layers > dense:
        yield block(sizes, names, sizes.layers - dense, experts=True)


def block(sizes: Sizes, names: Names, repeat: int, experts: bool) -> Layer:
    norms = [parameter for which in names.norms[: sizes.norms] for parameter in norm(which, sizes.hidden, sizes.norm_bias)]
    mixing = latent_attention(sizes) if sizes.mla else attention(sizes, names)
    feeding = expert_feed_forward(sizes) if experts else feed_forward(sizes, names, sizes.ffn)
    active = expert_flops(sizes) if experts else 2.0 * sum(weight.numel for weight in feeding if len(weight.shape) == 2)
    width = sizes.query_width if sizes.mla is None else sizes.heads * (sizes.mla.nope + sizes.mla.rope + sizes.mla.v) / 2
    return Layer(
        name="block",
        repeat=repeat,
        parameters=(*norms, *mixing, *feeding),
        flops=2.0 * sum(weight.numel for weight in mixing if len(weight.shape) == 2) + active,
        attention_flops=(2.0 if sizes.causal else 4.0) * width,
        output=sizes.hidden,
        core_fixed=4.0 * sizes.heads,
        routed=float(sizes.top_k * sizes.hidden) if experts else 0.0,
        routed_saved=routed_kept(sizes) if experts else 0.0,
        **context_widths(sizes),
        **block_kept(sizes, experts),
    )


def attention(sizes: Sizes, names: Names) -> list[Parameter]:
    """Query, key, value (fused or apart), the norms of queries and keys, and the projection back."""
    q, k, h = sizes.query_width, sizes.key_width, sizes.hidden
    heads = sizes.kv_heads if sizes.kv_heads != sizes.heads else 0
    parameters = []
    if names.fused:
        parts = () if names.interleaved else (q, k, k)
        cut = column(names.fused, q + 2 * k, h, sizes.qkv_bias, parts, sizes.transposed)
        parameters += [each.but(ways=(0, heads, heads)) for each in cut] if heads and parts else cut
    else:
        parameters += column(names.query, q, h, sizes.qkv_bias)
        for name in (names.key, names.value):
            parameters += [each.but(ways=(heads,) * bool(heads)) for each in column(name, k, h, sizes.qkv_bias)]
    if sizes.qk_norm:
        head = q // sizes.heads
        parameters += [Parameter(name=f"self_attn.{which}_norm.weight", shape=(head,)) for which in ("q", "k")]
    return parameters + row(names.out, h, q, sizes.linear_bias, sizes.transposed)


def latent_attention(sizes: Sizes) -> list[Parameter]:
    """Multi-head latent attention: down to a small rank, a norm, up to the heads. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1."""
    assert sizes.mla is not None
    part, h = sizes.mla, sizes.hidden
    query = sizes.heads * (part.nope + part.rope)
    parameters = []
    if part.q_lora:
        parameters += [Parameter(name="self_attn.q_a_proj.weight", shape=(part.q_lora, h))]
        parameters += [Parameter(name="self_attn.q_a_layernorm.weight", shape=(part.q_lora,))]
        parameters += column("self_attn.q_b_proj", query, part.q_lora, False)
    else:
        parameters += column("self_attn.q_proj", query, h, False)
    parameters += [Parameter(name="self_attn.kv_a_proj_with_mqa.weight", shape=(part.kv_lora + part.rope, h))]
    parameters += [Parameter(name="self_attn.kv_a_layernorm.weight", shape=(part.kv_lora,))]
    parameters += column("self_attn.kv_b_proj", sizes.heads * (part.nope + part.v), part.kv_lora, False)
    return parameters + row("self_attn.o_proj", h, sizes.heads * part.v, False)


def feed_forward(sizes: Sizes, names: Names, width: int) -> list[Parameter]:
    parameters = column(names.gate, width, sizes.hidden, sizes.linear_bias) if sizes.gated else []
    parameters += column(names.up, width, sizes.hidden, sizes.linear_bias, (), sizes.transposed)
    return parameters + row(names.down, sizes.hidden, width, sizes.linear_bias, sizes.transposed)


def expert_feed_forward(sizes: Sizes) -> list[Parameter]:
    """Router, experts stacked in one tensor each, and the shared experts as one wide feed-forward."""
    h, width, count = sizes.hidden, sizes.moe_ffn, sizes.experts
    parameters = [Parameter(name="mlp.gate.weight", shape=(count, h))]
    if sizes.router_bias:
        parameters += [Parameter(name="mlp.gate.e_score_correction_bias", shape=(count,))]
    ups = ("gate_proj", "up_proj") if sizes.gated else ("up_proj",)
    fused, parts = ("gate_up_proj", (width, width)) if sizes.gated else ("up_proj", ())
    parameters += [Parameter(name=f"mlp.experts.{fused}", shape=(count, len(ups) * width, h), split=1, parts=parts, experts=count)]
    parameters += [Parameter(name="mlp.experts.down_proj", shape=(count, h, width), split=2, experts=count)]
    if sizes.shared_experts:
        shared = width * sizes.shared_experts
        for up in ups:
            parameters += column(f"mlp.shared_experts.{up}", shared, h, False)
        parameters += row("mlp.shared_experts.down_proj", h, shared, False)
    if sizes.shared_gate:
        parameters += [Parameter(name="mlp.shared_expert_gate.weight", shape=(1, h))]
    return parameters


def expert_flops(sizes: Sizes) -> float:
    """Forward FLOPs of a token in its `top_k` experts, the shared ones and the router."""
    matrices = 3 if sizes.gated else 2
    return 2.0 * sizes.hidden * (matrices * sizes.moe_ffn * (sizes.top_k + sizes.shared_experts) + sizes.experts + sizes.shared_gate)


def back(sizes: Sizes, names: Names) -> Iterable[Layer]:
    """What stands between the last block and the head: the final norm, or the transform of a masked-language head."""
    parameters: list[Parameter] = []
    flops = 0.0
    if names.transform:
        parameters += [Parameter(name=f"{names.transform}.dense.weight", shape=(sizes.hidden, sizes.hidden))]
        parameters += [Parameter(name=f"{names.transform}.dense.bias", shape=(sizes.hidden,))]
        parameters += norm(f"{names.transform}.norm", sizes.hidden, True)
        flops = 2.0 * sizes.hidden**2
    elif sizes.final_norm:
        parameters += norm(names.final, sizes.hidden, sizes.norm_bias)
    if parameters:
        yield Layer(name="back", parameters=tuple(parameters), flops=flops, output=sizes.hidden, **back_kept(sizes))


def head(sizes: Sizes, names: Names) -> Layer:
    """The projection onto the vocabulary and the loss. A tied weight stands first."""
    weight = Parameter(
        name=names.embedding if sizes.tied_embeddings else f"{names.head}.weight", shape=(sizes.vocab, sizes.hidden), split=0
    )
    bias = (Parameter(name=f"{names.head}.bias", shape=(sizes.vocab,), split=0),) if names.transform else ()
    return Layer(
        name="head",
        parameters=(weight, *bias),
        flops=2.0 * sizes.vocab * sizes.hidden,
        tied="embedding" if sizes.tied_embeddings else None,
        output=sizes.vocab,
        **head_kept(sizes),
    )


def norm(name: str, width: int, bias: bool) -> list[Parameter]:
    return [Parameter(name=f"{name}.{which}", shape=(width,)) for which in (("weight", "bias") if bias else ("weight",))]


def column(name: str, width: int, size: int, bias: bool, parts: tuple[int, ...] = (), transposed: bool = False) -> list[Parameter]:
    """A weight whose outputs are shared among tensor ranks, and its bias."""
    shape, split = ((size, width), 1) if transposed else ((width, size), 0)
    weight = Parameter(name=f"{name}.weight", shape=shape, split=split, parts=parts)
    return [weight, Parameter(name=f"{name}.bias", shape=(width,), split=0, parts=parts)] if bias else [weight]


def row(name: str, width: int, size: int, bias: bool, transposed: bool = False) -> list[Parameter]:
    """A weight whose inputs are shared among tensor ranks; its bias is whole."""
    shape, split = ((size, width), 0) if transposed else ((width, size), 1)
    weight = Parameter(name=f"{name}.weight", shape=shape, split=split)
    return [weight, Parameter(name=f"{name}.bias", shape=(width,))] if bias else [weight]
