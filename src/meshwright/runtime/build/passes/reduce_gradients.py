"""The build pass that makes the gradient reducer and the updater of weights."""

from __future__ import annotations

import functools

from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.optim.full_tensor import make_full_tensor_steps
from meshwright.runtime.optim.updater import Updater, prefetch_states
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
    writes=("reducer", "updater"),
)
def reduce_gradients(build: Build) -> None:
    """Makes the reducer and the updater of the flat groups. Runs after `defer_weight_grads`, because that pass
    determines when the gradients of a group are complete."""
    plan, partition = build.context.plan, build.partition
    partial = partial_grad_names(build.model, partition.graph, plan.sequence_parallel) if plan.tp > 1 else set()
    swapper = build.context.state_swapper
    trainable = [unit for units in build.flat.stages.values() for unit in units if not unit.frozen]
    build.reducer = GradReducer(
        build.context,
        build.flat.stages,
        partial,
        build.flat.tied,
        build.tied_groups,
        build.trained,
        partition.idle,
        None if swapper is None else functools.partial(prefetch_states, swapper, trainable),
    )
    build.updater = Updater(build.reducer, make_full_tensor_steps(trainable, build.shards, build.full_tensors))
