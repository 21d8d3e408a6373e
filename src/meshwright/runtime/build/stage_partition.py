"""Which stage of a plan holds which layer of a model, by the analysis run (analysis/dataflow_recorder.py), and what may
not be cut so."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from meshwright.analysis.block_lists import params_by_layer
from meshwright.analysis.dataflow import DataflowRecord, WeightUses, is_within
from meshwright.analysis.dataflow_recorder import record_dataflow
from meshwright.analysis.example_inputs import ExampleInputs
from meshwright.analysis.graph import ModelGraph
from meshwright.core.errors import InputError
from meshwright.runtime.layout.partition import (
    NO_PARAM_STAGES,
    ParamStages,
    StageLayer,
    assign_layers,
    check_block_calls,
    check_stage_cut,
    find_buffer_stages,
    find_param_stages,
    stage_bounds,
)
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.pipeline.boundary_tensors import BoundarySpec, layers_over_stacks, trace_boundaries
from meshwright.runtime.preflight.step_checks import AnalysisGuard
from meshwright.spec.enums import Recompute
from meshwright.spec.plan import Plan


@dataclass(frozen=True)
class StagePartition:
    """`anatomy` as this plan uses it, `cut` with blocks numbered as stages cut them, `wants` of what goes between
    stages, the `table` of layers;
    `reads`: where weights are read; `idle`: parameters that no gradient was seen to come to; `analysed`: for batches
    that come."""

    anatomy: ModelGraph
    cut: ModelGraph
    wants: BoundarySpec | None
    table: list[StageLayer]
    reads: WeightUses
    idle: frozenset[str]
    analysed: AnalysisGuard | None
    writers: Mapping[str, int] = field(default_factory=dict)
    """The stage that writes to a buffer, of those that the forward writes to."""

    @property
    def several(self) -> set[tuple[int, ...]]:
        """Stages that hold the same parameters."""
        last = max((layer.stage for layer in self.table), default=0)
        ends = {(0, last)} if self.anatomy.tied and last else set()
        return {layer.stages for layer in self.table if layer.also} | ends


def partition_stages(
    model: nn.Module, anatomy: ModelGraph, mesh: ParallelContext, example: ExampleInputs, own_loss: bool
) -> StagePartition:
    """Of a model that is still whole. Raises InputError where it cannot be cut as the plan says."""
    plan = mesh.plan
    record = _analysis_record(model, anatomy, plan, example)
    wants = _boundary_spec(model, anatomy, plan, record)
    anatomy = _untie_embedding(anatomy, plan, record)
    cut = anatomy.across_stacks() if wants else anatomy
    _check_boundary(plan, cut, wants)
    check_stage_cut(model, cut, plan)
    holders = _param_stages(cut, mesh, record, wants, own_loss)
    named = (
        layers_over_stacks(model, anatomy, wants) if wants and wants.is_over_stacks else params_by_layer(model, anatomy)
    )
    table = assign_layers(named, cut, mesh, wants, holders)
    _check_all_assigned(table, {name for name, _ in model.named_parameters()})
    if record is None or not (plan.stages > 1 or plan.zero == 3):
        return StagePartition(anatomy, cut, wants, table, {} if record is None else record.reads, frozenset(), None)

    def derive(other: DataflowRecord) -> tuple[BoundarySpec | None, ParamStages]:
        if plan.stages == 1:
            return None, NO_PARAM_STAGES
        check_block_calls(other, cut, plan)
        found = trace_boundaries(other, cut)
        return found, _param_stages(cut, mesh, other, found, own_loss)

    ends = (0, plan.stages - 1)
    held = {
        name: ends if anatomy.tied and layer.name == "embedding" else layer.stages
        for layer in table
        for name in layer.parameters
    }
    analysed = AnalysisGuard(
        plan.name, model, cut.block_paths, example, wants if plan.stages > 1 else None, held, record.reads, derive
    )
    if plan.stages == 1:
        return StagePartition(anatomy, cut, wants, table, record.reads, frozenset(), analysed)
    writers = find_buffer_stages(record, cut, stage_bounds(cut, mesh), model.state_dict(keep_vars=True).keys(), plan)
    return StagePartition(anatomy, cut, wants, table, record.reads, record.params_without_grad, analysed, writers)


def _analysis_record(
    model: nn.Module, anatomy: ModelGraph, plan: Plan, example: ExampleInputs
) -> DataflowRecord | None:
    """The analysis run, for plans that rest on it: stages, weights that are gathered, blocks numbered over several
    stacks.
    Raises InputError where a plan needs it and the model cannot be run."""
    over_stacks = len(anatomy.stacks) > 1 and anatomy.embedding is not None
    if anatomy.blocks is None or not (plan.stages > 1 or plan.zero == 3 or over_stacks):
        return None
    blocks = anatomy.block_paths or tuple(anatomy.block(index) for index in range(anatomy.count))
    try:
        record = record_dataflow(model, blocks, example)
        if plan.stages > 1 and record.written_params:
            raise InputError(
                f"the model writes to its parameter {min(record.written_params)} in its forward, and other stages have none of it: write to it between steps, or use pp1"
            )
        return record
    except InputError as error:
        if plan.stages == 1 and plan.zero < 3:
            return None
        raise InputError(f"plan {plan.name}: {error}") from None


def _untie_embedding(anatomy: ModelGraph, plan: Plan, record: DataflowRecord | None) -> ModelGraph:
    """A tied table that the last stage reads past its head as well is one that stages share."""
    if record is None or plan.stages == 1 or not anatomy.tied or anatomy.head is None:
        return anatomy
    readers = record.reads.get(f"{anatomy.embedding}.weight", set()) | record.reads.get(f"{anatomy.head}.weight", set())
    astray = any(reader.blocks_begun and not is_within(reader.path, (anatomy.head,)) for reader in readers)
    return dataclasses.replace(anatomy, tied=False) if astray else anatomy


def _param_stages(
    anatomy: ModelGraph,
    mesh: ParallelContext,
    record: DataflowRecord | None,
    wants: BoundarySpec | None,
    own_loss: bool,
) -> ParamStages:
    if mesh.plan.stages == 1:
        return NO_PARAM_STAGES
    assert record is not None and wants is not None
    return find_param_stages(record, anatomy, wants, stage_bounds(anatomy, mesh), mesh.plan, own_loss)


def _boundary_spec(
    model: nn.Module, anatomy: ModelGraph, plan: Plan, record: DataflowRecord | None
) -> BoundarySpec | None:
    """Blocks of several stacks are numbered as stages cut them under every plan: what recomputes, and what the planner
    prices, are the same ones.
    One stage that needs no such numbers does without where they cannot be told."""
    if plan.stages == 1 and (len(anatomy.stacks) < 2 or anatomy.embedding is None):
        return None
    try:
        if record is None:
            raise InputError(
                "what goes from stage to stage of this model cannot be told: give an example of what it reads, or use pp1"
            )
        if plan.stages > 1:
            check_block_calls(record, anatomy, plan)
        wants = trace_boundaries(record, anatomy)
        if wants.is_over_stacks:
            layers_over_stacks(model, anatomy.across_stacks(), wants)
        return wants
    except InputError as error:
        if plan.stages > 1:
            raise
        if plan.zero == 3 or plan.recompute != Recompute.none:
            raise InputError(
                f"plan {plan.name}: {str(error).replace('use pp1', 'use z2 at most and no recompute')}"
            ) from None
        return None


def _check_boundary(plan: Plan, anatomy: ModelGraph, wants: BoundarySpec | None) -> None:
    plan.stage_layers(max(anatomy.count, 1))
    sequence = plan.sequence_parallel and not anatomy.against_sequence  # else shard_model says why
    if wants is not None and wants.is_more and (sequence or plan.cp > 1):
        part = f"cp{plan.cp}" if plan.cp > 1 else "sp"
        raise InputError(
            f"plan {plan.name}: blocks of this model hand on more than a hidden state, which {part} does not cut: leave it out"
        )


def _check_all_assigned(table: list[StageLayer], names: set[str]) -> None:
    accounted = [name for layer in table for name in layer.parameters]
    if sorted(accounted) != sorted(names):
        raise AssertionError(f"parameters lost or doubled in the cut: {sorted(names ^ set(accounted))[:3]}")
