"""A model and a plan go in; the same model comes out, sharded over the mesh, with the engine that runs its passes.

Order: understand the model, check every size against the plan, shard tensors, keep this rank's stages, lay what is left into flat units,
set the gates. Every parameter is accounted for: a layer can never be lost in a cut.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright.anatomy import Anatomy, layers, read
from meshwright.base.errors import InputError
from meshwright.parallel.backlog import put_off_weights
from meshwright.parallel.carry import Carry, Wants, carried, layers_over, numbered
from meshwright.parallel.context.blocks import Context
from meshwright.parallel.context.setup import context_of, set_context
from meshwright.parallel.expert import Mixture, lay_experts, refuse_balance, shard_experts, still_in
from meshwright.parallel.expert import check as check_experts
from meshwright.parallel.expert_ranks import ExpertRanks, expert_ranks
from meshwright.parallel.flat import FlatUnit
from meshwright.parallel.gates import Absent, Gate, Run, StageDone
from meshwright.parallel.gating import COPY, set_gates
from meshwright.parallel.keeping import Keeping, storage_of
from meshwright.parallel.mesh import Mesh, tie_group
from meshwright.parallel.objective import Batch, LossFunction, Objective
from meshwright.parallel.pipeline import Pipeline, Tensors
from meshwright.parallel.statistics import check_passes, over_batch
from meshwright.parallel.tensor import partial_names, shard_model
from meshwright.parallel.zero import Zero
from meshwright.spec.layout import LayerSlots, Slot, units
from meshwright.spec.plan import Plan
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
    experts: ExpertRanks | None = None
    mixtures: Sequence[Mixture] = ()
    context: Context | None = None
    aliases: frozenset[str] = frozenset()
    """Other names in the model's saved state: buffers, and tied weights under their second name."""
    unfilled: frozenset[str] = frozenset()
    """Parameters that were built without memory and have no values yet."""
    statistics: str = ""
    """A module with statistics over the batch."""

    def forward_backward(self, batches: Sequence[Batch], scale: float | None) -> torch.Tensor:
        """All micro-batches of this rank's replica; sum of losses on the last stage. `scale` None: no gradients."""
        if scale is not None:
            check_passes(self.statistics, self.mesh.plan, len(batches))
            self.zero.begin_step(len(batches))
            for mixture in self.mixtures:
                mixture.begin_step()
        if self.context is not None:
            self.context.waiting.seconds = 0.0
        self._open_ungated()
        total = self.pipeline.run(batches, scale)
        self.zero.close_all()
        return total

    @property
    def exposed(self) -> dict[str, float]:
        """Seconds that this rank waited in the last step, by the axis it waited on."""
        waited = {"data": self.zero.exposed, "pipeline": self.pipeline.wire.exposed}
        return waited if self.context is None else {**waited, "context": self.context.waiting.seconds}

    def _open_ungated(self) -> None:
        """ZeRO 3: small units whose modules have no single forward (norms, positions) stay whole through the step."""
        for unit in self.zero.units:
            if not unit.gated:
                unit.open()

    def parts(self, stage: int) -> int:
        """Tensors that a stage is sent."""
        carry = self.run.carry
        return 1 if carry is None else len(carry.wants.message(self.bounds[stage][0]))

    def stage_forward(self, stage: int, batch: Batch, received: Tensors) -> Tensors:
        """One micro-batch through one stage: the hidden state for the next one (or all that goes on), or the loss sum."""
        self.run.start, self.run.stop = self.bounds[stage]
        self.run.is_last = stage == self.mesh.plan.stages - 1
        self.run.received = received[0] if received and self.run.carry is None else None
        if self.run.carry is not None:
            self.run.carry.begin(self.run.start, self.run.stop, received)
        try:
            output = self.model(**self.objective.inputs(batch))
        except StageDone as done:
            return done.hidden if isinstance(done.hidden, tuple) else (done.hidden,)
        finally:
            self.run.received = None
            if self.run.carry is not None:
                self.run.carry.forget()
            if self.context is not None:
                self.context.forget()
        return (self.objective.sum(output, batch),)


