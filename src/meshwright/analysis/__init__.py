"""Analyses the structure of any `nn.Module`: its blocks, embedding and head, the layers that tensor parallelism can
shard, and the tensors that pipeline stages need. The runtime derives sharding and stages from the result
(`ModelGraph`), and the planner derives the costs of the model.

A region is a group of column-parallel layers and the row-parallel layers that read their outputs. A stack is a list of
blocks that pipeline stages cut.

Unless stated otherwise, the model is called as in training: each module in its own train or eval mode, with gradients
enabled, on the example inputs. No analysis changes the model (dry_run.py).

The structure comes from three kinds of forward:
- `trace_ops` (op_trace.py) runs one forward on the meta device and follows sharded features through every torch
  function. It finds blocks, regions, per-head arguments and parameter order. If a weight must stay unsharded, the
  sharding of all later operations changes. So the forward repeats, up to MAX_TRACE_PASSES times, until no further
  weight must stay unsharded. If a forward fails in the model's own dtypes, it is repeated in bfloat16, which some
  kernels require. One more forward, in eval mode, finds weights that the model writes to only in eval mode.
- `record_dataflow` (dataflow_recorder.py) runs one forward on the meta device and records which storages every torch
  function reads and writes. The record gives the modules that use each parameter, the tensors that cross stage
  boundaries, and the parameters of each stage. If the forward reads tensor values, it is repeated with real tensors. If
  its Python code uses random numbers, it is repeated with several seeds.
- `analysis.profile` runs two training steps on fake tensors, with all modules in training mode. The second step has
  twice the batch size. The difference between the steps gives FLOPs and activation bytes per token.

Shapes cannot show that a sharded block computes the same values as the full block. So three numeric checks repeat parts
of the forward with real values. If the model is small enough, they use float64:
- `ShardingCheck` (verify_sharding.py, simulated_ranks.py) runs blocks on simulated tensor-parallel ranks with two
  sequences of different lengths, and compares their outputs and gradients with those of the full blocks. It finds the
  integer attributes, such as head counts, that each rank must divide by tp. It also finds code that runs only in
  training or only for some sequence lengths.
- `sequence_parallel_objection` (verified_regions.py) runs the code between blocks on slices of the sequence. This code
  belongs to no block, so `ShardingCheck` does not run it.
- `ExpertCheck` (verify_experts.py) runs each expert module separately as expert-parallel and tensor-parallel ranks,
  because routing depends on values.
"""

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
from meshwright.analysis.layer_rules.rule import is_linear_like
from meshwright.analysis.local_layers import (
    LocalHeadsHook,
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
    "is_linear_like",
    "local_shard",
    "params_by_layer",
    "set_local_heads",
    "shard_intervals",
    "shard_view",
    "update_layer_sizes",
]  # fmt: skip
