"""Defines a grid of plans: all combinations of choices under one rank layout and one bucket size. The search creates
grids, and the cost model (cost_model.py) computes the cost of all plans of a grid together.

The costs of a grid are arrays over GRID_AXES. If a value does not depend on an axis, its array has length 1 along this
axis. NumPy broadcasting then computes each value once for all plans that share it. The axes:

- r: classes of pipeline ranks with equal layers
- o: pipeline schedules (orders of actions), with the blocks of each stage
- b: sizes and numbers of micro-batches, the context ranks, the method of context parallelism, and whether blocks are
  compiled
- s: sequence parallelism, off or on
- c: recompute kinds, and the blocks to which they apply
- z: ZeRO stage, with the division of data and context ranks into replicas and shards
- f: offload choices

Docstrings name axes by these letters: an array "over axes (b, s)" has one value for each pair of choices along b and s,
and "`tokens` is the tokens of a micro-batch (b)" means that `tokens` is an array over axis b. Not every combination of
choices is a legal plan; `PlanGrid.legal` marks the legal plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any, NamedTuple

import numpy as np

from meshwright.spec.enums import MESH_AXES as PLAN_AXES
from meshwright.spec.enums import (
    ContextParallelMethod,
    MeshAxis,
    Offload,
    Recompute,
    ScheduleName,
    min_zero_stage,
    offloads_activations,
    offloads_states,
    offloads_weights,
)
from meshwright.spec.grid import largest_shard_weight, relative_shard_size
from meshwright.spec.layout import ShardWeight
from meshwright.spec.model import ParameterSpec
from meshwright.spec.plan import Plan
from meshwright.spec.schedules.schedule import Schedule, find_schedule

GRID_AXES = "robsczf"
CHOICE_FIELDS = ("orders", "micro_batches", "sequence_parallel", "recompute", "shards", "offload")
"""The fields of `PlanGrid` with the choices along the axes `obsczf`, in this order."""

RECOMPUTE_PARTS_PER_STAGE = 8
"""For partial recompute, the blocks of a stage are divided into this number of parts. The search tries 1, 2, ...
recomputed parts."""

Array = np.ndarray[Any, np.dtype[Any]]


def broadcast_to_axis(array: Any, axes: str) -> Array:
    """Returns `array` with all axes of GRID_AXES. `axes` has one letter for each dimension of `array`, in the order of
    GRID_AXES. The result has length 1 along the other axes."""
    values = np.asanyarray(array)
    return values[_axis_index(axes, values.ndim)]


@cache
def _axis_index(axes: str, dimensions: int) -> tuple[slice | None, ...]:
    """Returns the index that adds an axis of length 1 for each letter of GRID_AXES that is not in `axes`."""
    assert dimensions == len(axes) and list(axes) == sorted(axes, key=GRID_AXES.index)
    return tuple(slice(None) if axis in axes else None for axis in GRID_AXES)


def stack_schedules(arrays: Sequence[Array], kinds: int, orders: int = 1) -> Array:
    """Stacks the arrays of several schedules along a new axis with index `orders`. `kinds` is the index of the axis of
    rank classes. Schedules with fewer rank classes repeat their first class."""
    width, shape = max(array.shape[kinds] for array in arrays), list(arrays[0].shape)
    shape[kinds] = width
    shape.insert(orders, len(arrays))
    found = np.empty_like(arrays[0], shape=shape)
    before: tuple[Any, ...] = (slice(None),) * orders
    for o, array in enumerate(arrays):
        if array.shape[kinds] < width:
            at = np.arange(width)
            array = np.take(array, np.where(at < array.shape[kinds], at, 0), axis=kinds)
        found[(*before, o)] = array
    return found


def pad_last_axis(array: Array, length: int) -> Array:
    """Returns `array` with zeros at the end of the last axis, so that this axis has length `length`."""
    if array.shape[-1] == length:
        return array
    found = np.zeros_like(array, shape=(*array.shape[:-1], length))
    found[..., : array.shape[-1]] = array
    return found


class TpEpShape(NamedTuple):
    """The division of weights over ranks: `tp` tensor ranks, and for experts `ep` expert ranks with `expert_tp` tensor
    ranks per expert."""

    tp: int
    ep: int = 1
    expert_tp: int = 1

    def splits_experts(self, parameter: ParameterSpec) -> bool:
        """Returns whether different ranks have different experts of this parameter."""
        return self.ep > 1 and parameter.experts > 0

    def numel(self, parameter: ParameterSpec) -> int:
        """Returns the number of elements of the parameter on the rank with the most elements."""
        if self.splits_experts(parameter):
            return -(-parameter.local_numel(self.expert_tp) // self.ep)
        return parameter.local_numel(self.tp)


class ScheduleChoice(NamedTuple):
    """A pipeline schedule with the number of blocks of each virtual stage. `given`: whether the plan lists these
    numbers. `actions` is the order of actions of a custom schedule, otherwise empty."""

    schedule: ScheduleName
    virtual_stages: int
    stage_layers: tuple[int, ...]
    given: bool = False
    actions: tuple[str, ...] = ()

    @property
    def rules(self) -> Schedule:
        """Returns the schedule's class of rules (spec/schedules)."""
        return find_schedule(self.schedule, self.actions)


