"""Defines `ArchitectureSizes`, the sizes of an architecture, for the model specs of the planner (architecture.py). A
row of the catalog, an architecture file and a Hugging Face configuration are converted to this type. The field names
are those of the catalog's table and of the reference models.

`sizes_from_hf_config` converts a Hugging Face `config.json` without using the transformers library. In such a file, the
name of a size depends on the model family (`hidden_size`, `n_embd` or `d_model`). Some properties may have no field:
biases, norms, tied embeddings, the type of feed-forward. `model_type` implies these properties, as in the configuration
classes of transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from meshwright.core.codec import StrictModel, parse_text, read_text_file, validate_data
from meshwright.core.errors import InputError, did_you_mean
from meshwright.core.messages import Message

ArchitectureKind = Literal["llama", "decoder", "gpt2", "bert", "neox", "bloom", "convnet"]
BLANK_CELLS = ("", None)
MAX_LAYERS, MAX_SIZE = 2**16, 2**40
"""Maximum number of layers, and maximum of all other sizes. With these limits, a mistyped size causes an error message
and not an endless search."""


class LatentAttention(StrictModel):
    """Ranks and widths of multi-head latent attention. `q_lora` and `kv_lora` are ranks; if `q_lora` is 0, queries have
    no low-rank projection. `nope` and `rope` are the features per head of queries and keys without and with rotary
    embedding, `v` is the features per head of values. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1."""

    q_lora: int = Field(default=0, description="rank of the low-rank projection of queries; 0: no such projection")
    kv_lora: int = Field(description="rank of the low-rank projection of keys and values")
    nope: int = Field(description="features per head of queries and keys without rotary embedding")
    rope: int = Field(description="features per head of queries and keys with rotary embedding")
    v: int = Field(description="features per head of values")


class ArchitectureSizes(StrictModel):
    """The sizes of an architecture. `kind` determines the structure of the blocks and the parameter names.

    `ffn` is the number of inner features of a feed-forward, `moe_ffn` that of an expert. `seq` is the maximum sequence
    length, `pos_rows` the number of learned positions. The first `dense_first_layers` blocks have no experts.
    `classes`, `channels` and `image` (the width and height of an image) belong to convolutional networks.
    """

    kind: ArchitectureKind = Field(description="structure of the blocks and names of the parameters")
    family: str = Field(default="", description="model family, for display")
    layers: int = Field(ge=1, le=MAX_LAYERS, description="number of blocks")
    hidden: int = Field(ge=1, le=MAX_SIZE, description="features of the hidden state")
    heads: int = Field(default=1, ge=1, le=MAX_SIZE, description="number of attention heads")
    kv_heads: int = Field(default=1, ge=1, le=MAX_SIZE, description="number of key-value heads; without the key: heads")
    head_dim: float = Field(
        default=0.0,
        ge=0,
        description="features per attention head; 0: hidden / heads; a fraction in two published models",
    )
    ffn: int = Field(default=1, ge=1, le=MAX_SIZE, description="inner features of a feed-forward")
    vocab: int = Field(default=0, ge=0, le=MAX_SIZE, description="number of token ids; 0: no embedding of tokens")
    seq: int = Field(default=1, ge=1, le=MAX_SIZE, description="maximum sequence length")
    tied_embeddings: bool = Field(default=False, description="whether the output head uses the weight of the embedding")
    mlp: Literal["swiglu", "geglu", "gelu", "gelu_new", "relu", "relu2"] = Field(
        default="swiglu", description="type of the feed-forward"
    )
    norm: Literal["rms", "ln", "ln1p"] = Field(default="rms", description="type of the norms")
    norms: int = Field(
        default=2,
        ge=1,
        le=4,
        description="norms per block: 1 if attention and feed-forward are parallel, 4 in Gemma 2",
    )
    embedding_norm: bool = Field(default=False, description="whether a norm follows the embedding")
    final_norm: bool = Field(default=True, description="whether a norm follows the last block")
    linear_bias: bool = Field(default=False, description="whether linear layers of the blocks have biases")
    qkv_bias: bool = Field(default=False, description="whether the query, key and value layers have biases")
    qk_norm: bool = Field(default=False, description="whether queries and keys are normalized")
    pos: Literal["rope", "learned", "alibi"] = Field(default="rope", description="type of the position information")
    pos_rows: int = Field(
        default=0, ge=0, le=MAX_SIZE, description="number of learned positions; without the key: seq, if pos is learned"
    )
    types: int = Field(default=0, ge=0, le=MAX_SIZE, description="number of token types (segment embeddings)")
    experts: int = Field(default=0, ge=0, le=MAX_SIZE, description="number of experts of a block; 0: no experts")
    top_k: int = Field(default=0, ge=0, le=MAX_SIZE, description="number of experts that process a token")
    moe_ffn: int = Field(default=0, ge=0, le=MAX_SIZE, description="inner features of an expert")
    shared_experts: int = Field(default=0, ge=0, le=MAX_SIZE, description="number of experts that process every token")
    shared_gate: bool = Field(
        default=False, description="whether a per-token gate scales the output of the shared experts, as in Qwen2-MoE"
    )
    router_bias: bool = Field(default=False, description="whether the router has a bias for each expert")
    dense_first_layers: int = Field(
        default=0, ge=0, le=MAX_LAYERS, description="number of first blocks without experts"
    )
    mla: LatentAttention | None = Field(
        default=None, description="sizes of multi-head latent attention; null: usual attention"
    )
    transposed: bool = Field(
        default=False, description="whether weights are stored as (in, out), as in Hugging Face's GPT-2"
    )
    rope_base: float = Field(default=10_000.0, gt=0, description="base of the rotary embedding")
    classes: int = Field(
        default=0, ge=0, le=MAX_SIZE, description="number of classes that a convolutional network distinguishes"
    )
    channels: int = Field(default=0, ge=0, le=MAX_SIZE, description="channels of an image")
    image: int = Field(default=0, ge=0, le=MAX_SIZE, description="width and height of an image in pixels")

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        """Sets missing sizes that depend on other sizes: key-value heads, learned positions, biases of query, key and
        value."""
        if not isinstance(given, Mapping):
            return given
        filled = dict(given)
        if "heads" in filled:
            filled.setdefault("kv_heads", filled["heads"])
        if filled.get("linear_bias"):
            filled.setdefault("qkv_bias", filled["linear_bias"])
        if filled.get("pos") == "learned" and "seq" in filled:
            filled.setdefault("pos_rows", filled["seq"])
        return filled

    @model_validator(mode="after")
    def _consistent(self) -> ArchitectureSizes:
        if self.kind == "convnet":
            if not (self.classes and self.channels and self.image):
                raise ValueError(Message("a convolutional network needs classes, channels and image"))
            return self
        if not self.vocab:
            raise ValueError(Message("vocab must be at least 1"))
        if not self.head_dim and self.hidden % self.heads:
            raise ValueError(
                Message(
                    "hidden({hidden}) must be a multiple of heads({heads}), or head_dim given",
                    hidden=self.hidden,
                    heads=self.heads,
                )
            )
        if self.heads % self.kv_heads:
            raise ValueError(
                Message(
                    "heads({heads}) must be a multiple of kv_heads({kv_heads})",
                    heads=self.heads,
                    kv_heads=self.kv_heads,
                )
            )
        if self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(
                Message(
                    "top_k({top_k}) must lie between 1 and experts({experts})", top_k=self.top_k, experts=self.experts
                )
            )
        return self

    def changed(self, changes: Mapping[str, Any], where: str = "$") -> ArchitectureSizes:
        """Returns a copy with the values in `changes`. `where` is the location for error messages.

        If the sequence length changes, the number of learned positions changes by the same amount. If each query head
        has its own key-value head and `heads` changes, `kv_heads` is set to the new number of heads.
        """
        fields = self.model_dump()
        if "heads" in changes and self.kv_heads == self.heads:
            del fields["kv_heads"]
        follow = "seq" in changes and "pos_rows" not in changes and self.pos_rows >= self.seq
        if follow:
            del fields["pos_rows"]
        found = validate_data(ArchitectureSizes, {**fields, **changes}, where)
        return found.but(pos_rows=found.seq + self.pos_rows - self.seq) if follow and found.pos_rows else found

    @property
    def query_width(self) -> int:
        """Returns the number of features of all query heads together."""
        return round(self.heads * (self.head_dim or self.hidden / self.heads))

    @property
    def key_width(self) -> int:
        """Returns the number of features of all key heads together."""
        return self.query_width // self.heads * self.kv_heads if self.kv_heads != self.heads else self.query_width

    @property
    def gated(self) -> bool:
        """Returns whether the feed-forward is gated, with three matrices instead of two."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def norm_bias(self) -> bool:
        """Returns whether norms have a bias."""
        return self.norm == "ln"

    @property
    def causal(self) -> bool:
        """Returns whether the attention of this architecture is causal."""
        return self.kind not in ("bert", "convnet")


