"""How any model is understood, by structure: its blocks, embedding, head, and what tensor parallelism shards."""

from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.block_lists import find_block_lists, params_by_layer
from meshwright.analysis.graph import (
    HeadCount,
    ModelGraph,
    PerHeadArg,
    StackedExperts,
    TpRegion,
    TpSplit,
    local_shard,
    shard_intervals,
    shard_view,
)
from meshwright.analysis.local_layers import (
    LocalHeadsHook,
    is_convolution,
    is_linear_like,
    set_local_heads,
    update_layer_sizes,
)

__all__ = [
    "HeadCount",
    "LocalHeadsHook",
    "ModelGraph",
    "PerHeadArg",
    "StackedExperts",
    "TpRegion",
    "TpSplit",
    "analyze_model",
    "find_block_lists",
    "is_convolution",
    "is_linear_like",
    "local_shard",
    "params_by_layer",
    "set_local_heads",
    "shard_intervals",
    "shard_view",
    "update_layer_sizes",
]  # fmt: skip
