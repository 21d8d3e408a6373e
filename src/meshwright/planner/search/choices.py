"""Lists the choices of a plan space (space.py): for each field of a plan, the values that pins and the runtime allow
and that are worth searching for the job. The module also splits devices into degrees, and blocks into stages."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import combinations, pairwise
from math import ceil, gcd
from typing import Any

from meshwright.core.cpp_compiler import has_cpp_compiler
from meshwright.planner.cost.links import link_model
from meshwright.planner.cost.plan_grid import RankLayout, RecomputeChoice, ScheduleChoice, ZeroChoice
from meshwright.planner.cost.uncertainty import ZERO_WITH_PIPELINE, is_on_host, is_trusted
from meshwright.planner.search.best_plans import uses_unmeasured_link
from meshwright.planner.search.feasibility import OFFLOAD_FRACTION_PINS
from meshwright.spec.constraints import SUPPORTED_VALUES
from meshwright.spec.enums import (
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
from meshwright.spec.precision import recipe
from meshwright.spec.schedules.schedule import find_schedule, offered_schedules


def split_with_lighter_last_stage(blocks: int, stages: int, less: int) -> tuple[int, ...]:
    """Returns the number of blocks of each stage if the last stage has `less` blocks fewer than in an even split. The
    other stages divide the remaining blocks evenly; stages near the end get one block more if the division leaves a
    remainder. Returns an empty tuple if the last stage would have no block.

    >>> split_with_lighter_last_stage(32, 4, 1), split_with_lighter_last_stage(4, 4, 1)
    ((8, 8, 9, 7), ())
    """
    last = blocks // stages - less
    if last < 1:
        return ()
    return (*reversed(even_split(blocks - last, stages - 1)), last)


def divisors(number: int) -> list[int]:
    """Returns the divisors of `number` in ascending order.

    >>> divisors(42)
    [1, 2, 3, 6, 7, 14, 21, 42]
    """
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return small + [number // size for size in reversed(small) if size * size != number]


def even_split(blocks: int, stages: int) -> tuple[int, ...]:
    """Returns the number of blocks of each stage in an even split. If there is a remainder, the first stages get one
    block more, as in `Plan.stage_layers`."""
    each, rest = divmod(blocks, stages)
    return tuple(each + (stage < rest) for stage in range(stages))


MAX_FEWER_LAST_BLOCKS = 4
"""The last stage, which also computes the head, may have at most this many blocks fewer than in an even split. The
searched numbers are also at most the FLOPs of the head divided by the FLOPs of a block, rounded up."""

MIN_ATTENTION_CORE_FRACTION = 0.01
"""Recompute of the attention core is searched if at least this fraction of a block's saved activations belongs to the
attention core. Fused attention saves almost nothing in the attention core, so recompute of the core does not pay
off."""


def attention_core_fraction(job: Job) -> float:
    """Returns the fraction of the blocks' saved activations that belongs to the attention core."""
    size, sequence = recipe(job.workload.precision).size, job.workload.sequence
    blocks = [layer for layer in job.model.layers if layer.name == "block"]
    core = sum(layer.repeat * (layer.core_fixed + layer.core_context * sequence) for layer in blocks)
    plain = sum(
        layer.repeat * ((layer.saved_split + layer.saved_whole) * size + layer.fixed_split + layer.fixed_whole)
        for layer in blocks
    )
    context = sum(layer.repeat * layer.core_context * sequence for layer in blocks)
    return core / (plain + context) if core else 0.0


MIN_RECOMPUTABLE_FRACTION = 0.1
"""Selective recompute is searched if at least this fraction of a block's saved activations can be recomputed by cheap
operations."""


def recomputable_fraction(job: Job) -> float:
    """Returns the fraction of the blocks' saved activations that cheap operations (all except matrix products and
    attention) can recompute.

    For compiled blocks, only activations that a compiled block saves are counted.
    """
    size = recipe(job.workload.precision).size
    blocks = [layer for layer in job.model.layers if layer.name == "block"]
    derived = sum(
        layer.repeat
        * ((layer.derived_split + layer.derived_whole) * size + layer.derived_fixed_split + layer.derived_fixed_whole)
        for layer in blocks
    )
    saved = sum(
        layer.repeat * ((layer.saved_split + layer.saved_whole) * size + layer.fixed_split + layer.fixed_whole)
        for layer in blocks
    )
    if job.pins.get("compile"):
        fused = sum(
            layer.repeat
            * ((layer.fused_split + layer.fused_whole) * size + layer.fused_fixed_split + layer.fused_fixed_whole)
            for layer in blocks
        )
        derived, saved = derived - fused, saved - fused
    return derived / saved if saved else 0.0


