"""Makes the reducer of gradients, and the update of tensors that the optimizer needs whole."""

from __future__ import annotations

from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.optim.full_tensor import install_full_tensor_step
from meshwright.runtime.tensor_parallel.layers import partial_grad_names
from meshwright.runtime.zero.reducer import GradReducer


@build_pass(
    reads=(
        "model",
        "partition",
        "context",
        "tied_groups",
        "shards",
        "trained",
        "full_tensors",
        "flat",
        "wgrad_accumulation",
    ),
    writes=("reducer",),
)
def reduce_gradients(build: Build) -> None:
    """Makes the reducer over the flat groups. Runs after weight gradients are deferred, which decides when a group is
    complete."""
    plan, partition = build.context.plan, build.partition
    partial = partial_grad_names(build.model, partition.graph, plan.sequence_parallel) if plan.tp > 1 else set()
    build.reducer = GradReducer(
        build.context,
        build.flat.stages,
        partial,
        build.flat.tied,
        build.tied_groups,
        build.trained,
        partition.idle,
    )
    install_full_tensor_step(build.reducer.trainable, build.shards, build.full_tensors)
