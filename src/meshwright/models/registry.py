"""Builds a reference model from the sizes of an architecture (the keys of the catalog: layers, hidden, heads, kv_heads,
ffn, vocab, seq, ...). Architectures without a reference model, such as BLOOM, are built by transformers.

Guarantees:
- Under every plan, the same torch seed gives the same parameters.
- Sizes that neither a reference model nor transformers supports raise an InputError.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.models.bert import Bert, BertConfig
from meshwright.models.convnet import ConvNet, ConvNetConfig
from meshwright.models.gpt2 import GPT2, GPT2Config
from meshwright.models.llama import Llama, LlamaConfig
from meshwright.models.moe import MoeConfig, MoeLlama
from meshwright.spec.huggingface_config import TRANSFORMERS_TYPES, huggingface_config, huggingface_type
from meshwright.spec.reference_models import optional_count, reference_model_kind, unsupported_sizes


def build_reference_model(model: Mapping[str, Any]) -> nn.Module:
    """Returns the model with the sizes `model`. Empty sizes ('' or None) count as not given.

    Raises:
        InputError: a size is missing or invalid, nothing supports the sizes, or transformers is missing.

    >>> model = build_reference_model({"layers": 1, "hidden": 8, "heads": 2, "ffn": 16, "vocab": 32, "seq": 4})
    >>> sum(p.numel() for p in model.parameters())  # embedding and head 512, attention 256, feed-forward 384, norms 24
    1176
    """
    given = {name: value for name, value in model.items() if value not in ("", None)}
    if (fault := unsupported_sizes(given)) is not None:
        raise InputError(fault)
    if (config := transformers_config(given)) is not None:
        return build_from_config(config)
    kind = str(given.get("kind") or reference_model_kind(given))
    if kind == "convnet":
        return ConvNet(
            ConvNetConfig(
                _required_size(given, "layers"),
                _required_size(given, "hidden"),
                _required_size(given, "classes"),
                channels=int(given.get("channels", 3)),
            )
        )
    layers, hidden, heads, ffn, vocab, seq = (
        _required_size(given, name) for name in ("layers", "hidden", "heads", "ffn", "vocab", "seq")
    )
    head_dim = int(float(given.get("head_dim", 0)))
    head_dim = head_dim or hidden // heads
    tied = bool(int(given.get("tied", given.get("tied_embeddings", kind not in ("llama", "decoder")))))
    if kind == "gpt2":
        positions, relu = _num_positions(given, seq), given.get("mlp") == "relu"
        return GPT2(GPT2Config(layers, hidden, heads, ffn, vocab, positions, tied, relu=relu))
    if kind == "bert":
        return Bert(BertConfig(layers, hidden, heads, ffn, vocab, _num_positions(given, seq), tied))
    kv_heads = int(given.get("kv_heads", heads))
    if heads % kv_heads:
        raise InputError(
            Message("heads ({heads}) must be a multiple of kv_heads ({kv_heads})", heads=heads, kv_heads=kv_heads)
        )
    bias = bool(int(given.get("qkv_bias", 0)))
    base = float(given.get("rope_base", LlamaConfig.rope_base))
    qk_norm, experts = bool(int(given.get("qk_norm", 0))), optional_count(given, "experts")
    inner = (experts and optional_count(given, "moe_ffn")) or ffn
    config = LlamaConfig(layers, hidden, heads, kv_heads, inner, vocab, seq, tied, head_dim, bias, base, qk_norm)
    if experts:
        return MoeLlama(MoeConfig(config, experts, _required_size(given, "top_k")))
    return Llama(replace(config, parallel=optional_count(given, "norms") == 1))


def transformers_config(sizes: Mapping[str, Any]) -> Any:
    """Returns the `PretrainedConfig` of an architecture that transformers builds, or None for other architectures.

    Raises:
        InputError: a size is missing, or transformers is not installed.
    """
    given = {name: value for name, value in sizes.items() if value not in ("", None)}
    model_type = huggingface_type(given)
    if model_type not in TRANSFORMERS_TYPES:
        return None
    for name in ("layers", "hidden", "heads", "ffn", "vocab", "seq"):
        _required_size(given, name)
    try:
        from transformers import AutoConfig
    except ImportError:
        raise InputError(
            Message(
                "a model of type {model_type} needs transformers: pip install 'meshwright[huggingface]'",
                model_type=model_type,
            )
        ) from None
    return AutoConfig.for_model(**huggingface_config(given) or {})


def transformers_class(config: Any) -> Any:
    """Returns the first architecture that a `PretrainedConfig` names. If it names none, the `AutoModel` class of models
    that predict tokens is returned.

    Raises:
        InputError: the installed version of transformers does not have the architecture.
    """
    import transformers

    names = list(getattr(config, "architectures", None) or [])
    if not names:
        causal = not getattr(config, "is_encoder_decoder", False)
        return transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSeq2SeqLM
    kind = getattr(transformers, names[0], None)
    if kind is None:
        raise InputError(
            Message(
                "transformers {version} has no {architecture}: pip install --upgrade transformers",
                version=transformers.__version__,
                architecture=names[0],
            )
        )
    return kind


def build_from_config(config: Any) -> nn.Module:
    """Builds the model of a `PretrainedConfig` in float32, with random weights. `config` does not change.

    Raises:
        InputError: the installed version of transformers does not have the architecture.
    """
    kind = transformers_class(config)
    config = deepcopy(config)
    unnamed = not getattr(config, "architectures", None)
    return cast("nn.Module", kind.from_config(config, dtype=torch.float32) if unnamed else kind(config))


def _required_size(given: Mapping[str, Any], name: str) -> int:
    if name not in given:
        raise InputError(Message("model needs {name!r}{hint}", name=name, hint=did_you_mean(name, given)))
    value = int(given[name])
    if value < 1:
        raise InputError(Message("{name} ({value}) must be at least 1", name=name, value=value))
    return value


def _num_positions(given: Mapping[str, Any], seq: int) -> int:
    return int(float(given.get("pos_rows", seq)))
