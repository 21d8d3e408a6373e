"""What a plan's parts take by themselves, in seconds of an undisturbed device or link: the cost model's own numbers, part by part.

A pass (forward or backward of one micro-batch on one virtual stage) is a row of pieces. A piece ends where something else begins: at
ZeRO 3 at each layer, whose weights are gathered before it and whose gradients are reduced behind its backward; at ZeRO 2 where a bucket
of gradients is full, in every backward (at most PIECES buckets are played, the smaller ones before them together); below it the same in
the last backward only, bucket by bucket. Everything else is one piece. Where the order separates W, gradients are reduced behind W.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from meshwright.cost import constants
from meshwright.cost.box import Again, Array, Box
from meshwright.cost.collectives import Group
from meshwright.cost.memory import lie_once, message
from meshwright.cost.price import Passes, Pricer, each_pass
from meshwright.cost.reduction import axis_groups, expert_groups
from meshwright.cost.setting import Setting
from meshwright.cost.stages import Kind, held, ranks
from meshwright.spec.layout import ALIGN, align
from meshwright.spec.plan import Plan, rank_of

PIECES = 8

Seconds = tuple[float, float]
"""Of compute, and of waiting for other ranks inside of it."""


class Piece(NamedTuple):
    """Seconds that a rank computes, seconds that it exchanges with tensor, context and expert ranks meanwhile; `unit` is the flat buffer that it needs or fills.

    `ahead`: at ZeRO 3 the weights of the unit are asked for when the piece before begins, not when this one does.
    """

    compute: float
    exchange: float
    unit: int = -1
    ahead: bool = False


Pieces = tuple[Piece, ...]


class Stage(NamedTuple):
    """One virtual stage: its passes, the last backward (or W) by itself, and the seconds of a gather and a reduction of each unit.

    `weights`: W where it is apart; `backward` is then without it.
    """

    forward: Pieces
    backward: Pieces
    last: Pieces
    gathers: tuple[float, ...]
    reductions: tuple[float, ...]
    weights: Pieces = ()


class Ending(NamedTuple):
    """What a pipeline rank does after its passes: sums over replicas, the update here and on the host, the gathering of new weights."""

    replicas: float
    update: float
    on_host: float
    weights: float


class Durations(NamedTuple):
    """Everything that a play needs to know of a plan. `message`: bytes from a pipeline rank to the next."""

    stages: tuple[Stage, ...]
    endings: tuple[Ending, ...]
    message: float
    tie: float
    on_host: bool


class Layer(NamedTuple):
    """One layer: seconds (compute, exchange) of its passes and of what of backward can be put off, elements of its dense weights and of experts that other ranks share."""

    forward: Seconds
    backward: Seconds
    weights: Seconds
    dense: int
    experts: int
    is_block: bool


class Cost(NamedTuple):
    """What reductions and gathers of one pair of groups cost; `holders` ranks share a buffer, which is padded for them."""

    shard: Group
    replicate: Group
    holders: int

    def scatter(self, elements: int, size: int) -> float:
        """A reduce-scatter over the shard group, or an all-gather."""
        return float(self.shard.gather(align(elements, self.holders * ALIGN) * size)) if elements else 0.0

    def reduce(self, elements: int, size: int) -> float:
        """An all-reduce of a shard over the replicas."""
        return float(self.replicate.reduce(align(elements, self.holders * ALIGN) * size / self.holders)) if elements else 0.0


class Data(NamedTuple):
    """The data ranks: of dense weights and of experts, bytes of an element at rest, on its way to a sum, and where it is gathered."""

    dense: Cost
    experts: Cost
    size: int
    sent: int
    zero: int
    fetched: int

    def reduction(self, dense: Sequence[int], experts: int) -> float:
        """One after the other of several buckets, and of the experts beside them."""
        cost = Cost.reduce if self.zero == 0 else Cost.scatter
        return sum(cost(self.dense, each, self.sent) for each in dense) + cost(self.experts, experts, self.sent)

    def gather(self, dense: int, experts: int) -> float:
        opened = 0.0 if self.fetched else constants.OPENING * ((dense > 0) + (experts > 0))
        return self.dense.scatter(dense, self.fetched) + self.experts.scatter(experts, self.fetched) + opened

    def replicas(self, dense: int, experts: int) -> float:
        return self.dense.reduce(dense, self.sent) + self.experts.reduce(experts, self.sent)


def durations(pricer: Pricer, plan: Plan, box: Box) -> Durations:
    """The parts of `plan`, the only one of `box`."""
    setting = pricer.setting
    bucket = None if plan.zero == 3 else max(-(-plan.bucket // setting.recipe.size), 1)
    contents = [tuple(row) for row in held(setting.entries, box.orders[0]).tolist()]
    data, offload = data_of(setting, box), offloads(pricer, box)
    table = layers_of(pricer, box)
    made: dict[tuple[tuple[int, ...], float], Stage] = {}
    stages: list[Stage] = []
    for number, content in enumerate(contents):
        waits = offload[rank_of(number, box.pp, box.orders[0].as_v)] / box.orders[0].virtual_stages
        if (content, waits) not in made:
            ends = [run.end for run in pricer.flat.units(content, box.cut, bucket).runs for _ in range(run.times)]
            layers = passed(stacked(table, content, box), each_pass(setting))
            made[content, waits] = stage(data, layers, ends, waits, plan.separates(number))
        stages.append(made[content, waits])
    return Durations(
        stages=tuple(stages),
        endings=tuple(endings(pricer, box, data)),
        message=float(message(setting, box, tokens(setting, box)).item()),
        tie=float(pricer.tie(box).item()),
        on_host=setting.on_host,
    )


def tokens(setting: Setting, box: Box) -> Array:
    return box.tokens(setting.job.workload.sequence)


def data_of(setting: Setting, box: Box) -> Data:
    shard, replicate = map(_numbers, axis_groups(setting, box))
    dense = Cost(shard, replicate, int(box.holders.item()))
    shard, replicate = map(_numbers, expert_groups(setting, box))
    experts = Cost(shard, replicate, int(box.expert_holders.item()))
    size = setting.recipe.size
    fetched = 0 if lie_once(setting, box).any() else size
    return Data(dense, experts, size, setting.practice.reduced or setting.recipe.gradient_size, box.shards[0].zero, fetched)


def _numbers(group: Group) -> Group:
    """A group of arrays of one as numbers."""
    return Group(*(np.asarray(value).item() for value in group))


def layers_of(pricer: Pricer, box: Box) -> list[tuple[Layer, Layer]]:
    """One layer of each entry as the plan has it, and as its blocks are behind the first ones, where only these recompute."""
    entries = pricer.setting.entries
    alone = [_kind(at, len(entries)) for at in range(len(entries))]
    both = [
        pricer.passes(replace(box, recompute=(Again(kind),)), pricer.alone(box, alone), whole=False)
        for kind in (box.recompute[0].kind, box.recompute[0].rest)
    ]
    found = []
    for at, entry in enumerate(entries):
        dense, experts = entry.aligned(box.cut), entry.experts(box.cut) if box.layout.ep > 1 else 0
        as_planned, without = (Layer(*_split(passes, at), dense, experts, entry.is_block) for passes in both)
        found.append((as_planned, without))
    return found


def _kind(at: int, entries: int) -> Kind:
    """A rank that holds one layer of one entry."""
    content = np.zeros((1, entries), dtype=np.int64)
    content[0, at] = 1
    return Kind(at, 1, content, ((tuple(content[0].tolist()), 1),))


def _split(passes: Passes, at: int) -> tuple[Seconds, Seconds, Seconds]:
    """Forward and backward as compute and exchange, both exchanging the same part of their time, and of backward what can be put off."""
    forward, backward, compute, again, weights = (
        float(np.broadcast_to(part, passes.forward.shape)[at].item())
        for part in (passes.forward, passes.backward, passes.compute, passes.recompute, passes.weights)
    )
    part = (compute + again) / (forward + backward) if forward + backward else 1.0
    return (forward * part, forward * (1.0 - part)), (backward * part, backward * (1.0 - part)), (min(weights, backward * part), 0.0)


def stacked(table: Sequence[tuple[Layer, Layer]], content: Sequence[int], box: Box) -> list[Layer]:
    """The layers of a stage in forward order; where only some blocks recompute, the first of them do."""
    found: list[Layer] = []
    recomputing = box.recompute[0].blocks(box.orders[0])
    for (as_planned, plain), count in zip(table, content, strict=True):
        for _ in range(count):
            blocks = sum(layer.is_block for layer in found)
            found.append(plain if recomputing and as_planned.is_block and blocks >= recomputing else as_planned)
    return found


def passed(layers: list[Layer], each: tuple[float, float]) -> list[Layer]:
    """What a stage takes beside its layers goes with the first of them."""
    if not layers or not any(each):
        return layers
    first, (forward, backward) = layers[0], each
    first = first._replace(
        forward=(first.forward[0] + forward, first.forward[1]), backward=(first.backward[0] + backward, first.backward[1])
    )
    return [first, *layers[1:]]


def offloads(pricer: Pricer, box: Box) -> list[float]:
    """Seconds that a micro-batch waits for the host, by pipeline rank."""
    return by_rank(pricer, box, pricer.price(box).seconds.offload)


def by_rank(pricer: Pricer, box: Box, values: Array) -> list[float]:
    """What the kinds of pipeline ranks have, for each rank."""
    order = box.orders[0]
    kinds = pricer.held(order, box.pp).kinds
    line = np.broadcast_to(values, (len(kinds), *values.shape[1:])).reshape(len(kinds))
    of_kind = {kind.layers.tobytes(): float(value) for kind, value in zip(kinds, line, strict=True)}
    return [of_kind[rank.layers.tobytes()] for rank in ranks(pricer.setting.entries, order, box.pp)]


def stage(data: Data, layers: Sequence[Layer], ends: Sequence[int], waits: float, apart: bool = False) -> Stage:
    """A virtual stage of `layers`, forward order, whose units end at `ends` elements; it `waits` so long for its host in a micro-batch.

    `apart`: its backward is two actions.
    """
    if apart:
        without = [
            layer._replace(backward=(layer.backward[0] - layer.weights[0], layer.backward[1]), weights=(0.0, 0.0)) for layer in layers
        ]
        first = stage(data, without, ends, waits)
        second = stage(data, [layer._replace(backward=layer.weights) for layer in layers], ends, 0.0)
        whole_of = first.backward if data.zero == 3 else whole([layer.backward for layer in without][::-1])
        return first._replace(backward=waiting(whole_of, waits * (data.zero < 3)), last=second.last, weights=second.backward)
    behind = layers[::-1]
    if data.zero == 3:
        some = [layer for layer in layers if layer.dense or layer.experts]
        gathers = tuple(data.gather(layer.dense, layer.experts) for layer in some)
        reductions = tuple(data.reduction([layer.dense], layer.experts) for layer in some)
        back = by_layer(behind, "backward", len(some))
        return Stage(by_layer(layers, "forward", len(some)), waiting(back, waits), waiting(back, waits), gathers, reductions)
    forward, backward = whole([layer.forward for layer in layers]), waiting(whole([layer.backward for layer in layers]), waits)
    if data.dense.shard.ranks * data.dense.replicate.ranks == 1 and data.experts.shard.ranks * data.experts.replicate.ranks == 1:
        return Stage(forward, backward, backward, (), ())
    buckets = merged(ends[::-1]) if data.zero == 2 else [[end] for end in ends[::-1]]
    cuts = by_bucket([layer.dense for layer in behind], [sum(some) for some in buckets])
    groups = [behind[start:stop] for start, stop in pairwise([0, *cuts])]
    reductions = tuple(data.reduction(some, sum(layer.experts for layer in group)) for some, group in zip(buckets, groups, strict=True))
    pieces = [whole([layer.backward for layer in group])[0]._replace(unit=unit) for unit, group in enumerate(groups)]
    last = waiting(tuple(pieces), waits)
    return Stage(forward, last if data.zero == 2 else backward, last, (), reductions)


def whole(parts: Sequence[Seconds]) -> Pieces:
    return (Piece(sum(compute for compute, _ in parts), sum(exchange for _, exchange in parts)),)


def waiting(pieces: Pieces, seconds: float) -> Pieces:
    """`pieces` of which the first waits so long."""
    return (pieces[0]._replace(exchange=pieces[0].exchange + seconds), *pieces[1:])


def by_layer(layers: Sequence[Layer], way: str, units: int) -> Pieces:
    """One piece a layer. A block's weights are asked for when the block before it begins."""
    pieces = []
    unit = -1 if way == "forward" else units
    before = False
    for layer in layers:
        owns = layer.dense > 0 or layer.experts > 0
        unit += (1 if way == "forward" else -1) if owns else 0
        compute, exchange = layer.forward if way == "forward" else layer.backward
        pieces.append(Piece(compute, exchange, unit if owns else -1, layer.is_block and before))
        before = layer.is_block
    return tuple(pieces)


