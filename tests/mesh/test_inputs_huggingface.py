"""A Hugging Face configuration read without their library, against the model that their library builds from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from meshwright.planner.inputs.architecture import model_spec
from meshwright.planner.inputs.architecture_sizes import read_hf_config
from meshwright.planner.inputs.model_parser import read_model

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
EXPERTS = {**GROUPED, "num_experts_per_tok": 2}
LATENT = {
    **SMALL, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "num_key_value_heads": 4,
}  # fmt: skip
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": GROUPED,
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen2": GROUPED,
    "qwen2_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96},
    "qwen3": {**GROUPED, "head_dim": 24},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 16},
    "gemma": {**GROUPED, "head_dim": 24},
    "gemma2": {**GROUPED, "head_dim": 24},
    "gemma3_text": {**GROUPED, "head_dim": 24},
    "smollm3": {**GROUPED, "pad_token_id": 0},
    "deepseek_v2": {**LATENT, "topk_method": "greedy"},
    "deepseek_v3": LATENT,
    "stablelm": GROUPED,
    "falcon": {
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_kv_heads": 2,
        "new_decoder_architecture": True,
        "ffn_hidden_size": 256,
    },
    "gpt2": {"vocab_size": 96, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 32},
    "gpt_neox": SMALL,
    "bloom": {"vocab_size": 96, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    "opt": {
        "vocab_size": 96,
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    },
    "bert": SMALL,
    "roberta": {**SMALL, "type_vocab_size": 1},
}


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_a_configuration_counts_the_parameters_of_its_model(kind: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(kind, **CONFIGURATIONS[kind])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    builder = transformers.AutoModelForMaskedLM if kind in ("bert", "roberta") else transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = builder.from_config(config)
    assert model_spec(kind, read_hf_config(tmp_path)).parameters == sum(
        parameter.numel() for parameter in model.parameters()
    )


def test_a_folder_is_read_like_a_catalog_name(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(
        "llama", hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, vocab_size=32000
    )
    config.save_pretrained(tmp_path)
    assert read_model(str(tmp_path)).parameters == read_model("llama2-7b").parameters
