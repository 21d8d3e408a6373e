"""Builds a reference model from the sizes of an architecture (the keys of the catalog: layers, hidden, heads, kv_heads,
ffn, vocab, seq, ...).

Guarantees:
- Under every plan, the same torch seed gives the same parameters.
- Sizes that no reference model supports raise an InputError.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message
from meshwright.models.bert import Bert, BertConfig
from meshwright.models.convnet import ConvNet, ConvNetConfig
from meshwright.models.gpt2 import GPT2, GPT2Config
from meshwright.models.llama import Llama, LlamaConfig
from meshwright.models.moe import MoeConfig, MoeLlama

MODEL_KINDS = ("llama", "decoder", "gpt2", "bert", "convnet")
MISSING_PARTS = {
    "bloom": Message("ALiBi positions"),
    "neox": Message("parallel attention and feed-forward with LayerNorm, and no rotation of a part of a head"),
}
"""What kinds of the catalog have that no reference model has."""
MISSING_PARTS_OF_FAMILIES = {
    "GPT-OSS": Message("attention sinks, sliding windows and biases of experts"),
}
"""The same for single families of a kind that is otherwise built."""


def build_reference_model(model: Mapping[str, Any]) -> nn.Module:
    """Returns the model with the sizes `model`. Empty sizes ('' or None) count as not given.

    Raises:
        InputError: a size is missing or invalid, or no reference model supports the sizes.

    >>> model = build_reference_model({"layers": 1, "hidden": 8, "heads": 2, "ffn": 16, "vocab": 32, "seq": 4})
    >>> sum(p.numel() for p in model.parameters())  # embedding and head 512, attention 256, feed-forward 384, norms 24
    1176
    """
    given = {name: value for name, value in model.items() if value not in ("", None)}
    kind = str(given.get("kind") or reference_model_kind(given))
    _check_supported(given, kind)
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
    if kind not in ("llama", "decoder") or not head_dim:  # other models need head_dim = hidden / heads
        head_dim = head_dim or hidden // heads
        _check_head_dim(hidden, heads, head_dim)
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
    qk_norm, parallel = bool(int(given.get("qk_norm", 0))), _optional_count(given, "norms") == 1
    if not _optional_count(given, "experts"):
        config = LlamaConfig(layers, hidden, heads, kv_heads, ffn, vocab, seq, tied, head_dim, bias, base, qk_norm)
        return Llama(replace(config, parallel=parallel))
    inner = LlamaConfig(
        layers,
        hidden,
        heads,
        kv_heads,
        _optional_count(given, "moe_ffn") or ffn,
        vocab,
        seq,
        tied,
        head_dim,
        bias,
        base,
        qk_norm,
    )
    return MoeLlama(MoeConfig(inner, _optional_count(given, "experts"), _required_size(given, "top_k")))


def reference_model_kind(sizes: Mapping[str, Any]) -> str:
    """Returns the kind of the reference model with these sizes: 'convnet' if they have `classes`, and 'bert' for the
    families bert and roberta. Otherwise the position encoding `pos` decides: 'gpt2' for learned positions, else
    'llama'."""
    if "classes" in sizes:
        return "convnet"
    if str(sizes.get("family", "")).lower() in ("bert", "roberta"):
        return "bert"
    return "gpt2" if sizes.get("pos", "rope") == "learned" else "llama"


def _check_head_dim(hidden: int, heads: int, head_dim: int) -> None:
    if head_dim * heads != hidden:
        raise InputError(
            Message(
                "hidden ({hidden}) must be heads ({heads}) times head_dim ({head_dim}): choose heads that divide "
                "hidden",
                hidden=hidden,
                heads=heads,
                head_dim=head_dim,
            )
        )


def _check_supported(given: Mapping[str, Any], kind: str) -> None:
    """Checks that the kind exists and that its reference model supports the given sizes.

    Raises:
        InputError: the kind does not exist, or does not support the sizes.
    """
    family = str(given.get("family", ""))
    missing = MISSING_PARTS.get(kind) or MISSING_PARTS_OF_FAMILIES.get(family)
    if missing:
        raise InputError(
            Message(
                "kind {kind!r}: the built-in reference models have no {part}; name a Hugging Face folder or a module "
                "instead",
                kind=kind if kind in MISSING_PARTS else family,
                part=missing,
            )
        )
    if kind not in MODEL_KINDS:
        raise InputError(
            Message(
                "model kind {kind!r} is not one of {kinds}{hint}",
                kind=kind,
                kinds=", ".join(MODEL_KINDS),
                hint=did_you_mean(kind, MODEL_KINDS),
            )
        )
    if _optional_count(given, "experts") and kind != "decoder":
        raise InputError(
            Message(
                "experts ({experts}): the reference model {kind!r} has no experts, 'decoder' has",
                experts=given["experts"],
                kind=kind,
            )
        )
    unsupported = next(
        (name for name in ("shared_experts", "dense_first_layers", "router_bias") if _optional_count(given, name)), None
    )
    if unsupported is not None:
        raise InputError(
            Message(
                "{unsupported} ({given}): the built-in reference models do not support it; name a Hugging Face folder "
                "or a module instead",
                unsupported=unsupported,
                given=given[unsupported],
            )
        )
    if kind == "decoder" and not (
        bool(_optional_count(given, "experts")) != (_optional_count(given, "norms") == 1)
        and given.get("norm", "rms") == "rms"
        and given.get("mlp", "swiglu") == "swiglu"
    ):
        raise InputError(
            Message(
                "kind 'decoder': the reference model needs experts or one norm per block (norms: 1), norm rms and mlp "
                "swiglu; set them, or name a Hugging Face folder or a module instead"
            )
        )
    _check_layers(given)


def _check_layers(given: Mapping[str, Any]) -> None:
    """Checks that the reference models support the given kind of attention and of position encoding.

    Raises:
        InputError: no reference model supports them.
    """
    if given.get("mla") not in (None, 0, "0"):
        raise InputError(
            Message(
                "mla: the built-in reference models have no latent attention; name a Hugging Face folder or a module "
                "instead"
            )
        )
    if given.get("pos") not in (None, "rope", "learned"):
        raise InputError(
            Message(
                "pos {pos!r} is not one of rope, learned; name a Hugging Face folder or a module instead",
                pos=given["pos"],
            )
        )


def _required_size(given: Mapping[str, Any], name: str) -> int:
    if name not in given:
        raise InputError(Message("model needs {name!r}{hint}", name=name, hint=did_you_mean(name, given)))
    value = int(given[name])
    if value < 1:
        raise InputError(Message("{name} ({value}) must be at least 1", name=name, value=value))
    return value


def _optional_count(given: Mapping[str, Any], name: str) -> int:
    """Returns the count `name`, or 0 if it is missing or empty."""
    return int(float(given.get(name) or 0))


def _num_positions(given: Mapping[str, Any], seq: int) -> int:
    return int(float(given.get("pos_rows", seq)))
