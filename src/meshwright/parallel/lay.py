"""The parameters of this rank, stage by stage, in flat units (spec/layout.py says which lie together)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import nn

from meshwright.anatomy import Anatomy
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline.gating import COPY
from meshwright.parallel.place import Layer
from meshwright.parallel.update.whole import NOTHING, Needs
from meshwright.parallel.zero.flat import FlatUnit
from meshwright.parallel.zero.zero import Tied
from meshwright.spec.layout import LayerSlots, Slot, units
from meshwright.spec.precision import Recipe


def lay_flat(
    mine: dict[int, list[Layer]],
    table: list[Layer],
    anatomy: Anatomy,
    mesh: Mesh,
    recipe: Recipe,
    parameters: dict[str, nn.Parameter],
    copies: Mapping[int, Mapping[str, nn.Parameter]],
    needs: Needs = NOTHING,
) -> tuple[dict[int, list[FlatUnit]], dict[int, Tied], dict[str, list[FlatUnit]]]:
    """Flat units by stage, those of which other stages have copies, and the units of each layer: what is trained and what is
    frozen lie apart, and what the optimizer `needs` whole. `copies` of a stage: those of what several stages of this rank compute with."""
    plan = mesh.plan
    tied_layer = next((layer for layer in table if layer.name == "embedding"), None) if anatomy.tied else None
    stages: dict[int, list[FlatUnit]] = {}
    tied: dict[int, Tied] = {}
    by_layer: dict[str, list[FlatUnit]] = {}
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
                _slots(layer, {name: parameters[name] for name in names}, split, layer is tied_layer or layer.name in shared)
                for layer in present
            ]
            for unit in units(slots, plan.zero, plan.shards, plan.bucket, recipe.size):
                (several,) = {shared.get(name) for name in unit.layers}
                flat = FlatUnit(
                    unit, {name: parameters[name] for name in unit.offsets}, mesh, recipe, mesh.sharing, needs.groups, several is not None
                )
                stages[stage].append(flat)
                for name in unit.layers:
                    by_layer.setdefault(COPY if shares_tie and name == "embedding" else name, []).append(flat)
                if several is not None:
                    tied[id(flat)] = Tied(unit.layers[0], several, stage == several[0])
        if needs.names:  # units of both kinds in forward order: backward then completes them in the reverse of it
            places = {layer.name: place for place, layer in enumerate(present)}
            stages[stage].sort(key=lambda flat: places[flat.unit.layers[0]])
    return stages, tied, by_layer


def _slots(layer: Layer, parameters: dict[str, nn.Parameter], split: Collection[str], alone: bool) -> LayerSlots:
    """The layer's parameters among `parameters`."""
    held = {name: parameters[name] for name in layer.parameters if name in parameters}
    return LayerSlots(layer.name, tuple(Slot(name, tensor.numel(), name in split) for name, tensor in held.items()), alone)