class BatchChoice(NamedTuple):
    """The micro-batches of a replica: `number` micro-batches of `size` sequences per step. `cp` context ranks divide
    each sequence by the method `context`. `ulysses` is the number of context ranks that exchange heads; 0 means all
    context ranks if the method is ulysses. `compile`: whether blocks are compiled."""

    size: int
    number: int
    cp: int = 1
    context: ContextParallelMethod = ContextParallelMethod.ring
    ulysses: int = 0
    compile: bool = False


class RecomputeChoice(NamedTuple):
    """The recompute kinds of the blocks of each virtual stage: `kind` for the blocks at the start of the stage, `rest`
    for the later blocks.

    The number of blocks with `kind` is `layers`, or `part` / RECOMPUTE_PARTS_PER_STAGE of the blocks of the largest
    stage, rounded up. If `layers` and `part` are both 0, all blocks have `kind`. `fewer`: whether the choice is dropped
    if no stage has more than `layers` blocks, because all blocks then have `kind`.
    """

    kind: Recompute
    layers: int = 0
    part: int = 0
    fewer: bool = False
    rest: Recompute = Recompute.none

    @property
    def some(self) -> bool:
        """Returns whether only some blocks of a stage have recompute `kind`."""
        return bool(self.layers or self.part)

    def blocks(self, order: ScheduleChoice) -> int:
        """Returns how many blocks at the start of each stage have recompute `kind`, or 0 if all blocks have it.

        >>> # 3/8 of 10 blocks, rounded up
        >>> RecomputeChoice(Recompute.full, part=3).blocks(ScheduleChoice("gpipe", 1, (10, 9)))
        4
        """
        return self.layers or -(-max(order.stage_layers) * self.part // RECOMPUTE_PARTS_PER_STAGE)


def is_distinct_recompute(orders: Sequence[ScheduleChoice], recompute: Sequence[RecomputeChoice]) -> Array:
    """Returns, over (o, c), whether a recompute choice differs from all other choices for the schedule. A choice of
    `part` parts must recompute more blocks than `part` - 1 parts, and fewer than all blocks."""
    most = np.array([max(order.stage_layers) for order in orders])[:, None]
    part = np.array([again.part for again in recompute], dtype=int)
    count, smaller = -(-most * part // RECOMPUTE_PARTS_PER_STAGE), -(-most * (part - 1) // RECOMPUTE_PARTS_PER_STAGE)
    fewer = np.array([again.layers * again.fewer for again in recompute], dtype=int)
    return ((part == 0) | ((smaller < count) & (count < most))) & (fewer < most)


class ZeroChoice(NamedTuple):
    """The ZeRO stage, the number of ranks of a shard group (`holders`), and the number of shard groups (`replicas`).
    The product of these two numbers is the number of data ranks times the number of context ranks."""

    zero: int
    replicas: int
    holders: int
    lone: bool = False
    """Whether the shard group has one rank, and the ZeRO stage is above 0 only because offload of weights or gradients
    requires this."""

    def allows(self, choice: tuple[Offload, ...]) -> bool:
        """Returns whether plans with this ZeRO choice may have the offload choice `choice`."""
        return allows_offload(self.zero, self.lone, choice)


@cache
def allows_offload(zero: int, lone: bool, choice: tuple[Offload, ...]) -> bool:
    """Returns whether plans with ZeRO stage `zero` may have the offload choice `choice`. `lone` is as in
    `ZeroChoice`."""
    least = min_zero_stage(choice)
    return zero >= least if least else not lone


class RankLayout(NamedTuple):
    """The layout of all ranks except data and context ranks. All plans of a grid share one layout."""

    tp: int
    pp: int
    ep: int = 1
    expert_tp: int = 1
    axes: tuple[MeshAxis, ...] = PLAN_AXES

    def strides(self, data: int) -> dict[str, int]:
        """Returns the distance between neighbouring ranks along each axis of the mesh. `data` is the number of data
        ranks times context ranks; context ranks are the innermost part of this axis."""
        found: dict[str, int] = {}
        inside = 1
        for axis in reversed(self.axes):
            found[axis] = inside
            inside *= {"tp": self.tp, "pp": self.pp, "dp": data}[axis]
        return found


@dataclass(frozen=True)
class PlanGrid:
    """All combinations of the choices in the fields CHOICE_FIELDS. The product of replicas and holders is the same for
    all elements of `shards`."""

    layout: RankLayout
    bucket: int
    orders: tuple[ScheduleChoice, ...]
    micro_batches: tuple[BatchChoice, ...]
    sequence_parallel: tuple[bool, ...]
    recompute: tuple[RecomputeChoice, ...]
    shards: tuple[ZeroChoice, ...]
    offload: tuple[tuple[Offload, ...], ...] = ((),)
    weight: float = 1.0
    """The shard size of the rank whose cost is computed, divided by the size that all shards would have if they were
    equal."""
    heft: ShardWeight | None = None
    """The position and size of this shard among uneven shards, or None for equal shards."""
    loss_chunks: int = 1
    offload_share: float | Array = 1.0
    weights_share: float | Array = 1.0
    """`offload_share` and `weights_share`: the offloaded fractions of optimizer states and of weights, if these are
    offloaded. The costs of several fractions can be computed together along f (planner/search/ranking.py)."""
    offload_layers: int = 0
    """How many blocks at the start of each virtual stage offload their activations, if a plan offloads activations; 0
    means all blocks."""

    @property
    def tp(self) -> int:
        """Returns the tensor-parallel degree."""
        return self.layout.tp

    @property
    def pp(self) -> int:
        """Returns the number of pipeline ranks."""
        return self.layout.pp

    @property
    def cut(self) -> TpEpShape:
        """Returns the tensor-parallel and expert-parallel division of weights."""
        return TpEpShape(self.tp, self.layout.ep, self.layout.expert_tp)

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the number of choices along `obsczf`."""
        return tuple(len(getattr(self, name)) for name in CHOICE_FIELDS)

    @property
    def size(self) -> int:
        """Returns the number of combinations, including those that are not legal."""
        return prod(self.shape)

    @property
    def legal_size(self) -> int:
        """Returns the number of legal plans."""
        rounds, shared, parts, allowed = self._legal
        per_micro_batch = (rounds * parts.sum(axis=1)[:, None]).sum(axis=0) * (shared @ allowed.sum(axis=1))
        return int(per_micro_batch.sum()) * len(self.sequence_parallel)

    @cached_property
    def strides(self) -> dict[str, int]:
        """Returns the distance between neighbouring ranks along each axis of the mesh."""
        return self.layout.strides(self.data)

    @property
    def data(self) -> int:
        """Returns the number of data ranks, context ranks included."""
        return self.shards[0].replicas * self.shards[0].holders

    @cached_property
    def counts(self) -> Array:
        """Returns the number of micro-batches per step of a replica (b)."""
        return np.array([each.number for each in self.micro_batches])

    def tokens(self, sequence: int) -> Array:
        """Returns the number of tokens of a micro-batch on one rank (b)."""
        return np.array([each.size * sequence / each.cp for each in self.micro_batches])

    @cached_property
    def contexts(self) -> Array:
        """Returns the number of context ranks (b)."""
        return np.array([each.cp for each in self.micro_batches])

    @cached_property
    def ulysses_ranks(self) -> Array:
        """Returns the number of context ranks that exchange heads (b)."""
        return np.array(
            [
                1 if each.context == ContextParallelMethod.ring else each.ulysses or each.cp
                for each in self.micro_batches
            ]
        )

    @cached_property
    def zero(self) -> Array:
        """Returns the ZeRO stages as an array over GRID_AXES that varies along z."""
        return broadcast_to_axis([each.zero for each in self.shards], "z")

    @cached_property
    def holders(self) -> Array:
        """Returns the number of ranks of a shard group (z)."""
        return np.array([each.holders for each in self.shards])

    @cached_property
    def expert_holders(self) -> Array:
        """Returns the number of ranks of the shard group of an expert (z)."""
        separate = self.layout.ep * self.layout.expert_tp
        return np.array([each.holders * self.tp // separate if each.zero else 1 for each in self.shards])

    @cached_property
    def legal(self) -> Array:
        """Returns which combinations are legal plans, as booleans over GRID_AXES."""
        rounds, shared, parts, allowed = self._legal
        found = broadcast_to_axis(rounds, "ob")
        found = found if shared.all() else found & broadcast_to_axis(shared, "bz")
        found = found if allowed.all() else found & broadcast_to_axis(allowed, "zf")
        return found if parts.all() else found & broadcast_to_axis(parts, "oc")

    @cached_property
    def _legal(self) -> tuple[Array, Array, Array, Array]:
        """Returns which pairs of choices are legal, as four boolean arrays.

        (o, b): the schedule accepts the number of micro-batches. (b, z): all context ranks of a sequence are in one
        shard group, and the expert ranks match the layout. (o, c): the recompute choice differs from all other choices.
        (z, f): the ZeRO stage shards the weights and gradients that are offloaded.
        """
        rules = {(order.schedule, order.actions): order.rules for order in self.orders}
        accepted = {key: each.accepts(self.pp, self.counts) for key, each in rules.items()}
        rounds = np.array([accepted[order.schedule, order.actions] for order in self.orders])
        cp, ep = self.contexts[:, None], self.layout.ep
        state_ranks = np.where(self.zero.reshape(-1) > 0, self.holders, cp)
        shared = state_ranks % cp == 0
        if ep > 1:
            shared &= (state_ranks * self.tp % ep == 0) & (
                self.layout.expert_tp == self.tp // (ep // np.gcd(ep, state_ranks))
            )
        allowed = np.array([[each.allows(choice) for choice in self.offload] for each in self.shards])
        return rounds, shared, is_distinct_recompute(self.orders, self.recompute), allowed

    def part(self, **choices: Any) -> PlanGrid:
        """Returns the grid with only some choices. Each argument is named like a field of CHOICE_FIELDS, and its value
        is the indices of the choices to keep."""
        fewer: dict[str, Any] = {
            name: tuple(getattr(self, name)[at] for at in indices) for name, indices in choices.items()
        }
        return replace(self, **fewer)

    def only(self, index: tuple[int, ...]) -> PlanGrid:
        """Returns the grid with only the plan at `index` along `obsczf`."""
        return self.part(**{name: (at,) for name, at in zip(CHOICE_FIELDS, index, strict=True)})

    def plan(self, index: tuple[int, ...]) -> Plan:
        """Returns the plan at `index` along `obsczf`."""
        order, micro_batch, parallel, again, shards, offload = (
            getattr(self, name)[at] for name, at in zip(CHOICE_FIELDS, index, strict=True)
        )
        cp = micro_batch.cp
        return Plan(
            dp_replicate=shards.replicas if shards.zero else shards.replicas // cp,
            dp_shard=shards.holders // cp if shards.zero else 1,
            tp=self.tp,
            sequence_parallel=parallel,
            pp=self.pp,
            cp=cp,
            ep=self.layout.ep,
            zero=shards.zero,
            micro_batch=micro_batch.size,
            schedule=order.schedule,
            virtual_stages=order.virtual_stages,
            actions=order.actions,
            layers_per_stage=order.stage_layers if order.given else (),
            recompute=again.kind,
            recompute_layers=again.blocks(order) if again.some else 0,
            recompute_rest=again.rest,
            offload=offload,
            offload_share=round(100 * float(self.offload_share)) if offloads_states(offload) else 100,
            weights_share=round(100 * float(self.weights_share)) if offloads_weights(offload) else 100,
            offload_layers=self.offload_layers if offloads_activations(offload) else 0,
            bucket=self.bucket,
            loss_chunks=self.loss_chunks,
            context=micro_batch.context,
            ulysses=micro_batch.ulysses,
            axes=self.layout.axes,
            compile=micro_batch.compile,
        )


def are_blocks_compiled(box: PlanGrid) -> Array:
    """Returns whether blocks are compiled (b)."""
    return np.array([each.compile for each in box.micro_batches])


def shard_fraction(box: PlanGrid) -> Array:
    """Returns the fraction of a replica's states in the shard of one rank, over GRID_AXES. The rank is the one whose
    cost is computed; the array varies along z."""
    return broadcast_to_axis(box.weight / box.holders, "z")


def grid_of_plan(plan: Plan, batch: int, blocks: int) -> PlanGrid:
    """Returns the grid with only `plan`, for a global batch of `batch` sequences and a model with `blocks` blocks. If
    shards are uneven, the cost is that of the rank with the largest shard.

    Raises:
        InputError: the plan cannot divide the batch into micro-batches, or the blocks into stages.
    """
    dp, cp = plan.dp, plan.cp
    return PlanGrid(
        layout=RankLayout(plan.tp, plan.pp, plan.ep, plan.expert_tp, plan.axes),
        bucket=plan.bucket,
        orders=(
            ScheduleChoice(
                plan.schedule,
                plan.virtual_stages,
                plan.stage_layers(max(blocks, 1)),
                bool(plan.layers_per_stage),
                plan.actions,
            ),
        ),
        micro_batches=(
            BatchChoice(plan.micro_batch, plan.micro_batches(batch), cp, plan.context, plan.ulysses, plan.compile),
        ),
        sequence_parallel=(plan.sequence_parallel,),
        recompute=(RecomputeChoice(plan.recompute, plan.recompute_layers, rest=plan.recompute_rest),),
        shards=(
            ZeroChoice(plan.zero, plan.dp_replicate, plan.dp_shard * cp) if plan.zero else ZeroChoice(0, dp * cp, 1),
        ),
        offload=(plan.offload,),
        weight=relative_shard_size(plan),
        heft=largest_shard_weight(plan),
        loss_chunks=plan.loss_chunks,
        offload_share=plan.offload_share / 100,
        weights_share=plan.weights_share / 100,
        offload_layers=plan.offload_layers,
    )
