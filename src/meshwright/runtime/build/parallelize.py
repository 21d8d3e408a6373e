"""A model and a plan go in; the same model comes out, sharded over the mesh, with the engine that runs its passes.

Order: understand the model, check every size against the plan, shard tensors, keep this rank's stages, lay what is left
into flat units,
set the gates. Every parameter is accounted for: a layer can never be lost in a cut.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypedDict, Unpack

import torch
from torch import nn

from meshwright.analysis.analyze import analyze_model
from meshwright.analysis.batch_coupling import find_batch_norm
from meshwright.analysis.example_inputs import DOES_NOT_RUN_PREFIX, ExampleInputs, make_example
from meshwright.analysis.graph import ModelGraph
from meshwright.core.errors import InputError
from meshwright.runtime.backend import backend_of
from meshwright.runtime.build.flatten import build_expert_param_groups, build_param_groups
from meshwright.runtime.build.stage_partition import partition_stages
from meshwright.runtime.build.wrap_blocks import install_context, wrap_blocks
from meshwright.runtime.comm.topology import GroupFactory
from meshwright.runtime.compile import check_compiler, compile_blocks
from meshwright.runtime.context_parallel.setup import make_context_state
from meshwright.runtime.deferred_init import check_unchanged_after_recording, deferred_init_of
from meshwright.runtime.engine import Engine
from meshwright.runtime.expert_parallel.groups import make_ep_groups
from meshwright.runtime.expert_parallel.load_balancing import make_aux_loss
from meshwright.runtime.expert_parallel.token_dispatcher import check_expert_plan as check_experts
from meshwright.runtime.expert_parallel.token_dispatcher import (
    local_dispatchers,
    shard_experts,
)
from meshwright.runtime.layout.partition import (
    MultiStageParameters,
    StageLayer,
    drop_other_stages,
    duplicate_tied_weight,
    find_extra_state,
    local_parameters,
    materialize_placeholders,
    paths_run_on_every_stage,
    stage_bounds,
    tied_stage_groups,
)
from meshwright.runtime.loss.cross_entropy import install_chunked_head
from meshwright.runtime.loss.objective import LossFunction, LossHead
from meshwright.runtime.optim.full_tensor import FullTensorNeeds, install_full_tensor_step
from meshwright.runtime.optim.param_groups import OptimizerFactory, ParamGroups
from meshwright.runtime.optim.rule_probe import check_update_rule, probe_update_rule
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.parameter_access import install_load_checks, loss_access_guard
from meshwright.runtime.pipeline.block_wrapper import StageCursor
from meshwright.runtime.pipeline.boundary_tensors import BoundaryState
from meshwright.runtime.pipeline.runner import ScheduleRunner
from meshwright.runtime.precision.float8 import apply_float8
from meshwright.runtime.preflight.step_checks import check_batch_norm
from meshwright.runtime.recompute.activation_offload import storage_id
from meshwright.runtime.recompute.policy import RecomputePolicy
from meshwright.runtime.tensor_parallel.layers import partial_grad_names, shard_model, with_full_logits
from meshwright.runtime.tensor_parallel.random import has_dropout
from meshwright.runtime.wgrad.accumulation import install_wgrad_accumulation
from meshwright.runtime.wgrad.deferred import install_deferred_wgrad
from meshwright.runtime.zero.diloco import make_outer_optimizer
from meshwright.runtime.zero.reducer import GradReducer
from meshwright.spec.constraints import block_count_violations, unsupported_parts
from meshwright.spec.enums import Recompute
from meshwright.spec.memory_policy import defers_wgrad, recompute_at
from meshwright.spec.plan import Plan
from meshwright.spec.precision import Recipe


class ModelHints(TypedDict, total=False):
    """What is known of a model besides: the loss where it returns no logits, what `read` finds of it, and a batch that
    it can be called with."""

    loss: LossFunction | None
    anatomy: ModelGraph | None
    example: ExampleInputs | None


def parallelize_model(
    model: nn.Module, mesh: ParallelContext, recipe: Recipe, make: OptimizerFactory, **known: Unpack[ModelHints]
) -> tuple[Engine, ParamGroups]:
    """Shard `model` in place. Its parameters must be whole and the same on every rank. `make`: the optimizer.

    Raises InputError before anything is changed when a size does not divide.
    """
    plan, later = mesh.plan, deferred_init_of(model)
    check_unchanged_after_recording(model, later)
    loss, example = known.get("loss"), make_example(model, known.get("example"))
    anatomy = _analyze_model(model, plan, known.get("anatomy"), example)
    anatomy = anatomy if loss is None else with_full_logits(model, anatomy)
    _check_plan(anatomy, mesh)
    _check_recipe(model, mesh, recipe)
    coupled = find_batch_norm(model)
    check_batch_norm(coupled, plan, 1)
    with later:
        _prepare_model(model, mesh.device, recipe)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    trained = tuple(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    unfilled = frozenset(
        name for name, parameter in model.named_parameters() if parameter.is_meta and later.seen(parameter) is None
    )
    layout = partition_stages(model, anatomy, mesh, example, loss is not None)
    anatomy, cut, wants, table = layout.anatomy, layout.cut, layout.wants, layout.table
    groups, needs = _probe_optimizer(model, make, table, mesh, recipe)
    beside = find_extra_state(model, cut, table, layout.writers)
    factory = GroupFactory(mesh.topology, mesh.device, mesh.groups)
    experts = make_ep_groups(mesh, factory, anatomy)
    context = make_context_state(model, anatomy, mesh, factory, example)
    tied_groups = tied_stage_groups(mesh, factory, layout.several)
    mesh = replace(mesh, groups=factory.groups)
    objective = LossHead(
        model,
        loss,
        mesh.tp if anatomy.shards_vocabulary(anatomy.head) else None,
        context.cut_labels if context else None,
    )
    with later:
        shard_model(model, experts.dense(anatomy), mesh.tp, plan.sequence_parallel)
        mixtures = shard_experts(model, anatomy, experts, mesh)
    materialize_placeholders(model, mesh.device, later)
    stages = plan.stages_of(mesh.coords.pp)
    mine = {stage: [layer for layer in table if stage in layer.stages] for stage in stages}
    tie_here = anatomy.tied and plan.stages > 1 and plan.stages - 1 in stages
    present = {name for held in mine.values() for layer in held for name in layer.parameters}
    parameters = local_parameters(model, table, present, tie_here)
    drop_other_stages(
        model,
        anatomy,
        present,
        tie_here,
        (mesh.device, getattr(torch, recipe.compute)),
        paths_run_on_every_stage(cut, wants),
    )
    objective.chunked = install_chunked_head(model, anatomy, plan, objective.group, loss is not None)
    shared = MultiStageParameters.of(model, table, stages)
    if tie_here and 0 in stages:
        shared.add(plan.stages - 1, duplicate_tied_weight(model, anatomy, table))
    flat, tied, by_layer = build_param_groups(
        mine, table, anatomy, mesh, recipe, experts.without(parameters), shared.copies, needs
    )
    by_layer |= build_expert_param_groups(
        flat, {layer.name: layer.parameters for layer in table}, experts, parameters, mesh, recipe, needs.groups
    )
    install_deferred_wgrad(model, cut, plan, stage_bounds(cut, mesh), flat)
    own = install_wgrad_accumulation(model, cut, flat, plan)
    partial = partial_grad_names(model, anatomy, plan.sequence_parallel) if plan.tp > 1 else set()
    zero = GradReducer(mesh, flat, partial, tied, tied_groups)
    zero.unused = zero.param_names = trained
    zero.disconnected = layout.idle
    weights = {storage_id(unit.weights) for unit in zero.units}
    run = StageCursor(
        start=0,
        stop=max(cut.count, 1),
        keeping=RecomputePolicy.of(mesh, weights),
        carry=BoundaryState(wants) if wants else None,
        shared=shared,
    )
    gates = wrap_blocks(
        model,
        cut,
        mesh,
        run,
        by_layer,
        {layer.name: layer.parameters for layer in table if not layer.also},
        layout.reads,
    )
    pipeline = ScheduleRunner(
        mesh,
        lambda *given: engine.stage_forward(*given),
        zero.end_backward,
        lambda stage: engine.parts(stage),
        recipe.exact,
        own,
    )
    engine = Engine(
        model, mesh, recipe, anatomy, shapes, zero, objective, run, gates, stage_bounds(cut, mesh), pipeline
    )
    engine.coupled_at_start, engine.balance = (
        coupled,
        make_aux_loss(model, loss, mesh, context.cut_labels if context else None),
    )
    engine.beside, engine.unfilled, engine.context, engine.experts = beside, unfilled, context, experts
    engine.mixtures, engine.preflight.analysed = local_dispatchers(model, mixtures), layout.analysed
    return _finish_engine(engine, needs), groups


def _analyze_model(model: nn.Module, plan: Plan, known: ModelGraph | None, example: ExampleInputs) -> ModelGraph:
    """What the model is made of; read anew, with numbers, where what is known of it was taken by shapes alone."""
    if known is None or (plan.tp > 1 and known.unsupported.get("proof")):
        known = analyze_model(model, use_random_weights=True, example=example, splits=plan.tp > 1)
    return known.for_tp(plan.tp)


def _probe_optimizer(
    model: nn.Module, make: OptimizerFactory, table: list[StageLayer], mesh: ParallelContext, recipe: Recipe
) -> tuple[ParamGroups, FullTensorNeeds]:
    """Of the optimizer, while its tensors are whole and the model's own; and what it needs whole."""
    in_block = {name: layer.name.startswith("block.") for layer in table for name in layer.parameters}
    own = dict(model.named_parameters())
    trained = {name: tensor.shape for name, tensor in own.items() if tensor.requires_grad}
    groups = ParamGroups(make, trained, in_block, {id(tensor): name for name, tensor in own.items()})
    rule = probe_update_rule(groups)
    check_update_rule(mesh.device.type, rule, recipe, mesh.plan)
    return groups, FullTensorNeeds.from_groups(groups, rule)


