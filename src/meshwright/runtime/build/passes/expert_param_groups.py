"""Makes the flat parameter groups (`FlatParamGroup`) of experts that are divided over expert ranks. The build pass in
flatten_parameters.py first makes the groups of dense parameters, and then calls this module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from meshwright.runtime.expert_parallel.groups import EpGroups
from meshwright.runtime.expert_parallel.token_dispatcher import is_expert_tensor_split
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.zero.param_group import FlatParamGroup
from meshwright.spec.layout import LayerParams, ParamSlot, bucket_layout
from meshwright.spec.precision import Recipe


def build_expert_param_groups(
    stages: dict[int, list[FlatParamGroup]],
    layers: Mapping[str, Sequence[str]],
    ranks: EpGroups,
    parameters: Mapping[str, nn.Parameter],
    context: ParallelContext,
    recipe: Recipe,
    groups: Mapping[str, int],
) -> dict[str, list[FlatParamGroup]]:
    """Inserts the groups of each layer's experts into `stages`, after the dense group of the layer. Returns the new
    groups, with the keys '<layer>.experts'. Trained and frozen parameters are in different groups.

    `layers`: the parameter names of each layer. `groups`: the index of each parameter's optimizer group.
    """
    made: dict[str, list[FlatParamGroup]] = {}
    for units in stages.values() if ranks.dealt else ():
        for dense in list(units):
            for layer in reversed(dense.layout.bucket.layers):
                dealt = {name: parameters[name] for name in layers.get(layer, ()) if name in ranks.dealt}
                if not dealt or f"{layer}.experts" in made:
                    continue
                made[f"{layer}.experts"] = _expert_param_groups(layer, dealt, ranks, context, recipe, groups)
                place = units.index(dense) + 1
                units[place:place] = made[f"{layer}.experts"]
    return made


def _expert_param_groups(
    layer: str,
    dealt: dict[str, nn.Parameter],
    ranks: EpGroups,
    context: ParallelContext,
    recipe: Recipe,
    groups: Mapping[str, int],
) -> list[FlatParamGroup]:
    units = []
    for trained in (True, False):
        params = {name: tensor for name, tensor in dealt.items() if tensor.requires_grad == trained}
        if params:
            slots = tuple(
                ParamSlot(name, tensor.numel(), ranks.shares > 1 and is_expert_tensor_split(ranks, name))
                for name, tensor in params.items()
            )
            unit = bucket_layout([LayerParams(f"{layer}.experts", slots)], ranks.sharing.shards)
            units.append(FlatParamGroup(unit, params, context, recipe, ranks.sharing, groups))
    return units
