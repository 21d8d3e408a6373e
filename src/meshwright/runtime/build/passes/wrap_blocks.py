"""Wraps the blocks of this rank: stage boundaries, sequence cuts, gathers of weights, recompute, and compilation."""

from __future__ import annotations

from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.build.passes.wrap_modules import install_context, wrap_modules
from meshwright.runtime.build.stages.assignment import stage_bounds
from meshwright.runtime.compile import compile_blocks
from meshwright.runtime.pipeline.block_wrapper import StageCursor
from meshwright.runtime.pipeline.boundary_tensors import BoundaryState
from meshwright.runtime.recompute.activation_offload import storage_id
from meshwright.runtime.recompute.policy import RecomputePolicy
from meshwright.spec.enums import Recompute
from meshwright.spec.memory_policy import defers_wgrad, recompute_at
from meshwright.spec.plan import Plan


@build_pass(
    reads=("model", "partition", "context", "sequence", "local", "flat", "reducer", "aux_loss"),
    writes=("cursor", "wrappers"),
)
def wrap_blocks(build: Build) -> None:
    """Replaces the forward of each block by a wrapper.

    From the outside to the inside a wrapper does: stage boundary, sequence cut, gathering of weights, recompute and
    offload, compiled forward of the block.
    """
    model, context, partition = build.model, build.context, build.partition
    graph, plan, boundary = partition.graph, context.plan, partition.boundary
    stage_graph = partition.stage_graph
    weights = {storage_id(unit.weights) for unit in build.reducer.units}
    cursor = StageCursor(
        start=0,
        stop=max(stage_graph.count, 1),
        keeping=RecomputePolicy.of(context, weights),
        carry=BoundaryState(boundary) if boundary else None,
        shared=build.local.copies,
    )
    table = {layer.name: layer.parameters for layer in partition.table if not layer.also}
    wrappers = wrap_modules(model, stage_graph, context, cursor, build.flat.layers, table, partition.reads)
    if plan.compile and graph.blocks is not None:
        blocks = [model.get_submodule(graph.block(index)) for index in range(graph.count)]
        bounds = stage_bounds(stage_graph, plan)
        compile_blocks(wrappers, blocks, _sac_blocks(plan, bounds), _deferred_wgrad_blocks(plan, bounds))
    install_context(model, graph, wrappers, build.sequence)
    build.cursor, build.wrappers = cursor, wrappers


def _sac_blocks(plan: Plan, bounds: dict[int, tuple[int, int]]) -> set[int]:
    """Returns the blocks with selective-operation recompute."""
    return {
        index
        for start, stop in bounds.values()
        for index in range(start, stop)
        if recompute_at(plan, index - start) == Recompute.sac
    }


def _deferred_wgrad_blocks(plan: Plan, bounds: dict[int, tuple[int, int]]) -> set[int]:
    """Returns the blocks whose weight gradients are deferred to W."""
    return {
        index
        for stage, (start, stop) in bounds.items()
        for index in range(start, stop)
        if plan.splits_backward(stage) and defers_wgrad(plan, index - start)
    }
