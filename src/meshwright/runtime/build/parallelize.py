"""Builds the engine of a model and a plan, by an ordered list of passes.

The passes up to `check_shards` analyse the model and raise all errors of the user. They leave the model unchanged, and
restore random state and configuration. The later passes change the model in place: they shard tensors, drop the modules
of other stages, flatten parameters, and wrap blocks.
"""

from __future__ import annotations

from typing import Unpack

from torch import nn

from meshwright.runtime.build.passes.analyze import analyze
from meshwright.runtime.build.passes.assemble import assemble
from meshwright.runtime.build.passes.check_plan import check_plan
from meshwright.runtime.build.passes.check_shards import check_shards
from meshwright.runtime.build.passes.create_groups import create_groups
from meshwright.runtime.build.passes.defer_weight_grads import defer_weight_grads
from meshwright.runtime.build.passes.describe_shards import describe_shards
from meshwright.runtime.build.passes.drop_other_stages import drop_other_stages
from meshwright.runtime.build.passes.flatten_parameters import flatten_parameters
from meshwright.runtime.build.passes.install_loss import install_loss
from meshwright.runtime.build.passes.low_precision_matmul import low_precision_matmul
from meshwright.runtime.build.passes.partition_stages import partition_stages
from meshwright.runtime.build.passes.prepare_model import prepare_model
from meshwright.runtime.build.passes.probe_optimizer import probe_optimizer
from meshwright.runtime.build.passes.record import Build, BuildPass, ModelHints
from meshwright.runtime.build.passes.reduce_gradients import reduce_gradients
from meshwright.runtime.build.passes.shard_tensors import shard_tensors
from meshwright.runtime.build.passes.wrap_blocks import wrap_blocks
from meshwright.runtime.engine import Engine
from meshwright.runtime.optim.param_groups import OptimizerFactory, ParamGroups
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.spec.precision import Recipe

CHECKS: tuple[BuildPass, ...] = (
    analyze,
    check_plan,
    partition_stages,
    probe_optimizer,
    create_groups,
    describe_shards,
    check_shards,
)
"""Passes that raise all errors of the user and leave the model unchanged."""

CHANGES: tuple[BuildPass, ...] = (
    prepare_model,
    shard_tensors,
    drop_other_stages,
    install_loss,
    flatten_parameters,
    defer_weight_grads,
    reduce_gradients,
    wrap_blocks,
    low_precision_matmul,
    assemble,
)
"""Passes that change the model in place."""

PASSES = (*CHECKS, *CHANGES)


def parallelize_model(
    model: nn.Module,
    context: ParallelContext,
    recipe: Recipe,
    make_optimizer: OptimizerFactory,
    **hints: Unpack[ModelHints],
) -> tuple[Engine, ParamGroups]:
    """Shards `model` in place. Returns its engine and the parameter groups of the optimizer.

    The parameters of `model` must be full and equal on every rank. All ranks call it.

    Raises:
        InputError: The model cannot be trained under the plan. The model is unchanged in this case.
    """
    build = Build()
    build.model, build.base, build.recipe, build.make_optimizer, build.hints = (
        model,
        context,
        recipe,
        make_optimizer,
        hints,
    )
    for step in PASSES:
        step(build)
    return build.engine, build.param_groups
