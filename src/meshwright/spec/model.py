"""Describes a model for the planner: its layers in forward order, with their parameters, FLOPs and saved activations.

A `ModelSpec` is made from sizes, from a Hugging Face configuration or from an nn.Module. The planner does not need the
model itself. Values are per token and scale with batch, sequence and parallel degrees. Values whose bytes depend on the
precision are in elements.

A `TpRule` is a hint of the user for a model whose layers could not be analysed. It names the layers of a block that
tensor parallelism shards.
"""

from __future__ import annotations

import math

from pydantic import Field

from meshwright.core.codec import StrictModel, TranslatableText


class ParameterSpec(StrictModel):
    """One parameter tensor. `split` is the dimension that tensor parallelism shards; None means that every tensor rank
    has the full tensor. The local size along `split` is ceil(size / tp), so that a vocabulary may be uneven. Sizes that
    must be divisible are in `ModelSpec.divisible`.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None = None
    parts: tuple[int, ...] = Field(
        default=(), description="fused projections: sizes of the parts along `split`; each part is sharded separately"
    )
    ways: tuple[int, ...] = Field(
        default=(),
        description=(
            "maximum shards per part (key-value heads), 0: any; with more tensor ranks each stores the full tensor"
        ),
    )
    frozen: bool = Field(
        default=False, description="whether the parameter is not trained and has neither gradient nor optimizer state"
    )
    bits: float | None = Field(
        default=None,
        gt=0,
        description="bits of a stored element of a frozen parameter; null: those of the compute dtype",
    )
    experts: int = Field(
        default=0,
        ge=0,
        description="number of experts stacked along the first dimension; 0: not an expert weight",
    )

    @property
    def numel(self) -> int:
        """Returns the number of elements of the full tensor."""
        return math.prod(self.shape)

    def overlaps(self, tp: int) -> bool:
        """Returns whether several of `tp` tensor ranks use the same part of the tensor. If so, every rank has the full
        tensor."""
        return any(0 < way < tp for way in self.ways)

    def local_numel(self, tp: int) -> int:
        """Returns the number of elements on one of `tp` tensor ranks. If ranks differ, returns the largest number.

        >>> keys = ParameterSpec(name="k", shape=(256, 1024), split=0, ways=(2,))  # 2 key-value heads
        >>> [(keys.local_numel(tp), keys.used_numel(tp)) for tp in (2, 4)]
        [(131072, 131072), (262144, 131072)]
        """
        return self.numel if self.overlaps(tp) else self.used_numel(tp)

    def used_numel(self, tp: int) -> int:
        """Returns the number of elements with which one of `tp` tensor ranks computes. If ranks differ, returns the
        largest number."""
        if self.split is None:
            return self.numel
        size = self.shape[self.split]
        parts = self.parts or (size,)
        ways = self.ways or (0,) * len(parts)
        local = sum(-(-part // min(tp, way or tp)) for part, way in zip(parts, ways, strict=True))
        return self.numel // size * local

    def stored_numel(self, numel: int, size: int) -> int:
        """Returns the number of elements of `size` bytes that take as much memory as `numel` elements of this
        parameter.

        >>> ParameterSpec(name="w", shape=(64, 64), bits=4.25).stored_numel(4096, size=2)
        1088
        """
        return numel if self.bits is None else math.ceil(numel * self.bits / 8 / size)


class SavedActivations(StrictModel):
    """The activations that a layer saves for backward, per token.

    The fields `derived_*` are the part that cheap operations can recompute from other saved tensors, minus the tensors
    that must be saved for this recompute. The fields `fused_*` are the part that a compiled block does not save,
    because no matrix product or attention reads it. `fused_moved` is the part of `moved` (`LayerSpec`) that a compiled
    block does not move.
    """

    saved_split: float = Field(
        default=0.0, ge=0, description="elements per token saved for backward and sharded by tensor parallelism"
    )
    saved_whole: float = Field(
        default=0.0, ge=0, description="elements per token saved for backward and sharded only by sequence parallelism"
    )
    fixed_split: float = Field(
        default=0.0, ge=0, description="bytes per token saved in a fixed dtype and sharded by tensor parallelism"
    )
    fixed_whole: float = Field(
        default=0.0, ge=0, description="bytes per token saved in a fixed dtype and sharded only by sequence parallelism"
    )
    core_fixed: float = Field(
        default=0.0,
        ge=0,
        description="bytes per token of fixed_split that the attention core saves, unless it is recomputed (attn)",
    )
    core_context: float = Field(
        default=0.0,
        ge=0,
        description="bytes per token and context token that unfused attention saves, before division by tp",
    )
    derived_split: float = Field(
        default=0.0, description="elements per token of saved_split that selective recompute (sac) does not save"
    )
    derived_whole: float = Field(
        default=0.0,
        description=(
            "elements per token of saved_whole that selective recompute does not save; negative if it saves more"
        ),
    )
    derived_fixed_split: float = Field(
        default=0.0, description="bytes per token of fixed_split that selective recompute does not save"
    )
    derived_fixed_whole: float = Field(
        default=0.0, description="bytes per token of fixed_whole that selective recompute does not save"
    )
    derived_moved: float = Field(
        default=0.0, ge=0, description="elements per token that selective recompute reads and writes"
    )
    fused_moved: float = Field(
        default=0.0,
        ge=0,
        description="elements per token of moved that a compiled block does not move",
    )
    fused_split: float = Field(
        default=0.0, description="elements per token of saved_split that a compiled block does not save"
    )
    fused_whole: float = Field(
        default=0.0,
        description="elements per token of saved_whole that a compiled block does not save; negative if it saves more",
    )
    fused_gates: float = Field(
        default=0.0,
        ge=0,
        description="elements per token of fused_split (activated gates) that a block compiled in several pieces saves",
    )
    fused_fixed_split: float = Field(
        default=0.0, description="bytes per token of fixed_split that a compiled block does not save"
    )
    fused_fixed_whole: float = Field(
        default=0.0, description="bytes per token of fixed_whole that a compiled block does not save"
    )


class LayerSpec(SavedActivations):
    """`repeat` consecutive equal layers. Pipeline stages, recompute and ZeRO-3 all-gathers divide a model between
    layers."""

    name: str = Field(
        description=(
            "role of the layer: 'embedding', 'block', 'norm', 'head', ...; pipeline stages consist of whole blocks"
        )
    )
    repeat: int = Field(default=1, ge=1)
    parameters: tuple[ParameterSpec, ...]
    flops: float = Field(default=0.0, ge=0, description="forward FLOPs of matrix products per token, on one device")
    attention_flops: float = Field(
        default=0.0, ge=0, description="forward FLOPs of attention per token and context token"
    )
    moved: float = Field(
        default=0.0, ge=0, description="elements per token that memory-bound forward operations read and write"
    )
    context_moved: float = Field(
        default=0.0,
        ge=0,
        description=(
            "elements per token and context token that unfused attention moves in forward, before division by tp"
        ),
    )
    query_width: float = Field(default=0.0, ge=0, description="elements per token of queries, before division by tp")
    key_value_width: float = Field(
        default=0.0, ge=0, description="elements per token of keys and values together, before division by tp"
    )
    routed: float = Field(default=0.0, ge=0, description="elements per token sent to experts: top_k x hidden")
    routed_saved: float = Field(
        default=0.0, ge=0, description="elements per token of saved_split inside the routed experts"
    )
    transient: float = Field(
        default=0.0, ge=0, description="peak elements per token that the layer's backward adds to the saved activations"
    )
    output: float = Field(default=0.0, ge=0, description="elements per token of the layer's output")
    tied: str | None = Field(default=None, description="name of the layer whose first parameter this layer shares")

    @property
    def key_value_heads(self) -> int:
        """Returns the largest number of tensor ranks that can all have different keys and values. Returns 0 if the
        number of key-value heads does not limit it."""
        return min((way for parameter in self.parameters for way in parameter.ways if way), default=0)

    @property
    def numel(self) -> int:
        """Returns the number of parameters of one of the `repeat` layers. A tied weight counts."""
        return sum(parameter.numel for parameter in self.parameters)


class ModelSpec(StrictModel):
    """The description of a model that the planner uses."""

    name: str
    layers: tuple[LayerSpec, ...]
    hidden: int = Field(gt=0)
    context: int = Field(default=0, ge=0, description="maximum sequence length in tokens; 0: unlimited")
    divisible: dict[str, int] = Field(
        default_factory=dict, description="sizes that tp must divide: heads, kv_heads, ffn"
    )
    tensor_parallel: bool = Field(default=True, description="whether tensor parallelism can shard the layers")
    against_sequence: str = Field(
        default="", description="why sequence parallelism would give a wrong result; empty: it is supported"
    )
    against_division: str = Field(
        default="", description="why a batch must not be split; empty: its rows are independent"
    )
    gathered: int = Field(
        default=0,
        ge=0,
        description=(
            "numbers per row that a loss over the whole batch gathers from all data ranks (gather='batch'); 0: the "
            "loss is a mean over rows"
        ),
    )
    against_stages: str = Field(
        default="",
        description="why the model must not be cut into pipeline stages; empty: it can be cut between blocks",
    )
    against_training: TranslatableText = Field(
        default="", description="why this version cannot build the model; empty: it can, so that plans can run"
    )
    vocabulary: int = Field(default=0, ge=0)
    notes: tuple[TranslatableText, ...] = Field(
        default=(), description="results of tracing the model, including code that was not understood"
    )

    @property
    def blocks(self) -> int:
        """Returns the number of blocks. Pipeline stages are cut between blocks."""
        return sum(layer.repeat for layer in self.layers if layer.name == "block")

    @property
    def shared_vocabulary(self) -> int:
        """Returns the size of the vocabulary if tensor ranks shard it, or 0 if every rank has the full vocabulary."""
        tables = (each for layer in self.layers if layer.name in ("embedding", "head") for each in layer.parameters)
        return self.vocabulary if any(each.split is not None for each in tables) else 0

    @property
    def experts(self) -> int:
        """Returns the number of experts of a layer, or 0 for a dense model. ep must divide this number."""
        return max((parameter.experts for layer in self.layers for parameter in layer.parameters), default=0)

    def trained(self, tp: int = 1, size: int = 4) -> float:
        """Returns the trained fraction of the stored bytes of parameters on one of `tp` tensor ranks, if the compute
        dtype has `size` bytes. The other parameters are frozen."""
        sizes = [
            (layer.repeat * each.stored_numel(each.local_numel(tp), size), each.frozen)
            for layer in self.layers
            for each in layer.parameters
            if layer.tied is None
        ]
        frozen = sum(count for count, is_frozen in sizes if is_frozen)
        return 1.0 - frozen / sum(count for count, _ in sizes) if frozen else 1.0

    @property
    def parameters(self) -> int:
        """Returns the number of parameters of the full model. Tied weights count once."""
        return sum(layer.repeat * layer.numel for layer in self.layers if layer.tied is None) + sum(
            layer.numel - layer.parameters[0].numel for layer in self.layers if layer.tied is not None
        )


class TpRule(StrictModel):
    """A tensor-parallel rule. It names linear layers by their paths inside a block. The outputs of `columns` are
    sharded, the inputs of `rows` are sharded in the same way, and the outputs of `rows` are summed."""

    columns: tuple[str, ...] = Field(
        min_length=1, description="column-parallel linear layers, sharded by output features"
    )
    rows: tuple[str, ...] = Field(
        min_length=1,
        description=(
            "row-parallel linear layers after the column-parallel ones, sharded by input features; outputs are summed"
        ),
    )