def parallelize_model(
    model: nn.Module, mesh: Mesh, recipe: Recipe, loss: LossFunction | None = None, anatomy: Anatomy | None = None
) -> Parallel:
    """Shard `model` in place. Its parameters must be whole and the same on every rank. `anatomy`: what `read` finds, where it is known.

    Raises InputError before anything is changed when a size does not divide.
    """
    plan = mesh.plan
    anatomy = (anatomy or read(model, lend=True)).over(plan.tp)
    _check(anatomy, mesh)
    statistics = over_batch(model)
    check_passes(statistics, plan, 1)
    refuse_balance(model, loss)
    _prepare(model, mesh.device, recipe)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    unfilled = frozenset(name for name, parameter in model.named_parameters() if parameter.is_meta)
    aliases = frozenset(model.state_dict().keys() - shapes.keys())
    wants = carried(model, anatomy) if plan.stages > 1 or (plan.zero == 3 and len(anatomy.stacks) > 1 and anatomy.embedding) else None
    cut = numbered(anatomy) if wants else anatomy
    _check_carried(plan, cut, wants)
    table = _place_layers(layers_over(model, anatomy, wants) if wants else layers(model, anatomy), cut, mesh, wants)
    accounted = [name for layer in table for name in layer.parameters]
    if sorted(accounted) != sorted(shapes):
        raise AssertionError(f"parameters lost or doubled in the cut: {sorted(set(shapes) ^ set(accounted))[:3]}")
    experts = expert_ranks(mesh, anatomy)
    context = context_of(model, anatomy, mesh)
    objective = Objective(model, loss, mesh.tp if anatomy.head is not None else None, context.cut_labels if context else None)
    shard_model(model, experts.dense(anatomy), mesh.tp, plan.sequence_parallel)
    mixtures = shard_experts(model, anatomy, experts, plan.sequence_parallel)
    _give_places(model, mesh.device)
    parameters = dict(model.named_parameters())
    stages = plan.stages_of(mesh.place.pp)
    mine = {stage: [layer for layer in table if layer.stage == stage] for stage in stages}
    tie_here = anatomy.tied and plan.stages > 1 and plan.stages - 1 in stages
    present = {name for held in mine.values() for layer in held for name in layer.parameters}
    _drop_absent(model, anatomy, present, tie_here, getattr(torch, recipe.compute), _kept_paths(cut, wants))
    second = None
    if tie_here and 0 in stages:  # both ends of a V are here: two copies that are kept equal, as on two ranks
        head: Any = model.get_submodule(anatomy.head or "")
        second = head.weight = nn.Parameter(head.weight.detach().clone())
    flat, tied, by_layer = _lay_flat(mine, table, anatomy, mesh, recipe, experts.without(parameters), second)
    by_layer |= lay_experts(flat, {layer.name: layer.parameters for layer in table}, experts, parameters, mesh, recipe)
    put_off_weights(model, cut, plan, _bounds(cut, mesh), flat)
    zero = Zero(
        mesh,
        flat,
        partial_names(model, anatomy, plan.sequence_parallel) if plan.tp > 1 else set(),
        tied,
        tie_group(mesh) if anatomy.tied else None,
    )
    weights = {storage_of(unit.weights) for unit in zero.units}
    run = Run(start=0, stop=max(cut.count, 1), keeping=Keeping.of(plan, weights), carry=Carry(wants) if wants else None)
    gates = set_gates(model, cut, mesh, run, by_layer, {layer.name: layer.parameters for layer in table})
    set_context(model, anatomy, gates, context)
    pipeline = Pipeline(mesh, lambda *given: engine.stage_forward(*given), zero.end_backward, lambda stage: engine.parts(stage))
    engine = Parallel(model, mesh, recipe, anatomy, shapes, zero, objective, run, gates, _bounds(cut, mesh), pipeline)
    engine.statistics = statistics
    engine.aliases, engine.unfilled, engine.context, engine.experts = aliases, unfilled, context, experts
    engine.mixtures = still_in(model, mixtures)
    return engine


def _prepare(model: nn.Module, device: torch.device, recipe: Recipe) -> None:
    """The model on its device, without what only the writing of a text needs."""
    config: Any = getattr(model, "config", None)
    if hasattr(config, "use_cache"):
        config.use_cache = False  # keys and values of a text being written: training would keep them twice, recompute add them twice
    model._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))
    if recipe.compute == "float64":
        model.double()


def _check(anatomy: Anatomy, mesh: Mesh) -> None:
    plan = mesh.plan
    if missing(plan):
        raise InputError(f"plan {plan.name}: {', '.join(missing(plan))} can be planned and priced but do not run yet; leave them out")
    if plan.tp > 1 and not (anatomy.regions or anatomy.experts):
        raise InputError(
            f"plan {plan.name}: tp({plan.tp}) needs a model with attention or feed-forward pairs to shard; this one has none: use tp1"
        )
    if plan.stages > 1 and anatomy.blocks is None:
        raise InputError(f"plan {plan.name}: {plan.stages} stages need a repeated list of blocks to cut between; none was found: use pp1")
    if plan.stages == 1:
        plan.stage_layers(max(anatomy.count, 1))
    check_experts(anatomy, plan)


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


