"""A model and a plan go in; the same model comes out, sharded over the mesh, with the engine that runs its passes.

Order: understand the model, check every size against the plan, shard tensors, keep this rank's stages, lay what is left into flat units,
set the gates. Every parameter is accounted for: a layer can never be lost in a cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from meshwright.anatomy import Anatomy, layers, read
from meshwright.base.errors import InputError
from meshwright.parallel.flat import FlatUnit
from meshwright.parallel.gates import Absent, Gate, Run, StageDone
from meshwright.parallel.keeping import Keeping, storage_of
from meshwright.parallel.mesh import Mesh, tie_group
from meshwright.parallel.objective import Batch, LossFunction, Objective
from meshwright.parallel.pipeline import Pipeline
from meshwright.parallel.tensor import SequenceRegion, partial_names, shard_model
from meshwright.parallel.zero import Zero
from meshwright.spec.layout import LayerSlots, Slot, units
from meshwright.spec.precision import Recipe
from meshwright.spec.runs import missing


@dataclass(frozen=True)
class Layer:
    """A layer of the model with the names of its parameters; `stage` is where it runs."""

    name: str
    parameters: tuple[str, ...]
    stage: int


@dataclass
class Parallel:
    """The engine: `forward_backward` over micro-batches, gradients in `zero`, shapes and splits for checkpoints."""

    model: nn.Module
    mesh: Mesh
    recipe: Recipe
    anatomy: Anatomy
    shapes: dict[str, torch.Size]
    zero: Zero
    objective: Objective
    run: Run
    gates: list[Gate]
    bounds: dict[int, tuple[int, int]]
    pipeline: Pipeline
    aliases: frozenset[str] = frozenset()
    """Other names in the model's saved state: buffers, and tied weights under their second name."""
    unfilled: frozenset[str] = frozenset()
    """Parameters that were built without memory and have no values yet."""

    def forward_backward(self, batches: Sequence[Batch], scale: float | None) -> torch.Tensor:
        """All micro-batches of this rank's replica; sum of losses on the last stage. `scale` None: no gradients."""
        if scale is not None:
            self.zero.begin_step(len(batches))
        self._open_ungated()
        total = self.pipeline.run(batches, scale)
        self.zero.close_all()
        return total

    def _open_ungated(self) -> None:
        """ZeRO 3: small units whose modules have no single forward (norms, positions) stay whole through the step."""
        for unit in self.zero.units:
            if not unit.gated:
                unit.open()

    def stage_forward(self, stage: int, batch: Batch, received: torch.Tensor | None) -> torch.Tensor:
        """One micro-batch through one stage: the hidden state for the next one, or the loss sum."""
        self.run.start, self.run.stop = self.bounds[stage]
        self.run.is_last = stage == self.mesh.plan.stages - 1
        self.run.received = received
        try:
            output = self.model(**self.objective.inputs(batch))
        except StageDone as done:
            return done.hidden
        finally:
            self.run.received = None
        return self.objective.sum(output, batch)


