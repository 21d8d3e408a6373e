"""Analyses the structure of any `nn.Module`: its blocks, embedding and head, what tensor parallelism can shard, and
what stages need.

The model is called as it trains: in the modes of its modules, with gradients enabled, on its example inputs. All runs
leave the model unchanged (dry_run.py).

Analysis runs:
- `trace_ops` (op_trace.py): one forward on the meta device follows sharded features through every torch function. It
  finds blocks, regions, per-head arguments and parameter order. It repeats, up to MAX_TRACE_PASSES times, while more
  columns must stay unsharded, since each such column changes what follows it. If the forward fails in the types of the
  model it runs in bfloat16, which some kernels require. One run in eval mode finds weights that only evaluation writes
  to.
- `record_dataflow` (dataflow_recorder.py): one forward on the meta device records which storages every torch function
  reads and writes. From this record follow the users of each parameter, the tensors that cross stage boundaries, and
  the parameters of each stage. It repeats with real tensors where the forward reads values, and with several seeds
  where it draws random numbers outside of dropout.
- `analysis.profile`: two training steps on fake tensors, with some rows and twice as many, give FLOPs and activation
  bytes per token.

Shapes cannot show that a sharded block computes the same numbers. So three numeric checks repeat parts of the run with
real values, in float64 where the model is small enough:
- `ShardingCheck` (verify_sharding.py, simulated_ranks.py) runs each kind of block as simulated tensor-parallel ranks,
  with two texts of two lengths, and compares outputs and gradients. It finds the integers that a rank must change, and
  code that only runs in training or for some lengths.
- `sequence_parallel_objection` (verified_regions.py) runs the code between blocks on slices of the sequence, since that
  code belongs to no block.
- `ExpertCheck` (verify_experts.py) runs the expert modules by themselves as expert-parallel and tensor-parallel ranks,
  since routing depends on values.
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
