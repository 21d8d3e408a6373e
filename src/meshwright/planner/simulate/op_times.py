"""Computes the times of all operations of a plan for the simulation of a step (run.py). The times are those of the cost
model, without faults and without contention.

A pass is the forward or the backward of one micro-batch on one virtual stage. A pass is a list of segments, and a
segment ends where communication begins:

- ZeRO 3: each layer is a segment, because the layer's weights are gathered before it runs and the layer's gradients are
  reduced after its backward.
- ZeRO 2: every backward has one segment for each gradient bucket. At most MAX_BUCKETS_SIMULATED buckets are simulated;
  neighbouring buckets are merged.
- ZeRO 0 and 1: only the last backward has one segment for each gradient bucket. All other passes have one segment.

If the schedule splits backward into B (gradients of inputs) and W (gradients of weights), gradients are reduced after
W.
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
from meshwright.planner.cost.step_terms import loss_gather_seconds, tied_vocab_seconds
from meshwright.spec.layout import ALIGN_NUMEL, align_numel
from meshwright.spec.plan import Plan
from meshwright.spec.schedules.schedule import stage_to_rank

MAX_BUCKETS_SIMULATED = 8

ComputeCommSeconds = tuple[float, float]
"""Seconds of compute, and seconds of communication that does not overlap with compute."""


class PassSegment(NamedTuple):
    """One segment of a pass. `compute` is the seconds of compute, `exchange` the seconds of tensor, context and expert
    communication.

    `unit` is the index of the parameter group whose weights are gathered before the segment or whose gradients are
    reduced after it. It is -1 if there is no such group. `ahead`: whether the all-gather of the weights is prefetched,
    that is, starts with the previous segment (ZeRO 3).
    """

    compute: float
    exchange: float
    unit: int = -1
    ahead: bool = False


PassSegments = tuple[PassSegment, ...]


class StageOpTimes(NamedTuple):
    """The times of one virtual stage. `last` is the last backward of a step (with a split backward, the last W).
    `gathers` and `reductions` are the seconds for each parameter group.

    `weights` is W (the weight gradients) if the schedule splits backward. In this case `backward` is only B (the
    gradients of inputs). Otherwise `weights` is empty.
    """

    forward: PassSegments
    backward: PassSegments
    last: PassSegments
    gathers: tuple[float, ...]
    reductions: tuple[float, ...]
    weights: PassSegments = ()


class EndOfStepTimes(NamedTuple):
    """The seconds of a pipeline rank after its last backward: the gradient reduction over replicas, the update on the
    device (`update`) and on the host (`on_host`), and the gather of the updated weights (`weights`), which overlaps
    with the next forward."""

    replicas: float
    update: float
    on_host: float
    weights: float


class OpTimes(NamedTuple):
    """All times that a simulation of a plan needs, by virtual stage and by pipeline rank.

    `message` is the bytes of one message between neighbouring pipeline ranks. `tie` is the seconds to sum the gradients
    of a tied weight on the first and last stage; without stages, those to gather the outputs for a loss over the whole
    batch. `on_host`: whether ranks are CPU processes.
    """

    stages: tuple[StageOpTimes, ...]
    endings: tuple[EndOfStepTimes, ...]
    message: float
    tie: float
    on_host: bool


class LayerOpTimes(NamedTuple):
    """The times and sizes of one layer.

    `forward`, `backward` and `weights` are seconds of compute and communication; `weights` is the deferrable weight
    gradient, a part of `backward`. `dense` and `experts` are the elements of dense weights and of expert weights on one
    rank.
    """

    forward: ComputeCommSeconds
    backward: ComputeCommSeconds
    weights: ComputeCommSeconds
    dense: int
    experts: int
    is_block: bool


class GroupCommCost(NamedTuple):
    """The cost of reductions and gathers over one shard group and one replica group. `holders` is the number of ranks
    in the shard group. Buffers are padded so that all shards are equal."""

    shard: CollectiveRates
    replicate: CollectiveRates
    holders: int

    def scatter(self, elements: int, size: float) -> float:
        """Returns the seconds of a reduce-scatter or an all-gather over the shard group. `size` is the bytes per
        element."""
        return float(self.shard.gather(align_numel(elements, self.holders * ALIGN_NUMEL) * size)) if elements else 0.0

    def reduce(self, elements: int, size: float) -> float:
        """Returns the seconds of an all-reduce over the replicas. Each rank reduces its shard of a buffer of `elements`
        elements."""
        return (
            float(self.replicate.reduce(align_numel(elements, self.holders * ALIGN_NUMEL) * size / self.holders))
            if elements
            else 0.0
        )


class DataParallelCost(NamedTuple):
    """The communication cost of data ranks, for dense weights and for experts.

    A weight element has `size` bytes in memory and `fetched` bytes in a gather; `fetched` is 0 if the ranks of a host
    share one replica of the weights. A gradient element has `sent` bytes in a reduction: frozen weights have no
    gradients, so `sent` is the mean over all elements. `trained` is the trained fraction of the weights.
    """

    dense: GroupCommCost
    experts: GroupCommCost
    size: int
    sent: float
    zero: int
    fetched: int
    trained: float

    def reduction(self, dense: Sequence[int], experts: int) -> float:
        """Returns the total seconds to reduce dense buckets and the gradients of experts one after another. `dense` has
        the elements of each bucket, `experts` is the elements of the expert weights."""
        cost = GroupCommCost.reduce if self.zero == 0 else GroupCommCost.scatter
        return sum(cost(self.dense, each, self.sent) for each in dense) + cost(self.experts, experts, self.sent)

    def gather(self, dense: int, experts: int) -> float:
        """Returns the seconds to gather the dense weights and the expert weights of one parameter group. `dense` and
        `experts` are numbers of elements."""
        opened = 0.0 if self.fetched else constants.SHARED_UNSHARD_SECONDS * ((dense > 0) + (experts > 0))
        return self.dense.scatter(dense, self.fetched) + self.experts.scatter(experts, self.fetched) + opened

    def replicas(self, dense: int, experts: int) -> float:
        """Returns the seconds of the all-reduces over replicas. `dense` and `experts` are numbers of elements."""
        return self.dense.reduce(dense, self.sent) + self.experts.reduce(experts, self.sent)


def compute_op_times(pricer: CostModel, plan: Plan, box: PlanGrid) -> OpTimes:
    """Returns the times of all operations of `plan`. `box` is the grid with only this plan."""
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
        tie=float((tied_vocab_seconds(setting, box) + loss_gather_seconds(setting, box)).item()),
        on_host=setting.on_host,
    )


def micro_batch_tokens(setting: CostContext, box: PlanGrid) -> Array:
    """Returns the tokens of a micro-batch on one rank, for each micro-batch choice of `box`."""
    return box.tokens(setting.job.workload.sequence)


def data_parallel_cost(setting: CostContext, box: PlanGrid) -> DataParallelCost:
    """Returns the communication cost of the data-parallel groups of the only plan in `box`."""
    shard, replicate = map(_as_scalars, dp_group_rates(setting, box))
    dense = GroupCommCost(shard, replicate, int(box.holders.item()))
    shard, replicate = map(_as_scalars, expert_group_rates(setting, box))
    experts = GroupCommCost(shard, replicate, int(box.expert_holders.item()))
    size = setting.recipe.size
    fetched = 0 if shared_on_host(setting, box).any() else size
    trained = setting.trained(box.tp)
    sent = (setting.practice.reduced or setting.recipe.gradient_size) * trained
    return DataParallelCost(dense, experts, size, sent, box.shards[0].zero, fetched, trained)


def _as_scalars(group: CollectiveRates) -> CollectiveRates:
    """Converts rates in arrays of one element to numbers."""
    return CollectiveRates(*(np.asarray(value).item() for value in group))


def layer_op_times(pricer: CostModel, box: PlanGrid) -> list[tuple[LayerOpTimes, LayerOpTimes]]:
    """Returns the times of one layer for each layer run, as pairs: with the recompute kind of the plan, and with the
    kind that applies to the blocks after the first recomputed blocks."""
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
    """Returns the seconds of forward, of backward, and of the deferrable weight gradient in layer run `at`. Each of
    these times is split into compute and communication. The fraction of communication is assumed to be the same in
    forward and backward."""
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
    """Returns the times of all layers of a stage in forward order. `table` is the result of `layer_op_times`, `content`
    the number of layers of each layer run. With partial recompute, only the first blocks have the plan's recompute
    kind."""
    found: list[LayerOpTimes] = []
    recomputing = box.recompute[0].blocks(box.orders[0])
    for (as_planned, plain), count in zip(table, content, strict=True):
        for _ in range(count):
            blocks = sum(layer.is_block for layer in found)
            found.append(plain if recomputing and as_planned.is_block and blocks >= recomputing else as_planned)
    return found


def add_stage_overhead(layers: list[LayerOpTimes], each: tuple[float, float]) -> list[LayerOpTimes]:
    """Returns `layers` with the overhead of the stage added to the first layer. `each` is the seconds per micro-batch
    in forward and in backward."""
    if not layers or not any(each):
        return layers
    first, (forward, backward) = layers[0], each
    first = first._replace(
        forward=(first.forward[0] + forward, first.forward[1]),
        backward=(first.backward[0] + backward, first.backward[1]),
    )
    return [first, *layers[1:]]


def offload_waits(pricer: CostModel, box: PlanGrid) -> list[float]:
    """Returns, for each pipeline rank, the seconds that offload adds to a micro-batch."""
    return values_by_rank(pricer, box, pricer.price(box).seconds.offload)


def values_by_rank(pricer: CostModel, box: PlanGrid, values: Array) -> list[float]:
    """Returns the value of each pipeline rank. `values` has one value for each class of equal ranks."""
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
    """Returns the times of a virtual stage. `layers` are its layers in forward order.

    `ends` is the number of elements of each parameter group. Each micro-batch waits `waits` seconds for transfers to
    and from the host. `split_backward`: whether backward is two actions, B and W.
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
    """Returns a pass with one segment. `parts` are the seconds of each layer."""
    return (PassSegment(sum(compute for compute, _ in parts), sum(exchange for _, exchange in parts)),)


