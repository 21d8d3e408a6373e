"""The build pass that shards the tensors of the model over tensor ranks and expert ranks."""

from __future__ import annotations

from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.build.stages.local_stages import materialize_placeholders
from meshwright.runtime.expert_parallel.token_dispatcher import shard_experts, shared_experts_by_path
from meshwright.runtime.tensor_parallel.layers import shard_model


@build_pass(reads=("model", "deferred", "partition", "context", "experts"), writes=("dispatchers",))
def shard_tensors(build: Build) -> None:
    """Replaces each split parameter by this rank's shard. Installs the collectives at the entries and exits of
    tensor-parallel regions, and the dispatchers of tokens to experts."""
    model, context, graph = build.model, build.context, build.partition.graph
    shared = shared_experts_by_path(model, graph, build.experts)
    with build.deferred:
        shard_model(model, build.experts.dense(graph), context.tp, context.plan.sequence_parallel)
        build.dispatchers = shard_experts(model, graph, build.experts, context, shared)
    materialize_placeholders(model, context.device, build.deferred)
