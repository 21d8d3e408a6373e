"""The plan space of a job: all factors of the devices into replicas, shards, tensor, pipeline and context ranks, and
all other choices.

The space is the product of these choices:

    tp x pp x cp x dp_replicate x dp_shard = devices
    ep divides the experts and dp_shard x cp x tp
    ZeRO 0 (one shard) or 1 to 3 (two shard ranks or more)
    micro-batch divides batch
    for pp > 1: 1f1b, gpipe, interleaved with 2 to blocks / pp stages a rank, zbh1, zbv, dualpipev
    blocks split evenly, or the last stage a few lighter
    recompute: none; attention core where it is large; by operation where much is recomputable; full; or of the first
        blocks of each stage, any number of them
    sequence parallelism for tp > 1
    offload of any of optimizer, parameters and activations where devices have a link to their host
    for cp > 1: ring, ulysses, or both with as many ulysses ranks as heads allow

Other orders of axes are offered for plans with uniform recompute and no offload: data ranks outermost, where that
changes a link. Tensor ranks stay innermost because nothing overlaps their traffic.

Plans that break a rule of `spec.constraints` are counted with the reason and not listed. The others come out as degree
groups, whose grids say which of their products are plans (`PlanGrid.legal`). Context degrees change the micro-batch and
not the rank layout, so they share a group. A pin leaves one value of a choice; `runnable` leaves what this version
runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from meshwright.planner.cost.links import link_model
from meshwright.planner.cost.plan_grid import (
    BatchChoice,
    PlanGrid,
    RankLayout,
    RecomputeChoice,
    ScheduleChoice,
    ZeroChoice,
    is_distinct_recompute,
)
from meshwright.planner.search.feasibility import (
    OFFLOAD_FRACTION_PINS,
    FeasibleSchedules,
    UpdateFeasibility,
    check_pins,
    count_plans,
    first_violation,
    sequence_cut_violation,
)
from meshwright.planner.search.offered_choices import (
    divisors,
    even_split,
    max_fewer_last_blocks,
    offered_recompute,
    split_with_lighter_last_stage,
)
from meshwright.spec.constraints import SUPPORTED_VALUES, Violation, batch_violations, context_parallel_violations
from meshwright.spec.enums import (
    DEFAULT_BUCKET_BYTES,
    DEFAULT_SCHEDULE,
    DISK_OFFLOADS,
    EXCLUSIVE_OFFLOADS,
    MESH_AXES,
    OPTIMIZER_OFFLOADS,
    PER_BLOCK_RECOMPUTE,
    ContextParallelMethod,
    MeshAxis,
    Offload,
    Recompute,
    min_zero_stage,
    upgrade_offload_fields,
)
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan
from meshwright.spec.schedules.schedule_registry import find_schedule, offered_schedules

AXIS_ORDERS: tuple[tuple[MeshAxis, ...], ...] = (MESH_AXES, ("dp", "pp", "tp"))
"""Orders of axes that are offered, the usual one first."""

OFFLOAD_CHOICES = tuple(
    choice
    for count in range(len(EXCLUSIVE_OFFLOADS) + 2)
    for choice in combinations(Offload, count)
    if not any(set(places) <= set(choice) for places in EXCLUSIVE_OFFLOADS.values())
    and (Offload.gradients not in choice or set(OPTIMIZER_OFFLOADS) & set(choice))
)


@dataclass
class RejectionCount:
    """How many plans broke a rule, and the line for the first of them."""

    count: int
    example: str


@dataclass(frozen=True)
class DegreeGroup:
    """Plans of equal degrees.

    `box` contains those with the usual order of axes, uniform recompute and no offload. The others differ in their
    order of axes, in the number of recomputed blocks, or in what they offload.
    """

    box: PlanGrid
    axes: tuple[tuple[MeshAxis, ...], ...]
    parts: tuple[RecomputeChoice, ...]
    offloads: tuple[tuple[Offload, ...], ...]

    @property
    def ways(self) -> tuple[tuple[Offload, ...], ...]:
        """Returns all offload choices, first that of `box`: nothing, or the pinned one."""
        return (*self.box.offload, *self.offloads)

    @cached_property
    def legal(self) -> int:
        """Counts the legal plans of the group."""
        every = replace(self.box, offload=self.ways)
        parts = replace(every, recompute=self.parts).legal_size if self.parts else 0
        return every.legal_size + parts + self.box.legal_size * len(self.axes)

    def boxes(self) -> Iterator[PlanGrid]:
        """Yields all grids of the group."""
        yield replace(self.box, offload=self.ways, recompute=(*self.box.recompute, *self.parts))
        for axes in self.axes:
            yield self.other(axes)

    def other(self, axes: tuple[MeshAxis, ...]) -> PlanGrid:
        """Returns the grid in another order of axes."""
        return replace(self.box, layout=self.box.layout._replace(axes=axes))


class ContextSlice(NamedTuple):
    """The legal choices of plans with one context degree."""

    layout: RankLayout
    axes: tuple[tuple[MeshAxis, ...], ...]
    parallel: tuple[bool, ...]
    micro_batches: tuple[BatchChoice, ...]
    shards: tuple[ZeroChoice, ...]


@dataclass
class PlanSpace:
    """The degree groups of a job. `considered` and `rejected` are complete once `groups` is exhausted."""

    job: Job
    runnable: bool = False
    offloading: bool = True
    bucket: int = DEFAULT_BUCKET_BYTES
    considered: int = 0
    rejected: dict[str, RejectionCount] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_pins(self.job)
        links = link_model(self.job.cluster)
        self._link_domain = links.domain
        self._recompute = offered_recompute(self.job, self.pins.get("recompute"))
        self._varies_recompute_layers = (
            not {"recompute", "recompute_layers", "recompute_rest", "offload_layers"} & self.pins.keys()
        )
        self._fewer_last_blocks = range(1, max_fewer_last_blocks(self.job) + 1)
        self._feasibility = UpdateFeasibility(self.job)
        ways = self._offload_choices()
        self._offloads = [way for way in ways if self._feasibility.offload_violation(way) is None]
        self._never_offloaded = [way for way in ways if way not in self._offloads]
        """Offload choices that the optimizer update does not allow."""
        self._min_zero_stages = {min_zero_stage(choice) for choice in (*self._offloads, *self._never_offloaded)}
        self._shards_of: dict[tuple[int, int], tuple[ZeroChoice, ...]] = {}

    @cached_property
    def pins(self) -> Mapping[str, Any]:
        """Returns the pins of the job in the current field names."""
        return upgrade_offload_fields(self.job.pins)

    def boxes(self) -> Iterator[PlanGrid]:
        """Yields all plans that are legal except for interleaving, simpler degrees first."""
        for group in self.groups():
            yield from group.boxes()

    def groups(self) -> Iterator[DegreeGroup]:
        """Yields the legal degree groups, simpler degrees first."""
        devices = self.job.cluster.devices
        for pp in self._choices("pp", divisors(devices)):
            every = self._schedules(pp)
            legal = [order for order in every if self._feasibility.schedule_violation(pp, order) is None]
            illegal = [order for order in every if order not in legal]
            orders = FeasibleSchedules(
                legal,
                illegal,
                *(int(is_distinct_recompute(some, self._partial_recompute(some)).sum()) for some in (legal, illegal)),
            )
            for tp in self._choices("tp", divisors(devices // pp)):
                together: dict[tuple[Any, ...], list[ContextSlice]] = {}
                for cp in self._choices("cp", divisors(devices // (pp * tp))):
                    shards = self._shards(devices // (pp * tp * cp), cp)
                    for (ep, expert_tp), part in self._experts(tp, cp, shards).items():
                        cell = self._context_slice(RankLayout(tp, pp, ep, expert_tp), cp, tuple(part), orders)
                        if cell is not None:
                            group_key = cp if self.pins.keys() & {"dp_shard", "dp_replicate"} else 0
                            together.setdefault((cell[:3], group_key), []).append(cell)
                for cells in together.values():
                    yield self._group(cells, orders.legal)

    def reject(self, reason: str, count: int, example: str) -> None:
        """Counts rejected plans under a reason, with an example."""
        if count:
            self.rejected.setdefault(reason, RejectionCount(0, example)).count += count

    # --- choices
    # ----------------------------------------------------------------------------------------------------------------

    def _choices(self, name: str, choices: list[Any]) -> list[Any]:
        """Returns the choices that pins, and runtime support, leave."""
        if self.runnable and name in SUPPORTED_VALUES:
            choices = [choice for choice in choices if choice in SUPPORTED_VALUES[name]]
        return [choice for choice in choices if choice == self.pins[name]] if name in self.pins else choices

    def _shards(self, dp: int, cp: int) -> tuple[ZeroChoice, ...]:
        if (dp, cp) not in self._shards_of:
            self._shards_of[dp, cp] = tuple(self._zero_choices(dp, cp))
        return self._shards_of[dp, cp]

    def _zero_choices(self, dp: int, cp: int) -> Iterator[ZeroChoice]:
        """Yields the ZeRO choices of a data-parallel degree."""
        if self.pins.get("dp", dp) != dp:
            return
        for zero in self._choices("zero", list(range(min(self._min_zero_stages, default=0), 4))):
            lone = zero > 0 and zero in self._min_zero_stages and dp * cp == 1 and "zero" not in self.pins
            smallest = 1 if self.pins.get("zero", 0) or lone else 2
            for shard in self._choices(
                "dp_shard", [1] if zero == 0 else [size for size in divisors(dp) if size * cp >= smallest]
            ):
                if self.pins.get("dp_replicate", dp // shard) == dp // shard:
                    yield ZeroChoice(zero, dp // shard, shard * cp, lone) if zero else ZeroChoice(0, dp * cp, 1)

    def _experts(self, tp: int, cp: int, shards: tuple[ZeroChoice, ...]) -> dict[tuple[int, int], list[ZeroChoice]]:
        """Returns expert degrees and the tensor ranks that shard one expert, with the ZeRO choices that they allow."""
        degrees = self._choices("ep", divisors(self.job.model.experts) if self.job.model.experts else [1])
        if not degrees and self.pins["ep"] > 1:
            degrees = [self.pins["ep"]]
        found: dict[tuple[int, int], list[ZeroChoice]] = {}
        for ep in degrees:
            for each in shards:
                holders = each.holders if each.zero else cp
                if holders * tp % ep == 0:
                    found.setdefault((ep, tp // (ep // gcd(ep, holders)) if ep > 1 else tp), []).append(each)
        return found

    def _axes(self, layout: RankLayout, data: int) -> tuple[tuple[MeshAxis, ...], ...]:
        """Returns every order of axes that differs on the links."""
        found: dict[tuple[int, ...], tuple[MeshAxis, ...]] = {}
        for axes in self._choices("axes", list(AXIS_ORDERS)):
            strides = layout._replace(axes=axes).strides(data)
            degrees = {"tp": layout.tp, "pp": layout.pp, "dp": data}
            other_choices = self._link_domain < self.job.cluster.devices
            found.setdefault(
                tuple(stride for axis, stride in sorted(strides.items()) if degrees[axis] > 1) if other_choices else (),
                axes,
            )
        return tuple(found.values())

    def _schedules(self, pp: int) -> list[ScheduleChoice]:
        """Returns schedules with a block for every stage. The first is present even where blocks are too few."""
        blocks = max(self.job.model.blocks, 1)
        given = tuple(self.pins.get("layers_per_stage", ()))
        pinned, actions = self.pins.get("schedule"), tuple(self.pins.get("actions", ()))
        schedules = [rules.name for rules in offered_schedules()] if pp > 1 else [DEFAULT_SCHEDULE]
        if pinned is not None:
            rules = find_schedule(pinned)
            one_stage = rules.stages_per_rank == 1 and not rules.any_stages_per_rank
            if len(actions) == pp if rules.listed else pp == 1 and one_stage:
                schedules = [pinned]
        found: list[ScheduleChoice] = []
        for schedule in self._choices("schedule", schedules):
            rules = find_schedule(schedule)
            least, pinned_stages = rules.stages_per_rank, self.pins.get("virtual_stages", 1)
            turns = [least]
            if rules.any_stages_per_rank:
                turns = [pinned_stages] if rules.listed or pinned_stages > 1 else list(range(least, blocks // pp + 1))
            for virtual_stages in self._choices("virtual_stages", turns):
                stages = pp * virtual_stages
                if stages > max(blocks, pp) and found:
                    continue
                if not given or len(given) == stages:
                    found.append(
                        ScheduleChoice(
                            schedule, virtual_stages, given or even_split(blocks, stages), bool(given), actions
                        )
                    )
                if pp > 1 and virtual_stages == 1 and "layers_per_stage" not in self.pins:
                    splits = (split_with_lighter_last_stage(blocks, stages, less) for less in self._fewer_last_blocks)
                    found += [
                        ScheduleChoice(schedule, 1, split, True, actions)
                        for split in splits
                        if split and split != even_split(blocks, stages)
                    ]
        return found

    # --- regions
    # ----------------------------------------------------------------------------------------------------------------

    def _context_slice(
        self, layout: RankLayout, cp: int, shards: tuple[ZeroChoice, ...], orders: FeasibleSchedules
    ) -> ContextSlice | None:
        """Returns the legal choices of one layout and context degree, and counts the others."""
        job, data = self.job, shards[0].replicas * shards[0].holders
        dp, batch = data // cp, job.workload.batch
        contexts = self._contexts(cp, layout.tp)
        parallel = self._choices("sequence_parallel", [False, True] if layout.tp > 1 else [False])
        sizes = (
            [self.pins["micro_batch"]]
            if "micro_batch" in self.pins
            else [batch]
            if job.model.against_division
            else divisors(batch)
        )
        axes = self._axes(layout, data)
        other_choices = len(sizes) * len(parallel) * len(contexts) if axes else 0

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
        each = count_plans(shards, ways, len(self._uniform_recompute()), orders.parts, len(orders.legal), len(axes))
        size = each * other_choices
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
        if True in parallel and (fault := sequence_cut_violation(job, cut := first.but(sequence_parallel=True))):
            _count_rejection(self, fault, cut, each * len(sizes) * len(contexts))
            parallel = [choice for choice in parallel if not choice]
        fit = [micro_batch for micro_batch in sizes if batch % (dp * micro_batch) == 0]
        if len(fit) < len(sizes):
            odd = first.but(micro_batch=next(micro_batch for micro_batch in sizes if micro_batch not in fit))
            _count_rejection(
                self,
                next(batch_violations(odd, batch)),
                odd,
                each * len(parallel) * len(contexts) * (len(sizes) - len(fit)),
            )
        for way in contexts:
            headed = first.but(context=way[0], ulysses=way[1])
            if (fault := next(context_parallel_violations(headed, job.model.divisible), None)) is not None:
                _count_rejection(self, fault, headed, each * len(parallel) * len(fit))
                contexts = [other for other in contexts if other != way]
        if not fit or not parallel or not contexts:
            return None
        return ContextSlice(layout, axes[1:], tuple(parallel), micro_batches(fit, contexts), shards)

    def _count_update_rejections(
        self, cell: ContextSlice, illegal: Sequence[ZeroChoice], orders: FeasibleSchedules, other_choices: int
    ) -> None:
        """Counts plans that the update of the job does not allow: by offload choice, by schedule, then by ZeRO
        choice.

        `other_choices` is the number of combinations of the other choices.
        """
        every = [*self._offloads, *self._never_offloaded] or [()]
        axes, whole, parts = 1 + len(cell.axes), len(self._uniform_recompute()), orders.parts + orders.illegal_parts
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

    def _contexts(self, cp: int, tp: int) -> list[tuple[ContextParallelMethod, int]]:
        """Returns the attention methods of a context degree: ring, ulysses, or both with as many ulysses ranks as
        heads allow."""
        heads = self.job.model.divisible.get("heads", 0)
        part = self.pins.get("ulysses") or max(
            (part for part in divisors(cp)[:-1] if heads % (part * tp) == 0), default=1
        )
        ways = [(ContextParallelMethod.ring, 0), (ContextParallelMethod.ulysses, 0)][: 1 + (cp > 1)]
        ways += [(ContextParallelMethod.ulysses, part)] if 1 < part < cp and cp % part == 0 else []
        return [
            way
            for way in ways
            if way[0] in self._choices("context", [way[0]]) and way[1] in self._choices("ulysses", [way[1]])
        ]

    def _group(self, cells: list[ContextSlice], orders: list[ScheduleChoice]) -> DegreeGroup:
        """Returns the degree group of slices that differ in their context ranks."""
        whole = cells[0]._replace(
            micro_batches=tuple(each for cell in cells for each in cell.micro_batches),
            shards=tuple(
                sorted({each for cell in cells for each in cell.shards}, key=lambda each: (each.zero, each.holders))
            ),
        )
        found = DegreeGroup(
            self._grid(whole, orders), whole.axes, self._partial_recompute(orders), tuple(self._offloads[1:])
        )
        self._count_interleaving_rejections(found)
        return found

    def _grid(self, cell: ContextSlice, orders: list[ScheduleChoice]) -> PlanGrid:
        bucket = self.pins.get("bucket", self.bucket)
        first = (self._offloads or [()])[0]
        given = (
            cell.layout,
            bucket,
            tuple(orders),
            cell.micro_batches,
            cell.parallel,
            self._uniform_recompute(),
            cell.shards,
            (first,),
        )
        return PlanGrid(
            *given,
            loss_chunks=self.pins.get("loss_chunks", 1),
            compile=self.pins.get("compile", False),
            offload_share=self.pins.get("offload_share", 100) / 100,
            weights_share=self.pins.get("weights_share", 100) / 100,
            offload_layers=self.pins.get("offload_layers", 0),
        )

    def _uniform_recompute(self) -> tuple[RecomputeChoice, ...]:
        """Returns the recompute choices that treat all blocks equally."""
        if self.pins.get("recompute_layers"):
            kind, rest = self.pins.get("recompute", Recompute.full), self.pins.get("recompute_rest", Recompute.none)
            return (RecomputeChoice(kind, self.pins["recompute_layers"], rest=rest),)
        return tuple(RecomputeChoice(kind) for kind in self._choices("recompute", self._recompute))

    def _partial_recompute(self, orders: list[ScheduleChoice]) -> tuple[RecomputeChoice, ...]:
        """Returns every number of recomputed blocks of a stage, with the lighter kind for the others."""
        most = max((max(order.stage_layers) for order in orders), default=0) if self._varies_recompute_layers else 0
        return tuple(
            rung._replace(layers=count, fewer=True)
            for rung in recompute_ladder(self._recompute)
            for count in range(1, most)
        )

    def _offload_choices(self) -> list[tuple[Offload, ...]]:
        """Returns what may be offloaded, nothing first."""
        if "offload" in self.pins:
            return [tuple(self.pins["offload"])]
        in_part = [
            waits for name, waits in OFFLOAD_FRACTION_PINS.items() if self.pins.get(name, 100) < 100
        ]  # a pinned fraction implies the offload
        ways = {
            what: (self.offloading or in_part)
            and getattr(self.job.cluster, "storage_bandwidth" if what in DISK_OFFLOADS else "host_bandwidth")
            for what in Offload
        }
        choices = [
            choice
            for choice in OFFLOAD_CHOICES
            if all(ways[what] for what in choice) and all(waits(choice) for waits in in_part)
        ]
        return self._choices("offload", choices)

    def _count_interleaving_rejections(self, group: DegreeGroup) -> None:
        box = group.box
        in_rounds = replace(box, orders=tuple(order._replace(schedule=DEFAULT_SCHEDULE) for order in box.orders))
        illegal = in_rounds.legal & ~box.legal
        if illegal.any():
            plan = box.plan(tuple(np.argwhere(illegal[0])[0].tolist()))
            all_of_it = replace(group, box=in_rounds)
            _count_rejection(
                self, next(batch_violations(plan, self.job.workload.batch)), plan, all_of_it.legal - group.legal
            )


def recompute_ladder(kinds: Sequence[Recompute]) -> tuple[RecomputeChoice, ...]:
    """Returns the pairs of kinds that blocks of one stage may mix: each kind with the next lighter one."""
    steps = [kind for kind in (Recompute.none, *PER_BLOCK_RECOMPUTE) if kind in kinds]
    return tuple(RecomputeChoice(more, rest=less) for less, more in pairwise(steps))


def _count_rejection(space: PlanSpace, fault: Violation, plan: Plan, count: int) -> None:
    space.reject(fault.reason, count, f"{plan.name}: {fault.message}")