def parallelize_model(
    model: nn.Module, mesh: Mesh, recipe: Recipe, loss: LossFunction | None = None, anatomy: Anatomy | None = None
) -> Parallel:
    """Shard `model` in place. Its parameters must be whole and the same on every rank. `anatomy`: what `read` finds, where it is known.

    Raises InputError before anything is changed when a size does not divide.
    """
    plan = mesh.plan
    anatomy = anatomy or read(model, lend=True)
    _check(anatomy, mesh)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values of a text being written: training would keep them twice, recompute add them twice
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(mesh.device))
    if recipe.compute == "float64":
        model.double()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    unfilled = frozenset(name for name, parameter in model.named_parameters() if parameter.is_meta)
    aliases = frozenset(model.state_dict().keys() - shapes.keys())
    table = _place_layers(layers(model, anatomy), anatomy, mesh)
    accounted = [name for layer in table for name in layer.parameters]
    if sorted(accounted) != sorted(shapes):
        raise AssertionError(f"parameters lost or doubled in the cut: {sorted(set(shapes) ^ set(accounted))[:3]}")
    objective = Objective(model, loss, mesh.tp if anatomy.head is not None else None)
    shard_model(model, anatomy, mesh.tp, plan.sequence_parallel)
    if unfilled:
        _give_places(model, mesh.device)
    parameters = dict(model.named_parameters())
    stages = range(mesh.place.pp, plan.stages, plan.pp)
    mine = {stage: [layer for layer in table if layer.stage == stage] for stage in stages}
    tie_here = anatomy.tied and plan.stages > 1 and plan.stages - 1 in stages
    dtype = getattr(torch, recipe.compute)
    _drop_absent(model, anatomy, {name for held in mine.values() for layer in held for name in layer.parameters}, tie_here, dtype)
    flat, tied, by_layer = _lay_flat(mine, table, anatomy, mesh, recipe, parameters)
    zero = Zero(
        mesh,
        flat,
        partial_names(model, anatomy, plan.sequence_parallel) if plan.tp > 1 else set(),
        tied,
        tie_group(mesh) if anatomy.tied else None,
    )
    weights = {storage_of(unit.weights) for unit in zero.units}
    run = Run(start=0, stop=max(anatomy.count, 1), keeping=Keeping.of(plan, weights))
    gates = _set_gates(model, anatomy, mesh, run, by_layer, {name: layer for layer in table for name in layer.parameters})
    pipeline = Pipeline(mesh, lambda *arguments: engine.stage_forward(*arguments), zero.end_backward)
    engine = Parallel(model, mesh, recipe, anatomy, shapes, zero, objective, run, gates, _bounds(anatomy, mesh), pipeline)
    engine.aliases, engine.unfilled = aliases, unfilled
    return engine


def _check(anatomy: Anatomy, mesh: Mesh) -> None:
    plan = mesh.plan
    if missing(plan):
        raise InputError(f"plan {plan.name}: {', '.join(missing(plan))} can be planned and priced but do not run yet; leave them out")
    if plan.tp > 1 and not anatomy.regions:
        raise InputError(
            f"plan {plan.name}: tp({plan.tp}) needs a model with attention or feed-forward pairs to shard; this one has none: use tp1"
        )
    if plan.stages > 1 and anatomy.blocks is None:
        raise InputError(f"plan {plan.name}: {plan.stages} stages need a repeated list of blocks to cut between; none was found: use pp1")
    plan.stage_layers(max(anatomy.count, 1))


def _give_places(model: nn.Module, device: torch.device) -> None:
    """Parameters without memory become NaN of one element each, so that they can be laid flat and are never silently zero."""
    places: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                nan = torch.full((), torch.nan, dtype=parameter.dtype, device=device).expand(parameter.shape)
                places.setdefault(id(parameter), nn.Parameter(nan, requires_grad=parameter.requires_grad))
                module._parameters[name] = places[id(parameter)]


def _bounds(anatomy: Anatomy, mesh: Mesh) -> dict[int, tuple[int, int]]:
    """First and last-plus-one block of each stage."""
    bounds, first = {}, 0
    for stage, count in enumerate(mesh.plan.stage_layers(max(anatomy.count, 1))):
        bounds[stage] = (first, first + count)
        first += count
    return bounds


def _place_layers(named: list[tuple[str, list[str]]], anatomy: Anatomy, mesh: Mesh) -> list[Layer]:
    bounds = _bounds(anatomy, mesh)
    last = mesh.plan.stages - 1

    def stage_of(name: str) -> int:
        if name.startswith("block.") and anatomy.blocks is not None:
            index = int(name.partition(".")[2])
            return next(stage for stage, (start, stop) in bounds.items() if start <= index < stop)
        return last if name in ("back", "head") else 0

    return [Layer(name, tuple(parameters), stage_of(name)) for name, parameters in named]


def _drop_absent(model: nn.Module, anatomy: Anatomy, held: set[str], keep_head: bool, dtype: torch.dtype) -> None:
    """Replace every module none of whose parameters this rank holds by an `Absent`."""
    kept_prefix = f"{anatomy.head}." if keep_head and anatomy.head else None
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def visit(module: nn.Module, prefix: str) -> None:
        for child_name, child in list(module.named_children()):
            path = f"{prefix}{child_name}"
            inside = {names[id(parameter)] for parameter in child.parameters()}
            if not inside or (kept_prefix and f"{path}." == kept_prefix):
                continue
            if inside & held or (kept_prefix and kept_prefix.startswith(f"{path}.")):
                visit(child, f"{path}.")
            else:
                module._modules[child_name] = Absent(child, dtype)

    visit(model, "")