def _check_carried(plan: Plan, anatomy: Anatomy, wants: Wants | None) -> None:
    plan.stage_layers(max(anatomy.count, 1))
    if wants is not None and (plan.sequence_parallel or plan.cp > 1):
        part = "sp" if plan.sequence_parallel else f"cp{plan.cp}"
        raise InputError(
            f"plan {plan.name}: stages of this model hand on more than a hidden state, which {part} does not cut: leave it out"
        )


def _place_layers(named: list[tuple[str, list[str]]], anatomy: Anatomy, mesh: Mesh, wants: Wants | None) -> list[Layer]:
    bounds = _bounds(anatomy, mesh)
    last = mesh.plan.stages - 1

    def stage_of(name: str) -> int:
        if name.startswith("block.") and anatomy.blocks is not None:
            index = int(name.partition(".")[2])
            return next(stage for stage, (start, stop) in bounds.items() if start <= index < stop)
        if name.startswith("between.") and wants is not None:
            return stage_of(f"block.{wants.firsts[int(name.partition('.')[2]) + 1] - 1}")
        return last if name in ("back", "head") else 0

    return [Layer(name, tuple(parameters), stage_of(name)) for name, parameters in named]


def _kept_paths(anatomy: Anatomy, wants: Wants | None) -> tuple[str, ...]:
    """Blocks and embedding that the model's own code must come to on every stage, in shapes that are right."""
    return (*anatomy.cuts, *([f"{anatomy.embedding}."] if anatomy.embedding else [])) if wants else ()


def _drop_absent(model: nn.Module, anatomy: Anatomy, held: set[str], keep_head: bool, dtype: torch.dtype, cuts: Sequence[str]) -> None:
    """Replace every module none of whose parameters this rank holds by an `Absent`, but for those whose own code leads to the blocks `cuts`."""
    kept_prefix = f"{anatomy.head}." if keep_head and anatomy.head else None
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def visit(module: nn.Module, prefix: str) -> None:
        for child_name, child in list(module.named_children()):
            path = f"{prefix}{child_name}"
            inside = {names[id(parameter)] for parameter in child.parameters()}
            if not inside or (kept_prefix and f"{path}." == kept_prefix):
                continue
            leads = any(cut.startswith(f"{path}.") for cut in cuts)
            if inside & held or leads or (kept_prefix and kept_prefix.startswith(f"{path}.")):
                visit(child, f"{path}.")
            else:
                module._modules[child_name] = Absent(child, dtype)

    visit(model, "")


def _lay_flat(
    mine: dict[int, list[Layer]],
    table: list[Layer],
    anatomy: Anatomy,
    mesh: Mesh,
    recipe: Recipe,
    parameters: dict[str, nn.Parameter],
    second: nn.Parameter | None,
) -> tuple[dict[int, list[FlatUnit]], dict[int, bool], dict[str, list[FlatUnit]]]:
    """Flat units by stage, tied units with whether they count in the norm here, and the units of each layer: what is trained and what is
    frozen lie apart. `second`: the tied weight of the last stage where another stage of this rank holds the first."""
    plan = mesh.plan
    tied_layer = next((layer for layer in table if layer.name == "embedding"), None) if anatomy.tied else None
    stages: dict[int, list[FlatUnit]] = {}
    tied: dict[int, bool] = {}
    by_layer: dict[str, list[FlatUnit]] = {}
    for stage, held in mine.items():
        shares_tie = tied_layer is not None and plan.stages > 1 and stage == plan.stages - 1
        present = [*held, *([tied_layer] if shares_tie and tied_layer is not None else [])]
        split = anatomy.splits.keys() if plan.tp > 1 else ()
        stages[stage] = []
        if shares_tie and tied_layer is not None and second is not None:
            parameters = {**parameters, **dict.fromkeys(tied_layer.parameters, second)}
        for trained in (True, False):
            slots = [_slots(layer, parameters, split, trained, layer is tied_layer) for layer in present]
            for unit in units(slots, plan.zero, plan.shards, plan.bucket, recipe.size):
                flat = FlatUnit(unit, {name: parameters[name] for name in unit.offsets}, mesh, recipe, mesh.sharing)
                stages[stage].append(flat)
                for name in unit.layers:
                    by_layer.setdefault(COPY if shares_tie and name == "embedding" else name, []).append(flat)
                if tied_layer is not None and plan.stages > 1 and tied_layer.name in unit.layers:
                    tied[id(flat)] = stage == 0
    return stages, tied, by_layer


def _slots(layer: Layer, parameters: dict[str, nn.Parameter], split: Collection[str], trained: bool, alone: bool) -> LayerSlots:
    """The layer's parameters that are trained, or those that are not; of those in `parameters`."""
    held = {name: parameters[name] for name in layer.parameters if name in parameters and parameters[name].requires_grad == trained}
    return LayerSlots(layer.name, tuple(Slot(name, tensor.numel(), name in split) for name, tensor in held.items()), alone)