def add_wait(pieces: PassSegments, seconds: float) -> PassSegments:
    """Returns the segments `pieces` with `seconds` added to the communication of the first segment."""
    return (pieces[0]._replace(exchange=pieces[0].exchange + seconds), *pieces[1:])


def segments_by_layer(layers: Sequence[LayerOpTimes], way: str, units: int) -> PassSegments:
    """Returns one segment per layer in the order of `layers`, for ZeRO 3. `way` is "forward" or "backward". `units` is
    the number of parameter groups. Weights of a block after another block are prefetched."""
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
    """Returns at most MAX_BUCKETS_SIMULATED groups of neighbouring buckets. `ends` is the elements of each bucket. The
    last bucket is never merged, because no compute overlaps with its reduction.

    >>> merge_buckets([4, 4, 1]), len(merge_buckets([1] * 100)), merge_buckets([1] * 100)[-1]
    ([[4], [4], [1]], 8, [1])
    """
    if len(ends) <= MAX_BUCKETS_SIMULATED:
        return [[end] for end in ends]
    first = len(ends) - 1
    cuts = [first * at // (MAX_BUCKETS_SIMULATED - 1) for at in range(MAX_BUCKETS_SIMULATED)]
    return [list(ends[start:stop]) for start, stop in pairwise(cuts)] + [[ends[-1]]]


def bucket_boundaries(elements: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Returns the number of layers in backward order after which each bucket is full. `elements` is the elements of
    each layer, `ends` the elements of each bucket. A layer without elements belongs to the bucket of a neighbouring
    layer.

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
    """Yields the times after the last backward, for each pipeline rank in order."""
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
            weights=data.trained * sum_collectives(data.gather, dense, own_experts) if data.zero in (1, 2) else 0.0,
        )


def sum_collectives(
    cost: Callable[[int, int], float], dense: Sequence[tuple[int, int]], experts: Sequence[tuple[int, int]]
) -> float:
    """Returns the total seconds of one collective per buffer. `dense` and `experts` are pairs: elements of a buffer,
    and number of such buffers. `cost` returns the seconds for the elements of a dense and of an expert buffer."""
    return sum(cost(end, 0) * times for end, times in dense) + sum(cost(0, end) * times for end, times in experts)
