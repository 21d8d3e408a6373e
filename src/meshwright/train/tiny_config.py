"""Reduces the sizes in a configuration of the `transformers` library, so that `meshwright verify` can train the
model under the plan and on one device. The structure of the model does not change, and its weights are random.

Model families use different names for the same size, so every integer attribute with a known name is replaced. The
ratio of query heads to key-value heads does not change, and dropout rates become 0. No attributes are added.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

LAYER_COUNT_KEYS = (
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "n_layers",
    "num_decoder_layers",
    "encoder_layers",
    "decoder_layers",
)
HEAD_COUNT_KEYS = (
    "num_attention_heads", "n_head", "num_heads", "n_heads", "attention_heads", "encoder_attention_heads",
    "decoder_attention_heads",
)  # fmt: skip
KV_HEAD_COUNT_KEYS = ("num_key_value_heads", "num_kv_heads")
HIDDEN_SIZE_KEYS = ("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size")
FFN_SIZE_KEYS = (
    "intermediate_size",
    "n_inner",
    "ffn_dim",
    "d_ff",
    "hidden_dim",
    "dff",
    "ffn_hidden_size",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
)
HEAD_SIZE_KEYS = ("head_dim", "d_kv")
LATENT_RANK_KEYS = ("q_lora_rank", "kv_lora_rank")
LATENT_HEAD_SIZE_KEYS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""Sizes of multi-head latent attention. In DeepSeek-V2 and V3, `head_dim` is the size of the rotary part of a head, and
`qk_head_dim` the sum of both parts."""
EXPERT_COUNT_KEYS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
EXPERT_FFN_SIZE_KEYS = ("moe_intermediate_size", "shared_expert_intermediate_size")
MAX_POSITION_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_seq_len",
    "max_source_positions",
    "max_target_positions",
)
WINDOW_SIZE_KEYS = ("sliding_window", "window_size", "attention_window")
DERIVED_SIZE_ERRORS = (AttributeError, NotImplementedError)
"""A configuration raises one of these errors if a size cannot be set because it is derived from other sizes."""
TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


def shrink_config(config: Any, layers: int, tp: int, sizes: dict[str, int]) -> None:
    """Reduces the sizes of `config`, a `PretrainedConfig`, in place.

    `layers`: the new number of layers. `tp` has no effect. `sizes` has the keys hidden, heads, ffn, vocabulary,
    sequence, side (of an image in pixels) and ep (the number of expert-parallel ranks).
    """
    hidden, heads = sizes["hidden"], sizes["heads"]
    given = next((value for name in HEAD_COUNT_KEYS if (value := _integer_attribute(config, name))), heads)
    fewer = next((value for name in KV_HEAD_COUNT_KEYS if (value := _integer_attribute(config, name))), given)
    kv_heads = min(heads, max(heads // max(1, given // fewer), 1))
    small: dict[str, Any] = (
        dict.fromkeys(LAYER_COUNT_KEYS, layers)
        | dict.fromkeys(HEAD_COUNT_KEYS, heads)
        | dict.fromkeys(KV_HEAD_COUNT_KEYS, kv_heads)
    )
    small |= (
        dict.fromkeys(HIDDEN_SIZE_KEYS, hidden)
        | dict.fromkeys(FFN_SIZE_KEYS, sizes["ffn"])
        | dict.fromkeys(HEAD_SIZE_KEYS, hidden // heads)
    )
    small |= {
        "vocab_size": sizes["vocabulary"],
        "image_size": sizes["side"],
        "patch_size": 4,
        "rotary_dim": hidden // heads // 2,
    }
    small |= (
        dict.fromkeys(LATENT_RANK_KEYS, hidden // 2)
        | dict.fromkeys(LATENT_HEAD_SIZE_KEYS, hidden // heads)
        | {"qk_head_dim": 2 * (hidden // heads)}
    )
    for name, value in small.items():
        if _integer_attribute(config, name):
            with suppress(*DERIVED_SIZE_ERRORS):
                setattr(config, name, value)
    room = max(2 * sizes["sequence"], 64)
    for name in MAX_POSITION_KEYS:
        if _integer_attribute(config, name):
            setattr(config, name, room)
    for name in WINDOW_SIZE_KEYS:
        if _integer_attribute(config, name):
            setattr(config, name, sizes["sequence"] // 2)
    for name in TOKEN_ID_KEYS:
        token = _integer_attribute(config, name)
        if token is not None and token >= sizes["vocabulary"]:
            setattr(config, name, 0)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    if hasattr(config, "use_cache"):
        config.use_cache = False
    if getattr(config, "layer_types", None):
        with suppress(*DERIVED_SIZE_ERRORS):
            config.layer_types = config.layer_types[:layers]
    _shrink_experts(config, layers, sizes)


def reduced_expert_count(given: int, ep: int) -> int:
    """Returns the reduced number of experts: the largest multiple of `ep` that is at most 8, but at least 2 `ep`. If
    `given` is at most 8 or not a multiple of `ep`, it is returned unchanged.

    >>> reduced_expert_count(256, 2), reduced_expert_count(6, 3), reduced_expert_count(96, 6)
    (8, 6, 12)
    """
    return given if given <= 8 or given % ep else max(8 // ep, 2) * ep


def _shrink_experts(config: Any, layers: int, sizes: dict[str, int]) -> None:
    """Reduces the number and the width of experts. Also selects the eager implementation of experts, which supports
    every dtype."""
    found = next((value for name in EXPERT_COUNT_KEYS if (value := _integer_attribute(config, name))), None)
    if found is None:
        return
    count, dense = reduced_expert_count(found, sizes["ep"]), _integer_attribute(config, "first_k_dense_replace")
    small = (
        dict.fromkeys(EXPERT_COUNT_KEYS, count)
        | dict.fromkeys(EXPERT_FFN_SIZE_KEYS, sizes["ffn"] // 2)
        | {"n_group": 1, "topk_group": 1}
    )
    small["num_experts_per_tok"] = min(_integer_attribute(config, "num_experts_per_tok") or 1, count // 2)
    small["first_k_dense_replace"] = min(dense or 0, layers - 1)
    for name, value in small.items():
        if _integer_attribute(config, name):
            with suppress(*DERIVED_SIZE_ERRORS):
                setattr(config, name, value)
    config._experts_implementation = "eager"


def _integer_attribute(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if type(value) is int else None
