"""Defines the sizes of an architecture. A row of the catalog, an architecture file and a Hugging Face configuration are
all converted to `ArchitectureSizes`.

Names are those of the catalog's table. The reference models use the same names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, model_validator

from meshwright.core.codec import StrictModel, validate_data
from meshwright.core.messages import Message

ArchitectureKind = Literal["llama", "decoder", "gpt2", "bert", "neox", "bloom", "convnet"]
BLANK_CELLS = ("", None)
MAX_LAYERS, MAX_SIZE = 2**16, 2**40
"""Maximum number of layers, and maximum of all other sizes. So a typing error leads to an error message and not to an
endless search."""


class LatentAttention(StrictModel):
    """Ranks and widths of multi-head latent attention. Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1. If `q_lora`
    is 0, queries have no low-rank projection."""

    q_lora: int = 0
    kv_lora: int
    nope: int
    rope: int
    v: int


class ArchitectureSizes(StrictModel):
    """The sizes of an architecture. `kind` determines the structure of its block and its parameter names."""

    kind: ArchitectureKind
    family: str = ""
    layers: int = Field(ge=1, le=MAX_LAYERS)
    hidden: int = Field(ge=1, le=MAX_SIZE)
    heads: int = Field(default=1, ge=1, le=MAX_SIZE)
    kv_heads: int = Field(default=1, ge=1, le=MAX_SIZE)
    head_dim: float = Field(
        default=0.0,
        ge=0,
        description="features per attention head; 0: hidden / heads; a fraction in two published models",
    )
    ffn: int = Field(default=1, ge=1, le=MAX_SIZE)
    vocab: int = Field(default=0, ge=0, le=MAX_SIZE)
    seq: int = Field(default=1, ge=1, le=MAX_SIZE)
    tied_embeddings: bool = False
    mlp: Literal["swiglu", "geglu", "gelu", "gelu_new", "relu", "relu2"] = "swiglu"
    norm: Literal["rms", "ln", "ln1p"] = "rms"
    norms: int = Field(
        default=2,
        ge=1,
        le=4,
        description="norms per block: 1 if attention and feed-forward are parallel, 4 in Gemma 2",
    )
    embedding_norm: bool = False
    final_norm: bool = True
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    pos: Literal["rope", "learned", "alibi"] = "rope"
    pos_rows: int = Field(default=0, ge=0, le=MAX_SIZE)
    types: int = Field(default=0, ge=0, le=MAX_SIZE, description="number of token types (segment embeddings)")
    experts: int = Field(default=0, ge=0, le=MAX_SIZE)
    top_k: int = Field(default=0, ge=0, le=MAX_SIZE)
    moe_ffn: int = Field(default=0, ge=0, le=MAX_SIZE)
    shared_experts: int = Field(default=0, ge=0, le=MAX_SIZE)
    shared_gate: bool = Field(
        default=False, description="whether a per-token gate scales the output of the shared experts, as in Qwen2-MoE"
    )
    router_bias: bool = False
    dense_first_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    mla: LatentAttention | None = None
    transposed: bool = Field(
        default=False, description="whether weights are stored as (in, out), as in Hugging Face's GPT-2"
    )
    rope_base: float = Field(default=10_000.0, gt=0)
    classes: int = Field(default=0, ge=0, le=MAX_SIZE)
    channels: int = Field(default=0, ge=0, le=MAX_SIZE)
    image: int = Field(default=0, ge=0, le=MAX_SIZE)

    @model_validator(mode="before")
    @classmethod
    def _fill(cls, given: Any) -> Any:
        """Fills defaults that depend on other sizes: key-value heads, positions, biases of the projections."""
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
        """Returns a copy with other values of some sizes.

        Sizes that depend on a changed size follow its new value. The number of learned positions keeps its distance to
        the sequence length. A model with one key-value head per query head keeps this ratio.
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
        """Returns the features of all query heads."""
        return round(self.heads * (self.head_dim or self.hidden / self.heads))

    @property
    def key_width(self) -> int:
        """Returns the features of all key heads."""
        return self.query_width // self.heads * self.kv_heads if self.kv_heads != self.heads else self.query_width

    @property
    def gated(self) -> bool:
        """Returns whether the feed-forward is gated: three matrices instead of two."""
        return self.mlp in ("swiglu", "geglu")

    @property
    def norm_bias(self) -> bool:
        """Returns whether norms have a bias."""
        return self.norm == "ln"

    @property
    def causal(self) -> bool:
        """Returns whether attention is causal."""
        return self.kind not in ("bert", "convnet")


def sizes_from_catalog(row: Mapping[str, Any]) -> ArchitectureSizes:
    """Converts a row of the catalog, whose cells are text, to `ArchitectureSizes`."""
    known = {name: row[name] for name in ArchitectureSizes.model_fields if row.get(name) not in BLANK_CELLS}
    if "mla" in known:
        known["mla"] = dict(part.split("=") for part in known["mla"].split(","))
    return validate_data(ArchitectureSizes, known, f"catalog {row['model']}")