def sizes_from_catalog(row: Mapping[str, Any]) -> ArchitectureSizes:
    """Converts a row of the catalog to `ArchitectureSizes`. The cells of the row are text."""
    known = {name: row[name] for name in ArchitectureSizes.model_fields if row.get(name) not in BLANK_CELLS}
    if "mla" in known:
        known["mla"] = dict(part.split("=") for part in known["mla"].split(","))
    return validate_data(ArchitectureSizes, known, f"catalog {row['model']}")


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
    """Returns the sizes in the file config.json of `folder`. Raises InputError if the file is missing or not
    supported."""
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(Message("model folder {folder!r} has no config.json", folder=str(folder)))
    config = parse_text(read_text_file(path, "model configuration"), str(path))
    if not isinstance(config, dict):
        raise InputError(Message("{path}: expected a JSON object with the configuration of a model", path=path))
    return sizes_from_hf_config(config, str(path))


def has_formulas(folder: Path) -> bool:
    """Returns whether the closed formulas support the model in `folder`. Also returns True for an invalid
    configuration, for which `read_hf_config` raises the error."""
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
    """Returns a property of a mixture-of-experts configuration that the formulas do not support, or '' if there is
    none."""
    wide, each = (config.get(name) for name in ("shared_expert_intermediate_size", "moe_intermediate_size"))
    if wide and not (isinstance(wide, int) and isinstance(each, int) and each > 0 and wide % each == 0):
        return Message(
            "shared_expert_intermediate_size({wide}) is not a multiple of moe_intermediate_size({each})",
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
    """Converts the Hugging Face configuration `config` to `ArchitectureSizes`. For a multimodal model, the
    configuration of its text model is used.

    Raises: InputError if the model family is not supported or a field is missing.

    >>> sizes = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    >>> sizes_from_hf_config({"model_type": "gpt2", **sizes}, "x").ffn  # not given, so 4 n_embd
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
                "{where}: model_type {kind!r} is not one of {hf_families}{hint}; or give an architecture file with "
                "its sizes",
                where=where,
                kind=kind,
                hf_families=", ".join(HF_FAMILIES),
                hint=did_you_mean(kind, HF_FAMILIES),
            )
        )
    if odd := _unsupported_moe(config):
        raise InputError(
            Message(
                "{where}: {odd}, which the cost formulas do not support; use meshwright.analysis.profile.describe, or "
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
    """Sets the fields of `sizes` that depend on the model family `kind` and on several fields of `config`."""
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