def merged(ends: Sequence[int]) -> list[list[int]]:
    """At most PIECES groups of neighbours, the last bucket alone: nothing is left to hide it behind.

    >>> merged([4, 4, 1]), len(merged([1] * 100)), merged([1] * 100)[-1]
    ([[4], [4], [1]], 8, [1])
    """
    if len(ends) <= PIECES:
        return [[end] for end in ends]
    first = len(ends) - 1
    cuts = [first * at // (PIECES - 1) for at in range(PIECES)]
    return [list(ends[start:stop]) for start, stop in pairwise(cuts)] + [[ends[-1]]]


def by_bucket(elements: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Behind which layers, backward order, the buckets of `ends` elements are full. What has no elements goes with what follows it.

    >>> by_bucket([10, 10, 0, 10, 0], [20, 10])
    [2, 5]
    """
    cuts: list[int] = []
    due = list(accumulate(ends))[:-1]
    for at, filled in enumerate(accumulate(elements), start=1):
        if len(cuts) < len(due) and filled >= due[len(cuts)]:
            cuts.append(at)
    return [*cuts, len(elements)]


def endings(pricer: Pricer, box: Box, data: Data) -> Iterator[Ending]:
    """For each pipeline rank."""
    seconds = pricer.price(box).seconds
    update, on_host = (by_rank(pricer, box, part) for part in (seconds.update, seconds.on_host))
    bucket = None if data.zero == 3 else max(-(-box.bucket // data.size), 1)
    experts = np.array([entry.experts(box.cut) if box.layout.ep > 1 else 0 for entry in pricer.setting.entries])
    for rank in ranks(pricer.setting.entries, box.orders[0], box.pp):
        runs = [(run, count) for content, count in rank.stages for run in pricer.flat.units(content, box.cut, bucket).runs]
        own = (rank.layers.sum(axis=0) * (experts > 0)).tolist()
        dense = [(run.end, run.times * count) for run, count in runs]
        apart = [(int(each), count) for each, count in zip(experts, own, strict=True)]
        yield Ending(
            replicas=spread(data.replicas, dense, apart) if data.zero else 0.0,
            update=update[rank.rank],
            on_host=on_host[rank.rank],
            weights=spread(data.gather, dense, apart) if data.zero in (1, 2) else 0.0,
        )


def spread(cost: Callable[[int, int], float], dense: Sequence[tuple[int, int]], experts: Sequence[tuple[int, int]]) -> float:
    """One collective a buffer."""
    return sum(cost(end, 0) * times for end, times in dense) + sum(cost(0, end) * times for end, times in experts)
