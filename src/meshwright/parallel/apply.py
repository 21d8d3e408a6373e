"""A model and a plan go in; the same model comes out, sharded over the mesh, with the engine that runs its passes.

Order: understand the model, check every size against the plan, shard tensors, keep this rank's stages, lay what is left into flat units,
set the gates. Every parameter is accounted for: a layer can never be lost in a cut.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from meshwright.anatomy import Anatomy, read
from meshwright.anatomy.inputs import UNSEEN, Example, example_of
from meshwright.anatomy.rows import over_batch
from meshwright.base.errors import InputError
from meshwright.parallel.compiled import check_compiler, compile_blocks
from meshwright.parallel.context.setup import context_of, set_context
from meshwright.parallel.engine import Parallel
from meshwright.parallel.experts.balance import balance_of
from meshwright.parallel.experts.dispatch import check as check_experts
from meshwright.parallel.experts.dispatch import lay_experts, shard_experts, still_in
from meshwright.parallel.experts.ranks import expert_ranks
from meshwright.parallel.followed import check_followed
from meshwright.parallel.full import watch_loads
from meshwright.parallel.later import later_of
from meshwright.parallel.lay import lay_flat
from meshwright.parallel.layout import layout_of
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.objective import LossFunction, Objective
from meshwright.parallel.offload.activations import storage_of
from meshwright.parallel.pipeline.backlog import put_off_weights
from meshwright.parallel.pipeline.carry import Carry
from meshwright.parallel.pipeline.gates import Run
from meshwright.parallel.pipeline.gating import set_gates
from meshwright.parallel.pipeline.keeping import Keeping
from meshwright.parallel.pipeline.play import Pipeline
from meshwright.parallel.pipeline.shared import Shared, ties_of
from meshwright.parallel.place import (
    Layer,
    beside_parameters,
    drop_absent,
    give_places,
    held_of,
    kept_paths,
    second_copy,
    stage_bounds,
)
from meshwright.parallel.tensor.chance import drops
from meshwright.parallel.tensor.chunked import chunk_loss
from meshwright.parallel.tensor.layers import partial_names, shard_model, with_whole_logits
from meshwright.parallel.tensor.products import use_products
from meshwright.parallel.tensor.statistics import check_passes
from meshwright.parallel.unreadable import during_loss
from meshwright.parallel.update.door import check_rule, rule_of
from meshwright.parallel.update.groups import Groups, MakeOptimizer
from meshwright.parallel.update.whole import Needs, give_whole
from meshwright.parallel.zero.in_place import make_in_place
from meshwright.parallel.zero.local import outer_of
from meshwright.parallel.zero.zero import Zero
from meshwright.spec.plan import Plan, Recompute
from meshwright.spec.precision import Recipe
from meshwright.spec.rules import count_faults
from meshwright.spec.runs import missing


class Known(TypedDict, total=False):
    """What is known of a model besides: the loss where it returns no logits, what `read` finds of it, and a batch that it can be called with."""

    loss: LossFunction | None
    anatomy: Anatomy | None
    example: Example | None


def parallelize_model(model: nn.Module, mesh: Mesh, recipe: Recipe, make: MakeOptimizer, **known: Unpack[Known]) -> tuple[Parallel, Groups]:
    """Shard `model` in place. Its parameters must be whole and the same on every rank. `make`: the optimizer.

    Raises InputError before anything is changed when a size does not divide.
    """
    plan, later = mesh.plan, later_of(model)
    check_followed(model, later)
    loss, example = known.get("loss"), example_of(model, known.get("example"))
    anatomy = _understood(model, plan, known.get("anatomy"), example)
    anatomy = anatomy if loss is None else with_whole_logits(model, anatomy)
    _check(anatomy, mesh)
    _check_recipe(model, mesh, recipe)
    coupled = over_batch(model)
    check_passes(coupled, plan, 1)
    with later:
        _prepare(model, mesh.device, recipe)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    unfilled = frozenset(name for name, parameter in model.named_parameters() if parameter.is_meta and later.seen(parameter) is None)
    layout = layout_of(model, anatomy, mesh, example, loss is not None)
    anatomy, cut, wants, table = layout.anatomy, layout.cut, layout.wants, layout.table
    groups, needs = _groups(model, make, table, mesh, recipe)
    beside = beside_parameters(model, cut, table, layout.writers)
    experts, context = expert_ranks(mesh, anatomy), context_of(model, anatomy, mesh, example)
    objective = Objective(model, loss, mesh.tp if anatomy.divides(anatomy.head) else None, context.cut_labels if context else None)
    with later:
        shard_model(model, experts.dense(anatomy), mesh.tp, plan.sequence_parallel)
        mixtures = shard_experts(model, anatomy, experts, mesh)
    give_places(model, mesh.device, later)
    stages = plan.stages_of(mesh.place.pp)
    mine = {stage: [layer for layer in table if stage in layer.stages] for stage in stages}
    tie_here = anatomy.tied and plan.stages > 1 and plan.stages - 1 in stages
    present = {name for held in mine.values() for layer in held for name in layer.parameters}
    parameters = held_of(model, table, present, tie_here)
    drop_absent(model, anatomy, present, tie_here, (mesh.device, getattr(torch, recipe.compute)), kept_paths(cut, wants))
    objective.chunked = chunk_loss(model, anatomy, plan, objective.group, loss is not None)
    shared = Shared.of(model, table, stages)
    if tie_here and 0 in stages:
        shared.add(plan.stages - 1, second_copy(model, anatomy, table))
    flat, tied, by_layer = lay_flat(mine, table, anatomy, mesh, recipe, experts.without(parameters), shared.copies, needs)
    by_layer |= lay_experts(flat, {layer.name: layer.parameters for layer in table}, experts, parameters, mesh, recipe, needs.groups)
    put_off_weights(model, cut, plan, stage_bounds(cut, mesh), flat)
    own = make_in_place(model, cut, flat, plan)
    partial = partial_names(model, anatomy, plan.sequence_parallel) if plan.tp > 1 else set()
    zero = Zero(mesh, flat, partial, tied, ties_of(mesh, layout.several))
    zero.unreached = zero.names = trained
    zero.unconnected = layout.idle
    weights = {storage_of(unit.weights) for unit in zero.units}
    run = Run(start=0, stop=max(cut.count, 1), keeping=Keeping.of(mesh, weights), carry=Carry(wants) if wants else None, shared=shared)
    gates = set_gates(model, cut, mesh, run, by_layer, {layer.name: layer.parameters for layer in table if not layer.also}, layout.reads)
    pipeline = Pipeline(
        mesh, lambda *given: engine.stage_forward(*given), zero.end_backward, lambda stage: engine.parts(stage), recipe.exact, own
    )
    engine = Parallel(model, mesh, recipe, anatomy, shapes, zero, objective, run, gates, stage_bounds(cut, mesh), pipeline)
    engine.coupled_at_start, engine.balance = coupled, balance_of(model, loss, mesh, context.cut_labels if context else None)
    engine.beside, engine.unfilled, engine.context, engine.experts = beside, unfilled, context, experts
    engine.mixtures, engine.preflight.analysed = still_in(model, mixtures), layout.analysed
    return _finished(engine, needs), groups


def _understood(model: nn.Module, plan: Plan, known: Anatomy | None, example: Example) -> Anatomy:
    """What the model is made of; read anew, with numbers, where what is known of it was taken by shapes alone."""
    if known is None or (plan.tp > 1 and known.against.get("proof")):
        known = read(model, lend=True, example=example, splits=plan.tp > 1)
    return known.over(plan.tp)


def _groups(model: nn.Module, make: MakeOptimizer, table: list[Layer], mesh: Mesh, recipe: Recipe) -> tuple[Groups, Needs]:
    """Of the optimizer, while its tensors are whole and the model's own; and what it needs whole."""
    in_block = {name: layer.name.startswith("block.") for layer in table for name in layer.parameters}
    own = dict(model.named_parameters())
    trained = {name: tensor.shape for name, tensor in own.items() if tensor.requires_grad}
    groups = Groups(make, trained, in_block, {id(tensor): name for name, tensor in own.items()})
    rule = rule_of(groups)
    check_rule(mesh.device.type, rule, recipe, mesh.plan)
    return groups, Needs.of(groups, rule)


