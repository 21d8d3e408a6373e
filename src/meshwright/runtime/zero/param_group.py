"""Gradients of a flat unit counted as they come. Each costs the same, however many the unit has: what is missing is
counted down.

A flat unit: the parameters of one or several layers as views of one buffer, with their gradients and optimizer shard
beside it.

[Note: ZeRO is three settings] What differs between ZeRO stages is only which of three buffers is a shard, 1 / (dp_shard
x cp) of the whole:

| stage | weights | gradients | master weights and optimizer states |
|---|---|---|---|
| 0 | whole | whole | whole |
| 1 | whole | whole | shard |
| 2 | whole | shard | shard |
| 3 | shard, gathered for use | shard | shard |

Source: Rajbhandari et al., ZeRO (2020). Gradients are sums, already divided by the number of labels of the whole batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import groupby, pairwise
from typing import Protocol

import torch
from torch import nn

from meshwright.analysis.dry_run import without_write_recording
from meshwright.runtime.comm.async_collectives import (
    COMPLETED_WORK,
    CollectiveWork,
    all_gather,
    all_reduce,
    reduce_scatter,
    uses_shared_memory,
)
from meshwright.runtime.comm.compression import FlatSlice, ReducerPair, make_compressed_reducer
from meshwright.runtime.comm.group import ShardPlacement, without_replicas
from meshwright.runtime.deferred_init import materialize
from meshwright.runtime.offload.param_swapper import CpuGradBuffer, NvmeShard, SplitShard, split_shard
from meshwright.runtime.parallel_context import ParallelContext
from meshwright.runtime.shard.access_guard import AccessGuard, sharded_weight_message
from meshwright.runtime.shard.low_bit import LowBitShard
from meshwright.runtime.shard.offloaded import OffloadedShard
from meshwright.runtime.shard.optimizer_shard import FrozenShard, OptimizerShard, ParamRun
from meshwright.runtime.wgrad.accumulation import accumulate_into
from meshwright.runtime.wgrad.deferred import WgradQueue
from meshwright.runtime.zero.exact_sum import FixedPointAccumulator
from meshwright.runtime.zero.shared_weights import make_shared_weights
from meshwright.spec.enums import Offload
from meshwright.spec.layout import BucketLayout, bucket_gaps, offload_splits, shard_bounds
from meshwright.spec.precision import GradientCompression, Recipe


class GradCounter:
    """Of a step in which `expected` passes bring a gradient of each parameter. `of`: how often that of each has come.
    `begun`: those that
    have something where their gradient is summed."""

    def __init__(self, names: Iterable[str]) -> None:
        self.of = dict.fromkeys(names, 0)
        self.begin(1)

    def begin(self, expected: int) -> None:
        self.expected, self.of = expected, dict.fromkeys(self.of, 0)
        self.begun: set[str] = set()
        self._all_there(0)

    def come(self, name: str) -> bool:
        """One more of `name`. Whether it was the last of a pass.

        >>> found = GradCounter("ab")
        >>> [found.come(name) for name in "abba"], found.passes
        ([False, True, False, True], 2)
        """
        self.of[name] += 1
        self._missing -= self.of[name] == self.passes + 1
        if self._missing:
            return False
        self._all_there(self.passes + 1)
        return True

    def end(self, passes: int) -> dict[str, int]:
        """No more of so many passes come: those that are missing count as there. Which they are, and how often each had
        come.

        >>> found = GradCounter("ab")
        >>> found.come("a"), found.end(1), found.passes, found.end(1)
        (False, {'b': 0}, 1, {})
        """
        if self.passes >= passes:
            return {}
        missing = {name: arrived for name, arrived in self.of.items() if arrived < passes}
        self.of |= dict.fromkeys(missing, passes)
        self._all_there(passes)
        return missing

    def _all_there(self, passes: int) -> None:
        self.passes, self._missing = passes, sum(arrived == passes for arrived in self.of.values())


GRAD_DTYPES = {2: torch.bfloat16, 4: torch.float32}
"""By the bytes that a recipe reduces in."""


class GradReadiness(Protocol):
    """What a unit tells of its gradients (zero.py). `passes`: backward passes that are over. `reached`: parameters that
    one has ever come to."""

    passes: int
    reached: set[str]

    def complete(self, unit: FlatParamGroup) -> None: ...

    def observes(self, name: str, gradient: torch.Tensor) -> bool: ...

    def through(self, unit: FlatParamGroup) -> None: ...


class FlatParamGroup:
    """One buffer. `own` is the run of elements that this rank updates."""

    def __init__(
        self,
        unit: BucketLayout,
        parameters: dict[str, nn.Parameter],
        mesh: ParallelContext,
        recipe: Recipe,
        sharing: ShardPlacement,
        groups: Mapping[str, int],
        tied: bool = False,
    ) -> None:
        """`groups`: of the optimizer, by the names of parameters. `tied`: its gradients are summed with those of
        another stage's copy."""
        self.unit, self.parameters, self.mesh = unit, parameters, mesh
        self.zero = mesh.plan.zero
        self.dtype = getattr(torch, recipe.compute)
        self.sums = FixedPointAccumulator(recipe, mesh.device) if recipe.exact else None
        self.sharing = sharing = sharing if recipe.local is None else without_replicas(sharing)
        self.group = sharing.shard_group
        bounds = shard_bounds(unit.numel, sharing.shards, sharing.weights)
        self.own = slice(*bounds[sharing.shard : sharing.shard + 2])
        self.arrivals = GradCounter(unit.offsets)
        self._full_gradient: torch.Tensor | None = None
        self.on_host: CpuGradBuffer | None = None  # where its gradients are, if not on the device
        self.stage: GradReadiness | None = None
        self.backlog: WgradQueue | None = None
        self._gaps = bucket_gaps(unit, {name: parameter.numel() for name, parameter in parameters.items()})
        self._gathering: CollectiveWork | None = None
        self.closing = AccessGuard(parameters, sharded_weight_message(mesh.plan.name))
        self.gated = False
        self.frozen = not any(
            each.requires_grad for each in parameters.values()
        )  # no gradients, no optimizer, no float32 copy, in no reduction
        self._lay_weights()
        self._lay_gradients(GRAD_DTYPES.get(recipe.reduced, self.dtype) if self.sums is None else self.sums.dtype, tied)
        self._make_master(recipe, groups)
        self.across = _make_reducer_pair(
            self, recipe.compression
        )  # how sums over the shard group and over the copies go between hosts
        for name, parameter in parameters.items() if not self.frozen else ():
            parameter.register_post_accumulate_grad_hook(self._taker(name))

    # --- construction
    # ---------------------------------------------------------------------------------------------------------

    def _lay_weights(self) -> None:
        away = {Offload.parameters, Offload.parameters_disk} & set(self.mesh.plan.offload)
        self.once = (
            make_shared_weights(self.mesh.shared_memory, self.group, self.unit.numel, self.dtype)
            if self.zero == 3 and not away
            else None
        )
        if self.once is not None:
            self.weights = self.once.whole
        else:
            self.weights = _allocate_buffer(self, self.unit.numel, self.zero in (1, 2), self.dtype)
        for name, parameter in self.parameters.items():
            view = self.view(self.weights, name)
            view.copy_(materialize(parameter))
            parameter.data = view
        mine = self.weights[self.own]
        self.cut = (
            self.mesh.state_swapper.parts(len(mine), self.frozen)
            if self.mesh.state_swapper is not None
            else offload_splits(len(mine), 0, 0)
        )
        self.elsewhere: SplitShard | None = (
            None  # the own run, where some of its weights are outside of the device's memory
        )
        if self.once is not None:
            self._shard = mine
            self.once.hold(self.parameters.values())
            self.once.meet().wait()  # nobody lays over what another one has updated
            self.close()
        elif self.zero == 3:
            if self.mesh.state_swapper is not None:
                self.elsewhere = split_shard(self.mesh.state_swapper, Offload.parameters_disk in away, mine, self.cut)
            if self.elsewhere is None:
                self._shard = _allocate_buffer(self, len(mine), True, self.dtype)
                self._shard.copy_(mine)
            self.close()
        else:
            self._shard = mine

    @property
    def lies(self) -> list[torch.Tensor | NvmeShard]:
        """The weights of each part of the own run, where they are."""
        return (
            [self._shard[part.start : part.stop] for part in self.cut]
            if self.elsewhere is None
            else self.elsewhere.lies(self.cut)
        )

    def _lay_gradients(self, dtype: torch.dtype, tied: bool) -> None:
        """`dtype`: in which they are held, summed and sent."""
        if self.frozen:
            self.gradients = self.own_gradients = _allocate_buffer(self, 0, False, dtype)
            return
        size = self.unit.numel if self.zero < 2 else self.own.stop - self.own.start
        away = self.mesh.state_swapper
        if away is not None and away.beyond and Offload.gradients in self.mesh.plan.offload:
            self.on_host = CpuGradBuffer(away, size, dtype)
            self.gradients = self.own_gradients = self.on_host.values
            return
        self.gradients = _allocate_buffer(self, size, self.zero < 2 or self.sharing.copy_group is not None, dtype, tied)
        self.own_gradients = self.gradients[self.own] if self.zero < 2 else self.gradients

    def _make_master(self, recipe: Recipe, groups: Mapping[str, int]) -> None:
        """What the optimizer updates: the own run of the weights, or a float32 copy of it."""
        self.has_master = bool(recipe.master) and not self.frozen
        stretches, lies, away = _shard_runs(self, groups), self.lies, self.mesh.state_swapper
        in_files = Offload.parameters_disk in self.mesh.plan.offload
        if away is not None and not self.frozen and (away.optimizer or (in_files and not self.has_master)):
            kind = torch.float32 if self.has_master else self.dtype
            self.master: OptimizerShard = OffloadedShard(away, lies, kind, stretches, self.cut)
            self.has_master = self.master.copies
            return
        held = [each.whole() if isinstance(each, NvmeShard) else each for each in lies]
        if self.has_master:  # also where weights wait elsewhere
            held = [torch.cat([each.to(self.mesh.device, torch.float32) for each in held])]
        lean = (recipe.rounds or recipe.eight) and not self.frozen
        self.master = (
            FrozenShard(held)
            if len(held) > 1
            else LowBitShard(held[0], stretches, recipe.rounds)
            if lean
            else OptimizerShard(held[0], stretches)
        )

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The tensor `name` inside a whole buffer of this unit."""
        parameter = self.parameters[name]
        offset = self.unit.offsets[name]
        return flat[offset : offset + parameter.numel()].view(parameter.shape)

    # --- gradients
    # ------------------------------------------------------------------------------------------------------------

    def _taker(self, name: str) -> Callable[[torch.Tensor], None]:
        """The hook holds the unit weakly: autograd keeps hooks where Python's collector does not look, and a cycle
        would never end."""
        unit = weakref.ref(self)

        def take(parameter: torch.Tensor) -> None:
            gradient, owner = parameter.grad, unit()
            if gradient is None or owner is None:
                return
            parameter.grad = None
            if owner.backlog is not None:
                owner.backlog.add(name, lambda: gradient)
            else:
                owner.take(name, gradient)

        return take

    def take(self, name: str, gradient: torch.Tensor) -> None:
        """A gradient of one backward pass. Sums between hosts go on meanwhile: nothing else looks after them until the
        next unit is whole."""
        if self.stage is not None and self.stage.observes(name, gradient):
            return
        group = self.group or self.sharing.copy_group
        if group is not None and group.lanes is not None and group.process is not None:
            group.lanes.under_way.progress()
        if self.sums is not None:
            gradient = self.sums.take(gradient)
        complete = self.arrivals.come(name)
        arrived = self.arrivals.of[name]
        if self.stage is not None:
            self.stage.reached.add(name)
            assert arrived <= self.stage.passes + 1, f"a gradient of {name} came when its unit was through"
        accumulate_into(*self.place(name), gradient)
        if complete and (self.zero >= 2 or arrived == self.arrivals.expected) and self.stage is not None:
            self.stage.complete(self)

    def place(self, name: str) -> tuple[torch.Tensor, bool]:
        """Where the gradients of `name` are summed, and whether the one that comes now is the first there."""
        first = name not in self.arrivals.begun
        self.arrivals.begun.add(name)
        return self.view(self.gradients if self.zero < 2 else self._full(), name), first

    def finish_backward(self, passes: int) -> bool:
        """After backward pass number `passes`: parameters that took no part count as zero. True when that completes the
        unit."""
        missing = self.arrivals.end(passes)
        if not missing:
            return False
        for into, first in map(self.place, missing):
            if first:
                into.zero_()
        return self.zero >= 2 or passes == self.arrivals.expected

    def _full(self) -> torch.Tensor:
        """ZeRO 2 and 3: the buffer in which one backward pass gathers whole gradients, where ranks of this host can
        read it."""
        if self._full_gradient is None:
            if (
                self.group is not None
                and self.group.lanes is not None
                and uses_shared_memory(self.group, _shard_sizes(self))
            ):
                self._full_gradient = self.group.lanes.stage_slowly(self.unit.numel, self.gradients.dtype)
            else:
                self._full_gradient = torch.empty(self.unit.numel, dtype=self.gradients.dtype, device=self.mesh.device)
            for gap in self._gaps:
                self._full_gradient[gap].zero_()
        return self._full_gradient

    def reduce(self) -> CollectiveWork:
        """Sum the gradients of this unit over the data ranks (over the shard group only at ZeRO 2 and 3, whose shards
        accumulate)."""
        if self.zero == 0:
            return all_reduce(self.gradients, self.sharing.copy_group, across=self.across.copies)
        if self.zero == 1:
            return reduce_scatter(
                self.gradients, self.own_gradients, self.group, self.across.shards, _shard_sizes(self)
            )
        full = self._full_gradient
        assert full is not None
        self._full_gradient, self.arrivals.begun = None, set()
        first, sent = self.arrivals.passes == 1, self.on_host
        out = self.gradients if first and sent is None else full.new_empty(self.gradients.shape)
        scattering = reduce_scatter(full, out, self.group, self.across.shards, _shard_sizes(self))

        def finish() -> None:
            scattering.wait()
            if sent is not None:
                sent.take(out, first)
            elif not first:
                self.gradients.add_(out)

        return CollectiveWork(None, finish)

    def reduce_over_replicas(self) -> CollectiveWork:  # from ZeRO 1 on with replicas: the shards, once a step
        if self.on_host is not None:
            return CollectiveWork(None, partial(self.on_host.over, self.sharing.copy_group, self.across.copies))
        return (
            all_reduce(self.own_gradients, self.sharing.copy_group, across=self.across.copies)
            if self.zero
            else COMPLETED_WORK
        )

    def begin_step(self, arrivals: int) -> None:
        """Before the first of `arrivals` backward passes."""
        self.arrivals.begin(arrivals)
        self._full_gradient = None  # of a pass that was broken off
        if self.sums is not None:
            self.sums.begin(sum(self.mesh.plan.shares) or arrivals * self.mesh.plan.dp)
            self.own_gradients = self.gradients[self.own] if self.zero < 2 else self.gradients

    # --- weights
    # --------------------------------------------------------------------------------------------------------------

    @without_write_recording
    def prefetch(self) -> None:
        """Start gathering the weights (ZeRO 3); what uses them calls `open`."""
        if self.zero < 3 or not self.closing.is_closed or self._gathering is not None:
            return
        if self.once is not None:
            self._gathering = self.once.meet()
        elif self.elsewhere is not None:
            self.elsewhere.fetch()
        else:
            _start_all_gather(self, [self._shard])

    @without_write_recording
    def open(self) -> None:
        """Whole weights from here on."""
        if not self.closing.is_closed:
            return
        self.prefetch()
        if self.elsewhere is not None:
            _start_all_gather(self, self.elsewhere.take())
        assert self._gathering is not None
        self._gathering.wait()
        self._gathering = None
        self.closing.open()
        if self.once is not None:
            self.once.show(True)
        if self.elsewhere is not None:
            self.elsewhere.give_back()

    @without_write_recording
    def close(
        self,
    ) -> None:  # views and saved tensors keep their storage, which `open` fills again; of weights that lie once parameters let go
        """Free the whole weights (ZeRO 3)."""
        if self.zero < 3:
            return
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None
        if self.elsewhere is not None:
            self.elsewhere.give_back()
        if self.once is not None:
            self.once.show(False)
        else:
            self.weights.untyped_storage().resize_(0)
        self.closing.close()

    def write_back(self) -> None:
        """After the update: the master's values into the weights of the compute type."""
        self.master.loaded()
        if not self.has_master:
            return
        parts = self.master.parts
        sizes = [part.stop - part.start for part in self.cut]
        for lies, part in zip(self.lies, parts[0].split(sizes) if len(parts) == 1 else parts, strict=True):
            lies.copy_(part) if isinstance(lies, torch.Tensor) else lies.write(part)

    def share(self) -> CollectiveWork:
        """After the update: everyone's updated run into everyone's weights (ZeRO 1 and 2)."""
        return (
            all_gather(self.weights, self._shard, self.group, sizes=_shard_sizes(self))
            if self.zero in (1, 2)
            else COMPLETED_WORK
        )

    def bytes(self) -> tuple[int, int]:
        """Held for weights and for gradients."""
        shard = self._shard if self.elsewhere is None else self.elsewhere.near
        weights = self.unit.numel if self.zero < 3 else len(shard)
        return weights * self.weights.element_size(), self.gradients.nbytes if self.on_host is None else 0


