"""Which sizes of an architecture the reference models and transformers support. The planner marks the plans of other
models as plan-only, and `models/registry.py` refuses to build them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.core.errors import did_you_mean
from meshwright.core.messages import Message
from meshwright.spec.huggingface_config import TRANSFORMERS_TYPES, huggingface_type

MODEL_KINDS = ("llama", "decoder", "gpt2", "bert", "convnet")
LAYER_TITLES = {"ln": "LayerNorm", "rms": "RMSNorm", "swiglu": "SwiGLU", "geglu": "GEGLU", "relu": "ReLU"} | {
    "gelu": "GELU",
    "gelu_new": "GELU",
    "relu2": "squared ReLU",
}
"""Names of norms and feed-forward layers in messages."""
UNSUPPORTED_COUNTS = ("shared_experts", "dense_first_layers", "router_bias")


def reference_model_kind(sizes: Mapping[str, Any]) -> str:
    """Returns the kind of the reference model with these sizes: 'convnet' if they have `classes`, and 'bert' for the
    families bert and roberta. Otherwise the position encoding `pos` decides: 'gpt2' for learned positions, else
    'llama'."""
    if "classes" in sizes:
        return "convnet"
    if str(sizes.get("family", "")).lower() in ("bert", "roberta"):
        return "bert"
    return "gpt2" if sizes.get("pos", "rope") == "learned" else "llama"


def unsupported_sizes(sizes: Mapping[str, Any]) -> Message | None:
    """Returns why no reference model is built from `sizes` (keys of the catalog), or None if one is. Empty sizes ('' or
    None) count as not given."""
    given = {name: value for name, value in sizes.items() if value not in ("", None)}
    if (found := huggingface_type(given)) in TRANSFORMERS_TYPES:
        return _unsupported_by_transformers(found, given)
    kind = str(given.get("kind") or reference_model_kind(given))
    if kind not in MODEL_KINDS:
        return Message(
            "model kind {kind!r} is not one of {kinds}{hint}",
            kind=kind,
            kinds=", ".join(MODEL_KINDS),
            hint=did_you_mean(kind, MODEL_KINDS),
        )
    if optional_count(given, "experts") and kind != "decoder":
        return Message(
            "experts ({experts}): the reference model {kind!r} has no experts, 'decoder' has",
            experts=given["experts"],
            kind=kind,
        )
    for name in UNSUPPORTED_COUNTS:
        if optional_count(given, name):
            return Message(
                "{unsupported} ({given}): the built-in reference models do not support it; name a Hugging Face folder "
                "or a module instead",
                unsupported=name,
                given=given[name],
            )
    norm, mlp = str(given.get("norm", "rms")), str(given.get("mlp", "swiglu"))
    if kind == "decoder" and (norm, mlp) != ("rms", "swiglu"):
        return Message(
            "{norm} with {mlp} cannot be built: the reference decoders have RMSNorm with SwiGLU; set norm rms and mlp "
            "swiglu, or name a Hugging Face folder or a module with --model",
            norm=LAYER_TITLES.get(norm, norm),
            mlp=LAYER_TITLES.get(mlp, mlp),
        )
    if kind == "decoder" and bool(optional_count(given, "experts")) == (optional_count(given, "norms") == 1):
        return Message(
            "kind 'decoder': the reference model needs experts or one norm per block (norms: 1); set one of them, or "
            "name a Hugging Face folder or a module instead"
        )
    if given.get("mla") not in (None, 0, "0"):
        return Message(
            "mla: the built-in reference models have no latent attention; name a Hugging Face folder or a module "
            "instead"
        )
    if given.get("pos") not in (None, "rope", "learned"):
        return Message(
            "pos {pos!r} is not one of rope, learned; name a Hugging Face folder or a module instead",
            pos=given["pos"],
        )
    free = kind in ("llama", "decoder") and optional_count(given, "head_dim")
    return None if free or kind == "convnet" else _odd_heads(given)


def _unsupported_by_transformers(found: str, given: Mapping[str, Any]) -> Message | None:
    """Returns why transformers cannot build the sizes `given` of the model type `found`, or None if it can."""
    hidden, ffn = optional_count(given, "hidden"), optional_count(given, "ffn")
    if found == "bloom" and ffn != 4 * hidden:
        return Message("ffn ({ffn}) of a BLOOM model must be 4 times hidden ({hidden})", ffn=ffn, hidden=hidden)
    return _odd_heads(given) if found in ("bloom", "gpt_neox", "falcon") else None


def _odd_heads(given: Mapping[str, Any]) -> Message | None:
    """Returns that heads do not divide the hidden state, for models whose heads together have its width, or None."""
    hidden, heads = optional_count(given, "hidden"), optional_count(given, "heads")
    head_dim = optional_count(given, "head_dim") or (hidden // heads if heads else 0)
    if head_dim * heads == hidden or not heads:
        return None
    return Message(
        "hidden ({hidden}) must be heads ({heads}) times head_dim ({head_dim}): choose heads that divide hidden",
        hidden=hidden,
        heads=heads,
        head_dim=head_dim,
    )


def optional_count(sizes: Mapping[str, Any], name: str) -> int:
    """Returns the count `name`, or 0 if it is missing or empty."""
    return int(float(sizes.get(name) or 0))