def _lay_flat(
    mine: dict[int, list[Layer]], table: list[Layer], anatomy: Anatomy, mesh: Mesh, recipe: Recipe, parameters: dict[str, nn.Parameter]
) -> tuple[dict[int, list[FlatUnit]], dict[int, bool], dict[str, FlatUnit]]:
    """Flat units by stage, tied units with whether they count in the norm here, and the unit of each layer."""
    plan = mesh.plan
    tied_layer = next((layer for layer in table if layer.name == "embedding"), None) if anatomy.tied else None
    stages: dict[int, list[FlatUnit]] = {}
    tied: dict[int, bool] = {}
    by_layer: dict[str, FlatUnit] = {}
    for stage, held in mine.items():
        shares_tie = tied_layer is not None and plan.stages > 1 and stage == plan.stages - 1
        present = [*held, *([tied_layer] if shares_tie and tied_layer is not None else [])]
        slots = [
            LayerSlots(
                layer.name,
                tuple(Slot(name, parameters[name].numel(), name in anatomy.splits and plan.tp > 1) for name in layer.parameters),
                alone=layer is tied_layer,
            )
            for layer in present
        ]
        stages[stage] = []
        for unit in units(slots, plan.zero, plan.dp_shard, plan.bucket, recipe.size):
            flat = FlatUnit(unit, {name: parameters[name] for name in unit.offsets}, mesh, recipe)
            stages[stage].append(flat)
            by_layer |= dict.fromkeys(unit.layers, flat)
            if tied_layer is not None and plan.stages > 1 and tied_layer.name in unit.layers:
                tied[id(flat)] = stage == 0
    return stages, tied, by_layer


def _set_gates(
    model: nn.Module, anatomy: Anatomy, mesh: Mesh, run: Run, by_layer: dict[str, FlatUnit], layer_of: dict[str, Layer]
) -> list[Gate]:
    plan = mesh.plan
    gates: list[Gate] = []
    if anatomy.blocks is not None:
        region = SequenceRegion(mesh.tp) if plan.sequence_parallel else None
        for index in range(anatomy.count):
            block = model.get_submodule(anatomy.block(index))
            if isinstance(block, Absent):
                continue
            gate = Gate(block, run, index)
            gate.units = [by_layer[f"block.{index}"]] if plan.zero == 3 else []
            if region is not None:
                gate.before = region.enter if index == 0 else None
                gate.after = region.leave if index == anatomy.count - 1 else None
            gates.append(gate)
    if plan.zero == 3:
        gates += _outer_gates(model, anatomy, run, by_layer, layer_of)
        blocks = [gate for gate in gates if gate.index is not None]
        for gate in gates:
            for unit in gate.units:
                unit.gated = True
        for first, second in pairwise(blocks):
            first.following, second.previous = second.units, first.units
    return gates


def _outer_gates(model: nn.Module, anatomy: Anatomy, run: Run, by_layer: dict[str, FlatUnit], layer_of: dict[str, Layer]) -> list[Gate]:
    """ZeRO 3 outside of the blocks: a gate on the one module that holds all of a layer's parameters, where there is one."""
    gates = []
    modules = dict(model.named_modules(remove_duplicate=False))
    by_path: dict[str, list[FlatUnit]] = {}
    for layer in {layer.name: layer for layer in layer_of.values()}.values():
        if layer.name in by_layer and not (anatomy.blocks and layer.name.startswith("block.")):
            owners = {name.rpartition(".")[0] for name in layer.parameters}
            by_path.setdefault(_common_path(owners), []).append(by_layer[layer.name])
    if anatomy.tied and anatomy.head is not None and "embedding" in by_layer:
        by_path.setdefault(anatomy.head, []).append(by_layer["embedding"])
    for path, held in by_path.items():
        module = modules.get(path)
        if path and module is not None and not isinstance(module, nn.ModuleList | nn.ModuleDict | Absent):
            gate = Gate(module, run)
            gate.units = held
            gates.append(gate)
    return gates


def _common_path(paths: set[str]) -> str:
    """
    >>> _common_path({"head.norm", "head.dense"})
    'head'
    """
    parts = [path.split(".") for path in sorted(paths)]
    common = []
    for step in zip(*parts, strict=False):
        if len(set(step)) > 1:
            break
        common.append(step[0])
    return ".".join(common)