def offered_recompute(job: Job, pinned: Recompute | None = None) -> list[Recompute]:
    """Returns the recompute kinds that are worth searching, from no recompute to full recompute. The kind `pinned` is
    always included."""
    selective = attention_core_fraction(job) >= MIN_ATTENTION_CORE_FRACTION or pinned == Recompute.attn
    follows = recomputable_fraction(job) >= MIN_RECOMPUTABLE_FRACTION or pinned == Recompute.sac
    offered = [Recompute.none, *[Recompute.attn] * selective, *[Recompute.sac] * follows, Recompute.full]
    return [kind for kind in offered if is_trusted(job, "recompute", kind)]


def max_fewer_last_blocks(job: Job) -> int:
    """Returns how many blocks fewer than in an even split the last stage may have at most."""
    work = {layer.name: layer.flops + layer.attention_flops * job.workload.sequence for layer in job.model.layers}
    return min(ceil(work.get("head", 0.0) / work["block"]), MAX_FEWER_LAST_BLOCKS) if work.get("block") else 0


AXIS_ORDERS: tuple[tuple[MeshAxis, ...], ...] = (MESH_AXES, ("dp", "pp", "tp"))
"""The orders of mesh axes that the search includes. The default order is first."""

OFFLOAD_CHOICES = tuple(
    choice
    for count in range(len(EXCLUSIVE_OFFLOADS) + 2)
    for choice in combinations(Offload, count)
    if not any(set(places) <= set(choice) for places in EXCLUSIVE_OFFLOADS.values())
    and (Offload.gradients not in choice or set(OPTIMIZER_OFFLOADS) & set(choice))
)


