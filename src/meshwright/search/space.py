"""Every plan of a job, as regions: all factors of the devices into replicas, shards, tensor, pipeline and context ranks, and all other choices.

The space is the product

    tp x pp x cp x dp_replicate x dp_shard = devices,  ep divides the experts and dp_shard x cp x tp,  ZeRO 0 (one shard) or 1 to 3 (two holders or more),  micro-batch divides batch,
    1f1b, gpipe, interleaved with 2 to blocks / pp stages a rank where pp > 1,  blocks as even as can be or the last stage with a few less,
    recompute none, selective, layer, or layer in eighths of each stage's blocks,  sequence parallelism where tp > 1,
    offload of any of optimizer, parameters and activations where devices have a link to their host;

and, all blocks alike and nothing offloaded, in the other layouts: ulysses instead of a ring where cp > 1, and data ranks outermost where that
changes a link. Tensor ranks stay innermost: nothing hides their traffic.

What breaks a rule of `spec.rules` is counted with its reason, without being listed; what is left comes out as regions that are legal but for
interleaving (`Box.legal`). Pins leave one value of a choice; `runnable` leaves what this version runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from math import ceil, gcd
from typing import Any

import numpy as np

from meshwright.base.errors import InputError, did_you_mean
from meshwright.cost.box import Box, Layout, Order, Shards
from meshwright.cost.collectives import fabric
from meshwright.spec.job import Job
from meshwright.spec.plan import AXES, Axis, Context, Offload, Plan, Recompute, Schedule
from meshwright.spec.rules import (
    Fault,
    batch_faults,
    context_faults,
    expert_faults,
    offload_faults,
    sequence_faults,
    stage_faults,
    tensor_faults,
)
from meshwright.spec.runs import RUNS

ROWS = 1 << 16
"""Plans of one box at most, so that its arrays stay in a core's cache."""

RELIEF = 4
"""Blocks that the last stage of a pipeline may have less than the others at most: what the head weighs in blocks, rounded up."""

ORDERS: tuple[tuple[Axis, ...], ...] = (AXES, ("dp", "pp", "tp"))
"""Orders of axes that are offered, the usual one first."""

PARTS = 8
"""Into how many parts the blocks of a stage are divided, of which some recompute."""

OFFLOADS = tuple(kept for count in range(len(Offload) + 1) for kept in combinations(Offload, count))


@dataclass
class Refused:
    """How many plans broke a rule, and the line for the first of them."""

    count: int
    example: str


@dataclass(frozen=True)
class Region:
    """Plans of equal degrees. `box` holds those in the usual layout that recompute all blocks alike and offload nothing; the others differ from
    them in their layout, in how many blocks of a stage recompute (`parts` of each order), in what they offload."""

    box: Box
    layouts: tuple[Layout, ...]
    parts: tuple[tuple[int, ...], ...]
    offloads: tuple[tuple[Offload, ...], ...]

    @property
    def legal(self) -> int:
        """Legal plans of all of them."""
        whole = self.box.legal[0, :, :, 0, 0, 0, 0].sum(axis=1)
        parts = np.array([len(parts) for parts in self.parts])
        usual = (whole * (len(self.box.recompute) + parts)).sum() * (1 + len(self.offloads))
        others = whole.sum() * len(self.box.recompute) * (len(self.layouts) - 1)
        return int(usual + others) * len(self.box.sequence_parallel) * len(self.box.shards)

    def boxes(self) -> Iterator[Box]:
        """All of them, layout by layout."""
        every = replace(self.box, offload=(*self.box.offload, *self.offloads))
        yield every
        for count in sorted(set().union(*self.parts)):
            orders = tuple(order for order, parts in zip(self.box.orders, self.parts, strict=True) if count in parts)
            yield replace(every, layout=every.layout._replace(recompute_layers=count), orders=orders, recompute=(Recompute.layer,))
        for layout in self.layouts[1:]:
            yield replace(self.box, layout=layout)

    def parts_of(self, order: Order) -> tuple[int, ...]:
        return self.parts[self.box.orders.index(order)]


