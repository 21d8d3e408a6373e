"""Defines a grid of plans: all combinations of choices that have one rank layout and one bucket size. The cost of all
plans of a grid is computed together.

Costs of a grid are arrays over GRID_AXES. If a value does not depend on an axis, its array has length 1 there. So NumPy
broadcasting computes each value only once for all plans that share it. The axes:

- r: classes of pipeline ranks
- o: schedules (orders), with their stages
- b: micro-batches, that is their sequences, the context ranks, and the method of context parallelism
- s: sequence parallelism
- c: recompute kinds, and the blocks to which they apply
- z: ZeRO stage, replicas and shards of the data and context ranks
- f: offload choices

Not every combination is a legal plan; `PlanGrid.legal` marks the legal plans.
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
"""The fields of a grid with the choices along the axes `obsczf`."""

RECOMPUTE_PARTS_PER_STAGE = 8
"""The number of parts into which the blocks of a stage are divided for partial recompute."""

Array = np.ndarray[Any, np.dtype[Any]]


def broadcast_to_axis(array: Any, axes: str) -> Array:
    """Returns `array` with length 1 along all missing axes. `axes` names the dimensions of `array` in order."""
    values = np.asarray(array)
    return values.reshape([values.shape[at] if at >= 0 else 1 for at in _axis_positions(axes, values.ndim)])


@cache
def _axis_positions(axes: str, dimensions: int) -> tuple[int, ...]:
    """Returns the position of each of GRID_AXES in `axes`, or -1 if it is absent."""
    assert dimensions == len(axes) and list(axes) == sorted(axes, key=GRID_AXES.index)
    return tuple(axes.find(axis) for axis in GRID_AXES)


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
        """Returns the elements of the parameter on the rank that has the most."""
        if self.splits_experts(parameter):
            return -(-parameter.local_numel(self.expert_tp) // self.ep)
        return parameter.local_numel(self.tp)


class ScheduleChoice(NamedTuple):
    """A pipeline schedule with the number of blocks of each virtual stage. `given`: whether the plan lists these
    numbers."""

    schedule: ScheduleName
    virtual_stages: int
    stage_layers: tuple[int, ...]
    given: bool = False
    actions: tuple[str, ...] = ()

    @property
    def rules(self) -> Schedule:
        """Returns the rules of the schedule."""
        return find_schedule(self.schedule, self.actions)


class BatchChoice(NamedTuple):
    """The micro-batches of a replica: the sequences of each, their number per step, the context ranks that divide a
    sequence, and the method of context parallelism (`ulysses` as in a plan)."""

    size: int
    number: int
    cp: int = 1
    context: ContextParallelMethod = ContextParallelMethod.ring
    ulysses: int = 0


class RecomputeChoice(NamedTuple):
    """The blocks with recompute `kind`: all blocks, the first `layers` blocks of each virtual stage, or the first
    `part` of its RECOMPUTE_PARTS_PER_STAGE parts. The other blocks have recompute `rest`. `fewer`: the choice is valid
    only if a stage has more than `layers` blocks; otherwise it would duplicate the choice of all blocks."""

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
        """Returns the number of blocks of a stage with recompute `kind`; 0 means all blocks.

        >>> RecomputeChoice(Recompute.full, part=3).blocks(ScheduleChoice("gpipe", 1, (10, 9)))
        4
        """
        return self.layers or -(-max(order.stage_layers) * self.part // RECOMPUTE_PARTS_PER_STAGE)


def is_distinct_recompute(orders: Sequence[ScheduleChoice], recompute: Sequence[RecomputeChoice]) -> Array:
    """Returns, over (o, c), whether a recompute choice is distinct for the schedule: it has other blocks than any
    smaller part, and not all blocks."""
    most = np.array([max(order.stage_layers) for order in orders])[:, None]
    part = np.array([again.part for again in recompute], dtype=int)
    count, smaller = -(-most * part // RECOMPUTE_PARTS_PER_STAGE), -(-most * (part - 1) // RECOMPUTE_PARTS_PER_STAGE)
    fewer = np.array([again.layers * again.fewer for again in recompute], dtype=int)
    return ((part == 0) | ((smaller < count) & (count < most))) & (fewer < most)


class ZeroChoice(NamedTuple):
    """The ZeRO stage, the number of ranks of a shard group (`holders`), and the number of replicas. The product of both
    numbers is the number of data ranks times context ranks."""

    zero: int
    replicas: int
    holders: int
    lone: bool = False
    """Whether a single rank uses ZeRO, because the offload of weights or gradients requires ZeRO."""

    def allows(self, choice: Sequence[Offload]) -> bool:
        """Returns whether the ZeRO stage allows the offload choice `choice`."""
        least = min_zero_stage(choice)
        return self.zero >= least if least else not self.lone


class RankLayout(NamedTuple):
    """The layout of all ranks except data and context ranks. All plans of a grid share it."""

    tp: int
    pp: int
    ep: int = 1
    expert_tp: int = 1
    axes: tuple[MeshAxis, ...] = PLAN_AXES

    def strides(self, data: int) -> dict[str, int]:
        """Returns the distance between neighbouring ranks of each axis if there are `data` data ranks. Context ranks
        are part of the data ranks, as their innermost axis."""
        found: dict[str, int] = {}
        inside = 1
        for axis in reversed(self.axes):
            found[axis] = inside
            inside *= {"tp": self.tp, "pp": self.pp, "dp": data}[axis]
        return found


@dataclass(frozen=True)
class PlanGrid:
    """All combinations of choices. All elements of `shards` have the same number of ranks."""

    layout: RankLayout
    bucket: int
    orders: tuple[ScheduleChoice, ...]
    micro_batches: tuple[BatchChoice, ...]
    sequence_parallel: tuple[bool, ...]
    recompute: tuple[RecomputeChoice, ...]
    shards: tuple[ZeroChoice, ...]
    offload: tuple[tuple[Offload, ...], ...] = ((),)
    weight: float = 1.0
    """The size of the shard of the rank whose cost is computed, relative to an equal shard."""
    heft: ShardWeight | None = None
    """The uneven shard of this rank, if it is known."""
    loss_chunks: int = 1
    compile: bool = False
    offload_share: float | Array = 1.0
    weights_share: float | Array = 1.0
    """`offload_share` and `weights_share`: the offloaded fractions of optimizer states and of weights, if these are
    offloaded. The costs of several fractions can be computed together along f (planner/search/ranking.py)."""
    offload_layers: int = 0
    """With offload of activations, it applies to this many first blocks of each virtual stage; 0 means all blocks."""

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
        """Returns the division of weights over ranks."""
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
        """Returns the distance between neighbouring ranks of each axis."""
        return self.layout.strides(self.data)

    @property
    def data(self) -> int:
        """Returns the number of data ranks, context ranks included."""
        return self.shards[0].replicas * self.shards[0].holders

    @cached_property
    def counts(self) -> Array:
        """Returns the number of micro-batches of a step (b)."""
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
        """Returns the ZeRO stages (z), over GRID_AXES."""
        return broadcast_to_axis([each.zero for each in self.shards], "z")

    @cached_property
    def holders(self) -> Array:
        """Returns the number of ranks that shard the states of a replica (z)."""
        return np.array([each.holders for each in self.shards])

    @cached_property
    def expert_holders(self) -> Array:
        """Returns the number of ranks that shard the states of an expert (z)."""
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

        (o, b): the schedule accepts the number of micro-batches. (b, z): context ranks are inside a shard group, and
        the expert ranks match the layout. (o, c): the recompute choice does not duplicate another one. (z, f):
        offloaded weights and gradients are shards.
        """
        rounds = np.array([order.rules.accepts(self.pp, self.counts) for order in self.orders])
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
        """Returns the grid with only some choices. The name of each argument is a field, its value the indices to
        keep."""
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
            compile=self.compile,
        )


