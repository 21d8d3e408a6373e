"""Describes a model for the planner: its layers in forward order, with their parameters, FLOPs and saved activations.

A `ModelSpec` is made from sizes, from a Hugging Face configuration or from an nn.Module. The planner does not need the
model itself. Values are per token and scale with batch, sequence and parallel degrees. If the precision determines the
bytes, values are in elements.

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
        default=(), description="fused projections: sizes along `split`, each sharded by itself"
    )
    ways: tuple[int, ...] = Field(
        default=(),
        description=(
            "into how many shares each part can be cut (key-value heads), 0 for any; more tensor ranks hold all of it"
        ),
    )
    frozen: bool = Field(default=False, description="not trained: no gradient, no optimizer state")
    experts: int = Field(
        default=0,
        ge=0,
        description="how many experts are stacked in it along its first dimension; 0 in an ordinary weight",
    )

    @property
    def numel(self) -> int:
        """The number of elements of the full tensor."""
        return math.prod(self.shape)

    def overlaps(self, tp: int) -> bool:
        """Returns whether several of `tp` tensor ranks use the same part of the tensor. Every rank then has the full
        tensor."""
        return any(0 < way < tp for way in self.ways)

    def local_numel(self, tp: int) -> int:
        """Returns the number of elements on the rank with the most elements, with `tp` tensor ranks.

        >>> keys = ParameterSpec(name="k", shape=(256, 1024), split=0, ways=(2,))
        >>> [(keys.local_numel(tp), keys.used_numel(tp)) for tp in (2, 4)]
        [(131072, 131072), (262144, 131072)]
        """
        return self.numel if self.overlaps(tp) else self.used_numel(tp)

    def used_numel(self, tp: int) -> int:
        """Returns the number of elements that a tensor rank computes with, for the rank with the most of `tp` ranks."""
        if self.split is None:
            return self.numel
        size = self.shape[self.split]
        parts = self.parts or (size,)
        ways = self.ways or (0,) * len(parts)
        local = sum(-(-part // min(tp, way or tp)) for part, way in zip(parts, ways, strict=True))
        return self.numel // size * local


class SavedActivations(StrictModel):
    """The activations that a layer saves for backward, per token.

    The fields `derived_*` are the part that cheap operations can recompute from other saved tensors, minus what must be
    saved for the recompute. The fields `fused_*` are the part that a compiled block does not save, because no matrix
    product or attention reads it.
    """

    saved_split: float = Field(
        default=0.0, ge=0, description="elements per token kept for backward that tensor parallelism divides"
    )
    saved_whole: float = Field(
        default=0.0, ge=0, description="elements per token kept for backward that only sequence parallelism divides"
    )
    fixed_split: float = Field(
        default=0.0, ge=0, description="bytes per token kept in a fixed type that tensor parallelism divides"
    )
    fixed_whole: float = Field(
        default=0.0, ge=0, description="bytes per token kept in a fixed type that only sequence parallelism divides"
    )
    core_fixed: float = Field(
        default=0.0, ge=0, description="of fixed_split, what the attention core keeps and selective recompute drops"
    )
    core_context: float = Field(
        default=0.0,
        ge=0,
        description="bytes per token and token of context that attention without a fused kernel keeps, divided by tp",
    )
    derived_split: float = Field(default=0.0, description="of saved_split, what recompute by operation drops")
    derived_whole: float = Field(
        default=0.0, description="of saved_whole; below 0 where more of it is held for what else is dropped"
    )
    derived_fixed_split: float = Field(default=0.0, description="of fixed_split, what recompute by operation drops")
    derived_fixed_whole: float = Field(default=0.0, description="of fixed_whole, what recompute by operation drops")
    derived_moved: float = Field(
        default=0.0, ge=0, description="elements per token that this recompute reads or writes"
    )
    fused_split: float = Field(default=0.0, description="of saved_split, what a compiled block does not keep")
    fused_whole: float = Field(
        default=0.0, description="of saved_whole; below 0 where more of it is kept for what else is not"
    )
    fused_gates: float = Field(
        default=0.0,
        ge=0,
        description="of fused_split, what stays where other products run between what makes it and what reads it",
    )
    fused_fixed_split: float = Field(default=0.0, description="of fixed_split, what a compiled block does not keep")
    fused_fixed_whole: float = Field(default=0.0, description="of fixed_whole, what a compiled block does not keep")


class LayerSpec(SavedActivations):
    """`repeat` consecutive equal layers. Pipeline stages, recompute and ZeRO-3 all-gathers divide a model between
    layers."""

    name: str = Field(description="'embedding', 'block', 'norm', 'head', ...: the role; blocks are what pipelines cut")
    repeat: int = Field(default=1, ge=1)
    parameters: tuple[ParameterSpec, ...]
    flops: float = Field(default=0.0, ge=0, description="forward FLOPs of matrix products per token, on one device")
    attention_flops: float = Field(
        default=0.0, ge=0, description="forward FLOPs of attention per token and token of context"
    )
    moved: float = Field(
        default=0.0, ge=0, description="elements per token read or written by memory-bound operations, forward"
    )
    context_moved: float = Field(
        default=0.0,
        ge=0,
        description="elements per token and token of context that such attention moves forward, divided by tp",
    )
    query_width: float = Field(default=0.0, ge=0, description="elements per token of queries, divided by tp")
    key_value_width: float = Field(
        default=0.0, ge=0, description="elements per token of keys and values together, divided by tp"
    )
    routed: float = Field(default=0.0, ge=0, description="elements per token sent to experts: top_k x hidden")
    routed_saved: float = Field(default=0.0, ge=0, description="of saved_split, what lies inside the routed experts")
    transient: float = Field(
        default=0.0, ge=0, description="elements per token alive only while the layer runs, beyond what it keeps"
    )
    output: float = Field(default=0.0, ge=0, description="elements per token that the layer hands on")
    tied: str | None = Field(default=None, description="name of the layer whose first parameter this layer shares")

    @property
    def key_value_heads(self) -> int:
        """The number of tensor ranks above which several ranks have the same keys and values; 0 means the number of
        heads."""
        return min((way for parameter in self.parameters for way in parameter.ways if way), default=0)

    @property
    def numel(self) -> int:
        """The parameters of one of the `repeat` layers. A tied weight counts in the layer that uses it first."""
        return sum(parameter.numel for parameter in self.parameters)


class ModelSpec(StrictModel):
    """The description of a model that the planner uses."""

    name: str
    layers: tuple[LayerSpec, ...]
    hidden: int = Field(gt=0)
    context: int = Field(default=0, ge=0, description="longest sequence, 0 when unbounded")
    divisible: dict[str, int] = Field(
        default_factory=dict, description="sizes that tp must divide: heads, kv_heads, ffn"
    )
    tensor_parallel: bool = Field(
        default=True, description="False when no rule shards its layers (a convolutional network)"
    )
    against_sequence: str = Field(
        default="", description="why sequence parallelism would be wrong; empty where it is right"
    )
    against_division: str = Field(
        default="", description="why a batch must pass whole; empty where its rows do not see each other"
    )
    against_stages: str = Field(
        default="", description="why stages cannot be cut between its blocks; empty where they can"
    )
    vocabulary: int = Field(default=0, ge=0)
    notes: tuple[TranslatableText, ...] = Field(
        default=(), description="what was found of a traced model, and what was not understood"
    )

    @property
    def blocks(self) -> int:
        """The number of layers between which a pipeline can cut."""
        return sum(layer.repeat for layer in self.layers if layer.name == "block")

    @property
    def shared_vocabulary(self) -> int:
        """The size of the vocabulary if tensor ranks shard it; 0 if every rank has the full vocabulary."""
        tables = (each for layer in self.layers if layer.name in ("embedding", "head") for each in layer.parameters)
        return self.vocabulary if any(each.split is not None for each in tables) else 0

    @property
    def experts(self) -> int:
        """The number of experts of a layer; 0 in a dense model. ep must divide this number."""
        return max((parameter.experts for layer in self.layers for parameter in layer.parameters), default=0)

    def trained(self, tp: int = 1) -> float:
        """Returns the trained fraction of the parameters on one of `tp` tensor ranks. The rest is frozen."""
        sizes = [
            (layer.repeat * each.local_numel(tp), each.frozen)
            for layer in self.layers
            for each in layer.parameters
            if layer.tied is None
        ]
        frozen = sum(count for count, is_frozen in sizes if is_frozen)
        return 1.0 - frozen / sum(count for count, _ in sizes) if frozen else 1.0

    @property
    def parameters(self) -> int:
        """The number of parameters of the full model. Tied weights count once."""
        return sum(layer.repeat * layer.numel for layer in self.layers if layer.tied is None) + sum(
            layer.numel - layer.parameters[0].numel for layer in self.layers if layer.tied is not None
        )


class TpRule(StrictModel):
    """A tensor-parallel rule with paths inside a block. The outputs of `columns` are sharded, the inputs of `rows`
    are sharded in the same way, and the outputs of `rows` are summed."""

    columns: tuple[str, ...] = Field(min_length=1, description="linear layers cut by their outputs")
    rows: tuple[str, ...] = Field(
        min_length=1, description="linear layers behind them, cut by their inputs; their outputs are summed"
    )