def _finished(engine: Parallel, needs: Needs) -> Parallel:
    """What depends on all that is laid: whole tensors for the optimizer, the products of the recipe, compiled blocks, what is cut around them."""
    model, anatomy = engine.model, engine.anatomy
    give_whole(engine, needs)
    if engine.mesh.plan.compile and anatomy.blocks is not None:
        blocks = [model.get_submodule(anatomy.block(index)) for index in range(anatomy.count)]
        compile_blocks(engine.gates, blocks, _leaner(engine), _put_off(engine))
    set_context(model, anatomy, engine.gates, engine.context)
    use_products(model, anatomy, engine.recipe)
    engine.outer = outer_of(engine.recipe, engine.zero)
    watch_loads(model, engine.mesh.plan.name)
    engine.objective.unreadable = during_loss(engine)
    return engine


def _leaner(engine: Parallel) -> set[int]:
    """Blocks of this rank that recompute by operation."""
    plan = engine.mesh.plan
    return {
        index for start, stop in engine.bounds.values() for index in range(start, stop) if plan.recompute_at(index - start) == Recompute.sac
    }


def _put_off(engine: Parallel) -> set[int]:
    """Blocks of this rank whose weights wait for W."""
    plan, bounds = engine.mesh.plan, engine.bounds.items()
    return {
        index for stage, (start, stop) in bounds for index in range(start, stop) if plan.separates(stage) and plan.puts_off(index - start)
    }