def _finish_engine(engine: Engine, needs: FullTensorNeeds) -> Engine:
    """What depends on all that is laid: whole tensors for the optimizer, the products of the recipe, compiled blocks,
    what is cut around them."""
    model, anatomy = engine.model, engine.anatomy
    install_full_tensor_step(engine, needs)
    if engine.mesh.plan.compile and anatomy.blocks is not None:
        blocks = [model.get_submodule(anatomy.block(index)) for index in range(anatomy.count)]
        compile_blocks(engine.gates, blocks, _sac_blocks(engine), _deferred_wgrad_blocks(engine))
    install_context(model, anatomy, engine.gates, engine.context)
    apply_float8(model, anatomy, engine.recipe)
    engine.outer = make_outer_optimizer(engine.recipe, engine.zero)
    install_load_checks(model, engine.mesh.plan.name)
    engine.objective.unreadable = loss_access_guard(engine)
    return engine


def _sac_blocks(engine: Engine) -> set[int]:
    """Blocks of this rank that recompute by operation."""
    plan = engine.mesh.plan
    return {
        index
        for start, stop in engine.bounds.values()
        for index in range(start, stop)
        if recompute_at(plan, index - start) == Recompute.sac
    }


def _deferred_wgrad_blocks(engine: Engine) -> set[int]:
    """Blocks of this rank whose weights wait for W."""
    plan, bounds = engine.mesh.plan, engine.bounds.items()
    return {
        index
        for stage, (start, stop) in bounds
        for index in range(start, stop)
        if plan.splits_backward(stage) and defers_wgrad(plan, index - start)
    }


