"""A configuration of transformers with small sizes: the form of the model stays, whatever its family calls its sizes.

Rule: every integer of the configuration that bears a known name of a size is replaced; how many heads share a key-value head stays, rates of dropout
become 0. Names that a family does not have are not made.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
HEADS = (
    "num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads", "encoder_attention_heads", "decoder_attention_heads",
)  # fmt: skip
KEYS = ("num_key_value_heads", "num_kv_heads")
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size")
FFN = ("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "dff", "ffn_hidden_size", "encoder_ffn_dim", "decoder_ffn_dim")
HEAD = ("head_dim", "d_kv")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERT_FFN = ("moe_intermediate_size", "shared_expert_intermediate_size")
POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_source_positions", "max_target_positions")
WINDOWS = ("sliding_window", "window_size", "attention_window")
FOLLOWS = (AttributeError, NotImplementedError)
"""What a configuration says where a size follows from others and cannot be set."""
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def reduce_config(config: Any, layers: int, tp: int, sizes: dict[str, int]) -> None:
    """Change `config` in place. `sizes`: hidden, heads, ffn, vocabulary, sequence, side (of an image)."""
    hidden, heads = sizes["hidden"], sizes["heads"]
    given = next((value for name in HEADS if (value := _integer(config, name))), heads)
    fewer = next((value for name in KEYS if (value := _integer(config, name))), given)
    kv_heads = min(heads, max(heads // max(1, given // fewer), 1))
    small: dict[str, Any] = dict.fromkeys(LAYERS, layers) | dict.fromkeys(HEADS, heads) | dict.fromkeys(KEYS, kv_heads)
    small |= dict.fromkeys(HIDDEN, hidden) | dict.fromkeys(FFN, sizes["ffn"]) | dict.fromkeys(HEAD, hidden // heads)
    small |= {"vocab_size": sizes["vocabulary"], "image_size": sizes["side"], "patch_size": 4, "rotary_dim": hidden // heads // 2}
    for name, value in small.items():
        if _integer(config, name):
            with suppress(*FOLLOWS):  # some sizes follow from others
                setattr(config, name, value)
    room = max(2 * sizes["sequence"], 64)
    for name in POSITIONS:
        if _integer(config, name):
            setattr(config, name, room)
    for name in WINDOWS:
        if _integer(config, name):
            setattr(config, name, sizes["sequence"] // 2)
    for name in TOKENS:
        token = _integer(config, name)
        if token is not None and token >= sizes["vocabulary"]:
            setattr(config, name, 0)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if getattr(config, "layer_types", None):
        with suppress(*FOLLOWS):
            config.layer_types = config.layer_types[:layers]
    _reduce_experts(config, layers, sizes)


def fewer_experts(given: int, ep: int) -> int:
    """As many experts as expert ranks can share, and no more than need be.

    >>> fewer_experts(256, 2), fewer_experts(6, 3), fewer_experts(96, 6)
    (8, 6, 12)
    """
    return given if given <= 8 or given % ep else max(8 // ep, 2) * ep


def _reduce_experts(config: Any, layers: int, sizes: dict[str, int]) -> None:
    """Fewer and thinner experts, some of them in every reduced model; in the plain form that computes in any type."""
    found = next((value for name in EXPERTS if (value := _integer(config, name))), None)
    if found is None:
        return
    count, dense = fewer_experts(found, sizes["ep"]), _integer(config, "first_k_dense_replace")
    small = dict.fromkeys(EXPERTS, count) | dict.fromkeys(EXPERT_FFN, sizes["ffn"] // 2) | {"n_group": 1, "topk_group": 1}
    small["num_experts_per_tok"] = min(_integer(config, "num_experts_per_tok") or 1, count // 2)
    small["first_k_dense_replace"] = min(dense or 0, layers - 1)
    for name, value in small.items():
        if _integer(config, name):
            with suppress(*FOLLOWS):
                setattr(config, name, value)
    config._experts_implementation = "eager"


def _integer(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if type(value) is int else None
