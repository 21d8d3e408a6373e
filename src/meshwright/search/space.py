"""Every plan of a job, as boxes: all factors of the devices into replicas, shards, tensor and pipeline ranks, and all other choices.

The space is the product

    tp x pp x dp_replicate x dp_shard = devices,  ZeRO 0 (one shard) or 1 to 3 (two shards or more),  micro-batch divides batch,
    1f1b, gpipe, interleaved with 2 to blocks / pp stages a rank where pp > 1,  recompute,  sequence parallelism where tp > 1.

What breaks a rule of `spec.rules` is counted with its reason, without being listed; what is left comes out as boxes that are legal but for
interleaving (`Box.legal`). Pins leave one value of a choice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.base.errors import InputError, did_you_mean
from meshwright.cost.box import Box, Layout, Order, Shards
from meshwright.spec.job import Job
from meshwright.spec.plan import Plan, Recompute, Schedule
from meshwright.spec.rules import Fault, batch_faults, sequence_faults, stage_faults, tensor_faults

ROWS = 1 << 16
"""Plans of one box at most, so that its arrays stay in a core's cache."""

NOT_OFFERED = {"cp": 1, "ep": 1, "offload": ()}
"""What every offered plan has: the runtime does not run the rest yet."""


@dataclass
class Refused:
    """How many plans broke a rule, and the line for the first of them."""

    count: int
    example: str


