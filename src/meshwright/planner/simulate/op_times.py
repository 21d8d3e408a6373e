"""Computes the times of the operations of a plan on an undisturbed device or link, from the cost model.

The forward or backward of one micro-batch on one virtual stage is a list of segments. A segment ends where
communication begins. At ZeRO 3 each layer is a segment, because its weights are gathered before it and its gradients
are reduced after its backward. At ZeRO 2 every backward has one segment for each gradient bucket. At most
MAX_BUCKETS_SIMULATED buckets are simulated; small buckets are merged. At ZeRO 0 and 1 only the last backward has
several segments. All other passes have one segment. If the schedule splits backward, gradients are reduced after W (the
weight gradients).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost import constants
from meshwright.planner.cost.cost_context import CostContext
from meshwright.planner.cost.cost_model import CostModel, PassTime, stage_overhead_seconds
from meshwright.planner.cost.dp_comm import dp_group_rates, expert_group_rates
from meshwright.planner.cost.links import CollectiveRates
from meshwright.planner.cost.memory import p2p_message_bytes, shared_on_host
from meshwright.planner.cost.plan_grid import Array, PlanGrid, RecomputeChoice
from meshwright.planner.cost.rank_contents import RankClass, list_ranks, stage_contents
from meshwright.spec.layout import ALIGN_NUMEL, align_numel
from meshwright.spec.plan import Plan
from meshwright.spec.schedules.schedule import stage_to_rank

MAX_BUCKETS_SIMULATED = 8

ComputeCommSeconds = tuple[float, float]
"""Seconds of compute, and of communication during which compute waits."""


class PassSegment(NamedTuple):
    """One segment of a pass: seconds of compute, and seconds of tensor, context and expert communication. `unit` is the
    index of the parameter group whose weights the segment needs or whose gradients it computes. `ahead`: the weights
    are requested when the previous segment begins (ZeRO 3)."""

    compute: float
    exchange: float
    unit: int = -1
    ahead: bool = False


PassSegments = tuple[PassSegment, ...]


class StageOpTimes(NamedTuple):
    """The times of one virtual stage: its passes, the last backward (or W), and the seconds to gather and to reduce
    each parameter group.

    `weights` is W (the weight gradients) of a split backward; then `backward` excludes W.
    """

    forward: PassSegments
    backward: PassSegments
    last: PassSegments
    gathers: tuple[float, ...]
    reductions: tuple[float, ...]
    weights: PassSegments = ()


class EndOfStepTimes(NamedTuple):
    """The times of a pipeline rank after its last backward: the reduction over replicas, the update on the device and
    on the host, and the gather of new weights."""

    replicas: float
    update: float
    on_host: float
    weights: float


class OpTimes(NamedTuple):
    """All times that a simulation of a plan needs. `message` is the bytes of one message between neighbouring pipeline
    ranks."""

    stages: tuple[StageOpTimes, ...]
    endings: tuple[EndOfStepTimes, ...]
    message: float
    tie: float
    on_host: bool


class LayerOpTimes(NamedTuple):
    """The times of one layer: seconds (compute, communication) of its forward and backward and of its deferrable weight
    gradient, and the elements of its dense weights and of its expert weights."""

    forward: ComputeCommSeconds
    backward: ComputeCommSeconds
    weights: ComputeCommSeconds
    dense: int
    experts: int
    is_block: bool


class GroupCommCost(NamedTuple):
    """The cost of reductions and gathers over one shard group and one replica group. A buffer is padded to equal shards
    on `holders` ranks."""

    shard: CollectiveRates
    replicate: CollectiveRates
    holders: int

    def scatter(self, elements: int, size: int) -> float:
        """Returns the seconds of a reduce-scatter or an all-gather over the shard group."""
        return float(self.shard.gather(align_numel(elements, self.holders * ALIGN_NUMEL) * size)) if elements else 0.0

    def reduce(self, elements: int, size: int) -> float:
        """Returns the seconds of an all-reduce of a shard over the replicas."""
        return (
            float(self.replicate.reduce(align_numel(elements, self.holders * ALIGN_NUMEL) * size / self.holders))
            if elements
            else 0.0
        )


class DataParallelCost(NamedTuple):
    """The communication cost of data ranks, for dense weights and for experts. The bytes of an element are `size` when
    stored, `sent` in a reduction and `fetched` in a gather."""

    dense: GroupCommCost
    experts: GroupCommCost
    size: int
    sent: int
    zero: int
    fetched: int

    def reduction(self, dense: Sequence[int], experts: int) -> float:
        """Returns the total seconds of the reductions of several buckets and of the experts, one after the other."""
        cost = GroupCommCost.reduce if self.zero == 0 else GroupCommCost.scatter
        return sum(cost(self.dense, each, self.sent) for each in dense) + cost(self.experts, experts, self.sent)

    def gather(self, dense: int, experts: int) -> float:
        """Returns the seconds of the gathers of one parameter group."""
        opened = 0.0 if self.fetched else constants.SHARED_UNSHARD_SECONDS * ((dense > 0) + (experts > 0))
        return self.dense.scatter(dense, self.fetched) + self.experts.scatter(experts, self.fetched) + opened

    def replicas(self, dense: int, experts: int) -> float:
        """Returns the seconds of the all-reduce over replicas."""
        return self.dense.reduce(dense, self.sent) + self.experts.reduce(experts, self.sent)


def compute_op_times(pricer: CostModel, plan: Plan, box: PlanGrid) -> OpTimes:
    """Returns the times of `plan`, the only plan of `box`."""
    setting = pricer.setting
    bucket = None if plan.zero == 3 else max(-(-plan.bucket // setting.recipe.size), 1)
    contents = [tuple(row) for row in stage_contents(setting.entries, box.orders[0]).tolist()]
    data, offload = data_parallel_cost(setting, box), offload_waits(pricer, box)
    table = layer_op_times(pricer, box)
    made: dict[tuple[tuple[int, ...], float], StageOpTimes] = {}
    stages: list[StageOpTimes] = []
    for number, content in enumerate(contents):
        waits = offload[stage_to_rank(number, box.pp, box.orders[0].rules.v_shape)] / box.orders[0].virtual_stages
        if (content, waits) not in made:
            ends = [run.end for run in pricer.flat.units(content, box.cut, bucket).runs for _ in range(run.times)]
            layers = add_stage_overhead(stage_layers(table, content, box), stage_overhead_seconds(setting))
            made[content, waits] = stage_op_times(data, layers, ends, waits, plan.splits_backward(number))
        stages.append(made[content, waits])
    return OpTimes(
        stages=tuple(stages),
        endings=tuple(end_of_step_times(pricer, box, data)),
        message=float(p2p_message_bytes(setting, box, micro_batch_tokens(setting, box)).item()),
        tie=float(pricer.tie(box).item()),
        on_host=setting.on_host,
    )


def micro_batch_tokens(setting: CostContext, box: PlanGrid) -> Array:
    """Returns the tokens of a micro-batch on one rank."""
    return box.tokens(setting.job.workload.sequence)


def data_parallel_cost(setting: CostContext, box: PlanGrid) -> DataParallelCost:
    """Returns the communication cost of the data-parallel groups."""
    shard, replicate = map(_as_scalars, dp_group_rates(setting, box))
    dense = GroupCommCost(shard, replicate, int(box.holders.item()))
    shard, replicate = map(_as_scalars, expert_group_rates(setting, box))
    experts = GroupCommCost(shard, replicate, int(box.expert_holders.item()))
    size = setting.recipe.size
    fetched = 0 if shared_on_host(setting, box).any() else size
    return DataParallelCost(
        dense, experts, size, setting.practice.reduced or setting.recipe.gradient_size, box.shards[0].zero, fetched
    )


def _as_scalars(group: CollectiveRates) -> CollectiveRates:
    """Converts rates that are arrays of one element to numbers."""
    return CollectiveRates(*(np.asarray(value).item() for value in group))


def layer_op_times(pricer: CostModel, box: PlanGrid) -> list[tuple[LayerOpTimes, LayerOpTimes]]:
    """Returns two times of one layer for each layer run: with the recompute kind of the plan, and with that of the
    remaining blocks."""
    entries = pricer.setting.entries
    classes = [_single_layer_class(at, len(entries)) for at in range(len(entries))]
    both = [
        pricer.passes(replace(box, recompute=(RecomputeChoice(kind),)), pricer.class_layout(box, classes), whole=False)
        for kind in (box.recompute[0].kind, box.recompute[0].rest)
    ]
    found = []
    for at, entry in enumerate(entries):
        dense, experts = entry.aligned(box.cut), entry.experts(box.cut) if box.layout.ep > 1 else 0
        as_planned, without = (
            LayerOpTimes(*_split_pass(passes, at), dense, experts, entry.is_block) for passes in both
        )
        found.append((as_planned, without))
    return found


def _single_layer_class(at: int, entries: int) -> RankClass:
    """Returns the class of a rank whose only layer belongs to layer run `at`."""
    content = np.zeros((1, entries), dtype=np.int64)
    content[0, at] = 1
    return RankClass(at, 1, content, ((tuple(content[0].tolist()), 1),))


def _split_pass(passes: PassTime, at: int) -> tuple[ComputeCommSeconds, ComputeCommSeconds, ComputeCommSeconds]:
    """Returns forward, backward, and the deferrable part of backward, each as compute and communication. The fraction
    of communication is assumed to be equal in forward and backward."""
    forward, backward, compute, again, weights = (
        float(np.broadcast_to(part, passes.forward.shape)[at].item())
        for part in (passes.forward, passes.backward, passes.compute, passes.recompute, passes.weights)
    )
    part = (compute + again) / (forward + backward) if forward + backward else 1.0
    return (
        (forward * part, forward * (1.0 - part)),
        (backward * part, backward * (1.0 - part)),
        (min(weights, backward * part), 0.0),
    )


def stage_layers(
    table: Sequence[tuple[LayerOpTimes, LayerOpTimes]], content: Sequence[int], box: PlanGrid
) -> list[LayerOpTimes]:
    """Returns the layers of a stage in forward order. With partial recompute, the first blocks have the plan's
    recompute kind."""
    found: list[LayerOpTimes] = []
    recomputing = box.recompute[0].blocks(box.orders[0])
    for (as_planned, plain), count in zip(table, content, strict=True):
        for _ in range(count):
            blocks = sum(layer.is_block for layer in found)
            found.append(plain if recomputing and as_planned.is_block and blocks >= recomputing else as_planned)
    return found


def add_stage_overhead(layers: list[LayerOpTimes], each: tuple[float, float]) -> list[LayerOpTimes]:
    """Adds the overhead of a stage to its first layer."""
    if not layers or not any(each):
        return layers
    first, (forward, backward) = layers[0], each
    first = first._replace(
        forward=(first.forward[0] + forward, first.forward[1]),
        backward=(first.backward[0] + backward, first.backward[1]),
    )
    return [first, *layers[1:]]


def offload_waits(pricer: CostModel, box: PlanGrid) -> list[float]:
    """Returns the seconds that a micro-batch waits for the host, by pipeline rank."""
    return values_by_rank(pricer, box, pricer.price(box).seconds.offload)


def values_by_rank(pricer: CostModel, box: PlanGrid, values: Array) -> list[float]:
    """Expands values of rank classes to pipeline ranks."""
    order = box.orders[0]
    kinds = pricer.rank_contents(order, box.pp).kinds
    line = np.broadcast_to(values, (len(kinds), *values.shape[1:])).reshape(len(kinds))
    of_kind = {kind.layers.tobytes(): float(value) for kind, value in zip(kinds, line, strict=True)}
    return [of_kind[rank.layers.tobytes()] for rank in list_ranks(pricer.setting.entries, order, box.pp)]


def stage_op_times(
    data: DataParallelCost,
    layers: Sequence[LayerOpTimes],
    ends: Sequence[int],
    waits: float,
    split_backward: bool = False,
) -> StageOpTimes:
    """Returns the times of a virtual stage of `layers`, in forward order.

    `ends` is the number of elements of each parameter group. Each micro-batch waits `waits` seconds for transfers to
    and from the host. `split_backward` means that backward is two actions.
    """
    if split_backward:
        without = [
            layer._replace(backward=(layer.backward[0] - layer.weights[0], layer.backward[1]), weights=(0.0, 0.0))
            for layer in layers
        ]
        first = stage_op_times(data, without, ends, waits)
        second = stage_op_times(data, [layer._replace(backward=layer.weights) for layer in layers], ends, 0.0)
        whole_of = first.backward if data.zero == 3 else single_segment([layer.backward for layer in without][::-1])
        return first._replace(
            backward=add_wait(whole_of, waits * (data.zero < 3)), last=second.last, weights=second.backward
        )
    behind = layers[::-1]
    if data.zero == 3:
        some = [layer for layer in layers if layer.dense or layer.experts]
        gathers = tuple(data.gather(layer.dense, layer.experts) for layer in some)
        reductions = tuple(data.reduction([layer.dense], layer.experts) for layer in some)
        back = segments_by_layer(behind, "backward", len(some))
        return StageOpTimes(
            segments_by_layer(layers, "forward", len(some)),
            add_wait(back, waits),
            add_wait(back, waits),
            gathers,
            reductions,
        )
    forward, backward = (
        single_segment([layer.forward for layer in layers]),
        add_wait(single_segment([layer.backward for layer in layers]), waits),
    )
    if (
        data.dense.shard.ranks * data.dense.replicate.ranks == 1
        and data.experts.shard.ranks * data.experts.replicate.ranks == 1
    ):
        return StageOpTimes(forward, backward, backward, (), ())
    buckets = merge_buckets(ends[::-1]) if data.zero == 2 else [[end] for end in ends[::-1]]
    cuts = bucket_boundaries([layer.dense for layer in behind], [sum(some) for some in buckets])
    groups = [behind[start:stop] for start, stop in pairwise([0, *cuts])]
    reductions = tuple(
        data.reduction(some, sum(layer.experts for layer in group)) for some, group in zip(buckets, groups, strict=True)
    )
    pieces = [
        single_segment([layer.backward for layer in group])[0]._replace(unit=unit) for unit, group in enumerate(groups)
    ]
    last = add_wait(tuple(pieces), waits)
    return StageOpTimes(forward, last if data.zero == 2 else backward, last, (), reductions)


def single_segment(parts: Sequence[ComputeCommSeconds]) -> PassSegments:
    """Returns the parts of a pass as one segment."""
    return (PassSegment(sum(compute for compute, _ in parts), sum(exchange for _, exchange in parts)),)


def add_wait(pieces: PassSegments, seconds: float) -> PassSegments:
    """Returns `pieces` with a wait of `seconds` at the beginning of the first segment."""
    return (pieces[0]._replace(exchange=pieces[0].exchange + seconds), *pieces[1:])


def segments_by_layer(layers: Sequence[LayerOpTimes], way: str, units: int) -> PassSegments:
    """Returns one segment per layer. The weights of a block are requested when the previous block begins."""
    pieces = []
    unit = -1 if way == "forward" else units
    before = False
    for layer in layers:
        owns = layer.dense > 0 or layer.experts > 0
        unit += (1 if way == "forward" else -1) if owns else 0
        compute, exchange = layer.forward if way == "forward" else layer.backward
        pieces.append(PassSegment(compute, exchange, unit if owns else -1, layer.is_block and before))
        before = layer.is_block
    return tuple(pieces)


def merge_buckets(ends: Sequence[int]) -> list[list[int]]:
    """Returns at most MAX_BUCKETS_SIMULATED groups of neighbouring buckets. The last bucket is a separate group,
    because nothing overlaps with its reduction.

    >>> merge_buckets([4, 4, 1]), len(merge_buckets([1] * 100)), merge_buckets([1] * 100)[-1]
    ([[4], [4], [1]], 8, [1])
    """
    if len(ends) <= MAX_BUCKETS_SIMULATED:
        return [[end] for end in ends]
    first = len(ends) - 1
    cuts = [first * at // (MAX_BUCKETS_SIMULATED - 1) for at in range(MAX_BUCKETS_SIMULATED)]
    return [list(ends[start:stop]) for start, stop in pairwise(cuts)] + [[ends[-1]]]


def bucket_boundaries(elements: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Returns after how many layers, in backward order, each bucket is full. `elements`: the elements of each layer.
    `ends`: the elements of each bucket. A layer without elements belongs to the bucket of its neighbour.

    >>> bucket_boundaries([10, 10, 0, 10, 0], [20, 10])
    [2, 5]
    """
    cuts: list[int] = []
    due = list(accumulate(ends))[:-1]
    for at, filled in enumerate(accumulate(elements), start=1):
        if len(cuts) < len(due) and filled >= due[len(cuts)]:
            cuts.append(at)
    return [*cuts, len(elements)]


