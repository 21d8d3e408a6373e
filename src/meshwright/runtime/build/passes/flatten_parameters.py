"""The build pass that moves the parameters of this rank into flat buffers, one for each `FlatParamGroup`.
spec/layout.py defines which parameters share a group."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from meshwright.analysis.graph import ModelGraph
from meshwright.runtime.build.passes.expert_param_groups import build_expert_param_groups
from meshwright.runtime.build.passes.record import Build, FlatGroups, build_pass
from meshwright.runtime.build.passes.wrap_modules import TIED_EMBEDDING
from meshwright.runtime.build.stages.assignment import StageLayer
from meshwright.runtime.build.stages.local_stages import LocalStages
from meshwright.runtime.optim.full_tensor import FullTensorNeeds
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.runtime.zero.reducer import TiedParamGroup
from meshwright.spec.layout import LayerParams, ParamSlot, bucket_layouts
from meshwright.spec.precision import Recipe


@build_pass(reads=("recipe", "partition", "context", "experts", "local", "full_tensors"), writes=("flat",))
def flatten_parameters(build: Build) -> None:
    """Makes the groups of dense parameters, and then the groups of experts. In the order of groups, a layer's experts
    follow the layer's dense group."""
    partition, context, experts, local = build.partition, build.context, build.experts, build.local
    groups = _build_param_groups(
        local,
        partition.table,
        partition.graph,
        context,
        build.recipe,
        experts.without(local.parameters),
        build.full_tensors,
    )
    groups.layers.update(
        build_expert_param_groups(
            groups.stages,
            partition.layers,
            experts,
            local.parameters,
            context,
            build.recipe,
            build.full_tensors.groups,
        )
    )
    build.flat = groups


def _build_param_groups(
    local: LocalStages,
    table: list[StageLayer],
    graph: ModelGraph,
    context: ParallelContext,
    recipe: Recipe,
    parameters: dict[str, nn.Parameter],
    needs: FullTensorNeeds,
) -> FlatGroups:
    """Returns the flat groups of the dense `parameters`. Separate groups contain the sets of `_separate_kinds`. If
    several stages of this rank compute with a parameter, each stage has a copy of the parameter in its own group.
    """
    plan = context.plan
    tied_layer = next((layer for layer in table if layer.name == "embedding"), None) if graph.tied else None
    stages: dict[int, list[FlatParamGroup]] = {}
    tied: dict[int, TiedParamGroup] = {}
    by_layer: dict[str, list[FlatParamGroup]] = {}
    for stage, layers in local.layers.items():
        shares_tie = tied_layer is not None and plan.stages > 1 and stage == plan.stages - 1
        present = [*layers, *([tied_layer] if shares_tie and tied_layer is not None else [])]
        split = graph.splits.keys() if plan.tp > 1 else ()
        stages[stage] = []
        parameters = {**parameters, **local.copies.copies.get(stage, {})}
        ends = () if tied_layer is None or plan.stages == 1 else (0, plan.stages - 1)
        shared = {layer.name: layer.stages for layer in present if layer.also} | ({"embedding": ends} if ends else {})
        for names in _separate_kinds(parameters, needs):
            slots = [
                _param_slots(
                    layer,
                    {name: parameters[name] for name in names},
                    split,
                    layer is tied_layer or layer.name in shared,
                )
                for layer in present
            ]
            for unit in bucket_layouts(slots, plan.zero, plan.shards, plan.bucket, recipe.size):
                (several,) = {shared.get(name) for name in unit.layers}
                flat = FlatParamGroup(
                    unit,
                    {name: parameters[name] for name in unit.offsets},
                    context,
                    recipe,
                    context.sharing,
                    needs.groups,
                    several is not None,
                )
                stages[stage].append(flat)
                for name in unit.layers:
                    by_layer.setdefault(TIED_EMBEDDING if shares_tie and name == "embedding" else name, []).append(flat)
                if several is not None:
                    tied[id(flat)] = TiedParamGroup(unit.layers[0], several, stage == several[0])
        if needs.names:  # groups follow forward order, so backward completes them in reverse
            places = {layer.name: place for place, layer in enumerate(present)}
            stages[stage].sort(key=lambda flat: places[flat.layout.bucket.layers[0]])
    return FlatGroups(stages, tied, by_layer)


def _separate_kinds(parameters: dict[str, nn.Parameter], needs: FullTensorNeeds) -> list[set[str]]:
    """Returns the names of the trained parameters, those that the optimizer needs as full tensors, the frozen
    parameters, and the bytes of frozen weights in 4 bits."""
    trained = {name for name, tensor in parameters.items() if tensor.requires_grad}
    packed = {name for name, tensor in parameters.items() if tensor.dtype == torch.uint8}
    return [trained - needs.names, trained & needs.names, parameters.keys() - trained - packed, packed]


def _param_slots(
    layer: StageLayer, parameters: dict[str, nn.Parameter], split: Collection[str], is_own_bucket: bool
) -> LayerParams:
    """Returns the slots of those parameters of the layer that are in `parameters`. `split`: the names of the parameters
    that tensor ranks shard. `is_own_bucket`: whether the layer shares no group with other layers."""
    present = {name: parameters[name] for name in layer.parameters if name in parameters}
    return LayerParams(
        layer.name,
        tuple(ParamSlot(name, tensor.numel(), name in split) for name, tensor in present.items()),
        is_own_bucket,
    )
