"""The reference models in Hugging Face's words: the config.json beside their exported weights.

Llama with biases on query, key and value alone is Qwen2 there; GPT-2 stores its projections as (in, out), so ours are turned. BERT and the
convolutional network differ in more than names and have no such form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Form(NamedTuple):
    """config.json, and the endings of the names whose matrices are turned."""

    config: dict[str, Any]
    turned: tuple[str, ...] = ()


def form_of(sizes: Mapping[str, Any]) -> Form | None:
    """The form of a reference model with `sizes` (the keys of `models.registry`), or None when transformers has no such model."""
    given = {name: value for name, value in sizes.items() if value not in ("", None)}
    kind = given.get("kind") or ("gpt2" if given.get("pos") == "learned" else "llama")
    if kind == "llama":
        return Form(_llama(given))
    if kind == "gpt2":
        return Form(_gpt2(given), ("c_attn.weight", "c_proj.weight", "c_fc.weight"))
    return None


def _llama(given: Mapping[str, Any]) -> dict[str, Any]:
    heads, base, biased = int(given["heads"]), float(given.get("rope_base", 10_000.0)), bool(int(given.get("qkv_bias", 0)))
    return {
        "architectures": ["Qwen2ForCausalLM" if biased else "LlamaForCausalLM"],
        "model_type": "qwen2" if biased else "llama",
        "hidden_size": int(given["hidden"]),
        "intermediate_size": int(given["ffn"]),
        "num_hidden_layers": int(given["layers"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(given.get("kv_heads", heads)),
        "head_dim": int(float(given.get("head_dim", 0))) or int(given["hidden"]) // heads,
        "vocab_size": int(given["vocab"]),
        "max_position_embeddings": int(given["seq"]),
        "rms_norm_eps": 1e-5,
        "rope_theta": base,
        "rope_parameters": {"rope_type": "default", "rope_theta": base},
        "hidden_act": "silu",
        "tie_word_embeddings": _tied(given, False),
    }


def _gpt2(given: Mapping[str, Any]) -> dict[str, Any]:
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
        "tie_word_embeddings": _tied(given, True),
    }


def _tied(given: Mapping[str, Any], otherwise: bool) -> bool:
    return bool(int(given.get("tied", given.get("tied_embeddings", otherwise))))
