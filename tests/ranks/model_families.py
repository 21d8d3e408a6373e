"""Families of models at tiny sizes, built from their configurations, unmodified: 2 blocks, 64 features, 8 heads.

`build_family(name)` gives the model, `batch_index(name, step)` what it reads. Rates of dropout are 0: two draws are
never equal.
A family is a line of FAMILIES: the class in transformers, and what its configuration says beside the common sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY, LENGTH, HIDDEN, FFN, HEADS, LAYERS, CLASSES = 99, 16, 64, 96, 8, 2, 11

COMMON = {
    "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
    "intermediate_size": FFN, "max_position_embeddings": 32, "use_cache": False, "bos_token_id": 0, "eos_token_id": 0,
    "pad_token_id": None,
}  # fmt: skip
GPT = {
    "vocab_size": VOCABULARY, "n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": 32, "n_inner": FFN,
    "use_cache": False, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

MIXTURE = {**COMMON, "num_key_value_heads": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8}
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 8,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", GPT),
    "gpt-neox": ("GPTNeoXForCausalLM", COMMON),
    "opt": ("OPTForCausalLM", {**COMMON, "ffn_dim": FFN, "word_embed_proj_dim": HIDDEN}),
    "bloom": ("BloomForCausalLM", {**COMMON, "n_layer": LAYERS, "n_head": HEADS}),
    "llama": ("LlamaForCausalLM", {**COMMON, "num_key_value_heads": 4}),
    "mistral": ("MistralForCausalLM", {**COMMON, "num_key_value_heads": 2, "sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", {**COMMON, "num_key_value_heads": 2, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {**COMMON, "num_key_value_heads": 2, "head_dim": 16}),
    "gemma": ("GemmaForCausalLM", {**COMMON, "num_key_value_heads": 1, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", {**COMMON, "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 8,
            "query_pre_attn_scalar": 8}),
    "phi": ("PhiForCausalLM", {**COMMON, "num_key_value_heads": 8}),
    "phi3": ("Phi3ForCausalLM", {**COMMON, "num_key_value_heads": 4}),
    "falcon": ("FalconForCausalLM", {**COMMON, "new_decoder_architecture": True, "num_kv_heads": 4, "alibi": False,
            "bias": False}),
    "falcon-multi-query": ("FalconForCausalLM",
        {**COMMON, "new_decoder_architecture": False, "multi_query": True, "alibi": False}),
    "falcon-alibi": ("FalconForCausalLM", {**COMMON, "new_decoder_architecture": False, "multi_query": False,
            "alibi": True, "bias": True}),
    "stablelm": ("StableLmForCausalLM", {**COMMON, "num_key_value_heads": 4}),
    "stablelm-norm": ("StableLmForCausalLM",
        {**COMMON, "num_key_value_heads": 4, "qk_layernorm": True, "use_parallel_residual": True}),
    "olmo": ("OlmoForCausalLM", {**COMMON, "num_key_value_heads": 4, "clip_qkv": 1.0}),
    "granite": ("GraniteForCausalLM", {**COMMON, "num_key_value_heads": 4, "logits_scaling": 4.0,
            "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2}),
    "bert": ("BertForMaskedLM", COMMON),
    "roberta": ("RobertaForMaskedLM", {**COMMON, "max_position_embeddings": 34, "pad_token_id": 1}),
    "vit": ("ViTForImageClassification", {**COMMON, "image_size": 16, "patch_size": 4, "num_channels": 3,
            "num_labels": CLASSES}),
    "t5": ("T5ForConditionalGeneration", {"vocab_size": VOCABULARY, "d_model": HIDDEN, "d_kv": 8, "d_ff": FFN,
            "num_layers": LAYERS, "num_decoder_layers": LAYERS, "num_heads": HEADS, "use_cache": False,
            "decoder_start_token_id": 0}),
    "mixtral": ("MixtralForCausalLM", {**MIXTURE, "num_local_experts": 4}),
    "qwen3-moe": ("Qwen3MoeForCausalLM", {**MIXTURE, "num_experts": 4, "norm_topk_prob": True}),
    "deepseek-v3": ("DeepseekV3ForCausalLM",
        {**MIXTURE, **LATENT, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}),
    "gpt-oss": ("GptOssForCausalLM", {**MIXTURE, "num_local_experts": 4, "sliding_window": 8}),
    "cohere": ("CohereForCausalLM", {**COMMON, "num_key_value_heads": 4, "use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": ("Cohere2ForCausalLM", {**COMMON, "num_key_value_heads": 4, "sliding_window": 8}),
    "starcoder2": ("Starcoder2ForCausalLM", {**COMMON, "num_key_value_heads": 2}),
    "glm": ("GlmForCausalLM", {**COMMON, "num_key_value_heads": 2, "head_dim": 8}),
    "glm4": ("Glm4ForCausalLM", {**COMMON, "num_key_value_heads": 2, "head_dim": 8}),
    "olmo2": ("Olmo2ForCausalLM", {**COMMON, "num_key_value_heads": 4}),
    "smollm3": ("SmolLM3ForCausalLM", {**COMMON, "num_key_value_heads": 4}),
    "gemma3": ("Gemma3ForCausalLM", {**COMMON, "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 8,
            "query_pre_attn_scalar": 8}),
    "distilbert": ("DistilBertForMaskedLM",
        {"vocab_size": VOCABULARY, "dim": HIDDEN, "n_layers": LAYERS, "n_heads": HEADS, "hidden_dim": FFN,
            "max_position_embeddings": 32}),
    "electra": ("ElectraForMaskedLM", {**COMMON, "embedding_size": 32}),
    "gptj": ("GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    "codegen": ("CodeGenForCausalLM", {**GPT, "rotary_dim": 4, "n_ctx": 32}),
    "gpt-neo": ("GPTNeoForCausalLM", {**COMMON, "num_layers": LAYERS, "num_heads": HEADS,
            "attention_types": [[["global", "local"], 1]], "window_size": 8}),
    "gpt-bigcode": ("GPTBigCodeForCausalLM", {**GPT, "multi_query": True}),
    "mpt": ("MptForCausalLM", {"d_model": HIDDEN, "n_heads": HEADS, "n_layers": LAYERS, "expansion_ratio": 2,
            "max_seq_len": 32, "vocab_size": VOCABULARY, "use_cache": False}),
    "xglm": ("XGLMForCausalLM", {**COMMON, "d_model": HIDDEN, "ffn_dim": FFN, "num_layers": LAYERS,
            "attention_heads": HEADS}),
    "bigbird": ("BigBirdForMaskedLM", {**COMMON, "attention_type": "original_full"}),
    "albert": ("AlbertForMaskedLM", {**COMMON, "embedding_size": 32, "num_hidden_groups": 1}),
    "deberta": ("DebertaV2ForMaskedLM", {**COMMON, "relative_attention": True, "position_buckets": 8,
            "pos_att_type": ["p2c", "c2p"]}),
    "mpnet": ("MPNetForMaskedLM", {**COMMON, "pad_token_id": 1}),
    "ctrl": ("CTRLLMHeadModel", {**GPT, "dff": FFN}),
    "nemotron": ("NemotronForCausalLM", {**COMMON, "num_key_value_heads": 4}),
    "persimmon": ("PersimmonForCausalLM", {**COMMON, "qk_layernorm": True}),
    "exaone4": ("Exaone4ForCausalLM", {**COMMON, "num_key_value_heads": 4, "sliding_window": 8}),
    "apertus": ("ApertusForCausalLM", {**COMMON, "num_key_value_heads": 4}),
    "modernbert-decoder": ("ModernBertDecoderForCausalLM",
        {**COMMON, "pad_token_id": 0, "local_attention": 8, "layer_types": ["full_attention", "sliding_attention"]}),
    "openai-gpt": ("OpenAIGPTLMHeadModel", GPT),
    "blenderbot": ("BlenderbotForCausalLM",
        {**COMMON, "pad_token_id": 0, "d_model": HIDDEN, "decoder_layers": LAYERS, "decoder_attention_heads": HEADS,
            "decoder_ffn_dim": FFN}),
    "mamba": ("MambaForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS,
            "state_size": 8, "use_cache": False}),
}  # fmt: skip
"""name: (class, configuration). Those behind GPT-OSS are families that nobody asked for by name."""

NO_DROPOUT = ("drop", "dropout")


class Bottleneck(nn.Module):
    """Three convolutions and a way around them. Source: He et al., Deep Residual Learning (2016), figure 5."""

    def __init__(self, width: int, inner: int, out: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, inner, 1, bias=False), norm(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), norm(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, out, 1, bias=False), norm(out)
        self.downsample = (
            nn.Sequential(nn.Conv2d(width, out, 1, stride, bias=False), norm(out))
            if stride > 1 or width != out
            else None
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(F.relu(self.bn2(self.conv2(y)))))
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """As torchvision builds it: a stem, four lists of blocks, a mean over places, a classifier."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), norm(16)
        self.layer1 = nn.Sequential(Bottleneck(16, 8, 32, 1, norm), Bottleneck(32, 8, 32, 1, norm))
        self.layer2 = nn.Sequential(Bottleneck(32, 16, 64, 2, norm), Bottleneck(64, 16, 64, 1, norm))
        self.fc = nn.Linear(64, CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.conv1(images)))
        return self.fc(self.layer2(self.layer1(x)).mean(dim=(2, 3)))


