"""Mixtures of experts at tiny sizes: our own, and families of transformers built from their configurations, unmodified.

The experts of transformers run their plain loop: its grouped product knows no float64. Rates of dropout are 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

VOCABULARY = 96
COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 16, "max_position_embeddings": 32, "use_cache": False,
    "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "num_experts_per_tok": 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixture": ("", {"kind": "decoder", "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 16,
            "vocab": VOCABULARY, "seq": 32, "experts": 8, "top_k": 2, "moe_ffn": 16}),
    "mixtral": ("MixtralForCausalLM", {**COMMON, "num_local_experts": 8}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**COMMON, "num_experts": 8, "moe_intermediate_size": 16,
            "norm_topk_prob": True}),
    "qwen2-moe": ("Qwen2MoeForCausalLM", {**COMMON, "num_experts": 8, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 32}),
    "deepseek-v3": ("DeepseekV3ForCausalLM",
        {**COMMON, **LATENT, "num_hidden_layers": 3, "first_k_dense_replace": 1, "n_routed_experts": 8,
            "moe_intermediate_size": 16, "n_group": 2, "topk_group": 1, "intermediate_size": 32}),
    "shared-experts": ("DeepseekV3ForCausalLM",
        {**COMMON, **LATENT, "first_k_dense_replace": 0, "n_routed_experts": 8, "moe_intermediate_size": 16,
            "n_group": 2, "topk_group": 1, "intermediate_size": 32}),
    "gpt-oss": ("GptOssForCausalLM", {**COMMON, "num_local_experts": 8, "sliding_window": 8}),
    "olmoe": ("OlmoeForCausalLM", {**COMMON, "num_experts": 8}),
    "granite-moe": ("GraniteMoeForCausalLM", {**COMMON, "num_local_experts": 8}),
    "glm4-moe": ("Glm4MoeForCausalLM", {**COMMON, "num_hidden_layers": 3, "first_k_dense_replace": 1,
            "n_routed_experts": 8, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1}),
    "llama4": ("Llama4ForCausalLM", {**COMMON, "num_local_experts": 8, "intermediate_size_mlp": 32,
            "interleave_moe_layer_step": 1, "attention_chunk_size": 32}),
    "dbrx": ("DbrxForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32,
            "vocab_size": VOCABULARY, "use_cache": False,
            "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
            "ffn_config": {"ffn_hidden_size": 16, "moe_num_experts": 8, "moe_top_k": 2, "hidden_size": 32}}),
}  # fmt: skip
"""name: (class of transformers or '', configuration or sizes)."""


def _read_early(mixture: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Routes by the result of the shared experts."""
    rows = hidden.view(-1, hidden.shape[-1])
    shared = mixture.shared_expert(rows)
    _, weights, chosen = mixture.gate(rows + shared)
    return (mixture.experts(rows, chosen, weights) + shared).view(hidden.shape)


def _change_input(mixture: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Changes the input of the shared experts, which autograd does not save, before the routed experts run."""
    rows = hidden.view(-1, hidden.shape[-1]) * 1
    shared = mixture.shared_expert(rows)
    rows.mul_(2)
    _, weights, chosen = mixture.gate(rows)
    return (mixture.experts(rows, chosen, weights) + shared).view(hidden.shape)


REORDERED: dict[str, Callable[..., torch.Tensor]] = {"qwen2-moe-early": _read_early, "qwen2-moe-changed": _change_input}
"""Mixtures with a forward for which the order of shared and routed experts makes a difference."""
MIXTURES |= dict.fromkeys(REORDERED, MIXTURES["qwen2-moe"])


def _copy_first(mlp: Any, x: torch.Tensor) -> torch.Tensor:
    """The feed-forward of Qwen2-MoE, of a copy of `x`. So autograd does not save `x`."""
    x = x + 0
    result: torch.Tensor = mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))
    return result


def _reorder(model: nn.Module, forward: Callable[..., torch.Tensor]) -> None:
    for module in model.modules():
        replaced = {"Qwen2MoeSparseMoeBlock": forward, "Qwen2MoeMLP": _copy_first}.get(type(module).__name__)
        if replaced is not None:
            module.__class__ = type("Replaced", (type(module),), {"forward": replaced})


def build_mixture(name: str) -> nn.Module:
    """The model in float32, the same at every call; biases, norms and routers away from where they begin, so that
    mistakes show."""
    kind, sizes = MIXTURES[name]
    torch.manual_seed(0)
    if not kind:
        from meshwright.models.registry import build_reference_model

        model: nn.Module = build_reference_model(sizes)
    else:
        import transformers

        config = getattr(transformers, kind).config_class(**sizes)
        for key, value in config.to_dict().items():
            if "drop" in key and isinstance(value, float):
                setattr(config, key, 0.0)
        config._experts_implementation = "eager"
        model = getattr(transformers, kind)(config)
    if name in REORDERED:
        _reorder(model, REORDERED[name])
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim < 2 or path.endswith("_bias"):
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            elif ".gate.weight" in path or ".router." in path:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model
