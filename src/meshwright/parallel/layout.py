"""Which stage of a plan holds which layer of a model, by the analysis run (anatomy/run.py), and what may not be cut so."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from meshwright.anatomy import Anatomy, layers
from meshwright.anatomy.inputs import Example
from meshwright.anatomy.readers import Reads, inside
from meshwright.anatomy.record import Record
from meshwright.anatomy.run import analyse
from meshwright.base.errors import InputError
from meshwright.parallel.analysis import Analysed
from meshwright.parallel.mesh import Mesh
from meshwright.parallel.pipeline.carry import Wants, carried, layers_over
from meshwright.parallel.pipeline.holding import NOBODY, Holders, check_calls, holders_of, writers_of
from meshwright.parallel.place import Layer, check_left_out, place_layers, stage_bounds
from meshwright.spec.plan import Plan, Recompute


@dataclass(frozen=True)
class Layout:
    """`anatomy` as this plan uses it, `cut` with blocks numbered as stages cut them, `wants` of what goes between stages, the `table` of layers;
    `reads`: where weights are read; `idle`: parameters that no gradient was seen to come to; `analysed`: for batches that come."""

    anatomy: Anatomy
    cut: Anatomy
    wants: Wants | None
    table: list[Layer]
    reads: Reads
    idle: frozenset[str]
    analysed: Analysed | None
    writers: Mapping[str, int] = field(default_factory=dict)
    """The stage that writes to a buffer, of those that the forward writes to."""

    @property
    def several(self) -> set[tuple[int, ...]]:
        """Stages that hold the same parameters."""
        last = max((layer.stage for layer in self.table), default=0)
        ends = {(0, last)} if self.anatomy.tied and last else set()
        return {layer.stages for layer in self.table if layer.also} | ends


def layout_of(model: nn.Module, anatomy: Anatomy, mesh: Mesh, example: Example, own_loss: bool) -> Layout:
    """Of a model that is still whole. Raises InputError where it cannot be cut as the plan says."""
    plan = mesh.plan
    record = _record(model, anatomy, plan, example)
    wants = _wants(model, anatomy, plan, record)
    anatomy = _untied(anatomy, plan, record)
    cut = anatomy.numbered() if wants else anatomy
    _check_carried(plan, cut, wants)
    check_left_out(model, cut, plan)
    holders = _holders(cut, mesh, record, wants, own_loss)
    named = layers_over(model, anatomy, wants) if wants and wants.is_over_stacks else layers(model, anatomy)
    table = place_layers(named, cut, mesh, wants, holders)
    _account(table, {name for name, _ in model.named_parameters()})
    if record is None or not (plan.stages > 1 or plan.zero == 3):
        return Layout(anatomy, cut, wants, table, {} if record is None else record.reads, frozenset(), None)

    def derive(other: Record) -> tuple[Wants | None, Holders]:
        if plan.stages == 1:
            return None, NOBODY
        check_calls(other, cut, plan)
        found = carried(other, cut)
        return found, _holders(cut, mesh, other, found, own_loss)

    ends = (0, plan.stages - 1)
    held = {name: ends if anatomy.tied and layer.name == "embedding" else layer.stages for layer in table for name in layer.parameters}
    analysed = Analysed(plan.name, model, cut.cuts, example, wants if plan.stages > 1 else None, held, record.reads, derive)
    if plan.stages == 1:
        return Layout(anatomy, cut, wants, table, record.reads, frozenset(), analysed)
    writers = writers_of(record, cut, stage_bounds(cut, mesh), model.state_dict(keep_vars=True).keys(), plan)
    return Layout(anatomy, cut, wants, table, record.reads, record.idle, analysed, writers)


def _record(model: nn.Module, anatomy: Anatomy, plan: Plan, example: Example) -> Record | None:
    """The analysis run, for plans that rest on it: stages, weights that are gathered, blocks numbered over several stacks.
    Raises InputError where a plan needs it and the model cannot be run."""
    over_stacks = len(anatomy.stacks) > 1 and anatomy.embedding is not None
    if anatomy.blocks is None or not (plan.stages > 1 or plan.zero == 3 or over_stacks):
        return None
    blocks = anatomy.cuts or tuple(anatomy.block(index) for index in range(anatomy.count))
    try:
        record = analyse(model, blocks, example)
        if plan.stages > 1 and record.rewritten:
            raise InputError(
                f"the model writes to its parameter {min(record.rewritten)} in its forward, and other stages have none of it: write to it between steps, or use pp1"
            )
        return record
    except InputError as error:
        if plan.stages == 1 and plan.zero < 3:
            return None
        raise InputError(f"plan {plan.name}: {error}") from None


def _untied(anatomy: Anatomy, plan: Plan, record: Record | None) -> Anatomy:
    """A tied table that the last stage reads past its head as well is one that stages share."""
    if record is None or plan.stages == 1 or not anatomy.tied or anatomy.head is None:
        return anatomy
    readers = record.reads.get(f"{anatomy.embedding}.weight", set()) | record.reads.get(f"{anatomy.head}.weight", set())
    astray = any(reader.begun and not inside(reader.path, (anatomy.head,)) for reader in readers)
    return dataclasses.replace(anatomy, tied=False) if astray else anatomy


def _holders(anatomy: Anatomy, mesh: Mesh, record: Record | None, wants: Wants | None, own_loss: bool) -> Holders:
    if mesh.plan.stages == 1:
        return NOBODY
    assert record is not None and wants is not None
    return holders_of(record, anatomy, wants, stage_bounds(anatomy, mesh), mesh.plan, own_loss)


def _wants(model: nn.Module, anatomy: Anatomy, plan: Plan, record: Record | None) -> Wants | None:
    """Blocks of several stacks are numbered as stages cut them under every plan: what recomputes, and what the planner prices, are the same ones.
    One stage that needs no such numbers does without where they cannot be told."""
    if plan.stages == 1 and (len(anatomy.stacks) < 2 or anatomy.embedding is None):
        return None
    try:
        if record is None:
            raise InputError("what goes from stage to stage of this model cannot be told: give an example of what it reads, or use pp1")
        if plan.stages > 1:
            check_calls(record, anatomy, plan)
        wants = carried(record, anatomy)
        if wants.is_over_stacks:
            layers_over(model, anatomy.numbered(), wants)
        return wants
    except InputError as error:
        if plan.stages > 1:
            raise
        if plan.zero == 3 or plan.recompute != Recompute.none:
            raise InputError(f"plan {plan.name}: {str(error).replace('use pp1', 'use z2 at most and no recompute')}") from None
        return None


def _check_carried(plan: Plan, anatomy: Anatomy, wants: Wants | None) -> None:
    plan.stage_layers(max(anatomy.count, 1))
    sequence = plan.sequence_parallel and not anatomy.against_sequence  # else shard_model says why
    if wants is not None and wants.is_more and (sequence or plan.cp > 1):
        part = f"cp{plan.cp}" if plan.cp > 1 else "sp"
        raise InputError(
            f"plan {plan.name}: blocks of this model hand on more than a hidden state, which {part} does not cut: leave it out"
        )


def _account(table: list[Layer], names: set[str]) -> None:
    accounted = [name for layer in table for name in layer.parameters]
    if sorted(accounted) != sorted(names):
        raise AssertionError(f"parameters lost or doubled in the cut: {sorted(names ^ set(accounted))[:3]}")