@dataclass
class Space:
    """The regions of a job. `considered` and `refused` are complete once `regions` has run out."""

    job: Job
    runnable: bool = False
    offloading: bool = True
    considered: int = 0
    refused: dict[str, Refused] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_pins(self.job)
        links = fabric(self.job.cluster)
        self._domain = links.domain
        core = any(layer.core_fixed + layer.core_context for layer in self.job.model.layers)
        self._recompute = [Recompute.none, *([Recompute.selective] if core else []), Recompute.layer]
        self._reliefs = range(1, relief(self.job) + 1)

    @property
    def pins(self) -> Mapping[str, Any]:
        return self.job.pins

    def boxes(self) -> Iterator[Box]:
        """Every plan that is legal but for interleaving, simpler degrees first."""
        for region in self.regions():
            yield from region.boxes()

    def regions(self) -> Iterator[Region]:
        """Legal regions, simpler degrees first."""
        devices = self.job.cluster.devices
        for pp in self._choices("pp", divisors(devices)):
            for tp in self._choices("tp", divisors(devices // pp)):
                for cp in self._choices("cp", divisors(devices // (pp * tp))):
                    shards = tuple(self._shards(devices // (pp * tp * cp), cp))
                    for (ep, expert_tensor), part in self._experts(tp, cp, shards).items():
                        yield from self._region(Layout(tp, pp, cp, ep, expert_tensor), tuple(part))

    def refuse(self, reason: str, count: int, example: str) -> None:
        if count:
            self.refused.setdefault(reason, Refused(0, example)).count += count

    # --- choices ----------------------------------------------------------------------------------------------------------------

    def _choices(self, name: str, choices: list[Any]) -> list[Any]:
        """Of `choices` those that the pins, and what runs, leave."""
        if self.runnable and name in RUNS:
            choices = [choice for choice in choices if choice in RUNS[name]]
        return [choice for choice in choices if choice == self.pins[name]] if name in self.pins else choices

    def _shards(self, dp: int, cp: int) -> Iterator[Shards]:
        if self.pins.get("dp", dp) != dp:
            return
        smallest = 1 if self.pins.get("zero", 0) else 2
        for zero in self._choices("zero", [0, 1, 2, 3]):
            for shard in self._choices("dp_shard", [1] if zero == 0 else [size for size in divisors(dp) if size * cp >= smallest]):
                if self.pins.get("dp_replicate", dp // shard) == dp // shard:
                    yield Shards(zero, dp // shard, shard)

    def _experts(self, tp: int, cp: int, shards: tuple[Shards, ...]) -> dict[tuple[int, int], list[Shards]]:
        """Expert degrees, and the tensor ranks that share one expert, with the shards that they go with."""
        degrees = self._choices("ep", divisors(self.job.model.experts) if self.job.model.experts else [1])
        if not degrees and self.pins["ep"] > 1:
            degrees = [self.pins["ep"]]
        found: dict[tuple[int, int], list[Shards]] = {}
        for ep in degrees:
            for each in shards:
                holders = each.dp_shard * cp
                if holders * tp % ep == 0:
                    found.setdefault((ep, tp // (ep // gcd(ep, holders)) if ep > 1 else tp), []).append(each)
        return found

    def _layouts(self, layout: Layout, dp: int) -> list[Layout]:
        """`layout` with every way to attend across context ranks and every order of axes that differs on the links."""
        contexts = self._choices("context", [Context.ring, Context.ulysses] if layout.cp > 1 else [Context.ring])
        found: dict[tuple[int, ...], tuple[Axis, ...]] = {}
        for axes in self._choices("axes", list(ORDERS)):
            strides = layout._replace(axes=axes).strides(dp)
            degrees = {"tp": layout.tp, "pp": layout.pp, "dp": dp * layout.cp}
            beside = self._domain < self.job.cluster.devices
            found.setdefault(tuple(stride for axis, stride in sorted(strides.items()) if degrees[axis] > 1) if beside else (), axes)
        return [layout._replace(context=context, axes=axes) for context in contexts for axes in found.values()]

    def _orders(self, pp: int) -> list[Order]:
        """Orders that have a block for every stage; the first is there even where the blocks do not suffice."""
        blocks = max(self.job.model.blocks, 1)
        given = tuple(self.pins.get("layers_per_stage", ()))
        schedules = [Schedule.one_f_one_b, Schedule.gpipe, Schedule.interleaved] if pp > 1 else [Schedule.one_f_one_b]
        if pp == 1 and self.pins.get("schedule") == Schedule.gpipe:
            schedules = [Schedule.gpipe]
        found = []
        for schedule in self._choices("schedule", schedules):
            turns = list(range(2, blocks // pp + 1)) if schedule == Schedule.interleaved else [1]
            if schedule == Schedule.interleaved and self.pins.get("virtual_stages", 1) > 1:
                turns = [self.pins["virtual_stages"]]
            for virtual_stages in self._choices("virtual_stages", turns):
                stages = pp * virtual_stages
                if not given or len(given) == stages:
                    found.append(Order(schedule, virtual_stages, given or even(blocks, stages), bool(given)))
                if pp > 1 and virtual_stages == 1 and "layers_per_stage" not in self.pins:
                    splits = (relieved(blocks, stages, less) for less in self._reliefs)
                    found += [Order(schedule, 1, split, True) for split in splits if split and split != even(blocks, stages)]
        return found

    def _parts(self, order: Order) -> tuple[int, ...]:
        """How many blocks of each stage may recompute beside others that do not: all numbers of few, eighths of many."""
        if {"recompute", "recompute_layers"} & self.pins.keys() or self.runnable:
            return ()
        most = max(order.stage_layers)
        return tuple(sorted({ceil(most * part / PARTS) for part in range(1, PARTS)} - {most}))

    # --- regions ----------------------------------------------------------------------------------------------------------------

    def _against_cut(self, plan: Plan) -> Fault | None:
        """Why the sequence cannot be cut as `plan` does."""
        return next(sequence_faults(plan, self.job.workload.sequence, against=self.job.model.against_sequence), None)

    def _region(self, layout: Layout, shards: tuple[Shards, ...]) -> Iterator[Region]:
        """The regions of one layout, with what breaks a rule taken out and counted."""
        job, dp = self.job, shards[0].dp_replicate * shards[0].dp_shard
        batch, orders = job.workload.batch, self._orders(layout.pp)
        parallel = self._choices("sequence_parallel", [False, True] if layout.tp > 1 else [False])
        recompute = self._choices("recompute", self._recompute)
        if self.pins.get("recompute_layers"):
            layout, recompute = layout._replace(recompute_layers=self.pins["recompute_layers"]), [Recompute.layer]
        sizes = [self.pins["micro_batch"]] if "micro_batch" in self.pins else divisors(batch)
        first, *offloads = self._offloads() or [()]
        layouts, parts = self._layouts(layout, dp), [self._parts(order) for order in orders]
        usual = (len(recompute) * len(orders) + sum(map(len, parts))) * (1 + len(offloads))
        each = (usual + len(recompute) * len(orders) * (len(layouts) - 1)) * len(shards) if layouts else 0
        size = each * len(sizes) * len(parallel)
        self.considered += size
        if not size:
            return

        def box(chosen: slice, sizes: list[int], parallel: list[bool]) -> Box:
            counts = tuple((size, batch // (dp * size)) for size in sizes)
            bucket = self.pins.get("bucket", Plan().bucket)
            return Box(layouts[0], bucket, tuple(orders[chosen]), counts, tuple(parallel), tuple(recompute), shards, (first,))

        example = box(slice(1), sizes[:1], [False]).plan((0, 0, 0, 0, 0, 0))
        fault = self._fault(example)
        if fault is not None:
            return self._take(fault, example, size)
        if True in parallel and (fault := self._against_cut(cut := example.but(sequence_parallel=True))):
            self._take(fault, cut, each * len(sizes))
            parallel = [choice for choice in parallel if not choice]
        whole = [micro_batch for micro_batch in sizes if batch % (dp * micro_batch) == 0]
        if len(whole) < len(sizes):
            odd = example.but(micro_batch=next(micro_batch for micro_batch in sizes if micro_batch not in whole))
            self._take(next(batch_faults(odd, batch)), odd, each * len(parallel) * (len(sizes) - len(whole)))
        layouts = self._attending(layouts, example, len(recompute) * len(orders) * len(shards) * len(whole) * len(parallel))
        if not whole or not parallel or not layouts:
            return
        per_order = len(whole) * len(parallel) * len(recompute) * len(shards)
        for begin in range(0, len(orders), step := max(ROWS // per_order, 1)):
            chosen = slice(begin, begin + step)
            found = Region(box(chosen, whole, parallel), tuple(layouts), tuple(parts[chosen]), tuple(offloads))
            self._interleaving(found)
            yield found

    def _offloads(self) -> list[tuple[Offload, ...]]:
        """What may wait on the host, nothing first."""
        if "offload" in self.pins:
            return [tuple(self.pins["offload"])]
        possible = self.offloading and self.job.cluster.host_bandwidth
        return self._choices("offload", list(OFFLOADS if possible else OFFLOADS[:1]))

    def _fault(self, plan: Plan) -> Fault | None:
        """The first rule that all plans of a layout break."""
        model = self.job.model
        found = (
            *tensor_faults(plan, model.divisible, model.tensor_parallel),
            *expert_faults(plan, model.experts),
            *offload_faults(plan, self.job.cluster.host_bandwidth),
            *stage_faults(plan, max(model.blocks, 1)),
            *sequence_faults(plan, self.job.workload.sequence),
        )
        return found[0] if found else None

    def _attending(self, layouts: list[Layout], example: Plan, each: int) -> list[Layout]:
        """The layouts whose context ranks can attend in their way."""
        fault = next(context_faults(example.but(context=Context.ulysses), self.job.model.divisible), None) if example.cp > 1 else None
        if fault is None:
            return layouts
        left = [layout for layout in layouts if layout.context != Context.ulysses]
        self._take(fault, example.but(context=Context.ulysses), each * (len(layouts) - len(left)))
        return left

    def _interleaving(self, region: Region) -> None:
        box = region.box
        illegal = ~box.legal[0, :, :, 0, 0, 0, 0]
        if illegal.any():
            order, micro_batch = np.argwhere(illegal)[0].tolist()
            plan = box.plan((order, micro_batch, 0, 0, 0, 0))
            all_of_it = replace(region, box=replace(box, orders=tuple(order._replace(schedule=Schedule.gpipe) for order in box.orders)))
            self._take(next(batch_faults(plan, self.job.workload.batch)), plan, all_of_it.legal - region.legal)

    def _take(self, fault: Fault, plan: Plan, count: int) -> None:
        self.refuse(fault.reason, count, f"{plan.name}: {fault.message}")


def relief(job: Job) -> int:
    """How many blocks less the last stage may have."""
    work = {layer.name: layer.flops + layer.attention_flops * job.workload.sequence for layer in job.model.layers}
    return min(ceil(work.get("head", 0.0) / work["block"]), RELIEF) if work.get("block") else 0


def relieved(blocks: int, stages: int, less: int) -> tuple[int, ...]:
    """Blocks of each stage when the last one has `less` than an even share; what does not divide goes to the later of the others.

    >>> relieved(32, 4, 1), relieved(4, 4, 1)
    ((8, 8, 9, 7), ())
    """
    last = blocks // stages - less
    if last < 1:
        return ()
    return (*reversed(even(blocks - last, stages - 1)), last)


def divisors(number: int) -> list[int]:
    """
    >>> divisors(42)
    [1, 2, 3, 6, 7, 14, 21, 42]
    """
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


def even(blocks: int, stages: int) -> tuple[int, ...]:
    """Blocks of each stage, as `Plan.stage_layers` shares them out."""
    each, rest = divmod(blocks, stages)
    return tuple(each + (stage < rest) for stage in range(stages))


def check_pins(job: Job) -> None:
    """InputError when a pin is no field of a plan, or pins contradict each other or the devices."""
    pins, devices = job.pins, job.cluster.devices
    known = ("dp", *(name for name in Plan.model_fields if name != "version"))
    for name in pins:
        if name not in known:
            raise InputError(f"pin {name!r} is no field of a plan{did_you_mean(name, known)}; pins are {', '.join(known)}")
    axes = ("dp", "tp", "pp", "cp") if "dp" in pins else ("dp_replicate", "dp_shard", "tp", "pp", "cp")
    factors = [(name, degree) for name in axes if isinstance(degree := pins.get(name), int) and (degree > 1 or name != "cp")]
    product = 1
    for _, degree in factors:
        product *= degree
    equation = " * ".join(f"{name}({degree})" for name, degree in factors)
    if factors and devices % product:
        raise InputError(f"pins {equation} = {product} but the cluster has {devices} devices, which {product} does not divide")
