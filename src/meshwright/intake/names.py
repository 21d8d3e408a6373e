"""What the parameters of a form are called. The reference models and Hugging Face's share these names, so that checkpoints line up.

Names inside a block are relative to the block, the others are the model's own.
"""

from __future__ import annotations

from typing import NamedTuple


class Names(NamedTuple):
    """`fused` stands for query, key and value in one; `interleaved` when they alternate head by head, so that one cut is a cut of each."""

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


_LLAMA = Names(
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

FORMS = {
    "llama": _LLAMA,
    "decoder": _LLAMA,
    "gpt2": Names(
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
    "bert": Names(
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
    "neox": Names(
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
    "bloom": Names(
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