def end_of_step_times(pricer: CostModel, box: PlanGrid, data: DataParallelCost) -> Iterator[EndOfStepTimes]:
    """Yields the times after the last backward for each pipeline rank."""
    seconds = pricer.price(box).seconds
    update, on_host = (values_by_rank(pricer, box, part) for part in (seconds.update, seconds.on_host))
    bucket = None if data.zero == 3 else max(-(-box.bucket // data.size), 1)
    experts = np.array([entry.experts(box.cut) if box.layout.ep > 1 else 0 for entry in pricer.setting.entries])
    for rank in list_ranks(pricer.setting.entries, box.orders[0], box.pp):
        runs = [
            (run, count) for content, count in rank.stages for run in pricer.flat.units(content, box.cut, bucket).runs
        ]
        own = (rank.layers.sum(axis=0) * (experts > 0)).tolist()
        dense = [(run.end, run.times * count) for run, count in runs]
        own_experts = [(int(each), count) for each, count in zip(experts, own, strict=True)]
        yield EndOfStepTimes(
            replicas=sum_collectives(data.replicas, dense, own_experts) if data.zero else 0.0,
            update=update[rank.rank],
            on_host=on_host[rank.rank],
            weights=sum_collectives(data.gather, dense, own_experts) if data.zero in (1, 2) else 0.0,
        )


def sum_collectives(
    cost: Callable[[int, int], float], dense: Sequence[tuple[int, int]], experts: Sequence[tuple[int, int]]
) -> float:
    """Returns the total seconds of one collective per buffer."""
    return sum(cost(end, 0) * times for end, times in dense) + sum(cost(0, end) * times for end, times in experts)
