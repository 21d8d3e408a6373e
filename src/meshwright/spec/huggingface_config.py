"""The config.json of Hugging Face's transformers for the sizes of an architecture (the keys of the catalog). Exported
checkpoints get this file, and architectures that no reference model has are built from it by transformers.

Values that are not sizes, such as the share of a head that is rotated, are those of the published configurations on the
Hugging Face hub: EleutherAI/pythia-70m and gpt-neox-20b, bigscience/bloom, deepseek-ai/DeepSeek-V2, DeepSeek-V2-Lite
and DeepSeek-V3, nvidia/Nemotron-4-340B-Base, tiiuae/falcon-40b, openai/gpt-oss-120b.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Config = dict[str, Any]
Sizes = Mapping[str, Any]

TRANSFORMERS_TYPES = ("gpt_neox", "bloom", "deepseek_v2", "deepseek_v3", "nemotron", "falcon", "gpt_oss")
"""Architectures without a reference model, whose classes transformers has."""
DECODER_TYPES = {
    "DeepSeek-V2": "deepseek_v2",
    "DeepSeek-V3": "deepseek_v3",
    "Falcon": "falcon",
    "GPT-OSS": "gpt_oss",
    "Nemotron-4": "nemotron",
}
"""The type of a decoder, by its family in the catalog. Other decoders with equal sizes may differ in what has no size,
such as the share of a head that is rotated, so they have no type."""
DEEPSEEK_EXPERT_GROUPS = 8
"""DeepSeek-V2 and V3 route a token to experts of few groups, which are on few nodes. V2-Lite does not."""


def huggingface_config(sizes: Sizes) -> Config | None:
    """Returns the contents of config.json for `sizes`, or None if transformers has no such architecture."""
    given = {name: value for name, value in sizes.items() if value not in ("", None)}
    make = CONFIGS.get(huggingface_type(given))
    return make(given) if make else None


def huggingface_type(sizes: Sizes) -> str:
    """Returns the `model_type` of transformers for `sizes`, or '' if there is none.

    >>> huggingface_type({"kind": "decoder", "family": "Nemotron-4"})
    'nemotron'
    """
    kind = str(sizes.get("kind") or ("gpt2" if sizes.get("pos") == "learned" else "llama"))
    if kind == "decoder":
        return DECODER_TYPES.get(str(sizes.get("family", "")), "")
    return {"gpt2": "gpt2", "neox": "gpt_neox", "bloom": "bloom", "llama": _llama_type(sizes)}.get(kind, "")


def _llama_type(sizes: Sizes) -> str:
    return "qwen3" if _flag(sizes, "qk_norm") else "qwen2" if _flag(sizes, "qkv_bias") else "llama"


def _llama(given: Sizes) -> Config:
    kind = _llama_type(given)
    return {
        "architectures": [f"{kind.capitalize()}ForCausalLM"],
        "model_type": kind,
        **_decoder(given),
        **({"attention_bias": _flag(given, "qkv_bias")} if kind == "qwen3" else {}),
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
    }


def _gpt2(given: Sizes) -> Config:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": int(given["hidden"]),
        "n_inner": int(given["ffn"]),
        "n_layer": int(given["layers"]),
        "n_head": int(given["heads"]),
        "vocab_size": int(given["vocab"]),
        "n_positions": int(float(given.get("pos_rows", given["seq"]))),
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "tie_word_embeddings": _has_tied_embeddings(given, True),
    }


def _gpt_neox(given: Sizes) -> Config:
    return {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        **_decoder(given, partial_rotary_factor=0.25),
        "rotary_pct": 0.25,
        "hidden_act": "gelu_fast" if given.get("family") == "GPT-NeoX" else "gelu",
        "use_parallel_residual": True,
    }


def _bloom(given: Sizes) -> Config:
    return {
        "architectures": ["BloomForCausalLM"],
        "model_type": "bloom",
        "hidden_size": int(given["hidden"]),
        "n_layer": int(given["layers"]),
        "n_head": int(given["heads"]),
        "vocab_size": int(given["vocab"]),
        "seq_length": int(given["seq"]),
        "tie_word_embeddings": _has_tied_embeddings(given, True),
    }


def _deepseek(given: Sizes) -> Config:
    version = 3 if huggingface_type(given) == "deepseek_v3" else 2
    latent, experts = given["mla"], int(given["experts"])
    # A group is scored by its two best experts, so it needs several.
    groups = DEEPSEEK_EXPERT_GROUPS if latent.get("q_lora") and experts % (4 * DEEPSEEK_EXPERT_GROUPS) == 0 else 1
    routing = (
        {"norm_topk_prob": True, "routed_scaling_factor": 2.5}
        if version == 3
        else {
            "topk_method": "group_limited_greedy" if groups > 1 else "greedy",
            "norm_topk_prob": False,
            "routed_scaling_factor": 16.0 if groups > 1 else 1.0,
        }
    )
    return {
        "architectures": [f"DeepseekV{version}ForCausalLM"],
        "model_type": f"deepseek_v{version}",
        **{name: value for name, value in _decoder(given).items() if name != "head_dim"},
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "q_lora_rank": latent.get("q_lora") or None,
        "kv_lora_rank": latent["kv_lora"],
        "qk_nope_head_dim": latent["nope"],
        "qk_rope_head_dim": latent["rope"],
        "v_head_dim": latent["v"],
        "n_routed_experts": experts,
        "num_experts_per_tok": int(given["top_k"]),
        "moe_intermediate_size": int(given["moe_ffn"]),
        "n_shared_experts": int(given.get("shared_experts", 0)) or None,
        "first_k_dense_replace": int(given.get("dense_first_layers", 0)),
        "n_group": groups,
        "topk_group": min(groups, 4 if version == 3 else 3),
        **routing,
    }


def _nemotron(given: Sizes) -> Config:
    return {
        "architectures": ["NemotronForCausalLM"],
        "model_type": "nemotron",
        **_decoder(given, partial_rotary_factor=0.5),
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
    }


def _falcon(given: Sizes) -> Config:
    heads = int(given["heads"])
    return {
        "architectures": ["FalconForCausalLM"],
        "model_type": "falcon",
        "hidden_size": int(given["hidden"]),
        "num_hidden_layers": int(given["layers"]),
        "num_attention_heads": heads,
        "num_kv_heads": int(given.get("kv_heads", heads)),
        "ffn_hidden_size": int(given["ffn"]),
        "vocab_size": int(given["vocab"]),
        "max_position_embeddings": int(given["seq"]),
        "new_decoder_architecture": True,
        "tie_word_embeddings": _has_tied_embeddings(given, True),
    }


def _gpt_oss(given: Sizes) -> Config:
    """Leaves the rotation to the class, whose defaults are those of gpt-oss-120b (YaRN, base 150,000)."""
    return {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        **{name: value for name, value in _decoder(given).items() if not name.startswith("rope_")},
        "intermediate_size": int(given["moe_ffn"]),
        "num_local_experts": int(given["experts"]),
        "num_experts_per_tok": int(given["top_k"]),
        "attention_bias": True,
        "sliding_window": 128,
    }


CONFIGS: Mapping[str, Callable[[Sizes], Config]] = {
    "llama": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "bloom": _bloom,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "nemotron": _nemotron,
    "falcon": _falcon,
    "gpt_oss": _gpt_oss,
}
"""The function that makes config.json, by `model_type`."""


def _decoder(given: Sizes, **rope: float) -> Config:
    """Returns the fields that most decoders of transformers have. `rope`: more fields of `rope_parameters`."""
    heads, base = int(given["heads"]), float(given.get("rope_base", 10_000.0))
    return {
        "hidden_size": int(given["hidden"]),
        "intermediate_size": int(given["ffn"]),
        "num_hidden_layers": int(given["layers"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(given.get("kv_heads", heads)),
        "head_dim": int(float(given.get("head_dim", 0))) or int(given["hidden"]) // heads,
        "vocab_size": int(given["vocab"]),
        "max_position_embeddings": int(given["seq"]),
        "rope_theta": base,
        "rope_parameters": {"rope_type": "default", "rope_theta": base, **rope},
        "tie_word_embeddings": _has_tied_embeddings(given, False),
    }


def _flag(given: Sizes, name: str) -> bool:
    return bool(int(given.get(name) or 0))


def _has_tied_embeddings(given: Sizes, otherwise: bool) -> bool:
    return bool(int(given.get("tied", given.get("tied_embeddings", otherwise))))
