"""Defers weight gradients to W where the schedule splits the backward, and accumulates others in place."""

from __future__ import annotations

from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.build.stages.assignment import stage_bounds
from meshwright.runtime.build.weight_grads import install_deferred_wgrad, install_wgrad_accumulation


@build_pass(reads=("model", "partition", "context", "flat"), writes=("wgrad_accumulation",))
def defer_weight_grads(build: Build) -> None:
    """Replaces the forward of matrix layers by ones that compute the weight gradient later or in place."""
    model, graph, plan, groups = build.model, build.partition.stage_graph, build.context.plan, build.flat.stages
    install_deferred_wgrad(model, graph, plan, stage_bounds(graph, plan), groups)
    build.wgrad_accumulation = install_wgrad_accumulation(model, graph, groups, plan)
