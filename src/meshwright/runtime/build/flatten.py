"""The parameters of this rank, stage by stage, in flat units (spec/layout.py says which lie together)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch import nn

from meshwright.analysis.graph import ModelGraph
from meshwright.runtime.build.wrap_blocks import TIED_EMBEDDING
from meshwright.runtime.expert_parallel.groups import EpGroups
from meshwright.runtime.expert_parallel.token_dispatcher import is_expert_tensor_split
from meshwright.runtime.layout.partition import StageLayer
from meshwright.runtime.optim.full_tensor import NO_FULL_TENSORS, FullTensorNeeds
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.runtime.zero.reducer import TiedParamGroup
from meshwright.spec.layout import LayerParams, ParamSlot, bucket_layout, bucket_layouts
from meshwright.spec.precision import Recipe


def build_param_groups(
    mine: dict[int, list[StageLayer]],
    table: list[StageLayer],
    anatomy: ModelGraph,
    mesh: ParallelContext,
    recipe: Recipe,
    parameters: dict[str, nn.Parameter],
    copies: Mapping[int, Mapping[str, nn.Parameter]],
    needs: FullTensorNeeds = NO_FULL_TENSORS,
) -> tuple[dict[int, list[FlatParamGroup]], dict[int, TiedParamGroup], dict[str, list[FlatParamGroup]]]:
    """Flat units by stage, those of which other stages have copies, and the units of each layer: what is trained and
    what is
    frozen lie apart, and what the optimizer `needs` whole. `copies` of a stage: those of what several stages of this
    rank compute with."""
    plan = mesh.plan
    tied_layer = next((layer for layer in table if layer.name == "embedding"), None) if anatomy.tied else None
    stages: dict[int, list[FlatParamGroup]] = {}
    tied: dict[int, TiedParamGroup] = {}
    by_layer: dict[str, list[FlatParamGroup]] = {}
    for stage, held in mine.items():
        shares_tie = tied_layer is not None and plan.stages > 1 and stage == plan.stages - 1
        present = [*held, *([tied_layer] if shares_tie and tied_layer is not None else [])]
        split = anatomy.splits.keys() if plan.tp > 1 else ()
        stages[stage] = []
        parameters = {**parameters, **copies.get(stage, {})}
        trained = [name for name, tensor in parameters.items() if tensor.requires_grad]
        frozen = parameters.keys() - trained
        ends = () if tied_layer is None or plan.stages == 1 else (0, plan.stages - 1)
        shared = {layer.name: layer.stages for layer in present if layer.also} | ({"embedding": ends} if ends else {})
        for names in (set(trained) - needs.names, set(trained) & needs.names, frozen):
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
                    mesh,
                    recipe,
                    mesh.sharing,
                    needs.groups,
                    several is not None,
                )
                stages[stage].append(flat)
                for name in unit.layers:
                    by_layer.setdefault(TIED_EMBEDDING if shares_tie and name == "embedding" else name, []).append(flat)
                if several is not None:
                    tied[id(flat)] = TiedParamGroup(unit.layers[0], several, stage == several[0])
        if needs.names:  # units of both kinds in forward order: backward then completes them in the reverse of it
            places = {layer.name: place for place, layer in enumerate(present)}
            stages[stage].sort(key=lambda flat: places[flat.layout.layers[0]])
    return stages, tied, by_layer


def _param_slots(
    layer: StageLayer, parameters: dict[str, nn.Parameter], split: Collection[str], alone: bool
) -> LayerParams:
    """The layer's parameters among `parameters`."""
    held = {name: parameters[name] for name in layer.parameters if name in parameters}
    return LayerParams(
        layer.name, tuple(ParamSlot(name, tensor.numel(), name in split) for name, tensor in held.items()), alone
    )


def build_expert_param_groups(
    stages: dict[int, list[FlatParamGroup]],
    layers: Mapping[str, Sequence[str]],
    ranks: EpGroups,
    parameters: Mapping[str, nn.Parameter],
    mesh: ParallelContext,
    recipe: Recipe,
    groups: Mapping[str, int],
) -> dict[str, list[FlatParamGroup]]:
    """Flat units for each layer's dealt experts, trained and frozen ones apart, behind the unit of the layer itself; by
    the layer's name and
    '.experts'."""
    made: dict[str, list[FlatParamGroup]] = {}
    for units in stages.values() if ranks.dealt else ():
        for dense in list(units):
            for layer in reversed(dense.layout.layers):
                dealt = {name: parameters[name] for name in layers.get(layer, ()) if name in ranks.dealt}
                if not dealt or f"{layer}.experts" in made:
                    continue
                made[f"{layer}.experts"] = _expert_param_groups(layer, dealt, ranks, mesh, recipe, groups)
                place = units.index(dense) + 1
                units[place:place] = made[f"{layer}.experts"]
    return made


def _expert_param_groups(
    layer: str,
    dealt: dict[str, nn.Parameter],
    ranks: EpGroups,
    mesh: ParallelContext,
    recipe: Recipe,
    groups: Mapping[str, int],
) -> list[FlatParamGroup]:
    units = []
    for trained in (True, False):
        held = {name: tensor for name, tensor in dealt.items() if tensor.requires_grad == trained}
        if held:
            slots = tuple(
                ParamSlot(name, tensor.numel(), ranks.shares > 1 and is_expert_tensor_split(ranks, name))
                for name, tensor in held.items()
            )
            unit = bucket_layout([LayerParams(f"{layer}.experts", slots)], ranks.sharing.shards)
            units.append(FlatParamGroup(unit, held, mesh, recipe, ranks.sharing, groups))
    return units