def build_own(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ResNet(nn.BatchNorm2d if name == "resnet" else lambda width: nn.GroupNorm(4, width))


def build_family(name: str) -> nn.Module:
    """The model in float32, the same at every call."""
    if name.startswith("resnet"):
        return build_own(name)
    import transformers

    kind = getattr(transformers, FAMILIES[name][0])
    config = kind.config_class(**FAMILIES[name][1])
    for key, value in config.to_dict().items():
        if "drop" in key and isinstance(value, float):
            setattr(config, key, 0.0)
    config._experts_implementation = "eager"  # its grouped product knows no float64
    torch.manual_seed(0)
    return roughened(kind(config))


def roughened(model: nn.Module) -> nn.Module:
    """Biases and scales of norms away from 0 and 1, where mistakes hide."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim < 2:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def objective_of(name: str) -> str:
    kind = FAMILIES[name][0] if name in FAMILIES else ""
    if kind.endswith("ForImageClassification") or name.startswith("resnet"):
        return "images"
    if kind.endswith("ForConditionalGeneration"):
        return "pairs"
    return "masked" if kind.endswith("ForMaskedLM") else "causal"


def batch_of(name: str, step: int, rows: int = 8) -> dict[str, torch.Tensor]:
    """Rows hold unequal numbers of valid labels."""
    generator = torch.Generator().manual_seed(1000 + step)
    objective = objective_of(name)
    if objective == "images":
        key = "images" if name.startswith("resnet") else "pixel_values"
        labels = torch.randint(0, CLASSES, (rows,), generator=generator)
        return {key: torch.randn(rows, 3, 16, 16, generator=generator), "labels": labels}
    ids = torch.randint(2, VOCABULARY, (rows, LENGTH), generator=generator)
    labels = ids.clone()
    for row in range(rows):
        labels[row, : (row * 5 + step) % LENGTH] = -100
    if objective == "pairs":
        inputs = torch.randint(2, VOCABULARY, (rows, 12), generator=generator)
        return {"input_ids": inputs, "decoder_input_ids": ids, "labels": labels}
    return {"input_ids": ids, "labels": labels}