@dataclass
class Space:
    """The boxes of a job. `considered` and `refused` are complete once `boxes` has run out."""

    job: Job
    considered: int = 0
    refused: dict[str, Refused] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_pins(self.job)

    @property
    def pins(self) -> Mapping[str, Any]:
        return self.job.pins

    def boxes(self) -> Iterator[Box]:
        """Legal boxes, simpler degrees first."""
        devices = self.job.cluster.devices
        for pp in self._pinned("pp", divisors(devices)):
            for tp in self._pinned("tp", divisors(devices // pp)):
                shards = tuple(self._shards(devices // (pp * tp)))
                if shards:
                    yield from self._box(tp, pp, shards)

    def refuse(self, reason: str, count: int, example: str) -> None:
        if count:
            self.refused.setdefault(reason, Refused(0, example)).count += count

    # --- choices ----------------------------------------------------------------------------------------------------------------

    def _pinned(self, name: str, choices: list[Any]) -> list[Any]:
        return [choice for choice in choices if choice == self.pins[name]] if name in self.pins else choices

    def _shards(self, dp: int) -> Iterator[Shards]:
        if self.pins.get("dp", dp) != dp:
            return
        smallest = 1 if self.pins.get("zero", 0) else 2
        for zero in self._pinned("zero", [0, 1, 2, 3]):
            for shard in self._pinned("dp_shard", [1] if zero == 0 else [size for size in divisors(dp) if size >= smallest]):
                if self.pins.get("dp_replicate", dp // shard) == dp // shard:
                    yield Shards(zero, dp // shard, shard)

    def _orders(self, pp: int) -> list[Order]:
        """Orders that have a block for every stage; the first is there even where the blocks do not suffice."""
        blocks = max(self.job.model.blocks, 1)
        given = tuple(self.pins.get("layers_per_stage", ()))
        schedules = [Schedule.one_f_one_b, Schedule.gpipe, Schedule.interleaved] if pp > 1 else [Schedule.one_f_one_b]
        if pp == 1 and self.pins.get("schedule") == Schedule.gpipe:
            schedules = [Schedule.gpipe]
        found = []
        for schedule in self._pinned("schedule", schedules):
            turns = list(range(2, blocks // pp + 1)) if schedule == Schedule.interleaved else [1]
            if schedule == Schedule.interleaved and self.pins.get("virtual_stages", 1) > 1:
                turns = [self.pins["virtual_stages"]]
            for virtual_stages in self._pinned("virtual_stages", turns):
                stages = pp * virtual_stages
                if not given or len(given) == stages:
                    found.append(Order(schedule, virtual_stages, given or even(blocks, stages), bool(given)))
        return found

    # --- boxes ------------------------------------------------------------------------------------------------------------------

    def _box(self, tp: int, pp: int, shards: tuple[Shards, ...]) -> Iterator[Box]:
        """The boxes of one (tp, pp), with what breaks a rule taken out and counted."""
        job, dp = self.job, shards[0].dp_replicate * shards[0].dp_shard
        batch = job.workload.batch
        sequence_parallel = self._pinned("sequence_parallel", [False, True] if tp > 1 else [False])
        recompute = self._pinned("recompute", [Recompute.none, Recompute.layer])
        sizes = [self.pins["micro_batch"]] if "micro_batch" in self.pins else divisors(batch)
        orders = self._orders(pp)
        size = len(orders) * len(sizes) * len(sequence_parallel) * len(recompute) * len(shards)
        self.considered += size
        if not size:
            return

        def box(orders: list[Order], sizes: list[int], sequence_parallel: list[bool]) -> Box:
            counts = tuple((size, batch // (dp * size)) for size in sizes)
            return Box(
                Layout(tp, pp),
                self.pins.get("bucket", Plan().bucket),
                tuple(orders),
                counts,
                tuple(sequence_parallel),
                tuple(recompute),
                shards,
            )

        example = box(orders[:1], sizes[:1], [False]).plan((0, 0, 0, 0, 0, 0))
        faults = [*tensor_faults(example, job.model.divisible, job.model.tensor_parallel), *stage_faults(example, max(job.model.blocks, 1))]
        if faults:
            return self._take(faults[0], example, size)
        each = size // len(sequence_parallel)
        if True in sequence_parallel:
            for fault in sequence_faults(example.but(sequence_parallel=True), job.workload.sequence):
                self._take(fault, example.but(sequence_parallel=True), each)
                sequence_parallel, size = [choice for choice in sequence_parallel if not choice], size - each
        whole = [micro_batch for micro_batch in sizes if batch % (dp * micro_batch) == 0]
        if len(whole) < len(sizes):
            odd = example.but(micro_batch=next(micro_batch for micro_batch in sizes if micro_batch not in whole))
            self._take(next(batch_faults(odd, batch)), odd, size // len(sizes) * (len(sizes) - len(whole)))
        if not whole or not sequence_parallel:
            return
        per_order = len(whole) * len(sequence_parallel) * len(recompute) * len(shards)
        for first in range(0, len(orders), step := max(ROWS // per_order, 1)):
            found = box(orders[first : first + step], whole, sequence_parallel)
            self._interleaving(found)
            yield found

    def _interleaving(self, box: Box) -> None:
        illegal = ~box.legal[0, :, :, 0, 0, 0, 0]
        if illegal.any():
            order, micro_batch = map(int, illegal.nonzero()[0][:1].tolist() + illegal.nonzero()[1][:1].tolist())
            plan = box.plan((order, micro_batch, 0, 0, 0, 0))
            others = box.size // illegal.size
            self._take(next(batch_faults(plan, self.job.workload.batch)), plan, int(illegal.sum()) * others)

    def _take(self, fault: Fault, plan: Plan, count: int) -> None:
        self.refuse(fault.reason, count, f"{plan.name}: {fault.message}")


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
    """InputError when a pin is no field of a plan, is not offered, or pins contradict each other or the devices."""
    pins, devices = job.pins, job.cluster.devices
    known = ("dp", *(name for name in Plan.model_fields if name != "version"))
    for name, value in pins.items():
        if name not in known:
            raise InputError(f"pin {name!r} is no field of a plan{did_you_mean(name, known)}; pins are {', '.join(known)}")
        if name in NOT_OFFERED and value != NOT_OFFERED[name]:
            raise InputError(f"pin {name}={value!r} is not offered: plans of the search have {name}={NOT_OFFERED[name]!r}")
    axes = ("dp", "tp", "pp") if "dp" in pins else ("dp_replicate", "dp_shard", "tp", "pp")
    factors = [(name, degree) for name in axes if isinstance(degree := pins.get(name), int)]
    product = 1
    for _, degree in factors:
        product *= degree
    equation = " * ".join(f"{name}({degree})" for name, degree in factors)
    if factors and devices % product:
        raise InputError(f"pins {equation} = {product} but the cluster has {devices} devices, which {product} does not divide")