def shard_fraction(box: PlanGrid) -> Array:
    """Returns the fraction of a replica's states on the rank whose cost is computed (z), over GRID_AXES."""
    return broadcast_to_axis(box.weight / box.holders, "z")


def grid_of_plan(plan: Plan, batch: int, blocks: int) -> PlanGrid:
    """Returns the grid with only `plan`. Uneven shards: the cost is that of the largest shard.

    Raises:
        InputError: the batch or the blocks do not divide.
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
        micro_batches=(BatchChoice(plan.micro_batch, plan.micro_batches(batch), cp, plan.context, plan.ulysses),),
        sequence_parallel=(plan.sequence_parallel,),
        recompute=(RecomputeChoice(plan.recompute, plan.recompute_layers, rest=plan.recompute_rest),),
        shards=(
            ZeroChoice(plan.zero, plan.dp_replicate, plan.dp_shard * cp) if plan.zero else ZeroChoice(0, dp * cp, 1),
        ),
        offload=(plan.offload,),
        weight=relative_shard_size(plan),
        heft=largest_shard_weight(plan),
        loss_chunks=plan.loss_chunks,
        compile=plan.compile,
        offload_share=plan.offload_share / 100,
        weights_share=plan.weights_share / 100,
        offload_layers=plan.offload_layers,
    )
