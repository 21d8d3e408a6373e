"""Converts a Hugging Face `config.json` to `ArchitectureSizes`, without a library of Hugging Face.

Several field names can have the same meaning (`hidden_size`, `n_embd`, `d_model`). Some properties have no field:
biases, norms, tied embeddings, the kind of feed-forward. They follow from `model_type`, as in the configuration classes
of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.core.codec import parse_text, read_text_file, validate_data
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.planner.inputs.architecture_sizes import ArchitectureSizes

ImpliedFields = Mapping[str, Any]
_GPT_FIELDS: ImpliedFields = {"norm": "ln", "mlp": "gelu", "linear_bias": True, "qkv_bias": True}
_LEARNED_POSITION_FIELDS: ImpliedFields = {"pos": "learned", "tied_embeddings": True}
_GEMMA_FIELDS: ImpliedFields = {"kind": "decoder", "mlp": "geglu", "tied_embeddings": True}
HF_FAMILIES: Mapping[str, ImpliedFields] = {
    "llama": {},
    "mistral": {},
    "mixtral": {"kind": "decoder"},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"kind": "decoder", "qkv_bias": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"kind": "decoder", "qk_norm": True},
    "gemma": _GEMMA_FIELDS,
    "gemma2": {**_GEMMA_FIELDS, "norms": 4},
    "gemma3_text": {**_GEMMA_FIELDS, "norms": 4, "qk_norm": True},
    "smollm3": {"tied_embeddings": True},
    "deepseek_v2": {"kind": "decoder"},
    "deepseek_v3": {"kind": "decoder"},
    "nemotron": {"kind": "decoder", "norm": "ln", "mlp": "relu2"},
    "stablelm": {"kind": "decoder", "norm": "ln"},
    "falcon": {"kind": "decoder", "norm": "ln", "mlp": "gelu", "tied_embeddings": True},
    "gpt2": {"kind": "gpt2", **_GPT_FIELDS, **_LEARNED_POSITION_FIELDS, "mlp": "gelu_new", "transposed": True},
    "gpt_neox": {"kind": "neox", **_GPT_FIELDS},
    "bloom": {"kind": "bloom", **_GPT_FIELDS, "tied_embeddings": True, "pos": "alibi", "embedding_norm": True},
    "opt": {"kind": "gpt2", **_GPT_FIELDS, **_LEARNED_POSITION_FIELDS, "mlp": "relu"},
    "bert": {"kind": "bert", **_GPT_FIELDS, **_LEARNED_POSITION_FIELDS, "embedding_norm": True, "types": 2},
    "roberta": {"kind": "bert", **_GPT_FIELDS, **_LEARNED_POSITION_FIELDS, "embedding_norm": True, "types": 1},
}
_FIELD_SPELLINGS = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "seq": ("max_position_embeddings", "n_positions", "seq_length"),
    "tied_embeddings": ("tie_word_embeddings",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "top_k": ("num_experts_per_tok",),
    "moe_ffn": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_first_layers": ("first_k_dense_replace",),
    "rope_base": ("rope_theta",),
    "types": ("type_vocab_size",),
}
_ACTIVATION_NAMES = {
    "gelu_new": "gelu_new",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu_new",
    "gelu": "gelu",
    "relu": "relu",
    "relu2": "relu2",
}


def read_hf_config(folder: Path) -> ArchitectureSizes:
    """Returns the sizes in `folder`/config.json."""
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(Message("model folder {folder!r} has no config.json", folder=str(folder)))
    config = parse_text(read_text_file(path, "model configuration"), str(path))
    if not isinstance(config, dict):
        raise InputError(Message("{path}: expected an object of a model's configuration", path=path))
    return sizes_from_hf_config(config, str(path))


def has_formulas(folder: Path) -> bool:
    """Returns whether the formulas support the model family in `folder`. For an invalid configuration it returns True,
    so that the error is raised when the configuration is read."""
    try:
        config = parse_text(read_text_file(folder / "config.json"), str(folder))
    except InputError:
        return True
    if isinstance(config, dict) and isinstance(config.get("text_config"), Mapping):
        config = {"model_type": config.get("model_type"), **config["text_config"]}
    return (
        not isinstance(config, dict)
        or "model_type" not in config
        or (config["model_type"] in HF_FAMILIES and not _unsupported_moe(config))
    )


def _unsupported_moe(config: Mapping[str, Any]) -> str:
    """Returns the property of a mixture-of-experts model that the formulas do not support, or '' if there is none."""
    wide, each = (config.get(name) for name in ("shared_expert_intermediate_size", "moe_intermediate_size"))
    if wide and not (isinstance(wide, int) and isinstance(each, int) and each > 0 and wide % each == 0):
        return Message(
            "shared_expert_intermediate_size({wide}) is no multiple of moe_intermediate_size({each})",
            wide=wide,
            each=each,
        )
    odd = {
        "decoder_sparse_step": config.get("decoder_sparse_step") not in (None, 1),
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
    }
    return next(
        (
            Message("{name}({config}) leaves blocks without experts", name=name, config=config[name])
            for name, found in odd.items()
            if found
        ),
        "",
    )


def sizes_from_hf_config(config: Mapping[str, Any], where: str) -> ArchitectureSizes:
    """Converts `config` to `ArchitectureSizes`. For a composite model it reads the configuration of the text model.

    >>> sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    >>> sizes_from_hf_config({"model_type": "gpt2", **sizes}, "x").ffn
    3072
    """
    if isinstance(config.get("text_config"), Mapping):
        config = {
            **config["text_config"],
            "model_type": config["text_config"].get("model_type", config.get("model_type")),
        }
    kind = str(config.get("model_type", ""))
    if kind not in HF_FAMILIES:
        raise InputError(
            Message(
                "{where}: model_type {kind!r} is not one of {hf_families}{hint}; an architecture file with its sizes "
                "says the same",
                where=where,
                kind=kind,
                hf_families=", ".join(HF_FAMILIES),
                hint=did_you_mean(kind, HF_FAMILIES),
            )
        )
    if odd := _unsupported_moe(config):
        raise InputError(
            Message(
                "{where}: {odd}, which no formula counts; meshwright.analysis.profile.describe reads such a model, or "
                "give an architecture file",
                where=where,
                odd=odd,
            )
        )
    sizes: dict[str, Any] = {"kind": "llama", "family": kind, **HF_FAMILIES[kind]}
    for name, spellings in _FIELD_SPELLINGS.items():
        found = next((config[spelling] for spelling in spellings if config.get(spelling) is not None), None)
        if found is not None:
            sizes[name] = found
    missing = [name for name in ("layers", "hidden", "heads", "vocab") if name not in sizes]
    if missing:
        raise InputError(
            Message(
                "{where}: model_type {kind!r} needs field {field_spellings!r}",
                where=where,
                kind=kind,
                field_spellings=_FIELD_SPELLINGS[missing[0]][0],
            )
        )
    _adjust_family(kind, config, sizes)
    return validate_data(ArchitectureSizes, sizes, where)


def _adjust_family(kind: str, config: Mapping[str, Any], sizes: dict[str, Any]) -> None:
    """Sets the sizes that follow from the model family."""
    sizes.setdefault("ffn", 4 * sizes["hidden"])
    sizes.setdefault("seq", 2048)
    if kind in ("llama", "mistral", "qwen3", "mixtral", "qwen3_moe"):
        sizes["qkv_bias"] = bool(config.get("attention_bias", False))
    if kind == "llama" and config.get("attention_bias") and not config.get("mlp_bias"):
        sizes["kind"] = "decoder"
    rope = config.get("rope_parameters") or {}
    if isinstance(rope, Mapping) and "rope_theta" in rope:
        sizes["rope_base"] = rope["rope_theta"]
    activation = config.get("activation_function") or config.get("hidden_act") or config.get("hidden_activation")
    if sizes.get("mlp", "geglu") != "geglu" and activation in _ACTIVATION_NAMES:
        sizes["mlp"] = _ACTIVATION_NAMES[str(activation)]
    if kind == "falcon":
        sizes["kv_heads"] = (
            config.get("num_kv_heads", 1)
            if config.get("new_decoder_architecture")
            else 1
            if config.get("multi_query")
            else sizes["heads"]
        )
        sizes["norms"] = 2 if config.get("new_decoder_architecture") else 1
    if kind == "opt":
        sizes["pos_rows"] = sizes["seq"] + 2
    if kind == "roberta":
        sizes["pos_rows"], sizes["seq"] = sizes["seq"], sizes["seq"] - 2
    if sizes.get("experts") and "moe_ffn" not in sizes:
        sizes["moe_ffn"] = sizes["ffn"]
    if wide := config.get("shared_expert_intermediate_size"):  # Qwen2-MoE has one wide shared expert
        sizes |= {"shared_experts": wide // sizes["moe_ffn"], "shared_gate": True}
    if not sizes.get("experts"):
        for name in ("experts", "top_k", "moe_ffn", "shared_experts", "shared_gate", "dense_first_layers"):
            sizes.pop(name, None)
    if config.get("kv_lora_rank"):
        sizes.pop("head_dim", None)
        sizes["mla"] = {
            "q_lora": config.get("q_lora_rank") or 0,
            "kv_lora": config["kv_lora_rank"],
            "nope": config["qk_nope_head_dim"],
            "rope": config["qk_rope_head_dim"],
            "v": config["v_head_dim"],
        }
