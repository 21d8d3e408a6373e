"""Divides a model into pipeline stages: determines which stage runs each layer, and which stages compute with each
parameter. The build pass `partition_stages` calls `partition_model` before the model is sharded.

The result depends on the analysis run: one recorded forward of the whole model on an example batch. The model is not
changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from meshwright.analysis.block_lists import params_by_layer
from meshwright.analysis.dataflow import DataflowRecord, WeightUses, is_within
from meshwright.analysis.dataflow_recorder import record_dataflow
from meshwright.analysis.example_inputs import ExampleInputs
from meshwright.analysis.graph import ModelGraph
from meshwright.analysis.guarded_values import HOOK_ATTRIBUTES
from meshwright.core.errors import InputError
from meshwright.core.messages import Message
from meshwright.core.printable_text import reason_of
from meshwright.runtime.build.stages.assignment import (
    NO_PARAM_STAGES,
    ParamStages,
    StageLayer,
    assign_layers,
    check_block_calls,
    check_value_changes,
    find_buffer_stages,
    find_param_stages,
    stage_bounds,
)
from meshwright.runtime.pipeline.block_wrapper import BoundarySpec, layers_over_stacks, trace_boundaries
from meshwright.runtime.preflight.analysis_guard import AnalysisGuard
from meshwright.spec.enums import Recompute
from meshwright.spec.plan import Plan


@dataclass(frozen=True)
class StagePartition:
    """The pipeline stages of a model under a plan."""

    graph: ModelGraph
    """The structure of the model as the plan uses it."""
    stage_graph: ModelGraph
    """The structure of the model, with the blocks of all stacks numbered in the order of stages."""
    boundary: BoundarySpec | None
    """The tensors that cross stage boundaries. May be None only for plans with one stage."""
    table: list[StageLayer]
    """All layers of the model with their stages."""
    reads: WeightUses
    """For each weight, the modules that read it."""
    idle: frozenset[str]
    """Names of parameters that got no gradient in the analysis run. Empty for plans with one stage."""
    guard: AnalysisGuard | None
    """Checks later batches against the analysis run; None if the plan does not depend on an analysis run."""
    writers: Mapping[str, int] = field(default_factory=dict)
    """For each buffer that the forward writes to, the stage that updates it. Empty for plans with one stage."""

    @property
    def layers(self) -> dict[str, tuple[str, ...]]:
        """For each layer, the names of its parameters."""
        return {layer.name: layer.parameters for layer in self.table}

    @property
    def shared_stages(self) -> set[tuple[int, ...]]:
        """The sets of stages that compute with a common parameter."""
        last = max((layer.stage for layer in self.table), default=0)
        ends = {(0, last)} if self.graph.tied and last else set()
        return {layer.stages for layer in self.table if layer.also} | ends

    @property
    def stages(self) -> dict[str, tuple[int, ...]]:
        """For each parameter, the stages that compute with it, in order."""
        last = max((layer.stage for layer in self.table), default=0)
        ends = (0, last)
        return {
            name: ends if self.graph.tied and layer.name == "embedding" else layer.stages
            for layer in self.table
            for name in layer.parameters
        }


def partition_model(
    model: nn.Module, graph: ModelGraph, plan: Plan, example: ExampleInputs, own_loss: bool
) -> StagePartition:
    """Assigns the layers of `model` to stages.

    Raises:
        InputError: The model cannot be divided into the stages of the plan.
    """
    record = _analysis_record(model, graph, plan, example)
    boundary = _boundary_spec(model, graph, plan, record)
    graph = _untie_embedding(graph, plan, record)
    stage_graph = graph.across_stacks() if boundary else graph
    _check_boundary(plan, stage_graph, boundary)
    check_hooks(model, stage_graph, plan)
    stages_of = param_stages(stage_graph, plan, record, boundary, own_loss)
    named = (
        layers_over_stacks(model, graph, boundary)
        if boundary and boundary.is_over_stacks
        else params_by_layer(model, graph)
    )
    table = assign_layers(named, stage_graph, plan, boundary, stages_of)
    _check_all_assigned(table, {name for name, _ in model.named_parameters()})
    reads = {} if record is None else record.reads
    partition = StagePartition(graph, stage_graph, boundary, table, reads, frozenset(), None)
    if record is None or not (plan.stages > 1 or plan.zero == 3):
        return partition

    def derive(other: DataflowRecord) -> tuple[BoundarySpec | None, ParamStages]:
        if plan.stages == 1:
            return None, NO_PARAM_STAGES
        check_block_calls(other, stage_graph, plan)
        check_value_changes(other, stage_bounds(stage_graph, plan), plan)
        crossing = trace_boundaries(other, stage_graph)
        return crossing, param_stages(stage_graph, plan, other, crossing, own_loss)

    guard = AnalysisGuard(
        plan.name,
        model,
        stage_graph.block_paths,
        example,
        boundary if plan.stages > 1 else None,
        partition.stages,
        record.reads,
        derive,
    )
    if plan.stages == 1:
        return dataclasses.replace(partition, guard=guard)
    check_value_changes(record, stage_bounds(stage_graph, plan), plan)
    saved = model.state_dict(keep_vars=True).keys()
    writers = find_buffer_stages(record, stage_graph, stage_bounds(stage_graph, plan), saved, plan)
    return dataclasses.replace(partition, idle=record.params_without_grad, guard=guard, writers=writers)


def _analysis_record(model: nn.Module, graph: ModelGraph, plan: Plan, example: ExampleInputs) -> DataflowRecord | None:
    """Runs the model and returns the record of its data flow. Returns None if the plan does not depend on the record.

    Plans with several stages or ZeRO 3 need the record. All other plans use it only to number the blocks of several
    stacks. For such a plan, returns None if the model does not run.

    Raises:
        InputError: The plan needs the record, and the model does not run. Or the plan has several stages, and the
            forward writes to a parameter.
    """
    over_stacks = len(graph.stacks) > 1 and graph.embedding is not None
    if graph.blocks is None or not (plan.stages > 1 or plan.zero == 3 or over_stacks):
        return None
    blocks = graph.block_paths or tuple(graph.block(index) for index in range(graph.count))
    try:
        record = record_dataflow(model, blocks, example)
        if plan.stages > 1 and record.written_params:
            raise InputError(
                Message(
                    "the forward writes to the parameter {written_params}, and other stages would not get the new "
                    "value: write to it between steps, or use pp1",
                    written_params=min(record.written_params),
                )
            )
        return record
    except InputError as error:
        if plan.stages == 1 and plan.zero < 3:
            return None
        raise InputError(Message("plan {plan}: {message}", plan=plan.name, message=error)) from None


def _untie_embedding(graph: ModelGraph, plan: Plan, record: DataflowRecord | None) -> ModelGraph:
    """Returns `graph`, with `tied=False` if a module that is not the head reads the tied embedding after the start of
    the first block. The embedding is then treated like other parameters of several stages."""
    if record is None or plan.stages == 1 or not graph.tied or graph.head is None:
        return graph
    readers = record.reads.get(f"{graph.embedding}.weight", set()) | record.reads.get(f"{graph.head}.weight", set())
    is_read_elsewhere = any(reader.blocks_begun and not is_within(reader.path, (graph.head,)) for reader in readers)
    return dataclasses.replace(graph, tied=False) if is_read_elsewhere else graph


def param_stages(
    graph: ModelGraph,
    plan: Plan,
    record: DataflowRecord | None,
    boundary: BoundarySpec | None,
    own_loss: bool,
) -> ParamStages:
    """Returns for each parameter outside of the blocks the stages that compute with it. The result is empty if the plan
    has one stage."""
    if plan.stages == 1:
        return NO_PARAM_STAGES
    assert record is not None and boundary is not None
    return find_param_stages(record, graph, boundary, stage_bounds(graph, plan), plan, own_loss)


def _boundary_spec(
    model: nn.Module, graph: ModelGraph, plan: Plan, record: DataflowRecord | None
) -> BoundarySpec | None:
    """Returns which tensors cross stage boundaries. Returns None if the plan has one stage and the model one stack.

    The result also determines the order in which the blocks of several stacks are numbered. Plans with one stage use
    the same order as plans with several stages, so that recompute and the cost model refer to the same blocks under
    every plan. If the order cannot be determined, and the plan has one stage and uses neither recompute nor ZeRO 3,
    returns None.

    Raises:
        InputError: The plan needs the boundaries or the order, and the data flow does not determine them.
    """
    if plan.stages == 1 and (len(graph.stacks) < 2 or graph.embedding is None):
        return None
    try:
        if record is None:
            raise InputError(
                Message(
                    "the tensors that the stages of this model send each other are not known: give parallelize an "
                    "example batch, or use pp1"
                )
            )
        if plan.stages > 1:
            check_block_calls(record, graph, plan)
        boundary = trace_boundaries(record, graph)
        if boundary.is_over_stacks:
            layers_over_stacks(model, graph.across_stacks(), boundary)
        return boundary
    except InputError as error:
        if plan.stages > 1:
            raise
        if plan.zero == 3 or plan.recompute != Recompute.none:
            raise InputError(
                Message(
                    "plan {plan}: {message}",
                    plan=plan.name,
                    message=str(error).replace("use pp1", "use z2 at most and no recompute"),
                )
            ) from None
        return None


def _check_boundary(plan: Plan, graph: ModelGraph, boundary: BoundarySpec | None) -> None:
    plan.stage_layers(max(graph.count, 1))
    sequence = plan.sequence_parallel and not graph.against_sequence  # shard_model raises if the model excludes sp
    if boundary is not None and boundary.is_more and (sequence or plan.cp > 1):
        part = f"cp{plan.cp}" if plan.cp > 1 else "sp"
        raise InputError(
            Message(
                "plan {plan}: the blocks of this model pass on other tensors besides the hidden state, which {part} "
                "does not support: leave {part} out",
                plan=plan.name,
                part=part,
            )
        )


def _check_all_assigned(table: list[StageLayer], names: set[str]) -> None:
    accounted = [name for layer in table for name in layer.parameters]
    if sorted(accounted) != sorted(names):
        raise AssertionError(f"parameters lost or doubled in the cut: {sorted(names ^ set(accounted))[:3]}")


def check_hooks(model: nn.Module, graph: ModelGraph, plan: Plan) -> None:
    """Checks that hooks of the user have the same effect under the plan as on one device.

    Raises:
        InputError: The plan has several stages, which do not call hooks of blocks, and a block has a hook. Or
            tensor ranks shard a parameter that has a gradient hook. Or the plan has several tensor ranks, context ranks
            or stages, which may each compute a part of a gradient, and a gradient hook is not linear or fails with a
            random gradient.
    """
    for index in range(graph.count) if plan.stages > 1 and graph.blocks else ():
        block = model.get_submodule(graph.block(index))
        if any(getattr(block, hooks) for hooks in HOOK_ATTRIBUTES):
            raise InputError(
                Message(
                    "plan {plan}: {block} has a hook, but pipeline stages do not call the hooks of blocks: register "
                    "it on a layer inside the block, or use pp1",
                    plan=plan.name,
                    block=graph.block(index),
                )
            )
    for name, parameter in model.named_parameters() if plan.tp > 1 else ():
        if has_gradient_hooks(parameter) and name in graph.splits:
            raise InputError(
                Message(
                    "plan {plan}: {name} has a gradient hook, but its tensor-parallel shards do not call it: use tp1, "
                    "or remove the hook",
                    plan=plan.name,
                    name=name,
                )
            )
    for name, parameter in model.named_parameters() if max(plan.tp, plan.cp, plan.stages) > 1 else ():
        if not has_gradient_hooks(parameter):
            continue
        try:
            is_linear = _are_hooks_linear(parameter)
        except Exception as error:
            reason = reason_of(error)
            raise InputError(
                Message(
                    "plan {plan}: the gradient hook of {name} fails with a random gradient ({reason}), so it is not "
                    "known whether the hook is linear: use data parallelism alone, or let the hook accept any "
                    "gradient",
                    plan=plan.name,
                    name=name,
                    reason=reason,
                )
            ) from None
        if not is_linear:
            raise InputError(
                Message(
                    "plan {plan}: the gradient hook of {name} is not linear, and tensor, context or pipeline ranks "
                    "may each compute a part of that gradient: use data parallelism alone, or a linear hook",
                    plan=plan.name,
                    name=name,
                )
            )


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Returns whether the user registered hooks that run before or after the parameter's gradient is accumulated."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _are_hooks_linear(parameter: nn.Parameter) -> bool:
    """Returns whether the gradient hooks of `parameter` are linear. Compares the result for the sum of two random
    gradients with the sum of the two results."""
    kind = parameter.dtype if parameter.dtype in (torch.float64, torch.complex64, torch.complex128) else torch.float32
    random = torch.Generator().manual_seed(0)

    def hooked(gradient: torch.Tensor) -> torch.Tensor:
        gradient = gradient.clone()
        for hook in (parameter._backward_hooks or {}).values():
            result = hook(gradient)
            gradient = gradient if result is None else result
        holder = nn.Parameter(torch.zeros_like(gradient))
        holder.grad = gradient
        for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(holder)
        return holder.grad if holder.grad is not None else torch.zeros_like(gradient)

    with torch.no_grad():
        one, other = (
            torch.randn(parameter.shape, generator=random, dtype=kind).to(
                parameter.device if not parameter.is_meta else "cpu"
            )
            for _ in range(2)
        )
        of_sum, summed = hooked(one + other), hooked(one) + hooked(other)
        return bool(
            (of_sum - summed).norm() <= (1e-10 if kind in (torch.float64, torch.complex128) else 1e-4) * summed.norm()
        )