def _prepare(model: nn.Module, device: torch.device, recipe: Recipe) -> None:
    """Buffers on the device, and nothing that only the writing of a text needs. Parameters stay where they are: this rank takes its part of them to its
    device (lay.py), which need not hold them all."""
    for module in model.modules():  # parts of a model may have configurations of their own
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            config.use_cache = False  # keys and values of a text being written: training would keep them twice, recompute add them twice
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device).contiguous()  # pieces of a checkpoint are runs of it
    if recipe.compute == "float64":
        model.double()


def _check(anatomy: Anatomy, mesh: Mesh) -> None:
    plan = mesh.plan
    if missing(plan):
        raise InputError(f"plan {plan.name}: {', '.join(missing(plan))} can be planned and priced but do not run yet; leave them out")
    if plan.tp > 1 and not (anatomy.regions or anatomy.experts):
        unseen = next((line for line in anatomy.understood if UNSEEN in line), "")
        lines = [line for line in anatomy.understood if "whole" in line]
        some = [line for at, line in enumerate(lines, 1) if at == 1 or sum(map(len, lines[:at])) <= 200]
        why = "".join(f" ({line})" for line in ([unseen] if unseen else some))
        way = "give parallelize an example of its batch, or use tp1" if unseen else "use tp1"
        raise InputError(
            f"plan {plan.name}: tp({plan.tp}) needs a model with attention or feed-forward pairs to shard; this one has none{why}: {way}"
        )
    if plan.tp > 1 and (unproven := anatomy.against.get("proof")):
        raise InputError(
            f"plan {plan.name}: tp({plan.tp}): {unproven}: give parallelize an example of its batch that it runs with, or use tp1"
        )
    if plan.zero == 3 and (written := anatomy.against.get("gathering")):
        raise InputError(
            f"plan {plan.name}: the model writes to {written} in its own forward, and ZeRO 3 gathers weights anew for each: use z2 at most, or turn that off"
        )
    if plan.stages > 1 and (called := anatomy.against.get("stages")):
        raise InputError(f"plan {plan.name}: {called}, and stages are left and entered between blocks: use pp1")
    if plan.stages > 1 and anatomy.blocks is None:
        raise InputError(f"plan {plan.name}: {plan.stages} stages need a repeated list of blocks to cut between; none was found: use pp1")
    if plan.stages == 1:
        plan.stage_layers(max(anatomy.count, 1))
    for fault in count_faults(plan, max(anatomy.count, 1)):
        raise InputError(f"plan {plan.name}: {fault.message}")
    check_experts(anatomy, plan)


def _check_recipe(model: nn.Module, mesh: Mesh, recipe: Recipe) -> None:
    """What exact sums rest on (exact.py): one thread, no draws that differ between ranks, gradients of their own size."""
    check_compiler(mesh.plan, mesh.device)
    for name, parameter in model.named_parameters():
        if parameter.is_complex():
            raise InputError(
                f"{name} {tuple(parameter.shape)} is complex, and weights are trained as real numbers of the precision's type: "
                "hold it as a real parameter with a last dimension of 2, and take torch.view_as_complex of it in forward"
            )
        if not parameter.is_floating_point():
            raise InputError(
                f"{name} {tuple(parameter.shape)} is a parameter of {str(parameter.dtype).removeprefix('torch.')}, and weights are laid as numbers of the "
                "precision's type, which would round it: hold it as a buffer (register_buffer)"
            )
    if not recipe.exact:
        return
    if recipe.loss_scaling:
        raise InputError(f"exact: {recipe.name} scales its loss, so that gradients are not of their own size; use bf16 or fp32")
    if drops(model):
        raise InputError("exact: the model drops at random, which other numbers of ranks do otherwise; set its rates of dropout to 0")
    if mesh.device.type == "cpu":
        torch.set_num_threads(1)
    else:
        torch.use_deterministic_algorithms(True)
