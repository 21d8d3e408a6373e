"""The build pass that removes the modules of stages that other ranks run."""

from __future__ import annotations

import torch

from meshwright.runtime.build.passes.record import Build, build_pass
from meshwright.runtime.build.stages import local_stages
from meshwright.runtime.build.stages.assignment import paths_run_on_every_stage
from meshwright.runtime.build.stages.local_stages import LocalStages


@build_pass(reads=("model", "recipe", "partition", "context"), writes=("local",))
def drop_other_stages(build: Build) -> None:
    """Replaces the modules of other stages by placeholders. If several stages of this rank compute with a parameter,
    makes a copy for each of these stages.

    A rank that runs both the first and the last stage has two copies of a tied weight.
    """
    model, partition, plan = build.model, build.partition, build.context.plan
    graph, table = partition.graph, partition.table
    stages = plan.stages_of(build.context.coords.pp)
    layers = {stage: [layer for layer in table if stage in layer.stages] for stage in stages}
    has_tied_head = graph.tied and plan.stages > 1 and plan.stages - 1 in stages
    present = {name for group in layers.values() for layer in group for name in layer.parameters}
    parameters = local_stages.local_parameters(model, table, present, has_tied_head)
    kind = (build.context.device, getattr(torch, build.recipe.compute))
    cuts = paths_run_on_every_stage(partition.stage_graph, partition.boundary)
    local_stages.drop_other_stages(model, graph, present, has_tied_head, kind, cuts)
    copies = local_stages.copy_shared_parameters(model, table, stages)
    if has_tied_head and 0 in stages:
        copies.add(plan.stages - 1, local_stages.duplicate_tied_weight(model, graph, table))
    build.local = LocalStages(layers, parameters, copies)
