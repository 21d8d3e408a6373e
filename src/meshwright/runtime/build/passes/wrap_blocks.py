"""The build pass that wraps the forward of each block. Wrappers add stage boundaries, sequence cuts, all-gathers of
weights, recompute, and compilation, as the plan requires."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.own_generators import own_generators
from meshwright.runtime.activation_recompute import RecomputePolicy
from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.build.passes.wrap_modules import BlockSteps, cut_head_input, hidden_functions, wrap_modules
from meshwright.runtime.build.stages.assignment import stage_bounds
from meshwright.runtime.compile import compile_block
from meshwright.runtime.context_parallel.blocks import ContextState
from meshwright.runtime.float8 import Float8Casts
from meshwright.runtime.offload.activation_offload import storage_id
from meshwright.runtime.pipeline.block_wrapper import BoundaryState, StageCursor
from meshwright.spec.enums import Recompute
from meshwright.spec.grid import defers_wgrad, recompute_at
from meshwright.spec.plan import Plan


@build_pass(
    reads=("model", "partition", "context", "sequence", "local", "flat", "reducer", "aux_loss", "float8_casts"),
    writes=("cursor", "wrappers"),
)
def wrap_blocks(build: Build) -> None:
    """Replaces the forward of each block by a wrapper.

    A wrapper handles, from the outermost to the innermost: stage boundary, sequence cut, all-gather of weights,
    recompute and offload, and finally the forward of the block, compiled if the plan compiles.
    """
    model, context, partition = build.model, build.context, build.partition
    graph, plan, boundary = partition.graph, context.plan, partition.boundary
    stage_graph = partition.stage_graph
    weights = {storage_id(unit.weights.full) for unit in build.reducer.units}
    cursor = StageCursor(
        start=0,
        stop=max(stage_graph.count, 1),
        keeping=RecomputePolicy.of(context, weights, own_generators(model)),
        carry=BoundaryState(boundary) if boundary else None,
        shared=build.local.copies,
    )
    table = {layer.name: layer.parameters for layer in partition.table if not layer.also}
    inner = _BlockComputation(model, graph, plan, stage_bounds(stage_graph, plan), build.sequence, build.float8_casts)
    steps = BlockSteps(inner, *hidden_functions(context, stage_graph.count, graph, build.sequence))
    build.wrappers = wrap_modules(model, stage_graph, plan, cursor, build.flat.layers, table, partition.reads, steps)
    if build.sequence is not None:
        cut_head_input(model, graph, build.sequence)
    build.cursor = cursor


class _BlockComputation:
    """Makes the innermost function of a wrapper: the forward of a block on this rank's piece of the sequence, compiled
    if the plan compiles, after the casts of its weights to float8 (`casts`). `bounds`: for each stage, its first block
    and the index after its last block."""

    def __init__(
        self,
        model: nn.Module,
        graph: ModelGraph,
        plan: Plan,
        bounds: dict[int, tuple[int, int]],
        sequence: ContextState | None,
        casts: Float8Casts | None,
    ) -> None:
        self.model, self.graph, self.sequence, self.casts = model, graph, sequence, casts
        self.is_compiled = plan.compile and graph.blocks is not None
        self.sac, self.deferred = _sac_blocks(plan, bounds), _deferred_wgrad_blocks(plan, bounds)

    def __call__(self, index: int, module: nn.Module) -> Callable[..., Any]:
        forward: Callable[..., Any] = module.forward
        if self.is_compiled:
            block = self.model.get_submodule(self.graph.block(index))
            forward = compile_block(forward, block, index in self.sac, index in self.deferred)
        if self.casts is not None:
            forward = self.casts.around(forward, index)
        return forward if self.sequence is None else self.sequence.around(forward, index)


def _sac_blocks(plan: Plan, bounds: dict[int, tuple[int, int]]) -> set[int]:
    """Returns the indices of the blocks with selective recompute (`sac`)."""
    return {
        index
        for start, stop in bounds.values()
        for index in range(start, stop)
        if recompute_at(plan, index - start) == Recompute.sac
    }


def _deferred_wgrad_blocks(plan: Plan, bounds: dict[int, tuple[int, int]]) -> set[int]:
    """Returns the indices of the blocks whose weight gradients are deferred to W."""
    return {
        index
        for stage, (start, stop) in bounds.items()
        for index in range(start, stop)
        if plan.splits_backward(stage) and defers_wgrad(plan, index - start)
    }