def _allocate_buffer(
    unit: FlatParamGroup, numel: int, shared: bool, dtype: torch.dtype, tied: bool = False
) -> torch.Tensor:
    """A buffer, where ranks of this host can read it if there are any and they have something to read in it."""
    if unit.mesh.shared_memory is not None and (tied or (shared and (unit.group or unit.sharing.copy_group))):
        return unit.mesh.shared_memory.zeros(numel, dtype)
    return torch.zeros(numel, dtype=dtype, device=unit.mesh.device)


def _start_all_gather(unit: FlatParamGroup, parts: list[torch.Tensor]) -> None:
    """`parts` of the own run, one behind the other."""
    unit.weights.untyped_storage().resize_(unit.unit.numel * unit.weights.element_size())
    shard = parts[0]
    if len(parts) > 1:
        shard = unit.weights[unit.own]
        for into, part in zip(shard.split([len(part) for part in parts]), parts, strict=True):
            into.copy_(part)
    unit._gathering = all_gather(unit.weights, shard, unit.group, sizes=_shard_sizes(unit))


def _shard_sizes(flat: FlatParamGroup) -> list[int] | None:
    """Elements of all shards, where they are unequal."""
    weights = flat.sharing.weights
    return (
        [stop - start for start, stop in pairwise(shard_bounds(flat.unit.numel, flat.sharing.shards, weights))]
        if weights
        else None
    )


