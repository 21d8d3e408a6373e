"""Every plan of a job, as regions: all factors of the devices into replicas, shards, tensor, pipeline and context ranks, and all other choices.

The space is the product

    tp x pp x cp x dp_replicate x dp_shard = devices,  ep divides the experts and dp_shard x cp x tp,  ZeRO 0 (one shard) or 1 to 3 (two holders or more),  micro-batch divides batch,
    1f1b, gpipe, interleaved with 2 to blocks / pp stages a rank, zbh1, zbv, dualpipev where pp > 1,  blocks as even as can be or the last stage with a few less,
    recompute none, selective where the attention core is worth it, by operation where much follows from the rest, layer, or of the first blocks of each stage, any number of them,  sequence parallelism where tp > 1,
    offload of any of optimizer, parameters and activations where devices have a link to their host;

    where cp > 1 a ring, ulysses, or both with as many ranks exchanging heads as heads allow,

and, all blocks alike and nothing offloaded, with data ranks outermost where that changes a link. Tensor ranks stay innermost: nothing hides their traffic.

What breaks a rule of `spec.rules` is counted with its reason, without being listed; what is left comes out as regions, whose boxes say which of
their products are plans (`Box.legal`). Context ranks change what a micro-batch is, not how ranks are cut: all of them share a region. Pins leave one value of a choice; `runnable` leaves what this version runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations, pairwise
from math import gcd
from typing import Any, NamedTuple

import numpy as np

from meshwright.cost.box import Again, Box, Layout, MicroBatch, Order, Shards, new_parts
from meshwright.cost.collectives import fabric
from meshwright.search.division import divisors, even, relieved
from meshwright.search.legal import Orders, Updates, against_cut, first_fault, plans_of
from meshwright.search.pinned import WAITS, check_pins
from meshwright.search.worth import offered, relief
from meshwright.spec.choices import OPTIMIZER, least_zero
from meshwright.spec.job import Job
from meshwright.spec.keeps import with_shares
from meshwright.spec.plan import (
    AXES,
    BUCKET,
    FILES,
    HELD,
    IN_BLOCKS,
    TWICE,
    Axis,
    Context,
    Offload,
    Plan,
    Recompute,
    Schedule,
)
from meshwright.spec.rules import Fault, batch_faults, context_faults
from meshwright.spec.runs import RUNS

ORDERS: tuple[tuple[Axis, ...], ...] = (AXES, ("dp", "pp", "tp"))
"""Orders of axes that are offered, the usual one first."""

OFFERED = (Schedule.one_f_one_b, Schedule.gpipe, Schedule.interleaved, Schedule.zbh1, Schedule.zbv, Schedule.dualpipev)
"""Schedules of pipelines."""

OFFLOADS = tuple(
    kept
    for count in range(len(TWICE) + 2)
    for kept in combinations(Offload, count)
    if not any(set(places) <= set(kept) for places in TWICE.values()) and (Offload.gradients not in kept or set(OPTIMIZER) & set(kept))
)


@dataclass
class Refused:
    """How many plans broke a rule, and the line for the first of them."""

    count: int
    example: str


@dataclass(frozen=True)
class Region:
    """Plans of equal degrees. `box` holds those in the usual order of axes that recompute all blocks alike and offload nothing; the others differ
    from them in their order of axes, in how many blocks of a stage recompute, in what they offload."""

    box: Box
    axes: tuple[tuple[Axis, ...], ...]
    parts: tuple[Again, ...]
    offloads: tuple[tuple[Offload, ...], ...]

    @property
    def ways(self) -> tuple[tuple[Offload, ...], ...]:
        """All that may wait elsewhere, first what `box` has: nothing, or what is pinned."""
        return (*self.box.offload, *self.offloads)

    @cached_property
    def legal(self) -> int:
        """Legal plans of all of them."""
        every = replace(self.box, offload=self.ways)
        parts = replace(every, recompute=self.parts).legal_size if self.parts else 0
        return every.legal_size + parts + self.box.legal_size * len(self.axes)

    def boxes(self) -> Iterator[Box]:
        """All of them."""
        yield replace(self.box, offload=self.ways, recompute=(*self.box.recompute, *self.parts))
        for axes in self.axes:
            yield self.other(axes)

    def other(self, axes: tuple[Axis, ...]) -> Box:
        """In another order of axes."""
        return replace(self.box, layout=self.box.layout._replace(axes=axes))


class Cell(NamedTuple):
    """The legal part of what plans with so many context ranks can be: what is left of each choice."""

    layout: Layout
    axes: tuple[tuple[Axis, ...], ...]
    parallel: tuple[bool, ...]
    micro_batches: tuple[MicroBatch, ...]
    shards: tuple[Shards, ...]


@dataclass
class Space:
    """The regions of a job. `considered` and `refused` are complete once `regions` has run out."""

    job: Job
    runnable: bool = False
    offloading: bool = True
    bucket: int = BUCKET
    considered: int = 0
    refused: dict[str, Refused] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_pins(self.job)
        links = fabric(self.job.cluster)
        self._domain = links.domain
        self._recompute = offered(self.job, self.pins.get("recompute"))
        self._partly = not {"recompute", "recompute_layers", "recompute_rest", "offload_layers"} & self.pins.keys()
        self._reliefs = range(1, relief(self.job) + 1)
        self._updates = Updates(self.job)
        ways = self._ways_to_offload()
        self._offloads = [way for way in ways if self._updates.against_way(way) is None]
        self._kept_near = [way for way in ways if way not in self._offloads]
        """What must not wait elsewhere, for how it is updated."""
        self._least = {least_zero(choice) for choice in (*self._offloads, *self._kept_near)}
        self._shards_of: dict[tuple[int, int], tuple[Shards, ...]] = {}

    @cached_property
    def pins(self) -> Mapping[str, Any]:
        return with_shares(self.job.pins)

    def boxes(self) -> Iterator[Box]:
        """Every plan that is legal but for interleaving, simpler degrees first."""
        for region in self.regions():
            yield from region.boxes()

    def regions(self) -> Iterator[Region]:
        """Legal regions, simpler degrees first."""
        devices = self.job.cluster.devices
        for pp in self._choices("pp", divisors(devices)):
            every = self._orders(pp)
            kept = [order for order in every if self._updates.against_order(pp, order) is None]
            lost = [order for order in every if order not in kept]
            orders = Orders(kept, lost, *(int(new_parts(some, self._parts(some)).sum()) for some in (kept, lost)))
            for tp in self._choices("tp", divisors(devices // pp)):
                together: dict[tuple[Any, ...], list[Cell]] = {}
                for cp in self._choices("cp", divisors(devices // (pp * tp))):
                    shards = self._shards(devices // (pp * tp * cp), cp)
                    for (ep, expert_tensor), part in self._experts(tp, cp, shards).items():
                        cell = self._cell(Layout(tp, pp, ep, expert_tensor), cp, tuple(part), orders)
                        if cell is not None:
                            alone = cp if self.pins.keys() & {"dp_shard", "dp_replicate"} else 0
                            together.setdefault((cell[:3], alone), []).append(cell)
                for cells in together.values():
                    yield self._region(cells, orders.kept)

    def refuse(self, reason: str, count: int, example: str) -> None:
        if count:
            self.refused.setdefault(reason, Refused(0, example)).count += count

    # --- choices ----------------------------------------------------------------------------------------------------------------

    def _choices(self, name: str, choices: list[Any]) -> list[Any]:
        """Of `choices` those that the pins, and what runs, leave."""
        if self.runnable and name in RUNS:
            choices = [choice for choice in choices if choice in RUNS[name]]
        return [choice for choice in choices if choice == self.pins[name]] if name in self.pins else choices

    def _shards(self, dp: int, cp: int) -> tuple[Shards, ...]:
        if (dp, cp) not in self._shards_of:
            self._shards_of[dp, cp] = tuple(self._cuts(dp, cp))
        return self._shards_of[dp, cp]

    def _cuts(self, dp: int, cp: int) -> Iterator[Shards]:
        """Ways to share states out."""
        if self.pins.get("dp", dp) != dp:
            return
        for zero in self._choices("zero", list(range(min(self._least, default=0), 4))):
            lone = zero > 0 and zero in self._least and dp * cp == 1 and "zero" not in self.pins
            smallest = 1 if self.pins.get("zero", 0) or lone else 2
            for shard in self._choices("dp_shard", [1] if zero == 0 else [size for size in divisors(dp) if size * cp >= smallest]):
                if self.pins.get("dp_replicate", dp // shard) == dp // shard:
                    yield Shards(zero, dp // shard, shard * cp, lone) if zero else Shards(0, dp * cp, 1)

    def _experts(self, tp: int, cp: int, shards: tuple[Shards, ...]) -> dict[tuple[int, int], list[Shards]]:
        """Expert degrees, and the tensor ranks that share one expert, with the shards that they go with."""
        degrees = self._choices("ep", divisors(self.job.model.experts) if self.job.model.experts else [1])
        if not degrees and self.pins["ep"] > 1:
            degrees = [self.pins["ep"]]
        found: dict[tuple[int, int], list[Shards]] = {}
        for ep in degrees:
            for each in shards:
                holders = each.holders if each.zero else cp
                if holders * tp % ep == 0:
                    found.setdefault((ep, tp // (ep // gcd(ep, holders)) if ep > 1 else tp), []).append(each)
        return found

    def _axes(self, layout: Layout, data: int) -> tuple[tuple[Axis, ...], ...]:
        """Every order of axes that differs on the links."""
        found: dict[tuple[int, ...], tuple[Axis, ...]] = {}
        for axes in self._choices("axes", list(ORDERS)):
            strides = layout._replace(axes=axes).strides(data)
            degrees = {"tp": layout.tp, "pp": layout.pp, "dp": data}
            beside = self._domain < self.job.cluster.devices
            found.setdefault(tuple(stride for axis, stride in sorted(strides.items()) if degrees[axis] > 1) if beside else (), axes)
        return tuple(found.values())

    def _orders(self, pp: int) -> list[Order]:
        """Orders that have a block for every stage; the first is there even where the blocks do not suffice."""
        blocks = max(self.job.model.blocks, 1)
        given = tuple(self.pins.get("layers_per_stage", ()))
        pinned, actions = self.pins.get("schedule"), tuple(self.pins.get("actions", ()))
        schedules = list(OFFERED) if pp > 1 else [Schedule.one_f_one_b]
        if (pp == 1 and pinned in (Schedule.gpipe, Schedule.zbh1)) or (pinned == Schedule.actions and len(actions) == pp):
            schedules = [pinned]
        found: list[Order] = []
        for schedule in self._choices("schedule", schedules):
            turns = list(range(2, blocks // pp + 1)) if schedule == Schedule.interleaved else [HELD.get(schedule, 1)]
            if schedule == Schedule.actions:
                turns = [self.pins.get("virtual_stages", 1)]
            if schedule == Schedule.interleaved and self.pins.get("virtual_stages", 1) > 1:
                turns = [self.pins["virtual_stages"]]
            for virtual_stages in self._choices("virtual_stages", turns):
                stages = pp * virtual_stages
                if stages > max(blocks, pp) and found:
                    continue
                if not given or len(given) == stages:
                    found.append(Order(schedule, virtual_stages, given or even(blocks, stages), bool(given), actions))
                if pp > 1 and virtual_stages == 1 and "layers_per_stage" not in self.pins:
                    splits = (relieved(blocks, stages, less) for less in self._reliefs)
                    found += [Order(schedule, 1, split, True, actions) for split in splits if split and split != even(blocks, stages)]
        return found

    # --- regions ----------------------------------------------------------------------------------------------------------------

    def _cell(self, layout: Layout, cp: int, shards: tuple[Shards, ...], orders: Orders) -> Cell | None:
        """What is legal of one layout and number of context ranks; what is not is counted."""
        job, data = self.job, shards[0].replicas * shards[0].holders
        dp, batch = data // cp, job.workload.batch
        contexts = self._contexts(cp, layout.tp)
        parallel = self._choices("sequence_parallel", [False, True] if layout.tp > 1 else [False])
        sizes = [self.pins["micro_batch"]] if "micro_batch" in self.pins else [batch] if job.model.against_division else divisors(batch)
        axes = self._axes(layout, data)
        beside = len(sizes) * len(parallel) * len(contexts) if axes else 0

        def micro_batches(sizes: list[int], contexts: list[tuple[Context, int]]) -> tuple[MicroBatch, ...]:
            return tuple(MicroBatch(size, batch // (dp * size), cp, *context) for context in contexts for size in sizes)

        lost = [shard for shard in shards if self._updates.against_shards(shard, cp)]
        shards = tuple(shard for shard in shards if shard not in lost)
        if beside:
            layout = layout._replace(axes=axes[0])
            cell = Cell(layout, axes[1:], (False,), micro_batches(sizes[:1], contexts[:1]), shards)
            self._take_update(cell, lost, orders, beside)
        ways = self._offloads or [()] * (not self._kept_near)
        each = plans_of(shards, ways, len(self._whole()), orders.parts, len(orders.kept), len(axes))
        size = each * beside
        self.considered += size
        if not size:
            return None
        example = self._box(Cell(layout, axes, (False,), micro_batches(sizes[:1], contexts[:1]), shards[:1]), orders.kept[:1])
        first = example.plan((0, 0, 0, 0, 0, 0))
        fault = first_fault(job, first, self._updates)
        if fault is not None:
            _take(self, fault, first, size)
            return None
        if True in parallel and (fault := against_cut(job, cut := first.but(sequence_parallel=True))):
            _take(self, fault, cut, each * len(sizes) * len(contexts))
            parallel = [choice for choice in parallel if not choice]
        fit = [micro_batch for micro_batch in sizes if batch % (dp * micro_batch) == 0]
        if len(fit) < len(sizes):
            odd = first.but(micro_batch=next(micro_batch for micro_batch in sizes if micro_batch not in fit))
            _take(self, next(batch_faults(odd, batch)), odd, each * len(parallel) * len(contexts) * (len(sizes) - len(fit)))
        for way in contexts:
            headed = first.but(context=way[0], ulysses=way[1])
            if (fault := next(context_faults(headed, job.model.divisible), None)) is not None:
                _take(self, fault, headed, each * len(parallel) * len(fit))
                contexts = [other for other in contexts if other != way]
        if not fit or not parallel or not contexts:
            return None
        return Cell(layout, axes[1:], tuple(parallel), micro_batches(fit, contexts), shards)

    def _take_update(self, cell: Cell, lost: Sequence[Shards], orders: Orders, beside: int) -> None:
        """Counts what the update of the job does not go with: ways to offload, orders, then shards. `beside`: plans of each other choice."""
        every = [*self._offloads, *self._kept_near] or [()]
        axes, whole, parts = 1 + len(cell.axes), len(self._whole()), orders.parts + orders.lost_parts
        cases = [
            *(
                (cell.shards, orders.kept, [way], plans_of(cell.shards, [way], whole, orders.parts, len(orders.kept)))
                for way in self._kept_near
            ),
            (cell.shards, orders.lost, every, plans_of(cell.shards, every, whole, orders.lost_parts, len(orders.lost), axes)),
            (lost, [*orders.kept, *orders.lost], every, plans_of(lost, every, whole, parts, len(orders.kept) + len(orders.lost), axes)),
        ]
        for shards, some, ways, count in cases:
            if count:
                way, shard = next((way, shard) for way in ways for shard in shards if shard.keeps(way))
                box = replace(self._box(cell._replace(shards=(shard,)), some[:1]), offload=(way,))
                plan = box.plan((0, 0, 0, 0, 0, 0))
                fault = self._updates.against(plan)
                assert fault is not None
                self.considered += count * beside
                _take(self, fault, plan, count * beside)

    def _contexts(self, cp: int, tp: int) -> list[tuple[Context, int]]:
        """How so many context ranks may attend, as in a plan: by a ring, by heads, or by both, with as many exchanging heads as heads allow."""
        heads = self.job.model.divisible.get("heads", 0)
        part = self.pins.get("ulysses") or max((part for part in divisors(cp)[:-1] if heads % (part * tp) == 0), default=1)
        ways = [(Context.ring, 0), (Context.ulysses, 0)][: 1 + (cp > 1)]
        ways += [(Context.ulysses, part)] if 1 < part < cp and cp % part == 0 else []
        return [way for way in ways if way[0] in self._choices("context", [way[0]]) and way[1] in self._choices("ulysses", [way[1]])]

    def _region(self, cells: list[Cell], orders: list[Order]) -> Region:
        """The region of cells that differ in their context ranks."""
        whole = cells[0]._replace(
            micro_batches=tuple(each for cell in cells for each in cell.micro_batches),
            shards=tuple(sorted({each for cell in cells for each in cell.shards}, key=lambda each: (each.zero, each.holders))),
        )
        found = Region(self._box(whole, orders), whole.axes, self._parts(orders), tuple(self._offloads[1:]))
        self._interleaving(found)
        return found

    def _box(self, cell: Cell, orders: list[Order]) -> Box:
        bucket = self.pins.get("bucket", self.bucket)
        first = (self._offloads or [()])[0]
        given = (cell.layout, bucket, tuple(orders), cell.micro_batches, cell.parallel, self._whole(), cell.shards, (first,))
        return Box(
            *given,
            loss_chunks=self.pins.get("loss_chunks", 1),
            compile=self.pins.get("compile", False),
            offload_share=self.pins.get("offload_share", 100) / 100,
            weights_share=self.pins.get("weights_share", 100) / 100,
            offload_layers=self.pins.get("offload_layers", 0),
        )

    def _whole(self) -> tuple[Again, ...]:
        """What recomputes where all blocks are alike."""
        if self.pins.get("recompute_layers"):
            kind, rest = self.pins.get("recompute", Recompute.full), self.pins.get("recompute_rest", Recompute.none)
            return (Again(kind, self.pins["recompute_layers"], rest=rest),)
        return tuple(Again(kind) for kind in self._choices("recompute", self._recompute))

    def _parts(self, orders: list[Order]) -> tuple[Again, ...]:
        """Every number of blocks of a stage that recompute beside others that do less."""
        most = max((max(order.stage_layers) for order in orders), default=0) if self._partly else 0
        return tuple(rung._replace(layers=count, fewer=True) for rung in rungs(self._recompute) for count in range(1, most))

    def _ways_to_offload(self) -> list[tuple[Offload, ...]]:
        """What may wait on the host, nothing first."""
        if "offload" in self.pins:
            return [tuple(self.pins["offload"])]
        in_part = [waits for name, waits in WAITS.items() if self.pins.get(name, 100) < 100]  # who pins a share asks for what waits
        ways = {
            what: (self.offloading or in_part) and getattr(self.job.cluster, "storage_bandwidth" if what in FILES else "host_bandwidth")
            for what in Offload
        }
        choices = [choice for choice in OFFLOADS if all(ways[what] for what in choice) and all(waits(choice) for waits in in_part)]
        return self._choices("offload", choices)

    def _interleaving(self, region: Region) -> None:
        box = region.box
        in_rounds = replace(box, orders=tuple(order._replace(schedule=Schedule.gpipe) for order in box.orders))
        illegal = in_rounds.legal & ~box.legal
        if illegal.any():
            plan = box.plan(tuple(np.argwhere(illegal[0])[0].tolist()))
            all_of_it = replace(region, box=in_rounds)
            _take(self, next(batch_faults(plan, self.job.workload.batch)), plan, all_of_it.legal - region.legal)


def rungs(kinds: Sequence[Recompute]) -> tuple[Again, ...]:
    """What the first blocks of a stage can do, and the others beside them: each kind with the one before it, from all to nothing."""
    steps = [kind for kind in (Recompute.none, *IN_BLOCKS) if kind in kinds]
    return tuple(Again(more, rest=less) for less, more in pairwise(steps))


def _take(space: Space, fault: Fault, plan: Plan, count: int) -> None:
    space.refuse(fault.reason, count, f"{plan.name}: {fault.message}")
