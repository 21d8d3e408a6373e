"""Converts architecture sizes to a `ModelSpec` for the planner: the layers in forward order, with every parameter by
name, shape and sharded dimension.

Parameters have the names that the reference models and Hugging Face use, as checkpoints require. Names inside a block
are relative to the block.

Sharding rules: the shape of a weight is (out, in). Column-parallel weights (query, key, value, gate, up) are split
along the output, row-parallel weights (out, down) along the input. The bias of a column-parallel weight is split. The
bias of a row-parallel weight and all norms are replicated. The vocabulary is split by rows. Source: Shoeybi et al.,
Megatron-LM (2019), section 3.

FLOPs count multiplications and additions. Let q be the features of all query heads. For each token of context,
attention computes two products of width q, which are 4 q FLOPs per token in an encoder. The causal mask of a decoder
halves this to 2 q. (Korthikanti et al. count 4 q for both.)

`convolution_spec` describes a small residual convolutional network. For this network, a token is an image, and the
sequence length is 1. The network has a stem that halves the width and height of the image, equal residual blocks with
group norms, a mean over positions, and a classifier. Data parallelism, ZeRO, tensor and pipeline parallelism apply to
this network.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from meshwright.planner.inputs.activation_formulas import (
    attention_widths,
    block_activations,
    embedding_moved,
    head_activations,
    post_block_activations,
    pre_block_activations,
    routed_saved_elements,
)
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes
from meshwright.spec.model import LayerSpec, ModelSpec, ParameterSpec


class ParamNames(NamedTuple):
    """The parameter names of one kind of architecture; '' means that the architecture has no such parameter. `fused` is
    one weight for query, key and value. `interleaved`: whether query, key and value alternate head by head in the fused
    weight, so that one split shards all three."""

    embedding: str
    head: str
    norms: tuple[str, ...]
    out: str
    up: str
    down: str
    final: str = ""
    gate: str = ""
    query: str = ""
    key: str = ""
    value: str = ""
    positions: str = ""
    types: str = ""
    embedding_norm: str = ""
    transform: str = ""
    fused: str = ""
    interleaved: bool = False


_LLAMA_NAMES = ParamNames(
    embedding="model.embed_tokens.weight",
    head="lm_head",
    final="model.norm",
    norms=("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    query="self_attn.q_proj",
    key="self_attn.k_proj",
    value="self_attn.v_proj",
    out="self_attn.o_proj",
    gate="mlp.gate_proj",
    up="mlp.up_proj",
    down="mlp.down_proj",
    positions="model.embed_positions.weight",
    embedding_norm="model.embed_layernorm",
)

PARAM_NAMES_BY_KIND = {
    "llama": _LLAMA_NAMES,
    "decoder": _LLAMA_NAMES,
    "gpt2": ParamNames(
        embedding="transformer.wte.weight",
        head="lm_head",
        final="transformer.ln_f",
        norms=("ln_1", "ln_2"),
        out="attn.c_proj",
        up="mlp.c_fc",
        down="mlp.c_proj",
        positions="transformer.wpe.weight",
        fused="attn.c_attn",
    ),
    "bert": ParamNames(
        embedding="bert.embeddings.word_embeddings.weight",
        head="decoder",
        norms=("attention_norm", "output_norm"),
        query="attention.query",
        key="attention.key",
        value="attention.value",
        out="attention.output",
        up="intermediate",
        down="output",
        positions="bert.embeddings.position_embeddings.weight",
        types="bert.embeddings.token_type_embeddings.weight",
        embedding_norm="bert.embeddings.norm",
        transform="transform",
    ),
    "neox": ParamNames(
        embedding="gpt_neox.embed_in.weight",
        head="embed_out",
        final="gpt_neox.final_layer_norm",
        norms=("input_layernorm", "post_attention_layernorm"),
        out="attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        fused="attention.query_key_value",
        interleaved=True,
    ),
    "bloom": ParamNames(
        embedding="transformer.word_embeddings.weight",
        head="lm_head",
        final="transformer.ln_f",
        norms=("input_layernorm", "post_attention_layernorm"),
        out="self_attention.dense",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        embedding_norm="transformer.word_embeddings_layernorm",
        fused="self_attention.query_key_value",
        interleaved=True,
    ),
}


KERNEL_ELEMENTS, NORM_GROUPS = 9, 4
"""The elements of a kernel, and the groups of a GroupNorm (models/convnet.py)."""


def convolution_spec(name: str, sizes: ArchitectureSizes) -> ModelSpec:
    """Returns the model spec of a convolutional network with square kernels of 3 x 3. Tensor ranks divide the channels
    between the two convolutions of a block."""
    width, places = sizes.hidden, (sizes.image // 2) ** 2
    side = 3

    def convolution(path: str, inputs: int, split: int | None = None) -> ParameterSpec:
        return ParameterSpec(name=f"{path}.weight", shape=(width, inputs, side, side), split=split)

    def norm(path: str, split: int | None = None) -> tuple[ParameterSpec, ...]:
        return tuple(ParameterSpec(name=f"{path}.{part}", shape=(width,), split=split) for part in ("weight", "bias"))

    map_size = float(width * places)
    stem = LayerSpec(
        name="front",
        parameters=(convolution("stem", sizes.channels), *norm("norm")),
        flops=2.0 * KERNEL_ELEMENTS * sizes.channels * map_size,
        moved=4 * map_size,
        saved_whole=sizes.channels * sizes.image**2 + 2 * map_size,
        transient=2 * map_size,
        output=map_size,
    )
    block = LayerSpec(
        name="block",
        repeat=sizes.layers,
        parameters=(convolution("conv1", width, 0), *norm("norm1", 0), convolution("conv2", width, 1), *norm("norm2")),
        flops=4.0 * KERNEL_ELEMENTS * width * map_size,
        moved=11 * map_size,
        saved_split=2 * map_size,
        saved_whole=2 * map_size,
        transient=2 * map_size,
        output=map_size,
    )
    classifier = (
        ParameterSpec(name="classifier.weight", shape=(sizes.classes, width)),
        ParameterSpec(name="classifier.bias", shape=(sizes.classes,)),
    )
    head = LayerSpec(
        name="head",
        parameters=classifier,
        flops=2.0 * width * sizes.classes,
        moved=map_size,
        saved_whole=map_size + width + sizes.classes,
        output=float(sizes.classes),
    )
    divisible = {"ffn": width, "groups of norm1": NORM_GROUPS}
    return ModelSpec(name=name, layers=(stem, block, head), hidden=width, context=1, divisible=divisible)


def model_spec(name: str, sizes: ArchitectureSizes) -> ModelSpec:
    """Returns the model spec of an architecture. `name` is the name of the model for the user."""
    if sizes.kind == "convnet":
        return convolution_spec(name, sizes)
    names = PARAM_NAMES_BY_KIND[sizes.kind]
    layers = [
        embedding_layer(sizes, names),
        *pre_block_layers(sizes, names),
        *block_layers(sizes, names),
        *post_block_layers(sizes, names),
        head_layer(sizes, names),
    ]
    return ModelSpec(
        name=name,
        layers=tuple(layers),
        hidden=sizes.hidden,
        context=sizes.seq if sizes.pos == "learned" else 0,
        divisible=tp_divisible_sizes(sizes),
        vocabulary=sizes.vocab,
    )


def tp_divisible_sizes(sizes: ArchitectureSizes) -> dict[str, int]:
    """Returns the sizes of a model that the tensor-parallel degree must divide, by name. The degree may also be a
    multiple of `kv_heads`."""
    result = {"heads": sizes.heads}
    if sizes.kv_heads != sizes.heads and sizes.mla is None:
        result["kv_heads"] = sizes.kv_heads
    if not sizes.experts or sizes.dense_first_layers:
        result["ffn"] = sizes.ffn
    if sizes.experts:
        result["moe_ffn"] = sizes.moe_ffn
    return result


def embedding_layer(sizes: ArchitectureSizes, names: ParamNames) -> LayerSpec:
    """Returns the layer spec of the token embedding."""
    table = ParameterSpec(name=names.embedding, shape=(sizes.vocab, sizes.hidden), split=0)
    return LayerSpec(name="embedding", parameters=(table,), moved=embedding_moved(sizes), output=sizes.hidden)


def pre_block_layers(sizes: ArchitectureSizes, names: ParamNames) -> Iterable[LayerSpec]:
    """Yields the layer between the token embedding and the first block: learned positions, segment types and a norm.
    Yields nothing if the model has none of them."""
    parameters = []
    if sizes.pos_rows:
        parameters.append(ParameterSpec(name=names.positions, shape=(sizes.pos_rows, sizes.hidden)))
    if sizes.types:
        parameters.append(ParameterSpec(name=names.types, shape=(sizes.types, sizes.hidden)))
    if sizes.embedding_norm:
        parameters += norm_params(names.embedding_norm, sizes.hidden, sizes.norm_bias)
    if parameters:
        yield LayerSpec(name="front", parameters=tuple(parameters), output=sizes.hidden, **pre_block_activations(sizes))


def block_layers(sizes: ArchitectureSizes, names: ParamNames) -> Iterable[LayerSpec]:
    """Yields one layer spec for all blocks, or two if only the first blocks have no experts."""
    dense = sizes.layers if not sizes.experts else sizes.dense_first_layers
    if dense:
        yield block_layer(sizes, names, dense, experts=False)
    if sizes.layers > dense:
        yield block_layer(sizes, names, sizes.layers - dense, experts=True)


def block_layer(sizes: ArchitectureSizes, names: ParamNames, repeat: int, experts: bool) -> LayerSpec:
    """Returns the layer spec of `repeat` equal transformer blocks. `experts`: whether their feed-forward is an expert
    layer."""
    norms = [
        parameter
        for which in names.norms[: sizes.norms]
        for parameter in norm_params(which, sizes.hidden, sizes.norm_bias)
    ]
    mixing = latent_attention_params(sizes) if sizes.mla else attention_params(sizes, names)
    feeding = expert_params(sizes) if experts else feed_forward_params(sizes, names, sizes.ffn)
    active = expert_flops(sizes) if experts else 2.0 * sum(weight.numel for weight in feeding if len(weight.shape) == 2)
    width = (
        sizes.query_width if sizes.mla is None else sizes.heads * (sizes.mla.nope + sizes.mla.rope + sizes.mla.v) / 2
    )
    return LayerSpec(
        name="block",
        repeat=repeat,
        parameters=(*norms, *mixing, *feeding),
        flops=2.0 * sum(weight.numel for weight in mixing if len(weight.shape) == 2) + active,
        attention_flops=(2.0 if sizes.causal else 4.0) * width,
        output=sizes.hidden,
        core_fixed=4.0 * sizes.heads,
        routed=float(sizes.top_k * sizes.hidden) if experts else 0.0,
        routed_saved=routed_saved_elements(sizes) if experts else 0.0,
        **attention_widths(sizes),
        **block_activations(sizes, experts),
    )


def attention_params(sizes: ArchitectureSizes, names: ParamNames) -> list[ParameterSpec]:
    """Returns the weights of query, key and value (fused or separate), the norms of queries and keys, and the output
    projection."""
    q, k, h = sizes.query_width, sizes.key_width, sizes.hidden
    heads = sizes.kv_heads if sizes.kv_heads != sizes.heads else 0
    parameters = []
    if names.fused:
        parts = () if names.interleaved else (q, k, k)
        cut = column_parallel_params(names.fused, q + 2 * k, h, sizes.qkv_bias, parts, sizes.transposed)
        parameters += [each.but(ways=(0, heads, heads)) for each in cut] if heads and parts else cut
    else:
        parameters += column_parallel_params(names.query, q, h, sizes.qkv_bias)
        for name in (names.key, names.value):
            parameters += [
                each.but(ways=(heads,) * bool(heads)) for each in column_parallel_params(name, k, h, sizes.qkv_bias)
            ]
    if sizes.qk_norm:
        head = q // sizes.heads
        parameters += [ParameterSpec(name=f"self_attn.{which}_norm.weight", shape=(head,)) for which in ("q", "k")]
    return parameters + row_parallel_params(names.out, h, q, sizes.linear_bias, sizes.transposed)


def latent_attention_params(sizes: ArchitectureSizes) -> list[ParameterSpec]:
    """Returns the parameters of multi-head latent attention: projections to a low rank, norms, and projections to the
    heads. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1."""
    assert sizes.mla is not None
    part, h = sizes.mla, sizes.hidden
    query = sizes.heads * (part.nope + part.rope)
    parameters = []
    if part.q_lora:
        parameters += [ParameterSpec(name="self_attn.q_a_proj.weight", shape=(part.q_lora, h))]
        parameters += [ParameterSpec(name="self_attn.q_a_layernorm.weight", shape=(part.q_lora,))]
        parameters += column_parallel_params("self_attn.q_b_proj", query, part.q_lora, False)
    else:
        parameters += column_parallel_params("self_attn.q_proj", query, h, False)
    parameters += [ParameterSpec(name="self_attn.kv_a_proj_with_mqa.weight", shape=(part.kv_lora + part.rope, h))]
    parameters += [ParameterSpec(name="self_attn.kv_a_layernorm.weight", shape=(part.kv_lora,))]
    parameters += column_parallel_params("self_attn.kv_b_proj", sizes.heads * (part.nope + part.v), part.kv_lora, False)
    return parameters + row_parallel_params("self_attn.o_proj", h, sizes.heads * part.v, False)


def feed_forward_params(sizes: ArchitectureSizes, names: ParamNames, width: int) -> list[ParameterSpec]:
    """Returns the parameters of a feed-forward with `width` inner features."""
    parameters = column_parallel_params(names.gate, width, sizes.hidden, sizes.linear_bias) if sizes.gated else []
    parameters += column_parallel_params(names.up, width, sizes.hidden, sizes.linear_bias, (), sizes.transposed)
    return parameters + row_parallel_params(names.down, sizes.hidden, width, sizes.linear_bias, sizes.transposed)


def expert_params(sizes: ArchitectureSizes) -> list[ParameterSpec]:
    """Returns the router, the routed experts stacked in one tensor per weight, and the shared experts as one wide
    feed-forward."""
    h, width, count = sizes.hidden, sizes.moe_ffn, sizes.experts
    parameters = [ParameterSpec(name="mlp.gate.weight", shape=(count, h))]
    if sizes.router_bias:
        parameters += [ParameterSpec(name="mlp.gate.e_score_correction_bias", shape=(count,))]
    ups = ("gate_proj", "up_proj") if sizes.gated else ("up_proj",)
    fused, parts = ("gate_up_proj", (width, width)) if sizes.gated else ("up_proj", ())
    parameters += [
        ParameterSpec(
            name=f"mlp.experts.{fused}", shape=(count, len(ups) * width, h), split=1, parts=parts, experts=count
        )
    ]
    parameters += [ParameterSpec(name="mlp.experts.down_proj", shape=(count, h, width), split=2, experts=count)]
    if sizes.shared_experts:
        shared = width * sizes.shared_experts
        for up in ups:
            parameters += column_parallel_params(f"mlp.shared_experts.{up}", shared, h, False)
        parameters += row_parallel_params("mlp.shared_experts.down_proj", h, shared, False)
    if sizes.shared_gate:
        parameters += [ParameterSpec(name="mlp.shared_expert_gate.weight", shape=(1, h))]
    return parameters


def expert_flops(sizes: ArchitectureSizes) -> float:
    """Returns the forward FLOPs per token in an expert layer: in `top_k` routed experts, in the shared experts and in
    the router."""
    matrices = 3 if sizes.gated else 2
    return (
        2.0
        * sizes.hidden
        * (matrices * sizes.moe_ffn * (sizes.top_k + sizes.shared_experts) + sizes.experts + sizes.shared_gate)
    )


def post_block_layers(sizes: ArchitectureSizes, names: ParamNames) -> Iterable[LayerSpec]:
    """Yields the layer between the last block and the head: the final norm, or the transform of a BERT head. Yields
    nothing if the model has neither."""
    parameters: list[ParameterSpec] = []
    flops = 0.0
    if names.transform:
        parameters += [ParameterSpec(name=f"{names.transform}.dense.weight", shape=(sizes.hidden, sizes.hidden))]
        parameters += [ParameterSpec(name=f"{names.transform}.dense.bias", shape=(sizes.hidden,))]
        parameters += norm_params(f"{names.transform}.norm", sizes.hidden, True)
        flops = 2.0 * sizes.hidden**2
    elif sizes.final_norm:
        parameters += norm_params(names.final, sizes.hidden, sizes.norm_bias)
    if parameters:
        yield LayerSpec(
            name="back", parameters=tuple(parameters), flops=flops, output=sizes.hidden, **post_block_activations(sizes)
        )


def head_layer(sizes: ArchitectureSizes, names: ParamNames) -> LayerSpec:
    """Returns the layer spec of the head: the projection to the vocabulary, and the loss. If the vocabulary is tied,
    the tied weight is the first parameter."""
    weight = ParameterSpec(
        name=names.embedding if sizes.tied_embeddings else f"{names.head}.weight",
        shape=(sizes.vocab, sizes.hidden),
        split=0,
    )
    bias = (ParameterSpec(name=f"{names.head}.bias", shape=(sizes.vocab,), split=0),) if names.transform else ()
    return LayerSpec(
        name="head",
        parameters=(weight, *bias),
        flops=2.0 * sizes.vocab * sizes.hidden,
        tied="embedding" if sizes.tied_embeddings else None,
        output=sizes.vocab,
        **head_activations(sizes),
    )


def norm_params(name: str, width: int, bias: bool) -> list[ParameterSpec]:
    """Returns the parameters of a norm with `width` features."""
    return [
        ParameterSpec(name=f"{name}.{which}", shape=(width,)) for which in (("weight", "bias") if bias else ("weight",))
    ]


def column_parallel_params(
    name: str, width: int, size: int, bias: bool, parts: tuple[int, ...] = (), transposed: bool = False
) -> list[ParameterSpec]:
    """Returns a column-parallel weight with `width` outputs and `size` inputs, and its bias, which is sharded too.
    `parts` are the widths of the parts of a fused weight. `transposed`: whether the shape is (in, out)."""
    shape, split = ((size, width), 1) if transposed else ((width, size), 0)
    weight = ParameterSpec(name=f"{name}.weight", shape=shape, split=split, parts=parts)
    return [weight, ParameterSpec(name=f"{name}.bias", shape=(width,), split=0, parts=parts)] if bias else [weight]


def row_parallel_params(name: str, width: int, size: int, bias: bool, transposed: bool = False) -> list[ParameterSpec]:
    """Returns a row-parallel weight with `width` outputs and `size` inputs, and its bias, which is replicated.
    `transposed`: whether the shape is (in, out)."""
    shape, split = ((size, width), 0) if transposed else ((width, size), 1)
    weight = ParameterSpec(name=f"{name}.weight", shape=shape, split=split)
    return [weight, ParameterSpec(name=f"{name}.bias", shape=(width,))] if bias else [weight]
