"""Enumerates the plan space of a job: all factorizations of the number of devices into degrees of parallelism, with all
other choices. The search (branch_and_bound.py) computes the cost of these plans.

The space is the product of these choices:

- degrees: tp x pp x cp x dp_replicate x dp_shard = number of devices
- expert parallelism: ep divides the number of experts and dp_shard x cp x tp
- ZeRO stage: 0 if a shard group has one rank, or 1, 2 or 3 if a shard group has several ranks; without data and context
  parallelism, also the stage that offload of weights or gradients requires
- micro-batch size: the divisors of the batch
- schedule for pp > 1: 1f1b, gpipe, zbh1, zbv, dualpipev, or interleaved with 2, 3, ... up to blocks / pp stages per
  rank
- blocks of each stage: an even split, or a few blocks fewer on the last stage
- recompute: none, attention core (if it saves much), selective (if many activations are recomputable), or full; for all
  blocks of each stage, or only for some blocks at the start of each stage
- sequence parallelism, off or on, for tp > 1
- offload of optimizer states, gradients, parameters and activations, in any combination that is allowed, if devices
  have a link to their host or a disk
- compiled blocks, off or on, on accelerators; on CPUs only for tp > 1, where compiled blocks were measured to be faster
- context parallelism for cp > 1: ring, ulysses, or both with as many ulysses ranks as the number of heads allows

Orders of mesh axes other than the default are searched only for plans with uniform recompute and without offload. The
only other order has data ranks outermost. It is searched only if it changes which ranks a link connects. Tensor ranks
stay innermost, because their communication does not overlap with compute.

Plans that break a rule of `spec.constraints` are counted by reason and not listed. All other plans are in degree groups
(`DegreeGroup`), whose grids mark the legal combinations (`PlanGrid.legal`). Plans with different context-parallel
degrees can be in one group, because these degrees do not change the rank layout. A pin restricts a choice to one value.
`runnable`: whether to include only values that this version can run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from meshwright.core.messages import Message
from meshwright.planner.cost.plan_grid import (
    BatchChoice,
    PlanGrid,
    RankLayout,
    RecomputeChoice,
    ScheduleChoice,
    ZeroChoice,
    is_distinct_recompute,
)
from meshwright.planner.search.choices import (
    PlanChoices,
    divisors,
)
from meshwright.planner.search.feasibility import (
    FeasibleSchedules,
    UpdateFeasibility,
    check_pins,
    count_plans,
    first_violation,
    sequence_cut_violation,
)
from meshwright.spec.constraints import batch_violations, context_parallel_violations
from meshwright.spec.enums import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_SCHEDULE,
    ContextParallelMethod,
    MeshAxis,
    Offload,
)
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan
from meshwright.spec.violation import Violation


@dataclass
class RejectionCount:
    """The number of plans that are rejected for one reason, and the message about one of these plans."""

    count: int
    example: str


@dataclass(frozen=True)
class DegreeGroup:
    """Plans with equal tensor, pipeline and expert degrees.

    `box` contains the plans with the default order of axes, uniform recompute, and no offload (or the pinned offload).
    The other fields are the additional choices: orders of axes, partial recompute, and offload choices.
    """

    box: PlanGrid
    axes: tuple[tuple[MeshAxis, ...], ...]
    parts: tuple[RecomputeChoice, ...]
    offloads: tuple[tuple[Offload, ...], ...]

    @property
    def ways(self) -> tuple[tuple[Offload, ...], ...]:
        """Returns all offload choices. The first is that of `box`: no offload, or the pinned choice."""
        return (*self.box.offload, *self.offloads)

    @cached_property
    def legal(self) -> int:
        """Returns the number of legal plans of the group."""
        every = replace(self.box, offload=self.ways)
        parts = replace(every, recompute=self.parts).legal_size if self.parts else 0
        return every.legal_size + parts + self.box.legal_size * len(self.axes)

    def boxes(self) -> Iterator[PlanGrid]:
        """Yields all grids of the group. The first grid has the default order of axes and all choices of recompute and
        offload. Then each other order of axes has one grid, with only the choices of `box`."""
        yield replace(self.box, offload=self.ways, recompute=(*self.box.recompute, *self.parts))
        for axes in self.axes:
            yield self.other(axes)

    def other(self, axes: tuple[MeshAxis, ...]) -> PlanGrid:
        """Returns `box` with the order of axes `axes`."""
        return replace(self.box, layout=self.box.layout._replace(axes=axes))


class ContextSlice(NamedTuple):
    """The legal choices for one layout and one context-parallel degree."""

    layout: RankLayout
    axes: tuple[tuple[MeshAxis, ...], ...]
    parallel: tuple[bool, ...]
    micro_batches: tuple[BatchChoice, ...]
    shards: tuple[ZeroChoice, ...]


@dataclass
class PlanSpace:
    """The plan space of a job. `allowed` limits the values of some fields (choices.py). `considered` is the number of
    plans, `rejected` the number of illegal plans by reason. Both are complete after the last item of `groups`.

    Raises: InputError if pins are invalid or contradict each other.
    """

    job: Job
    runnable: bool = False
    offloading: bool = True
    bucket: int = DEFAULT_BUCKET_BYTES
    allowed: Mapping[str, Collection[Any]] = field(default_factory=dict)
    considered: int = 0
    rejected: dict[str, RejectionCount] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_pins(self.job)
        self.choices = PlanChoices(self.job, self.runnable, self.offloading, self.allowed)
        self._feasibility = UpdateFeasibility(self.job, self.runnable)
        ways = self.choices.offload_choices()
        self._offloads = [way for way in ways if self._feasibility.offload_violation(way) is None]
        self._never_offloaded = [way for way in ways if way not in self._offloads]
        """The offload choices that the optimizer update does not allow."""

    def boxes(self) -> Iterator[PlanGrid]:
        """Yields grids that together contain all legal plans, in ascending order of pp, then of tp. A grid may also
        contain illegal combinations."""
        for group in self.groups():
            yield from group.boxes()

    def groups(self) -> Iterator[DegreeGroup]:
        """Yields the legal degree groups, in ascending order of pp, then of tp."""
        devices = self.job.cluster.devices
        for pp in self.choices.select("pp", divisors(devices)):
            every = self.choices.schedule_choices(pp)
            legal = [order for order in every if self._feasibility.schedule_violation(pp, order) is None]
            illegal = [order for order in every if order not in legal]
            orders = FeasibleSchedules(
                legal,
                illegal,
                *(
                    int(is_distinct_recompute(some, self.choices.partial_recompute(some)).sum())
                    for some in (legal, illegal)
                ),
            )
            for tp in self.choices.select("tp", divisors(devices // pp)):
                together: dict[tuple[Any, ...], list[ContextSlice]] = {}
                for cp in self.choices.select("cp", divisors(devices // (pp * tp))):
                    shards = self.choices.zero_choices(devices // (pp * tp * cp), cp, pp)
                    for (ep, expert_tp), part in self.choices.expert_choices(tp, cp, shards).items():
                        cell = self._context_slice(RankLayout(tp, pp, ep, expert_tp), cp, tuple(part), orders)
                        if cell is not None:
                            group_key = cp if self.choices.pins.keys() & {"dp_shard", "dp_replicate"} else 0
                            together.setdefault((cell[:3], group_key), []).append(cell)
                for cells in together.values():
                    yield self._group(cells, orders.legal)

    def reject(self, reason: str, count: int, example: str) -> None:
        """Adds `count` rejected plans to the reason `reason`. `example` is the message about one of these plans."""
        if count:
            self.rejected.setdefault(reason, RejectionCount(0, example)).count += count

    # --- degree groups
    # ----------------------------------------------------------------------------------------------------------------

    def _context_slice(
        self, layout: RankLayout, cp: int, shards: tuple[ZeroChoice, ...], orders: FeasibleSchedules
    ) -> ContextSlice | None:
        """Returns the legal choices for one layout and context-parallel degree, or None if there are none. Counts legal
        and illegal plans."""
        job, data = self.job, shards[0].replicas * shards[0].holders
        dp, batch = data // cp, job.workload.batch
        contexts = self.choices.context_methods(cp, layout.tp)
        parallel = self.choices.select("sequence_parallel", [False, True] if layout.tp > 1 else [False])
        sizes = (
            [self.choices.pins["micro_batch"]]
            if "micro_batch" in self.choices.pins
            else [batch]
            if job.model.against_division
            else [max(batch // dp, 1)]
            if job.model.gathered
            else divisors(batch)
        )
        axes = self.choices.axis_orders(layout, data)
        compiled = len(self.choices.compile_choices(layout.tp))
        other_choices = len(sizes) * len(parallel) * len(contexts) * compiled if axes else 0

        def micro_batches(
            sizes: list[int], contexts: list[tuple[ContextParallelMethod, int]]
        ) -> tuple[BatchChoice, ...]:
            return tuple(
                BatchChoice(size, batch // (dp * size), cp, *context) for context in contexts for size in sizes
            )

        illegal = [shard for shard in shards if self._feasibility.excludes_zero(shard, cp)]
        shards = tuple(shard for shard in shards if shard not in illegal)
        if other_choices:
            layout = layout._replace(axes=axes[0])
            cell = ContextSlice(layout, axes[1:], (False,), micro_batches(sizes[:1], contexts[:1]), shards)
            self._count_update_rejections(cell, illegal, orders, other_choices)
        ways = self._offloads or [()] * (not self._never_offloaded)
        each = compiled * count_plans(
            shards, ways, len(self.choices.uniform_recompute()), orders.parts, len(orders.legal), len(axes)
        )
        size = each * len(sizes) * len(parallel) * len(contexts) if axes else 0
        self.considered += size
        if not size:
            return None
        example = self._grid(
            ContextSlice(layout, axes, (False,), micro_batches(sizes[:1], contexts[:1]), shards[:1]), orders.legal[:1]
        )
        first = example.plan((0, 0, 0, 0, 0, 0))
        fault = first_violation(job, first, self._feasibility)
        if fault is not None:
            _count_rejection(self, fault, first, size)
            return None
        sizes, parallel, contexts = self._drop_illegal(first, each, sizes, parallel, contexts)
        if not sizes or not parallel or not contexts:
            return None
        return ContextSlice(layout, axes[1:], tuple(parallel), micro_batches(sizes, contexts), shards)

    def _drop_illegal(
        self,
        first: Plan,
        each: int,
        sizes: list[int],
        parallel: list[bool],
        contexts: list[tuple[ContextParallelMethod, int]],
    ) -> tuple[list[int], list[bool], list[tuple[ContextParallelMethod, int]]]:
        """Returns the legal elements of `sizes`, `parallel` and `contexts` for plans whose other fields are those of
        `first`.

        Illegal combinations are counted as rejected; every combination counts as `each` plans.
        """
        job, batch = self.job, self.job.workload.batch
        if True in parallel and (fault := sequence_cut_violation(job, cut := first.but(sequence_parallel=True))):
            _count_rejection(self, fault, cut, each * len(sizes) * len(contexts))
            parallel = [choice for choice in parallel if not choice]
        fit = [micro_batch for micro_batch in sizes if batch % (first.dp * micro_batch) == 0]
        if len(fit) < len(sizes):
            odd = first.but(micro_batch=next(micro_batch for micro_batch in sizes if micro_batch not in fit))
            count = each * len(parallel) * len(contexts) * (len(sizes) - len(fit))
            _count_rejection(self, next(batch_violations(odd, batch)), odd, count)
        for way in contexts:
            headed = first.but(context=way[0], ulysses=way[1])
            if (fault := next(context_parallel_violations(headed, job.model.divisible), None)) is not None:
                _count_rejection(self, fault, headed, each * len(parallel) * len(fit))
                contexts = [other for other in contexts if other != way]
        return fit, parallel, contexts

    def _count_update_rejections(
        self, cell: ContextSlice, illegal: Sequence[ZeroChoice], orders: FeasibleSchedules, other_choices: int
    ) -> None:
        """Counts the plans that the optimizer update of the job does not allow because of their offload choice, their
        schedule, or their ZeRO choice.

        `other_choices` is the number of combinations of micro-batch size, sequence parallelism, context method and
        compilation.
        """
        every = [*self._offloads, *self._never_offloaded] or [()]
        axes, whole, parts = (
            1 + len(cell.axes),
            len(self.choices.uniform_recompute()),
            orders.parts + orders.illegal_parts,
        )
        cases = [
            *(
                (
                    cell.shards,
                    orders.legal,
                    [way],
                    count_plans(cell.shards, [way], whole, orders.parts, len(orders.legal)),
                )
                for way in self._never_offloaded
            ),
            (
                cell.shards,
                orders.illegal,
                every,
                count_plans(cell.shards, every, whole, orders.illegal_parts, len(orders.illegal), axes),
            ),
            (
                illegal,
                [*orders.legal, *orders.illegal],
                every,
                count_plans(illegal, every, whole, parts, len(orders.legal) + len(orders.illegal), axes),
            ),
        ]
        for shards, some, ways, count in cases:
            if count:
                way, shard = next((way, shard) for way in ways for shard in shards if shard.allows(way))
                box = replace(self._grid(cell._replace(shards=(shard,)), some[:1]), offload=(way,))
                plan = box.plan((0, 0, 0, 0, 0, 0))
                fault = self._feasibility.violation(plan)
                assert fault is not None
                self.considered += count * other_choices
                _count_rejection(self, fault, plan, count * other_choices)

    def _group(self, cells: list[ContextSlice], orders: list[ScheduleChoice]) -> DegreeGroup:
        """Returns the degree group that joins `cells`, which differ only in their context-parallel degree."""
        whole = cells[0]._replace(
            micro_batches=tuple(
                each._replace(compile=is_compiled)
                for is_compiled in self.choices.compile_choices(cells[0].layout.tp)
                for cell in cells
                for each in cell.micro_batches
            ),
            shards=tuple(
                sorted({each for cell in cells for each in cell.shards}, key=lambda each: (each.zero, each.holders))
            ),
        )
        found = DegreeGroup(
            self._grid(whole, orders), whole.axes, self.choices.partial_recompute(orders), tuple(self._offloads[1:])
        )
        self._count_interleaving_rejections(found)
        return found

    def _grid(self, cell: ContextSlice, orders: list[ScheduleChoice]) -> PlanGrid:
        bucket = self.choices.pins.get("bucket", self.bucket)
        first = (self._offloads or [()])[0]
        given = (
            cell.layout,
            bucket,
            tuple(orders),
            cell.micro_batches,
            cell.parallel,
            self.choices.uniform_recompute(),
            cell.shards,
            (first,),
        )
        return PlanGrid(
            *given,
            loss_chunks=self.choices.pins.get("loss_chunks", 1),
            offload_share=self.choices.pins.get("offload_share", 100) / 100,
            weights_share=self.choices.pins.get("weights_share", 100) / 100,
            offload_layers=self.choices.pins.get("offload_layers", 0),
        )

    def _count_interleaving_rejections(self, group: DegreeGroup) -> None:
        box = group.box
        in_rounds = replace(box, orders=tuple(order._replace(schedule=DEFAULT_SCHEDULE) for order in box.orders))
        illegal = in_rounds.legal & ~box.legal
        if illegal.any():
            plan = box.plan(tuple(np.argwhere(illegal[0])[0].tolist()))
            all_of_it = replace(group, box=in_rounds)
            fault = next(batch_violations(plan, self.job.workload.batch))
            _count_rejection(self, fault, plan, all_of_it.legal - group.legal)


def _count_rejection(space: PlanSpace, fault: Violation, plan: Plan, count: int) -> None:
    space.reject(fault.reason, count, Message("{plan}: {reason}", plan=plan.name, reason=fault.message))