def param_shard_range(unit: FlatParamGroup, name: str) -> slice:
    """Where the own run holds elements of the tensor `name`; empty where it holds none."""
    first = unit.unit.offsets[name]
    last = first + unit.parameters[name].numel()
    return slice(max(first, unit.own.start) - unit.own.start, max(min(last, unit.own.stop) - unit.own.start, 0))


def flat_slice(unit: FlatParamGroup, run: slice, like: torch.Tensor) -> FlatSlice:
    """Elements of the buffer, and what lies there."""
    return FlatSlice(
        run.start,
        run.stop,
        like,
        [(offset, tuple(unit.parameters[name].shape)) for name, offset in unit.unit.offsets.items()],
    )


def _make_reducer_pair(unit: FlatParamGroup, asked: GradientCompression | None) -> ReducerPair:
    asked = None if unit.frozen else asked
    whole = flat_slice(unit, slice(0, unit.unit.numel), unit.gradients)
    return ReducerPair(
        make_compressed_reducer(asked, unit.group, whole, True),
        make_compressed_reducer(asked, unit.sharing.copy_group, flat_slice(unit, unit.own, unit.gradients), False),
    )


def _shard_runs(flat: FlatParamGroup, groups: Mapping[str, int]) -> list[ParamRun]:
    """Where the own run holds matrices, or vectors (biases and norms), of one group of the optimizer, each with the
    room behind it: runs of an
    optimizer end at multiples of ALIGN alone, so that fused kernels, whose rounding is another behind the last full
    vector of a run, round an
    element alike wherever it lies."""
    offsets, own = flat.unit.offsets, flat.own
    tensors = sorted(
        ((name, one) for name, one in flat.parameters.items() if one.numel()), key=lambda item: offsets[item[0]]
    )
    here = [
        (name, tensor)
        for name, tensor in tensors
        if offsets[name] < own.stop and offsets[name] + tensor.numel() > own.start
    ]
    firsts = [next(alike)[0] for _, alike in groupby(here, key=lambda item: (item[1].ndim > 1, groups.get(item[0], 0)))]
    starts = [0, *(offsets[name] - own.start for name in firsts[1:]), own.stop - own.start]
    named = [(flat.parameters[name].ndim > 1, name) for name in firsts] or [(True, "")]
    return [ParamRun(start, stop, *each) for (start, stop), each in zip(pairwise(starts), named, strict=True)]
