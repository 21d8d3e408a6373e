"""Computes the cost of a grid of plans: the bytes on each class of equal pipeline ranks and the seconds of a step, for
all plans at once. The search, `estimate` (step.py) and the simulation use it.

    step = m x (micro-batch of the slowest rank) + bubble + messages + exposed reductions + update + terms

m is the number of micro-batches of a step, and the terms are those of step_terms.py. Arrays are over GRID_AXES
(plan_grid.py) and over layer runs (cost_context.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshwright.planner.cost import constants, cp_ep_comm, offload
from meshwright.planner.cost.activations import activation_peak, layer_activations
from meshwright.planner.cost.compute import LayerTimes, cpu_op_seconds, layer_times
from meshwright.planner.cost.cost_context import MESHWRIGHT_RUNTIME, CostContext, RuntimeModel, build_cost_context
from meshwright.planner.cost.dp_comm import DpTraffic, dp_traffic, replicated_kv_reduce_seconds, update_seconds
from meshwright.planner.cost.float8 import cast_seconds
from meshwright.planner.cost.links import p2p_seconds
from meshwright.planner.cost.memory import (
    MemoryFootprint,
    StateSizes,
    memory_footprint,
    p2p_message_bytes,
    state_sizes,
)
from meshwright.planner.cost.pipeline import (
    PassSplit,
    any_split_backward,
    critical_path_messages,
    interleaving_imbalance,
    slowest_rank_and_bubble,
)
from meshwright.planner.cost.pipeline import bubble_seconds as bubble_of
from meshwright.planner.cost.plan_grid import (
    Array,
    PlanGrid,
    RecomputeChoice,
    ScheduleChoice,
    TpEpShape,
    are_blocks_compiled,
    broadcast_to_axis,
    shard_fraction,
    stack_schedules,
)
from meshwright.planner.cost.rank_contents import (
    ModelBuckets,
    RankClass,
    RankContents,
    group_equal_ranks,
    list_ranks,
)
from meshwright.planner.cost.step_terms import step_terms
from meshwright.spec.enums import PER_BLOCK_RECOMPUTE, Recompute, offloads_activations
from meshwright.spec.job import Job


class StepTime(NamedTuple):
    """The parts of the time of a step, over GRID_AXES.

    The first PER_MICRO_BATCH_FIELDS fields are seconds per micro-batch on each rank class, and `each` is the sum of
    them. The other fields are seconds per step: `once` is exposed reductions and gathers, `update` the update on the
    device, `on_host` the update on the host. `terms` is the seconds of the terms of step_terms.py (term, GRID_AXES),
    `step` the seconds of the whole step.
    """

    compute: Array
    recompute: Array
    tensor: Array
    context: Array
    expert: Array
    data: Array
    offload: Array
    bubble: Array
    messages: Array
    once: Array
    update: Array
    on_host: Array
    terms: Array
    each: Array
    step: Array


PER_MICRO_BATCH_FIELDS = 7


class PassTime(NamedTuple):
    """The seconds of one micro-batch on each rank class, over GRID_AXES: by kind, and in total for forward and for
    backward. `weights` is the part of `backward` that computes deferrable weight gradients, if a schedule splits
    backward. `block_backward` is the longest backward of a block."""

    compute: Array
    recompute: Array
    tensor: Array
    context: Array
    expert: Array
    forward: Array
    backward: Array
    weights: Array
    block_backward: Array


class GridCost(NamedTuple):
    """The memory and time of a grid of plans. The first axis is the rank classes."""

    footprint: MemoryFootprint
    seconds: StepTime

    @property
    def step(self) -> Array:
        """Returns the seconds of a step over the axes `obsczf` of GRID_AXES."""
        return self.seconds.step[0]

    @property
    def allocated(self) -> Array:
        """Returns the bytes on the rank with the highest memory peak, over the axes `obsczf` of GRID_AXES."""
        return self.footprint.total.max(axis=0)

    @property
    def on_host(self) -> Array:
        """Returns the bytes in host memory on the rank that offloads most, over the axes `obsczf` of GRID_AXES."""
        return self.footprint.host.max(axis=0)


class RankClasses(NamedTuple):
    """The classes of pipeline ranks of several schedules: the contents by schedule (`of_order`), `layers` per layer run
    (r, o, layer run), and the number of ranks in each class (r, o). The argument `blocks` of the methods marks the
    layer runs of blocks."""

    of_order: tuple[RankContents, ...]
    layers: Array
    numbers: Array

    @classmethod
    def of(cls, found: Sequence[RankContents]) -> RankClasses:
        """Returns the classes of the schedules `found`. Schedules with fewer classes get additional classes without
        ranks."""
        numbers = np.zeros((max(len(stored.kinds) for stored in found), len(found)))
        for o, stored in enumerate(found):
            numbers[: len(stored.kinds), o] = stored.numbers
        return cls(tuple(found), stack_schedules([stored.layers for stored in found], kinds=0), numbers)

    def doing(self, recompute: Sequence[RecomputeChoice], blocks: Array, *kinds: Recompute) -> Array:
        """Returns the number of blocks with a recompute kind in `kinds`, over (r, o, layer run, c)."""
        found, every = np.zeros((*self.layers.shape, len(recompute))), self.layers * blocks
        for c, choice in enumerate(recompute):
            if choice.some:
                first = stack_schedules(
                    [stored.again(choice.blocks(stored.order)) for stored in self.of_order], kinds=0
                )
                found[..., c] = (choice.kind in kinds) * first + (choice.rest in kinds) * (every - first)
            elif choice.kind in kinds:
                found[..., c] = every
        return found

    def sending(self, box: PlanGrid, blocks: Array, kind: Recompute) -> Array:
        """Returns the number of blocks with recompute `kind` to which offload of activations applies, over (r, o, layer
        run, c)."""
        if not box.offload_layers:
            return self.doing(box.recompute, blocks, kind)
        return self.first(box, blocks)[..., None] * np.array([choice.kind == kind for choice in box.recompute])

    def first(self, box: PlanGrid, blocks: Array) -> Array:
        """Returns the number of blocks whose activations are offloaded by a plan with offload of activations, over (r,
        o, layer run)."""
        if not box.offload_layers:
            return self.layers * blocks
        return stack_schedules([stored.again(box.offload_layers) for stored in self.of_order], kinds=0)


class CostModel:
    """Computes the cost of grids of plans of one job. Grids share cached values: the contents of ranks, and the seconds
    of layers."""

    def __init__(self, job: Job, practice: RuntimeModel = MESHWRIGHT_RUNTIME, like: CostModel | None = None) -> None:
        """`practice` is the runtime whose cost is computed. `like` is a cost model of the same job on different
        devices. The new cost model reuses those results of `like` that do not depend on devices."""
        self.setting: CostContext = build_cost_context(job, practice)
        self.flat: ModelBuckets = like.flat if like else ModelBuckets(self.setting.entries)
        self._rank_contents: dict[tuple[ScheduleChoice, int, bool], RankContents] = like._rank_contents if like else {}
        self.blocks = np.array([entry.is_block for entry in self.setting.entries])
        self._work: dict[tuple[TpEpShape, int], tuple[dict[tuple[float, bool], int], Array | None]] = {}

    def price(self, box: PlanGrid) -> GridCost:
        """Computes the cost of every plan of `box`, including combinations that are not legal plans."""
        return self.price_ranks(box, self.ranks(box))

    def price_ranks(self, box: PlanGrid, ranks: RankClasses) -> GridCost:
        """Computes the cost of the plans of `box` for the rank classes `ranks`."""
        found = self.states(box, ranks)
        return GridCost(self.memory(box, ranks, found), self.seconds(box, ranks, found))

    def states(self, box: PlanGrid, ranks: RankClasses) -> StateSizes:
        """Returns the sizes of the flat buffers of each class of `ranks`."""
        return state_sizes(self.setting, box, ranks.of_order, ranks.layers)

    def memory(self, box: PlanGrid, ranks: RankClasses, found: StateSizes | None = None) -> MemoryFootprint:
        """Returns the bytes on each class of `ranks`."""
        alive = activation_peak(self.setting, box, ranks.of_order)
        return memory_footprint(self.setting, box, found or self.states(box, ranks), alive, self._tokens(box))

    # --- shared between grids

    def ranks(self, box: PlanGrid, each: bool = False) -> RankClasses:
        """Returns the classes of pipeline ranks of each schedule of `box`. `each`: whether every rank is a separate
        class."""
        key = ("ranks", box.orders, box.pp, each)
        if key not in self.setting.cache:
            found = RankClasses.of([self.rank_contents(order, box.pp, each) for order in box.orders])
            self.setting.cache[key] = found
        return self.setting.cache[key]  # type: ignore[no-any-return]

    def class_layout(self, box: PlanGrid, found: Sequence[RankClass]) -> RankClasses:
        """Returns `RankClasses` with the rank classes `found` for every schedule of `box`. The result is not cached."""
        return RankClasses.of([RankContents(self.flat, order, box.pp, found) for order in box.orders])

    def rank_contents(self, order: ScheduleChoice, pp: int, each: bool = False) -> RankContents:
        """Returns the cached contents of the pipeline ranks of a schedule. `each`: whether every rank is a separate
        class."""
        key = (order, pp, each)
        if key not in self._rank_contents:
            found = (list_ranks if each else group_equal_ranks)(self.setting.entries, order, pp)
            self._rank_contents[key] = RankContents(self.flat, order, pp, found)
        return self._rank_contents[key]

    def _tokens(self, box: PlanGrid) -> Array:
        return box.tokens(self.setting.job.workload.sequence)

    # --- time

    def layers(self, box: PlanGrid) -> tuple[LayerTimes, tuple[Array, Array, Array]]:
        """Returns the seconds of one layer of each layer run over (layer run, b, s): `LayerTimes`, and three arrays.
        The three arrays are exposed communication: of context ranks in forward, of context ranks in backward, and of
        expert ranks in one pass (equal in forward and backward)."""
        tokens, one = self._tokens(box), self.work(box)
        forward, backward = cp_ep_comm.cp_comm_seconds(self.setting, box, tokens, one)
        return one, (
            forward,
            backward,
            cp_ep_comm.ep_comm_seconds(self.setting, box, tokens)[:, :, None] + 0.0 * forward,
        )

    def passes(self, box: PlanGrid, ranks: RankClasses, whole: bool = True) -> PassTime:
        """Returns the seconds of one micro-batch on each class of `ranks`, without data-parallel communication and
        offload. `whole`: whether the overhead of a stage is added; it is false if the classes are single layers."""
        one, waits = self.layers(box)
        forward, backward, tensor_forward, tensor_backward, context_forward, context_backward, dispatch = sum_layers(
            ranks.layers, np.stack([*one[:4], *waits])
        )
        kinds_of_recompute = {kind for choice in box.recompute for kind in (choice.kind, choice.rest)}
        recompute = tensor_again = context_again = dispatch_again = np.zeros((1,) * forward.ndim)
        if Recompute.full in kinds_of_recompute:
            again = np.stack([one.forward, one.tensor_forward, waits[0], waits[2]])
            recompute, tensor_again, context_again, dispatch_again = _sum_recomputed_layers(
                ranks.doing(box.recompute, self.blocks, Recompute.full), again
            )
        if Recompute.sac in kinds_of_recompute:
            recompute = (
                recompute
                + _sum_recomputed_layers(ranks.doing(box.recompute, self.blocks, Recompute.sac), one.derived[None])[0]
            )
        if Recompute.attn in kinds_of_recompute:
            core = broadcast_to_axis([choice.kind == Recompute.attn for choice in box.recompute], "c")
            recompute = recompute + core * sum_layers(ranks.layers * self.blocks, one.attention[None])[0]
        weights = np.zeros((1,) * forward.ndim)
        if any_split_backward(box.orders):
            rest = (ranks.layers * self.blocks)[..., None] - ranks.doing(
                box.recompute, self.blocks, *PER_BLOCK_RECOMPUTE
            )
            weights = _sum_recomputed_layers(rest, one.weights[None])[0]
            sent = [offloads_activations(choice) for choice in box.offload]
            if any(sent):  # fetched activations are not stored until W
                stay = np.minimum(rest, (ranks.layers * self.blocks - ranks.first(box, self.blocks))[..., None])
                weights = np.where(
                    broadcast_to_axis(sent, "f"), _sum_recomputed_layers(stay, one.weights[None])[0], weights
                )
        repeated = tensor_again + context_again + dispatch_again
        if whole:
            times = broadcast_to_axis([order.virtual_stages for order in box.orders], "o")
            forward, backward = (
                part + times * each
                for part, each in zip((forward, backward), stage_overhead_seconds(self.setting), strict=True)
            )
        return PassTime(
            compute=forward + backward,
            recompute=recompute,
            tensor=tensor_forward + tensor_backward + tensor_again,
            context=context_forward + context_backward + context_again,
            expert=2.0 * dispatch + dispatch_again,
            forward=forward + tensor_forward + context_forward + dispatch,
            backward=backward + tensor_backward + context_backward + dispatch + recompute + repeated,
            weights=weights,
            block_backward=self._block_backward(
                one, broadcast_to_axis([choice.kind == Recompute.full for choice in box.recompute], "c")
            ),
        )

    def work(self, box: PlanGrid) -> LayerTimes:
        """Returns the seconds of one layer of each layer run. Results are cached by the tokens of a micro-batch,
        because many grids have equal numbers of tokens."""
        key, parallel = (box.cut, box.strides["tp"]), np.array([False, True][: 1 + (box.tp > 1)])
        found, known = self._work.get(key, ({}, None))
        choices = list(zip(self._tokens(box).tolist(), are_blocks_compiled(box).tolist(), strict=True))
        unknown = set(choices) - found.keys()
        for is_compiled in sorted({choice[1] for choice in unknown}):
            new = sorted(choice for choice in unknown if choice[1] == is_compiled)
            tokens = np.array([count for count, _ in new])
            more = np.stack(layer_times(self.setting, *key, is_compiled, tokens, parallel))
            known = more if known is None else np.concatenate([known, more], axis=2)
            found = {**found, **{choice: len(found) + at for at, choice in enumerate(new)}}
            self._work[key] = found, known
        assert known is not None
        rows, columns = [found[choice] for choice in choices], [int(choice) for choice in box.sequence_parallel]
        return LayerTimes(*known[:, :, rows][..., columns])

    def seconds(self, box: PlanGrid, ranks: RankClasses, found: StateSizes) -> StepTime:
        """Returns the parts of the time of a step for the rank classes `ranks`. `found` is the sizes of their flat
        buffers."""
        one = self.passes(box, ranks)
        casting, cast_once = cast_seconds(self.setting, box, found.casts)
        one = one._replace(compute=one.compute + casting)
        data = dp_traffic(self.setting, box, found, one.forward, one.backward)
        hidden = self._offloaded(box, ranks, found, one, data)
        updating, on_host = offload.offloaded_update_seconds(
            self.setting, box, sharded_numel(box, found), update_seconds(self.setting, box, found)
        )
        each = (one.compute + one.recompute + one.tensor) + one.context + one.expert + data.each + hidden
        bubble = self._bubble(box, ranks, each, one)
        busy = broadcast_to_axis(box.counts, "b") * each.max(axis=0, keepdims=True) + bubble
        passing, terms = self._passing(box, busy), step_terms(self.setting, box)
        once, last, imbalance = (
            part.max(axis=0, keepdims=True)
            for part in (
                data.once + replicated_kv_reduce_seconds(self.setting, box, ranks.layers),
                updating + cast_once,
                on_host,
            )
        )
        step = busy + passing + once + last + imbalance + terms.sum(axis=0)
        return StepTime(*one[:5], data.each, hidden, bubble, passing, once, last, imbalance, terms, each, step)

    def _offloaded(self, box: PlanGrid, ranks: RankClasses, found: StateSizes, one: PassTime, data: DpTraffic) -> Array:
        """Returns the seconds per micro-batch in which compute waits for transfers to and from the host."""
        if not any(box.offload):
            return broadcast_to_axis(0.0, "")
        saved = self.saved(box, ranks)
        room = (
            np.maximum(one.forward - data.overlapped_forward, 0.0),
            np.maximum(one.backward - data.overlapped_backward, 0.0),
        )
        weights = sharded_numel(box, found, zero=3) * self.setting.recipe.size
        return offload.offload_wait_seconds(self.setting, box, weights, sharded_numel(box, found, zero=2), saved, *room)

    def saved(self, box: PlanGrid, ranks: RankClasses) -> Array:
        """Returns the bytes of activations of one micro-batch that each class of `ranks` would offload, over
        GRID_AXES."""
        layers = layer_activations(self.setting, box)
        found = 0.0
        for kind in {kind for choice in box.recompute for kind in (choice.kind, choice.rest)}:
            each = np.stack([layer.when([kind])[0][..., 0] for layer in layers])
            found = found + np.einsum("roec,ebs->robsc", ranks.sending(box, self.blocks, kind), each)
        return broadcast_to_axis(found, "robsc")

    def _bubble(self, box: PlanGrid, ranks: RankClasses, each: Array, one: PassTime) -> Array:
        counts = broadcast_to_axis(ranks.numbers, "ro")
        longest, bubble = slowest_rank_and_bubble(
            each, counts, broadcast_to_axis([order.virtual_stages for order in box.orders], "o")
        )
        split_orders = [o for o, order in enumerate(box.orders) if any_split_backward([order])]
        if split_orders:
            weights = np.broadcast_to(one.weights, (*one.weights.shape[:1], len(box.orders), *one.weights.shape[2:]))[
                :, split_orders
            ]
            forward, whole = one.forward[:, split_orders], each[:, split_orders]
            bubble[:, split_orders] = bubble_of(
                [box.orders[o] for o in split_orders],
                PassSplit(forward, whole - forward - weights, weights),
                counts[:, split_orders],
            )
        imbalance = [interleaving_imbalance(order, box.pp) for order in box.orders]
        if not any(imbalance):
            return bubble
        slack = longest - (each * counts).sum(axis=0, keepdims=True) / box.pp
        return bubble + broadcast_to_axis(box.counts, "b") * np.maximum(
            broadcast_to_axis(imbalance, "o") * one.block_backward - slack, 0.0
        )

    def _passing(self, box: PlanGrid, busy: Array) -> Array:
        """Returns the seconds per step of messages between pipeline ranks that add to the seconds `busy` of the
        pipeline: those on the critical path. If a link needs longer than that for all messages, two per micro-batch and
        virtual stage, the result is the rest of this time."""
        if box.pp == 1:
            return broadcast_to_axis(0.0, "")
        size, group = p2p_message_bytes(self.setting, box, self._tokens(box)), (box.pp, box.strides["pp"])
        passed = p2p_seconds(self.setting.fabric, size, *group)
        hops = np.array([critical_path_messages(order, box.pp, box.counts) for order in box.orders])
        exposed = broadcast_to_axis(hops, "ob") * passed
        wire = passed - p2p_seconds(self.setting.fabric, 0.0 * size, *group)
        stages = broadcast_to_axis([order.virtual_stages for order in box.orders], "o")
        loaded = 2.0 * broadcast_to_axis(box.counts, "b") * stages * wire
        return np.maximum(exposed, loaded - busy)

    def _block_backward(self, one: LayerTimes, recompute: Array) -> Array:
        """Returns the seconds of the longest backward of a block. `recompute` is 1 where all of the block is
        recomputed, else 0."""
        blocks = self.blocks if self.blocks.any() else np.arange(len(self.blocks)) == 0
        backward, again = (
            broadcast_to_axis(part[blocks].max(axis=0), "bs")
            for part in (one.backward + one.tensor_backward, one.forward + one.tensor_forward)
        )
        return backward + recompute * again


def sharded_numel(box: PlanGrid, states: StateSizes, zero: int = 1) -> Array:
    """Returns the elements on one rank of a type of tensor (weights, gradients or states) that is sharded from ZeRO
    stage `zero` on."""
    dense = states.numel * np.where(box.zero >= zero, shard_fraction(box), 1)
    return dense + states.experts / np.where(box.zero >= zero, broadcast_to_axis(box.expert_holders, "z"), 1)


def stage_overhead_seconds(setting: CostContext) -> tuple[float, float]:
    """Returns the overhead of a virtual stage in addition to its layers, in seconds per micro-batch: in forward and in
    backward. The overhead is 0 on accelerators."""
    seconds = (
        constants.CPU_OPS_PER_STAGE_PASS
        * cpu_op_seconds(setting)
        * setting.on_host
        / (1.0 + constants.BACKWARD_FORWARD_RATIO)
    )
    return seconds, constants.BACKWARD_FORWARD_RATIO * seconds


def sum_layers(layers: Array, parts: Array) -> Array:
    """Returns the total seconds of the layers of each rank class, over (part, GRID_AXES). `layers` is the number of
    layers (r, o, layer run), `parts` the seconds of one layer (part, layer run, b, s)."""
    found = layers.reshape(-1, layers.shape[-1]) @ parts.reshape(*parts.shape[:2], -1)
    return found.reshape(len(parts), *layers.shape[:2], *parts.shape[2:], 1, 1, 1)


def _sum_recomputed_layers(layers: Array, parts: Array) -> Array:
    """Returns the total seconds of the layers of each rank class, over (part, GRID_AXES). `layers` is the number of
    layers for each recompute choice (r, o, layer run, c), `parts` the seconds of one layer (part, layer run, b, s)."""
    found = layers.swapaxes(2, 3).reshape(-1, layers.shape[2]) @ parts.reshape(*parts.shape[:2], -1)
    shape = (*layers.shape[:2], layers.shape[3], *parts.shape[2:])
    return np.moveaxis(found.reshape(len(parts), *shape), 3, 5)[..., None, None]