class PlanChoices:
    """The searched values of each field of a job's plans. `runnable`: whether to include only values that this version
    can run. `offloading`: whether offload is searched. `allowed` limits the values of some fields, if a field has
    several values.
    """

    def __init__(
        self, job: Job, runnable: bool, offloading: bool, allowed: Mapping[str, Collection[Any]] | None = None
    ) -> None:
        self.job, self.runnable = job, runnable
        self.offloading = offloading and (job.trust == "all" or not uses_unmeasured_link(job.cluster, tuple(Offload)))
        self.allowed = allowed or {}
        self._link_domain = link_model(job.cluster).domain
        self._recompute = offered_recompute(job, self.pins.get("recompute"))
        self._varies_recompute_layers = (
            not {"recompute", "recompute_layers", "recompute_rest", "offload_layers"} & self.pins.keys()
            and not {"recompute_layers", "recompute_rest"} & self.allowed.keys()
        )
        self._fewer_last_blocks = range(1, max_fewer_last_blocks(job) + 1)
        self._min_zero_stages = {min_zero_stage(choice) for choice in self.offload_choices()}
        self._shards_of: dict[tuple[int, int], tuple[ZeroChoice, ...]] = {}

    @cached_property
    def pins(self) -> Mapping[str, Any]:
        """Returns the pins of the job. Old names of offload fields are replaced by the current names."""
        return upgrade_offload_fields(self.job.pins)

    def select(self, name: str, choices: list[Any]) -> list[Any]:
        """Returns the elements of `choices` for the field `name` that the pin of this field and the trust of the job
        allow. If `runnable` is set, the runtime must allow them too."""
        choices = [choice for choice in choices if is_trusted(self.job, name, choice)]
        if self.runnable and name in SUPPORTED_VALUES:
            choices = [choice for choice in choices if choice in SUPPORTED_VALUES[name]]
        if name in self.allowed and len(choices) > 1:
            choices = [choice for choice in choices if choice in self.allowed[name]]
        return [choice for choice in choices if choice == self.pins[name]] if name in self.pins else choices

    def zero_choices(self, dp: int, cp: int, pp: int) -> tuple[ZeroChoice, ...]:
        """Returns the ZeRO choices of a data-parallel and a context-parallel degree, for `pp` pipeline ranks. Results
        are cached."""
        if (dp, cp) not in self._shards_of:
            self._shards_of[dp, cp] = tuple(self._list_zero_choices(dp, cp))
        field = ZERO_WITH_PIPELINE if pp > 1 else "zero"
        return tuple(each for each in self._shards_of[dp, cp] if is_trusted(self.job, field, each.zero))

    def _list_zero_choices(self, dp: int, cp: int) -> Iterator[ZeroChoice]:
        """Yields the ZeRO choices of a data-parallel and a context-parallel degree."""
        if self.pins.get("dp", dp) != dp:
            return
        for zero in self.select("zero", list(range(min(self._min_zero_stages, default=0), 4))):
            lone = zero > 0 and zero in self._min_zero_stages and dp * cp == 1 and "zero" not in self.pins
            smallest = 1 if self.pins.get("zero", 0) or lone else 2
            for shard in self.select(
                "dp_shard", [1] if zero == 0 else [size for size in divisors(dp) if size * cp >= smallest]
            ):
                allowed = not zero or dp // shard in self.allowed.get("dp_replicate", (dp // shard,))
                if self.pins.get("dp_replicate", dp // shard) == dp // shard and allowed:
                    yield ZeroChoice(zero, dp // shard, shard * cp, lone) if zero else ZeroChoice(0, dp * cp, 1)

    def expert_choices(
        self, tp: int, cp: int, shards: tuple[ZeroChoice, ...]
    ) -> dict[tuple[int, int], list[ZeroChoice]]:
        """Returns, for each pair (expert-parallel degree, tensor ranks per expert), the elements of `shards` that allow
        this pair."""
        degrees = self.select("ep", divisors(self.job.model.experts) if self.job.model.experts else [1])
        if not degrees and self.pins["ep"] > 1:
            degrees = [self.pins["ep"]]
        found: dict[tuple[int, int], list[ZeroChoice]] = {}
        for ep in degrees:
            for each in shards:
                holders = each.holders if each.zero else cp
                if holders * tp % ep == 0:
                    found.setdefault((ep, tp // (ep // gcd(ep, holders)) if ep > 1 else tp), []).append(each)
        return found

    def axis_orders(self, layout: RankLayout, data: int) -> tuple[tuple[MeshAxis, ...], ...]:
        """Returns the orders of mesh axes. If several orders place the ranks equally on the links, only the first of
        them is returned. `data` is the number of data ranks times context ranks."""
        found: dict[tuple[int, ...], tuple[MeshAxis, ...]] = {}
        for axes in self.select("axes", list(AXIS_ORDERS)):
            strides = layout._replace(axes=axes).strides(data)
            degrees = {"tp": layout.tp, "pp": layout.pp, "dp": data}
            other_choices = self._link_domain < self.job.cluster.devices
            found.setdefault(
                tuple(stride for axis, stride in sorted(strides.items()) if degrees[axis] > 1) if other_choices else (),
                axes,
            )
        return tuple(found.values())

    def schedule_choices(self, pp: int) -> list[ScheduleChoice]:
        """Returns the schedules for `pp` pipeline ranks, with the blocks of each stage. A schedule with more stages
        than blocks is omitted if it has several stages per rank and the list already has a schedule. If the blocks of
        each stage are pinned, schedules with a different number of stages are omitted."""
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
        for schedule in self.select("schedule", schedules):
            rules = find_schedule(schedule)
            least, pinned_stages = rules.stages_per_rank, self.pins.get("virtual_stages", 1)
            turns = [least]
            if rules.any_stages_per_rank:
                turns = [pinned_stages] if rules.listed or pinned_stages > 1 else list(range(least, blocks // pp + 1))
            for virtual_stages in self.select("virtual_stages", turns):
                stages = pp * virtual_stages
                if stages > max(blocks, pp) and found:
                    continue
                if not given or len(given) == stages:
                    found.append(
                        ScheduleChoice(
                            schedule, virtual_stages, given or even_split(blocks, stages), bool(given), actions
                        )
                    )
                if pp > 1 and virtual_stages == 1 and not {"layers_per_stage"} & {*self.pins, *self.allowed}:
                    splits = (split_with_lighter_last_stage(blocks, stages, less) for less in self._fewer_last_blocks)
                    found += [
                        ScheduleChoice(schedule, 1, split, True, actions)
                        for split in splits
                        if split and split != even_split(blocks, stages)
                    ]
        return found

    def context_methods(self, cp: int, tp: int) -> list[tuple[ContextParallelMethod, int]]:
        """Returns the methods of context parallelism for the degrees `cp` and `tp`, as pairs (method, `ulysses` as in a
        plan). The methods are ring, ulysses, and both together with as many ulysses ranks as the number of heads
        allows."""
        heads = self.job.model.divisible.get("heads", 0)
        part = self.pins.get("ulysses") or max(
            (part for part in divisors(cp)[:-1] if heads % (part * tp) == 0), default=1
        )
        ways = [(ContextParallelMethod.ring, 0), (ContextParallelMethod.ulysses, 0)][: 1 + (cp > 1)]
        ways += [(ContextParallelMethod.ulysses, part)] if 1 < part < cp and cp % part == 0 else []
        if cp > 1:
            allowed = {name: self.allowed[name] for name in ("context", "ulysses") if name in self.allowed}
            ways = [
                way
                for way in ways
                if way[0] in allowed.get("context", way[:1]) and way[1] in allowed.get("ulysses", way[1:])
            ]
        return [
            way
            for way in ways
            if way[0] in self.select("context", [way[0]]) and way[1] in self.select("ulysses", [way[1]])
        ]

    def compile_choices(self, tp: int) -> list[bool]:
        """Returns whether blocks are compiled, for the tensor-parallel degree `tp`. On a CPU, compiled blocks were
        measured to be faster only with several tensor ranks, and a run needs a C++ compiler (`runnable`)."""
        if "compile" in self.pins:
            return [self.pins["compile"]]
        if is_on_host(self.job.cluster) and (tp == 1 or (self.runnable and not has_cpp_compiler())):
            return [False]
        return self.select("compile", [False, True])

    def uniform_recompute(self) -> tuple[RecomputeChoice, ...]:
        """Returns the recompute choices with one kind for all blocks, or only the pinned choice if a number of
        recomputed blocks is pinned."""
        if self.pins.get("recompute_layers"):
            kind, rest = self.pins.get("recompute", Recompute.full), self.pins.get("recompute_rest", Recompute.none)
            return (RecomputeChoice(kind, self.pins["recompute_layers"], rest=rest),)
        return tuple(RecomputeChoice(kind) for kind in self.select("recompute", self._recompute))

    def partial_recompute(self, orders: list[ScheduleChoice]) -> tuple[RecomputeChoice, ...]:
        """Returns the recompute choices with one kind for the first blocks of a stage and another kind for the later
        blocks: one choice for each number of first blocks and each pair of `recompute_ladder`."""
        most = max((max(order.stage_layers) for order in orders), default=0) if self._varies_recompute_layers else 0
        return tuple(
            rung._replace(layers=count, fewer=True)
            for rung in recompute_ladder(self._recompute)
            for count in range(1, most)
        )

    def offload_choices(self) -> list[tuple[Offload, ...]]:
        """Returns the offload choices. The first is no offload, unless offload is pinned."""
        if "offload" in self.pins:
            return [tuple(self.pins["offload"])]
        # A pinned offload fraction below 100 % requires offload of the data to which this fraction applies.
        in_part = [waits for name, waits in OFFLOAD_FRACTION_PINS.items() if self.pins.get(name, 100) < 100]
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
        return self.select("offload", choices)


def recompute_ladder(kinds: Sequence[Recompute]) -> tuple[RecomputeChoice, ...]:
    """Returns the pairs of recompute kinds that the blocks of one stage may have: one of `kinds` for the first blocks,
    and for the later blocks (`rest`) the one of `kinds` that recomputes next less. Recompute of the attention core is
    never part of a pair."""
    steps = [kind for kind in (Recompute.none, *PER_BLOCK_RECOMPUTE) if kind in kinds]
    return tuple(RecomputeChoice(more, rest=less) for less, more in pairwise(steps))
