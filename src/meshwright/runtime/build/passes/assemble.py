"""The last build pass: makes the engine from the results of the other passes. Later code changes the engine only
through the engine's methods."""

from __future__ import annotations

from meshwright.runtime.batch_loss import BatchLoss
from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.build.stages.assignment import stage_bounds
from meshwright.runtime.engine import Engine, StageExecutor
from meshwright.runtime.expert_parallel.token_dispatcher import local_dispatchers
from meshwright.runtime.loss import LossHead
from meshwright.runtime.parameter_access import install_load_checks, loss_access_guard, refuse_copies
from meshwright.runtime.pipeline.runner import ScheduleRunner
from meshwright.runtime.preflight.step_checks import Preflight
from meshwright.runtime.zero.diloco import make_outer_optimizer


@build_pass(
    reads=(
        "model",
        "recipe",
        "batch_norm",
        "partition",
        "context",
        "experts",
        "sequence",
        "evaluation",
        "shards",
        "extra_state",
        "uninitialized",
        "dispatchers",
        "hints",
        "chunked_head",
        "aux_loss",
        "wgrad_accumulation",
        "reducer",
        "updater",
        "cursor",
        "wrappers",
        "float8_casts",
    ),
    writes=("engine",),
)
def assemble(build: Build) -> None:
    """Makes the executor of this rank's stages, the runner of the pipeline schedule, and the engine."""
    context, graph = build.context, build.partition.graph
    install_load_checks(build.model, context.plan.name)
    refuse_copies(build.model, context.plan)
    loss = build.hints.get("loss")
    batch_loss = BatchLoss(loss, context) if loss is not None and build.hints.get("gather") else None
    loss_head = LossHead(
        build.model,
        loss,
        context.tp if graph.shards_vocabulary(graph.head) else None,
        None if build.sequence is None else build.sequence.cut_labels,
        build.chunked_head,
        loss_access_guard(build.model, context.plan, loss, bool(build.experts.dealt)),
        batch_loss,
    )
    executor = StageExecutor(
        build.model,
        context,
        graph,
        stage_bounds(build.partition.stage_graph, context.plan),
        build.cursor,
        build.reducer,
        loss_head,
        build.extra_state,
        Preflight(analysed=build.partition.guard, evaluation=build.evaluation),
        local_dispatchers(build.model, build.dispatchers),
        build.aux_loss,
        build.sequence,
        batch_loss,
    )
    runner = ScheduleRunner(
        context,
        executor.forward_stage,
        build.reducer.end_backward,
        executor.num_inputs,
        build.recipe.exact,
        build.wgrad_accumulation,
    )
    build.engine = Engine(
        executor,
        build.recipe,
        build.shards,
        runner,
        build.wrappers,
        build.updater,
        build.experts,
        make_outer_optimizer(build.recipe, build.reducer),
        build.uninitialized,
        build.batch_norm,
        build.float8_casts,
    )