def _prepare_model(model: nn.Module, device: torch.device, recipe: Recipe) -> None:
    """Buffers on the device, and nothing that only the writing of a text needs. Parameters stay where they are: this
    rank takes its part of them to its
    device (lay.py), which need not hold them all."""
    for module in model.modules():  # parts of a model may have configurations of their own
        config: Any = getattr(module, "config", None)
        if hasattr(config, "use_cache"):
            # keys and values of a text being written: training would keep them twice, recompute add them twice
            config.use_cache = False
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device).contiguous()  # pieces of a checkpoint are runs of it
    if recipe.compute == "float64":
        model.double()


def _check_plan(anatomy: ModelGraph, mesh: ParallelContext) -> None:
    plan = mesh.plan
    if unsupported_parts(plan):
        raise InputError(
            f"plan {plan.name}: {', '.join(unsupported_parts(plan))} can be planned and priced but do not run yet; leave them out"
        )
    if plan.tp > 1 and not (anatomy.regions or anatomy.experts):
        unseen = next((line for line in anatomy.findings if DOES_NOT_RUN_PREFIX in line), "")
        lines = [line for line in anatomy.findings if "whole" in line]
        some = [line for at, line in enumerate(lines, 1) if at == 1 or sum(map(len, lines[:at])) <= 200]
        why = "".join(f" ({line})" for line in ([unseen] if unseen else some))
        way = "give parallelize an example of its batch, or use tp1" if unseen else "use tp1"
        raise InputError(
            f"plan {plan.name}: tp({plan.tp}) needs a model with attention or feed-forward pairs to shard; this one has none{why}: {way}"
        )
    if plan.tp > 1 and (unproven := anatomy.unsupported.get("proof")):
        raise InputError(
            f"plan {plan.name}: tp({plan.tp}): {unproven}: give parallelize an example of its batch that it runs with, or use tp1"
        )
    if plan.zero == 3 and (written := anatomy.unsupported.get("gathering")):
        raise InputError(
            f"plan {plan.name}: the model writes to {written} in its own forward, and ZeRO 3 gathers weights anew for each: use z2 at most, or turn that off"
        )
    if plan.stages > 1 and (called := anatomy.unsupported.get("stages")):
        raise InputError(f"plan {plan.name}: {called}, and stages are left and entered between blocks: use pp1")
    if plan.stages > 1 and anatomy.blocks is None:
        raise InputError(
            f"plan {plan.name}: {plan.stages} stages need a repeated list of blocks to cut between; none was found: use pp1"
        )
    if plan.stages == 1:
        plan.stage_layers(max(anatomy.count, 1))
    for fault in block_count_violations(plan, max(anatomy.count, 1)):
        raise InputError(f"plan {plan.name}: {fault.message}")
    check_experts(anatomy, plan)


def _check_recipe(model: nn.Module, mesh: ParallelContext, recipe: Recipe) -> None:
    """What exact sums rest on (exact.py): one thread, no draws that differ between ranks, gradients of their own
    size."""
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
        raise InputError(
            f"exact: {recipe.name} scales its loss, so that gradients are not of their own size; use bf16 or fp32"
        )
    if has_dropout(model):
        raise InputError(
            "exact: the model drops at random, which other numbers of ranks do otherwise; set its rates of dropout to 0"
        )
    backend_of(mesh.device).make_deterministic()
